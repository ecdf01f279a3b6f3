"""Losses in chunks against losses from full logits; memory of the chunks; no side effects."""

from __future__ import annotations

import copy
import logging
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModel, LlamaForCausalLM

from hf_posenc import patch_model, unpatch_model
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.scoring.decoder import evaluation_mode
from hf_posenc.evaluation.scoring.head_replay import TokenScorer
from tests.support import zoo
from tests.support.selection import covering


@torch.no_grad()
def full_logits(model: nn.Module, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids[None], use_cache=False).logits[0]
    return logits


def check(losses: Tensor, expected: Tensor, off: float = 2e-6) -> None:
    torch.testing.assert_close(losses, expected, atol=off, rtol=off)


def expected_losses(logits: Tensor, ids: Tensor) -> Tensor:
    return -logits[:-1].double().log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


IN_ATTENTION: tuple[tuple[str, dict[str, Any]], ...] = (
    ("rerope", {"window": 16}),
    ("alibi", {}),
    ("dynamic_ntk", {"update": "row", "bucket": 8, "original_max_position_embeddings": 16}),
    ("dynamic_ntk", {"update": "request", "original_max_position_embeddings": 16}),
    ("log_n", {"original_max_position_embeddings": 16}),
)


@pytest.mark.parametrize(
    ("model_type", "patch"),
    covering(("llama", "gemma2", "gpt_neox", "qwen3", "cohere"), IN_ATTENTION),
)
def test_attention_patches_are_replayed(model_type: str, patch: tuple[str, dict[str, Any]]) -> None:
    method, options = patch
    model = patch_model(zoo.build(model_type), method, **options)
    ids = zoo.tokens(57)[0]
    expected = expected_losses(full_logits(model, ids), ids)
    for chunk in (7, None):
        scorer = TokenScorer(model, ids, chunk=chunk)
        assert scorer.replays
        check(scorer(ids), expected)
        check(scorer(ids, 33), expected[32:])
    unpatched = expected_losses(full_logits(unpatch_model(model), ids), ids)
    assert (unpatched - expected).abs().max() > 1e-3  # the patch was in force


def test_any_chunk_and_any_start_give_the_same_losses() -> None:
    model, ids = zoo.build("llama"), zoo.tokens(50)[0]
    expected = expected_losses(full_logits(model, ids), ids)
    for chunk in (1, 7, 49, 1000, None):
        scorer = TokenScorer(model, ids, chunk=chunk)
        for first in (1, 2, 33, 49):
            check(scorer(ids, first), expected[first - 1 :])


_DispatchMode: Any = TorchDispatchMode


class LargestTensor(_DispatchMode):  # type: ignore[misc]
    """Records the size of the largest floating-point tensor that any operation creates, views aside."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {value.untyped_storage().data_ptr() for value in args if isinstance(value, Tensor)}
        output = func(*args, **(kwargs or {}))
        for value in output if isinstance(output, tuple | list) else (output,):
            if not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            if value.untyped_storage().data_ptr() not in given:  # the head's weight, transposed
                self.elements = max(self.elements, value.numel())
        return output


def largest(run: Callable[[], Any]) -> int:
    watch: Any = LargestTensor()
    with watch:
        run()
    return int(watch.elements)


def test_logits_never_exceed_a_chunk() -> None:
    vocabulary, chunk = 4096, 8
    model = zoo.build("llama", vocab_size=vocabulary)
    sizes = {}
    for length in (128, 256, 512):
        ids = zoo.tokens(length)[0]
        scorer = TokenScorer(model, ids, chunk=chunk)
        sizes[length] = largest(lambda scorer=scorer, ids=ids: scorer(ids))  # type: ignore[misc]
        assert largest(lambda ids=ids: full_logits(model, ids)) >= length * vocabulary  # type: ignore[misc]
    assert sizes[128] == sizes[256] == chunk * vocabulary  # the logits of one chunk
    # from here on the activations are larger than a chunk of logits: 96 MLP features a token
    assert sizes[512] == 512 * 96


def test_the_default_chunk_adapts_to_the_vocabulary() -> None:
    models = (zoo.build("llama", vocab_size=size) for size in (128, 65536))
    small, large = (TokenScorer(model, zoo.tokens(9)[0]) for model in models)
    assert small.chunk * 128 == large.chunk * 65536 == 2**25


def test_nothing_is_left_behind() -> None:
    model, ids = zoo.build("gemma2"), zoo.tokens(40)[0]
    model.train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    config = copy.deepcopy(model.config.to_dict())
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    with evaluation_mode(model):
        assert not any(module.training for module in model.modules())
        TokenScorer(model, ids, chunk=4)(ids)
    assert [module.training for module in model.modules()] == modes
    assert model.config.to_dict() == config
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert not any(module._forward_hooks for module in model.modules())


def test_an_error_in_the_forward_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = zoo.build("llama").train(), zoo.tokens(40)[0]
    with evaluation_mode(model):
        scorer = TokenScorer(model, ids)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    hooks = dict(model.model._forward_hooks)

    def broken(hidden: Tensor) -> Tensor:
        raise RuntimeError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(model.lm_head, "forward", broken)
        with pytest.raises(RuntimeError, match="broken"), evaluation_mode(model):
            scorer(ids)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert model.model._forward_hooks == hooks


def test_a_forward_that_was_already_replaced_is_put_back() -> None:
    model, ids = zoo.build("llama"), zoo.tokens(40)[0]
    expected = TokenScorer(model, ids)(ids)
    own, calls = model.model.forward, []

    def hooked(*args: Any, **kwargs: Any) -> Any:  # as accelerate's hooks do
        calls.append(1)
        return own(*args, **kwargs)

    model.model.forward = hooked
    assert torch.equal(TokenScorer(model, ids)(ids), expected)
    assert vars(model.model)["forward"] is hooked
    assert calls


class OldStyle(nn.Module):
    """Imitates remote code: the decoder returns a tuple, the head is in the outer forward, no `use_cache`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.body, self.head = OldStyleBody(model.model), model.lm_head

    def get_input_embeddings(self) -> Any:
        return self.body.inner.get_input_embeddings()

    def forward(self, input_ids: Tensor) -> Any:
        return types.SimpleNamespace(logits=self.head(self.body(input_ids)[0]))


class OldStyleBody(nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner: Any = inner

    def forward(self, input_ids: Tensor) -> tuple[Tensor, None]:
        hidden = self.inner(input_ids, use_cache=False).last_hidden_state
        # so that slices of the inner module would be wrong
        return hidden * torch.arange(hidden.shape[1], dtype=hidden.dtype)[:, None], None


def with_adapter(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


@pytest.mark.parametrize(
    "wrap", [OldStyle, with_adapter, lambda model: model.bfloat16()], ids=["tuples", "peft", "half"]
)
def test_other_forms_of_a_model_are_replayed_too(wrap: Callable[[Any], Any]) -> None:
    """Losses of half precision are made in float32."""
    model, ids = wrap(zoo.build("llama")).eval(), zoo.tokens(41)[0]
    scorer = TokenScorer(model, ids, chunk=8)
    assert scorer.replays
    with torch.no_grad():
        check(scorer(ids), expected_losses(model(ids[None]).logits[0], ids))


Llama: Any = LlamaForCausalLM


class Changed(Llama):  # type: ignore[misc]
    """Its logits are changed behind the head, and the loss is of these."""

    def change(self, logits: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = self.change(output.logits)
        if labels is not None:
            output.loss = self.loss_function(output.logits, labels, self.config.vocab_size)
        return output


class PositionBias(Changed):
    """Its head depends on where a token stands, which a slice of hidden states does not tell."""

    def change(self, logits: Tensor) -> Tensor:
        places = torch.arange(logits.shape[1], dtype=torch.float32)
        return logits + places[:, None] * torch.linspace(-1, 1, logits.shape[-1])


def test_a_head_that_cannot_be_replayed_is_scored_in_full_and_says_so(caplog: Any) -> None:
    model: Any = PositionBias(zoo.tiny_config("llama")).eval()
    ids = zoo.tokens(40)[0]
    with caplog.at_level(logging.WARNING):
        scorer = TokenScorer(model, ids, chunk=4)
    assert "head replay does not reproduce" in caplog.text
    assert not scorer.replays
    check(scorer(ids), expected_losses(full_logits(model, ids), ids))


def test_a_model_without_a_language_head_is_refused() -> None:
    auto: Any = AutoModel
    model = auto.from_config(zoo.tiny_config("llama"))
    with pytest.raises(PosencError, match="LlamaModel does not return logits"):
        TokenScorer(model, zoo.tokens(40)[0])


def test_a_window_needs_a_token_to_score() -> None:
    model, ids = zoo.build("llama"), zoo.tokens(10)[0]
    scorer = TokenScorer(model, ids)
    for first in (0, 10):
        with pytest.raises(PosencError, match="10 tokens"):
            scorer(ids, first)
    with pytest.raises(PosencError, match="chunk is a whole number of at least 1, not 0"):
        TokenScorer(model, ids, chunk=0)
