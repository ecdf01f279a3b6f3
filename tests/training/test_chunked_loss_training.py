"""The loss in chunks in what trains models, in half precision, and in models whose loss cannot be computed so."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from hf_posenc.training import chunked_loss as head_chunks
from hf_posenc.training.chunked_loss import chunk_loss
from tests.evaluation.scoring.test_head_replay import Changed, Llama, PositionBias
from tests.support import zoo
from tests.support.selection import late
from tests.training.test_chunked_loss import CHUNK, assert_same, both, texts, trained

pytestmark = pytest.mark.slow  # whole trainings or graphs

SILENT: Any = {"logging_steps": 1, "report_to": [], "use_cpu": True, "save_strategy": "no"}
SILENT["disable_tqdm"] = True


class Rows(torch.utils.data.Dataset[Any]):
    """Texts with ever fewer labels, so that a mean of means is not the mean."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = zoo.tokens(40, seed=index)[0]
        return {"input_ids": ids, "labels": ids.index_fill(0, torch.arange(4 * index), -100)}


def history(folder: Path, *, chunked: bool, **options: Any) -> list[float]:
    """Losses, gradient norms and the loss of an evaluation of three steps of `Trainer`."""
    model = zoo.build("llama", attention_dropout=0.1)
    handle = chunk_loss(model, CHUNK) if chunked else None
    settings = {"max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 1e-3}
    arguments = TrainingArguments(str(folder), **SILENT, **{**settings, **options})
    trainer = Trainer(model, arguments, train_dataset=Rows(), eval_dataset=Rows())
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert handle is None or handle.exact
    evaluated = trainer.evaluate()["eval_loss"]
    return [*(step["loss"] for step in steps), *(step["grad_norm"] for step in steps), evaluated]


ACCUMULATED = {"gradient_accumulation_steps": 3, "average_tokens_across_devices": True}


@pytest.mark.parametrize(
    "options",
    [
        {**ACCUMULATED, "gradient_checkpointing": True},
        *late([{}, {"gradient_accumulation_steps": 2, "bf16": True}]),
        *late([{"torch_compile": True, "torch_compile_backend": "aot_eager"}]),
    ],
)
def test_trainer(options: dict[str, Any], tmp_path: Path) -> None:
    plain, chunked = (history(tmp_path, chunked=chunked, **options) for chunked in (False, True))
    assert len(plain) == 7
    assert plain[0] != plain[2]
    # The weights' own rounding; Adam's first steps make it a matter of signs.
    torch.testing.assert_close(chunked, plain, rtol=1e-2 if "bf16" in options else 1e-6, atol=0)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_bare_loop_of_accelerate(precision: str) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    losses = []
    for chunked in (False, True):
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        model: Any = zoo.build("gemma2").train()
        if chunked:
            handle = chunk_loss(model, CHUNK)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        for _ in range(3):
            loss = model(**texts()).loss
            assert loss.dtype == torch.float32
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    AcceleratorState._reset_state(reset_partial_state=True)
    assert losses[0] - losses[2] > 0.05  # of ten seeds, the least is 0.18
    tolerance = 1e-6 if precision == "no" else 2e-3
    torch.testing.assert_close(losses[3:], losses[:3], rtol=tolerance, atol=0)
    handle.remove()
    assert "logits" in model(**texts())


def lora(model: nn.Module, **options: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(init_lora_weights=False, **options)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return get_peft_model(model, config).train()


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "lm_head"]},
        {"modules_to_save": ["embed_tokens", "norm"], "lora_dropout": 0.1},
        {"modules_to_save": ["lm_head"]},
    ],
)
def test_adapters_of_peft(options: dict[str, Any]) -> None:
    options = {"target_modules": ["q_proj"], **options}
    expected = trained(lora(zoo.build("llama"), **options), **texts())
    assert "base_model.model.model.layers.0.mlp.up_proj.weight" not in expected[1]
    wrapped = lora(zoo.build("llama"), **options)
    assert chunk_loss(wrapped, CHUNK).exact
    assert_same(trained(wrapped, **texts()), expected)
    model = zoo.build("llama")
    assert chunk_loss(model, CHUNK).exact
    assert_same(trained(lora(model, **options), **texts()), expected)


@pytest.mark.parametrize("autocast", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gradients_of_half_precision_are_added_up_in_single(
    autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = zoo.build("llama", vocab_size=512)
    if not autocast:
        model.bfloat16()
    ids = zoo.tokens(512)
    context = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    with context, torch.no_grad():
        hidden = model.model(ids).last_hidden_state.bfloat16().double()
    weights = model.lm_head.weight.detach().bfloat16().double().requires_grad_()
    nn.functional.cross_entropy((hidden @ weights.T)[0, :-1], ids[0, 1:]).backward()
    exact = weights.grad
    assert exact is not None

    def error() -> float:
        model.zero_grad()
        with context:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return float((model.lm_head.weight.grad.double() - exact).norm() / exact.norm())

    plain = error()
    assert plain < 3e-3
    chunk_loss(model, 4)  # 128 chunks
    assert error() < 1.3 * plain  # of eight seeds, at most 1.15
    monkeypatch.setattr(head_chunks, "SinglePrecisionSums", contextlib.nullcontext)
    assert error() > 4 * plain  # of eight seeds, at least 5.7


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "mixtral", "gemma2 in float64"])
def test_other_precisions(model_type: str) -> None:
    name, *other = model_type.split()
    model: Any = zoo.build(name)
    model.to(torch.float64 if other else torch.bfloat16)
    expected = trained(model, **texts())
    assert chunk_loss(model, CHUNK).exact
    assert_same(trained(model, **texts()), expected, 1e-6 if other else 0.05)


def test_frozen_heads_and_frozen_models() -> None:
    model: Any = zoo.build("cohere")
    model.requires_grad_(False)
    model.model.layers[0].requires_grad_(True)
    both(model, **texts())
    model.requires_grad_(False)
    expected = model(**texts()).loss
    assert chunk_loss(model, CHUNK).exact
    torch.testing.assert_close(model(**texts()).loss, expected)


# Models whose loss cannot be computed in chunks, or not in the usual way: found by the probe, trained as before.

LARGE = {"vocab_size": 32_768, "hidden_size": 256, "num_hidden_layers": 1}


@pytest.mark.parametrize("late", [False, True])
def test_a_head_that_chunks_change_keeps_its_plain_forward_and_says_so(
    late: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = PositionBias(zoo.tiny_config("llama"))
    expected = trained(model, **texts())
    if late:
        monkeypatch.setattr(head_chunks, "runs_here", lambda model: False)
    with caplog.at_level(logging.WARNING):
        handle = chunk_loss(model, CHUNK)
        found = trained(model, **texts())
    assert handle.exact is False
    assert "PositionBias: its loss cannot be computed in chunks (another loss)" in caplog.text
    assert_same(found, expected, 0)
    assert "logits" in model(**texts())


class Detached(Changed):
    """Its loss is right in chunks and its gradient is not."""

    def change(self, logits: Tensor) -> Tensor:
        return logits.detach() + 0 * logits if logits.shape[1] < 9 else logits


def test_wrong_gradients_alone_are_found(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert chunk_loss(Detached(zoo.tiny_config("llama")), CHUNK).exact is False
    assert "(other gradients)" in caplog.text


@pytest.mark.parametrize("seed", [0, 1, *late([2, 3])])
@pytest.mark.parametrize(("dtype", "options"), [(torch.float32, LARGE), (torch.float64, {})])
def test_rounding_is_no_difference(dtype: torch.dtype, options: dict[str, int], seed: int) -> None:
    """Over a large vocabulary, and of a model in float64, whose loss is float32."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(zoo.tiny_config("llama", **options))  # type: ignore[arg-type]
        assert chunk_loss(model.to(dtype)).exact


class Flattened(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden.view(-1, hidden.shape[-1]), self.weight).view(*hidden.shape[:-1], -1)


def test_a_head_may_view_what_it_gets_in_another_shape() -> None:
    model: Any = zoo.build("llama")
    expected = trained(model, **texts())
    weight = model.lm_head.weight
    model.lm_head = Flattened(64, 128, bias=False)
    model.lm_head.weight = weight
    assert chunk_loss(model, CHUNK).exact
    assert_same(trained(model, **texts()), expected)


class NoHead(Llama):  # type: ignore[misc]
    """Its embeddings are none that its forward uses."""

    def get_input_embeddings(self) -> Any:
        return nn.Embedding(128, 8)


def test_a_model_without_a_decoder_trains_as_it_did(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = NoHead(zoo.tiny_config("llama"))
    given = texts()
    expected = model(**given).loss
    handle = chunk_loss(model, CHUNK)
    with caplog.at_level(logging.WARNING):
        assert model(**given).loss == expected
    assert handle.exact is False
    assert "calls no part that holds its embeddings" in caplog.text
