"""The handle of the loss in chunks: what a model keeps and gets back, and what happens where chunks will not do."""

from __future__ import annotations

import copy
import inspect
import json
import logging
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.head_replay import TokenScorer
from hf_posenc.training import loss_probe
from hf_posenc.training.loss import chunk_loss, default_chunk
from scripts.benchmark_training import CHUNKS, LENGTHS, RESULT, VOCABULARY, WHOLE, _llama, title
from tests import zoo
from tests.test_chunked_loss import CHUNK, LENGTH, assert_same, texts, trained

LARGE = {"vocab_size": 32_768, "hidden_size": 256, "num_hidden_layers": 1}


def test_everything_is_put_back() -> None:
    model = zoo.build("gemma2").train()
    model.model.layers[1].eval()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    parts, modes = list(model.named_modules()), [module.training for module in model.modules()]
    loss_function = model.loss_function
    handle = chunk_loss(model, CHUNK)
    trained(model, **texts())
    assert set(vars(model)) - before[""] == {"forward", "_chunked_loss"}
    handle.remove()
    assert list(model.named_modules()) == parts
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert [module.training for module in model.modules()] == modes
    assert model.loss_function is loss_function
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert "logits" in model(**texts())


def test_an_error_in_the_head_puts_everything_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = zoo.build("llama")
    chunk_loss(model, CHUNK)
    decoder, loss_function = model.model, model.loss_function

    def broken(hidden: Tensor) -> Tensor:
        raise RuntimeError("broken")

    monkeypatch.setattr(model.lm_head, "forward", broken)
    with pytest.raises(RuntimeError, match="broken"):
        model(**texts())
    assert model.model is decoder
    assert model.loss_function is loss_function
    assert not decoder._forward_hooks


def test_a_forward_without_labels_is_the_models_own() -> None:
    model: Any = zoo.build("llama")
    ids = texts()["input_ids"]
    expected = model(ids)
    handle = chunk_loss(model, CHUNK)
    output = model(ids)
    assert torch.equal(output.logits, expected.logits)
    assert output.past_key_values.get_seq_length() == LENGTH
    generated = model.generate(ids[:, :5], max_new_tokens=4, do_sample=False)
    losses = TokenScorer(model, ids[0], chunk=8)(ids[0])
    handle.remove()
    assert torch.equal(generated, model.generate(ids[:, :5], max_new_tokens=4, do_sample=False))
    assert torch.equal(losses, TokenScorer(model, ids[0], chunk=8)(ids[0]))


def test_tuples_and_positions_of_arguments() -> None:
    model: Any = zoo.build("llama")
    given = texts()
    expected = trained(model, **given)[0]
    chunk_loss(model, CHUNK)
    loss, *others = model(**given, return_dict=False, use_cache=False)
    assert (loss, others) == (model(**given).loss, [])
    torch.testing.assert_close(loss, expected)
    assert model(given["input_ids"], labels=given["labels"]).loss == loss
    embedded = model.get_input_embeddings()(given["input_ids"])
    assert model(inputs_embeds=embedded, labels=given["labels"]).loss == loss


def test_the_signature_stays_for_those_who_read_it() -> None:
    model: Any = zoo.build("llama")
    bare = zoo.build("llama")
    chunk_loss(model, CHUNK)
    assert inspect.signature(model.forward) == inspect.signature(bare.forward)
    assert model.forward.__func__.__get__(model)(**texts()).loss == model(**texts()).loss


def test_a_copy_has_a_loss_of_its_own() -> None:
    model: Any = zoo.build("llama")
    chunk_loss(model, CHUNK)
    expected = trained(model, **texts())
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    assert_same(trained(other, **texts()), expected, 0)
    other.forward.__self__._chunked_loss.remove()
    assert "logits" in other(**texts())
    assert "logits" not in model(**texts())


def test_what_wraps_it_is_kept() -> None:
    model: Any = zoo.build("llama")
    handle = chunk_loss(model, CHUNK)
    autocast: Any = torch.autocast("cpu", torch.bfloat16)  # as accelerate does it
    model.forward = types.MethodType(autocast(model.forward.__func__), model)
    wrapped = model.forward
    assert chunk_loss(model, 8) is handle
    assert "logits" not in model(**texts())
    handle.remove()
    assert model.forward is wrapped
    assert "logits" in model(**texts())
    assert chunk_loss(model, CHUNK).active
    assert "logits" not in model(**texts())


def test_the_default_chunk() -> None:
    assert default_chunk(zoo.build("llama", vocab_size=4096)) == 2**23 // 4096
    wide: Any = zoo.tiny_config("llama", hidden_size=4096, vocab_size=128_256)
    with torch.device("meta"):
        model = LlamaForCausalLM(wide)
        assert chunk_loss(model).chunk == default_chunk(model) == 1024
    with pytest.raises(PosencError, match="at least 1 token, not 0"):
        chunk_loss(model, 0)


def test_the_committed_measurement_is_of_this_default() -> None:
    results = json.loads(RESULT.read_text(encoding="utf-8"))["results"]
    for situation, cases in results.items():
        vocabulary = int(situation.split()[-1])
        with torch.device("meta"):
            assert cases[CHUNKS]["chunk"] == default_chunk(_llama(vocabulary)), situation
    longest = results[title(max(LENGTHS), VOCABULARY)]
    assert longest[CHUNKS]["peak_mib"] < longest[WHOLE]["peak_mib"] / 10
    assert longest[CHUNKS]["seconds"] < 1.25 * longest[WHOLE]["seconds"]


def test_weights_that_are_not_here_yet_are_tried_on_the_first_batch() -> None:
    config = zoo.tiny_config("gemma2")
    model = zoo.from_config(config)
    with torch.device("meta"):
        absent: Any = type(model)(config)
    handle = chunk_loss(absent, CHUNK)
    assert handle.exact is None
    absent.load_state_dict(model.state_dict(), assign=True)
    absent.tie_weights()
    absent.model.rotary_emb = model.model.rotary_emb
    absent.model.embed_tokens.embed_scale = model.model.embed_tokens.embed_scale
    given = texts() | {"attention_mask": torch.ones(2, LENGTH, dtype=torch.long)}
    runs: list[Any] = []
    absent.model.norm.register_forward_hook(lambda *_: runs.append(1))
    found = trained(absent.eval(), **given)
    assert handle.exact
    assert len(runs) == 1
    assert_same(found, trained(model, **given))


_Llama: Any = LlamaForCausalLM


class PositionBias(_Llama):  # type: ignore[misc]
    """Its head depends on where a token stands, which a slice of hidden states does not tell."""

    def forward(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        places = torch.arange(output.logits.shape[1], dtype=torch.float32)
        output.logits = output.logits + places[:, None] * torch.linspace(
            -1, 1, output.logits.shape[-1]
        )
        output.loss = (
            None
            if labels is None
            else self.loss_function(output.logits, labels, self.config.vocab_size)
        )
        return output


@pytest.mark.parametrize("late", [False, True])
def test_a_head_that_chunks_change_keeps_its_plain_forward_and_says_so(
    late: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = PositionBias(zoo.tiny_config("llama"))
    expected = trained(model, **texts())
    if late:
        monkeypatch.setattr(loss_probe, "runs_here", lambda model: False)
    with caplog.at_level(logging.WARNING):
        handle = chunk_loss(model, CHUNK)
        found = trained(model, **texts())
    assert handle.exact is False
    assert "PositionBias: its loss cannot be computed in chunks (another loss)" in caplog.text
    assert_same(found, expected, 0)
    assert "logits" in model(**texts())


class Detached(_Llama):  # type: ignore[misc]
    """Its loss is right in chunks and its gradient is not."""

    def forward(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if output.logits.shape[1] < 9:
            output.logits = output.logits.detach() + 0 * output.logits
        output.loss = (
            None
            if labels is None
            else self.loss_function(output.logits, labels, self.config.vocab_size)
        )
        return output


def test_wrong_gradients_alone_are_found(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert chunk_loss(Detached(zoo.tiny_config("llama")), CHUNK).exact is False
    assert "(other gradients)" in caplog.text


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("dtype", "options"), [(torch.float32, LARGE), (torch.float64, {})])
def test_rounding_is_no_difference(dtype: torch.dtype, options: dict[str, int], seed: int) -> None:
    """Over a large vocabulary, and of a model in float64, whose loss is float32."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(zoo.tiny_config("llama", **options))  # type: ignore[arg-type]
        assert chunk_loss(model.to(dtype)).exact


class OwnLoss(_Llama):  # type: ignore[misc]
    """As remote code may be: the loss is computed in the forward, in a way of its own to count."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids, **kwargs)
        if labels is not None:
            flat = output.logits[:, :-1].flatten(0, 1)
            output.loss = F.cross_entropy(flat, labels[:, 1:].flatten())
        return output


def test_a_loss_inside_the_forward_is_chunked_too() -> None:
    model: Any = OwnLoss(zoo.tiny_config("llama"))
    expected = trained(model, **texts(), num_items_in_batch=3)
    handle = chunk_loss(model, CHUNK)
    assert handle.exact
    assert_same(trained(model, **texts(), num_items_in_batch=3), expected)
    assert "logits" not in model(**texts())


class OwnCount(OwnLoss):
    """It counts the tokens itself where it is told how many there are: a rule that nobody else can know."""

    def forward(self, *args: Any, num_items_in_batch: int | None = None, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if num_items_in_batch is not None:
            output.loss = output.loss / num_items_in_batch
        return output


def test_a_rule_of_its_own_for_the_number_of_tokens_is_found() -> None:
    model: Any = OwnCount(zoo.tiny_config("llama"))
    expected = trained(model, **texts(), num_items_in_batch=3)
    assert chunk_loss(model, CHUNK).exact is False
    assert_same(trained(model, **texts(), num_items_in_batch=3), expected, 0)


class Flattened(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        logits = F.linear(hidden.view(-1, hidden.shape[-1]), self.weight)
        return logits.view(*hidden.shape[:-1], -1)


def test_a_head_may_view_what_it_gets_in_another_shape() -> None:
    model: Any = zoo.build("llama")
    expected = trained(model, **texts())
    weight = model.lm_head.weight
    model.lm_head = Flattened(64, 128, bias=False)
    model.lm_head.weight = weight
    assert chunk_loss(model, CHUNK).exact
    assert_same(trained(model, **texts()), expected)


class NoHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner: Any = zoo.build("llama")
        self.config = self.inner.config

    def get_input_embeddings(self) -> Any:
        return nn.Embedding(128, 8)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        return self.inner(input_ids, labels=labels)


def test_a_model_without_a_decoder_to_be_found_trains_as_it_did(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = NoHead()
    given = texts()
    expected = model(**given).loss
    handle = chunk_loss(model, CHUNK)
    with caplog.at_level(logging.WARNING):
        assert model(**given).loss == expected
    assert handle.exact is False
    assert "calls no part that holds its embeddings" in caplog.text
