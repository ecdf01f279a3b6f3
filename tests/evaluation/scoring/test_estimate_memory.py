"""Estimates of memory against every tensor that a forward creates."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_posenc import patch_model
from hf_posenc.attention import engine, exact
from hf_posenc.evaluation.scoring import estimate
from hf_posenc.evaluation.scoring.head_replay import TokenScorer
from hf_posenc.model import masks
from tests.support import zoo
from tests.support.emulated import EmulatedFlash
from tests.support.live_bytes import LiveBytes, attentions, build, forward_cost, measured, within
from tests.support.selection import covering, late, quick
from tests.support.zoo_registry import quiet as quietly

DTYPES = (torch.float32, torch.bfloat16)
TYPES = (
    *("llama", "qwen3", "cohere", "granite", "phi", "phi3", "olmo2", "stablelm"),
    *("gpt_neox", "gpt2", "mixtral", "qwen3_moe", "deepseek_v3", "lfm2", "gemma2"),
)
KINDS = ("llama", "gpt2", "mixtral", "deepseek_v3")
"""One for each form of attention and of what follows it."""


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [*covering(KINDS, DTYPES), *late([name for name in TYPES if name not in KINDS], DTYPES)],
)
def test_memory_is_estimated_within_a_quarter(model_type: str, dtype: torch.dtype) -> None:
    model = build(model_type).to(dtype)
    for length in (256, 1024):
        cost = forward_cost(model, length, chunk=32)
        assert within(cost, measured(model, length, chunk=32))


@pytest.mark.parametrize("model_type", quick(["bloom", "gptj", "gpt_oss"], ["bloom"]))
def test_families_with_an_attention_of_their_own_hold_more_scores(model_type: str) -> None:
    model = build(model_type)
    for length in (256, 1024):
        cost = forward_cost(model, length, chunk=32)
        assert within(cost, measured(model, length, chunk=32), 1.75)


@pytest.mark.parametrize(
    ("vocabulary", "chunk", "dtype"), covering([128, 4096, 32768], [16, 256], DTYPES, rounds=2)
)
def test_logits_count_by_the_chunk(vocabulary: int, chunk: int, dtype: torch.dtype) -> None:
    model = build("llama", vocab_size=vocabulary).to(dtype)
    cost, peak = forward_cost(model, 512, chunk=chunk), measured(model, 512, chunk=chunk)
    assert within(cost, peak)
    assert (cost.logits > cost.activations) == (vocabulary * chunk > 2**18)


ATTENTIONS = (("llama", "sdpa"), ("gemma3_text", "sdpa"))
MORE_ATTENTIONS = (("llama", "eager"), ("mixtral", "sdpa"))


@pytest.mark.parametrize(
    ("case", "dtype"), [*covering(ATTENTIONS, DTYPES), *late(MORE_ATTENTIONS, DTYPES)]
)
def test_a_prefill_in_pieces_keeps_a_cache(case: tuple[str, str], dtype: torch.dtype) -> None:
    model_type, attention = case
    model = build(model_type, **({"sliding_window": 32} if "gemma" in model_type else {})).to(dtype)
    model.set_attn_implementation(attention)
    whole, pieces = (forward_cost(model, 1024, chunk=16, prefill_chunk=p) for p in (None, 128))
    seen = sum(min(layer.window or 1024, 1024) * layer.cached for layer in attentions(model))
    assert whole.cache == 0
    assert pieces.cache >= seen * dtype.itemsize
    assert pieces.activations < whole.activations / 2
    assert pieces.flops == whole.flops
    rows = [forward_cost(model, 1024, chunk=4096, prefill_chunk=p).logits for p in (None, 128)]
    assert rows[0] / rows[1] == 1023 / 128  # a chunk of logits lies within one piece
    for cost, prefill in ((whole, None), (pieces, 128)):
        most = 1.15 if prefill and attention == "sdpa" else 1.35
        assert within(cost, measured(model, 1024, chunk=16, prefill=prefill), most)


@pytest.mark.parametrize(
    ("model_type", "dtype"), covering(["llama", "gpt2", "gpt_neox", "qwen3_moe"], DTYPES)
)
def test_mlps_over_slices_need_no_cache(model_type: str, dtype: torch.dtype) -> None:
    model = build(model_type).to(dtype)
    whole, sliced = (forward_cost(model, 1024, chunk=16, mlp_chunk=n) for n in (None, 64))
    assert sliced.cache == 0
    assert (sliced.activations < whole.activations) == (model_type != "qwen3_moe")  # has experts
    if model_type != "qwen3_moe":
        assert within(sliced, measured(model, 1024, chunk=16, mlp=64), 1.35)


def test_a_prefill_in_pieces_keeps_no_more_than_a_window() -> None:
    model = build("mistral", sliding_window=32)
    short, long = (forward_cost(model, n, chunk=64, prefill_chunk=64) for n in (512, 1024))
    assert short.cache == long.cache > 0
    assert short.beside_weights == long.beside_weights
    for length in (512, 1024):
        assert within(short, measured(model, length, chunk=64, prefill=64), 1.35)


def test_masks_and_scores_grow_with_the_square() -> None:
    windowed = build("mistral", sliding_window=32)
    assert forward_cost(windowed, 2048, chunk=16).activations > 2048**2 * 6
    assert forward_cost(windowed, 31, chunk=16).activations < 31**2 * 2000
    eager, fused = build("llama"), build("llama")
    eager.set_attn_implementation("eager")
    more = forward_cost(eager, 1024).activations - forward_cost(fused, 1024).activations
    assert more > 4 * 1024**2 * 4  # heads, pairs, bytes
    for model in (windowed, eager, fused):
        assert within(forward_cost(model, 1024, chunk=16), measured(model, 1024, chunk=16))


METHODS: dict[str, dict[str, Any]] = {
    "yarn": {"scale": 4},
    "rerope": {"window": 64},
    "dual_chunk": {},
    "alibi": {},
    "log_n": {},
    "dynamic_ntk": {"update": "request"},
}


OTHERS = ("dual_chunk", "log_n")
"""Not so different from those beside them."""


@pytest.mark.parametrize(
    ("method", "dtype"),
    [*covering([name for name in METHODS if name not in OTHERS], DTYPES), *late(OTHERS, DTYPES)],
)
def test_patched_models_on_the_kernels(method: str, dtype: torch.dtype) -> None:
    model = patch_model(
        build("llama", max_position_embeddings=256).to(dtype), method, **METHODS[method]
    )
    cost = forward_cost(model, 1024, chunk=16)
    assert within(cost, measured(model, 1024, chunk=16))


@pytest.mark.parametrize(
    ("method", "prefill"),
    [*covering(["rerope", "alibi"], [None, 256]), *late(["dual_chunk"], [None, 256])],
)
def test_patched_models_on_the_general_path(method: str, prefill: int | None) -> None:
    model = patch_model(build("llama", max_position_embeddings=256), method, **METHODS[method])
    with engine.forced("exact"):
        cost = forward_cost(model, 1024, chunk=64, prefill_chunk=prefill)
        assert within(cost, measured(model, 1024, chunk=64, prefill=prefill), 1.5)


@pytest.mark.parametrize(
    ("method", "dtype"),
    [*covering(["rerope", "yarn"], DTYPES), *late(["dual_chunk", "alibi", "log_n"], DTYPES)],
)
def test_pieces_of_patched_models_on_the_kernels(
    method: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (masks, estimate):
        monkeypatch.setattr(module, "DENSE", 0)  # small beside the text, as for long texts
    model = build("llama", max_position_embeddings=256).to(dtype)
    patch_model(model, method, **METHODS[method])
    cost = forward_cost(model, 1024, chunk=16, prefill_chunk=128)
    assert within(cost, measured(model, 1024, chunk=16, prefill=128), 1.15)


def test_the_general_path_rotates_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (exact, estimate):
        monkeypatch.setattr(module, "SCRATCH", 2**14)  # small beside the text, as for long texts
    model: Any = build("llama", max_position_embeddings=256).to(torch.bfloat16)
    patch_model(model, "rerope", window=64)
    with engine.forced("exact"):
        assert within(forward_cost(model, 1024, chunk=16), measured(model, 1024, chunk=16))


@pytest.mark.parametrize(
    ("method", "dtype"),
    [*covering(["rerope", "dynamic_ntk"], DTYPES), *late(["dual_chunk"], DTYPES)],
)
def test_patched_models_on_a_fused_operator(
    method: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(
        self: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any
    ) -> tuple[Tensor, Tensor, Any]:
        """Make the tensors of the operator, and no others."""
        lse = query.new_zeros(query.shape[1], query.shape[0], dtype=torch.float32)
        return query.new_zeros(*query.shape[:2], value.shape[2]), lse, (lse, lse)

    monkeypatch.setattr(EmulatedFlash, "attend", attend)
    model = build("llama", max_position_embeddings=256).to(dtype)
    options = METHODS[method] if method != "dynamic_ntk" else {}
    patch_model(model, method, **options)
    with engine.forced(EmulatedFlash.name):
        cost = forward_cost(model, 1024, chunk=16)
        assert within(cost, measured(model, 1024, chunk=16))
        assert estimate.backends(model) == {EmulatedFlash.name: True}


def test_a_backend_that_was_never_checked_here_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patch_model(build("llama", max_position_embeddings=256), "rerope", window=64)
    untried = engine.Backend("untried", lambda *_: True, exact.exact, proven=False)
    monkeypatch.setattr(engine, "BACKENDS", (untried, *engine.BACKENDS))
    assert estimate.backends(model) == {"untried": False}
    assert not engine._checked  # nor was it now


def test_full_logits_are_held_whole() -> None:
    model = build("llama", vocab_size=4096)
    scorer = TokenScorer(model, zoo.tokens(9)[0], chunk=16)
    scorer.replays = False
    live: Any = LiveBytes(model)
    with live:
        scorer(zoo.tokens(512)[0])
    cost = forward_cost(model, 512, chunk=16, full_logits=True)
    assert within(cost, live.peak)
    assert cost.logits > 512 * 4096 * 4


def test_windows_of_a_batch() -> None:
    model = build("llama")
    one, four = (forward_cost(model, 256, windows=n, chunk=16) for n in (1, 4))
    assert four.flops == 4 * one.flops
    assert four.tokens == 4 * 256
    assert four.activations == 4 * one.activations
    assert four.logits == one.logits  # the windows share a chunk
    scorer = TokenScorer(model, zoo.tokens(9)[0], chunk=16)
    live: Any = LiveBytes(model)
    with live:
        scorer(zoo.tokens(256).expand(4, -1))
    assert within(four, live.peak)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    with quietly():
        yield
    logging.disable(logging.NOTSET)
