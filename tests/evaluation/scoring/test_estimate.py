"""Estimates: operations against PyTorch's own count, memory against every tensor; models without weights."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig

from hf_posenc import patch_model
from hf_posenc.attention import engine, exact
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.scoring import estimate
from hf_posenc.evaluation.scoring.estimate import (
    Attention,
    read_layer,
    run_cost,
    visible_pairs,
)
from hf_posenc.model import masks, memory
from tests.support import zoo
from tests.support.emulated import EmulatedFlash
from tests.support.live_bytes import attentions, build, forward_cost, measured, within
from tests.support.selection import covering, late
from tests.support.zoo_registry import quiet as quietly

# --- operations -------------------------------------------------------------------------------------


def grouped(a: Any, b: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """Operations missing from `FlopCounterMode`: rows (n, in) times the matrices (experts, in, out) of experts."""
    return int(2 * a[0] * a[1] * b[-1])


def counted_flops(model: Any, ids: Tensor) -> int:
    """Count every matrix product of a forward with eager attention, which computes all pairs."""
    model.set_attn_implementation("eager")
    mapping: Any = {torch.ops.aten._grouped_mm: grouped}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter, torch.no_grad():
        model(input_ids=ids, use_cache=False)
    return int(counter.get_total_flops())


@pytest.mark.parametrize(
    "model_type",
    [
        *("llama", "gemma4_text", "gpt2", "minicpm3", "lfm2", "qwen2_moe", "deepseek_v3"),
        *late(["mistral", "gemma2", "cohere2", "phi", "phi3", "gpt_neox", "gptj", "opt", "bloom"]),
        *late(["stablelm", "starcoder2", "mixtral", "qwen3_moe", "granitemoe", "olmoe"]),
    ],
)
def test_operations_are_those_that_pytorch_counts(model_type: str) -> None:
    model, length = zoo.build(model_type), 24
    ids = zoo.tokens(length)
    hidden_pairs = sum(
        2 * layer.heads * (layer.key_dim + layer.value_dim)
        * (length**2 - visible_pairs(layer, length))
        for layer in attentions(model)
    )  # fmt: skip
    cost = forward_cost(model, length, scored=length)
    counted = counted_flops(model, ids)
    # transformers up to 5.17 computes the angles of a rotation by a matrix product, which PyTorch counts
    assert 0 <= counted - (cost.flops + hidden_pairs) <= counted / 2000
    assert cost.tokens == length


class Expert(nn.Module):
    """A gated MLP of 8 features within."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 4)


def test_experts_in_a_list_of_modules_as_remote_code_has_them() -> None:
    layer = nn.Module()
    layer.experts, layer.router = nn.ModuleList(Expert() for _ in range(6)), nn.Linear(4, 6)
    config = types.SimpleNamespace(num_experts=6, num_experts_per_tok=2)
    found = read_layer(layer, config, hidden=4)
    assert found.weights == pytest.approx(2 * 3 * 32 + 24)
    assert found.intermediate == 2 * 3 * 8
    assert found.attention is None


@pytest.mark.parametrize("length", [1, 7, 8, 9, 40])
@pytest.mark.parametrize(("window", "chunked"), [(None, False), (8, False), (8, True), (64, True)])
def test_pairs_are_those_of_the_mask(length: int, window: int | None, chunked: bool) -> None:
    row, column = torch.arange(length)[:, None], torch.arange(length)
    mask = column <= row
    if window is not None:
        mask &= (column // window == row // window) if chunked else (row - column < window)
    attention = Attention(4, 2, 16, 16, window, chunked)
    assert visible_pairs(attention, length) == int(mask.sum())


@pytest.mark.parametrize(
    ("model_type", "windows"),
    [
        ("mistral", [8] * 4),
        ("gemma3_text", [8, None, 8, None]),
        ("qwen2", [None] * 4),
        ("olmo3", [8, 8, 8, None]),
    ],
)
def test_windows_are_read_off(model_type: str, windows: list[int | None]) -> None:
    model = zoo.build(model_type)
    config: Any = model.config
    if any(windows) and None in windows:
        assert config.layer_types[0] == "sliding_attention"
    assert [layer.window for layer in attentions(model)] == windows


def test_a_head_reads_scored_tokens_only() -> None:
    model = zoo.build("llama", vocab_size=4096)
    every, few = (forward_cost(model, 64, scored=scored).flops for scored in (63, 10))
    assert every - few == 2 * 53 * 64 * 4096
    assert forward_cost(model, 64).flops == every


# --- whole runs, and models without weights ---------------------------------------------------------


def test_a_run_adds_up_work_and_takes_the_dearest_window() -> None:
    model = build("llama")
    short, long = forward_cost(model, 64, scored=20), forward_cost(model, 256)
    run = run_cost(model, [(64, 20), (256, 255), (64, 20)])
    assert run == dataclasses.replace(
        long, tokens=64 + 64 + 256, flops=2 * short.flops + long.flops
    )


def meta(config: Any, dtype: torch.dtype) -> Any:
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(config, dtype=dtype)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt2", "mixtral", "bloom"])
def test_no_weights_are_needed(model_type: str) -> None:
    model: Any = zoo.build(model_type)
    empty = meta(model.config, torch.float32)
    for options in ({}, {"prefill_chunk": 32}, {"dtype": torch.bfloat16}):
        assert forward_cost(empty, 128, **options) == forward_cost(model, 128, **options)


def test_llama_3_8b() -> None:
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
    )
    model = meta(config, torch.bfloat16)
    length = 131_072
    cost, pieces = (forward_cost(model, length, prefill_chunk=p) for p in (None, 8192))
    parameters = 8_030_261_248  # as published
    assert cost.weights == pytest.approx(2 * parameters, rel=1e-6)  # plus the table of frequencies
    attention = 32 * 4 * 4096 * (length**2 + length) / 2
    multiplied = parameters - 128256 * 4096 - 65 * 4096  # the embeddings are looked up; norms
    head = 2 * 128256 * 4096  # the last token is not scored
    assert cost.flops == 2.0 * length * multiplied - head + attention
    assert pieces.cache > 32 * 2 * 8 * 128 * length * 2
    for found in (cost, pieces):
        assert found.total < 140e9
    assert forward_cost(model, length, full_logits=True).logits > length * 128256 * 2


def test_another_dtype_and_shared_weights() -> None:
    model = zoo.build("llama", tie_word_embeddings=True)
    own, half = forward_cost(model, 64), forward_cost(model, 64, dtype=torch.bfloat16)
    untied = forward_cost(zoo.build("llama", tie_word_embeddings=False), 64)
    assert own.weights == 2 * half.weights
    assert own.activations == 2 * half.activations
    assert untied.weights - own.weights == 128 * 64 * 4
    assert untied.flops == own.flops


def test_adapters_are_multiplied_too() -> None:
    peft = pytest.importorskip("peft")
    model = zoo.build("llama")
    plain = forward_cost(model, 64)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    cost = forward_cost(wrapped, 64)
    assert cost.flops - plain.flops == 4 * 2 * 64 * (64 * 4 + 4 * 64)
    assert cost.activations == plain.activations


def test_what_cannot_be_estimated() -> None:
    model = zoo.build("llama")
    with pytest.raises(PosencError, match="no window"):
        run_cost(model, [])
    auto: Any = AutoModel
    for other in (nn.Linear(2, 2), auto.from_config(zoo.tiny_config("llama"))):
        with pytest.raises(PosencError, match=f"{type(other).__name__} has no language head"):
            forward_cost(other, 64)


def test_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory.free_memory("meta") is None
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  900 kB\nMemAvailable:   100 kB\n", encoding="ascii")
    monkeypatch.setattr(memory, "_MEMINFO", meminfo)
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory.free_memory("cpu") == 102_400
    for name, text in (("max", "max"), ("current", "5000"), ("stat", "anon 9\ninactive_file 70\n")):
        (tmp_path / f"memory.{name}").write_text(text, encoding="ascii")
    assert memory.free_memory(torch.device("cpu")) == 102_400  # no limit
    (tmp_path / "memory.max").write_text("9000\n", encoding="ascii")
    assert memory.free_memory("cpu") == 4070
    meminfo.unlink()
    (tmp_path / "memory.max").unlink()
    assert memory.free_memory("cpu") is None


# --- memory, against every tensor that a forward creates --------------------------------------------

DTYPES = (torch.float32, torch.bfloat16)
TYPES = (
    *("llama", "qwen3", "cohere", "granite", "phi", "phi3", "olmo2", "stablelm"),
    *("gpt_neox", "gpt2", "mixtral", "qwen3_moe", "deepseek_v3", "lfm2", "gemma2"),
)
KINDS = ("llama", "gpt2", "mixtral", "deepseek_v3")
"""One for each form of attention and of what follows it."""


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [
        *covering(KINDS, DTYPES),
        *late([name for name in TYPES if name not in KINDS], DTYPES),
        *(("bloom", DTYPES[0]), *late(["gptj", "gpt_oss"], DTYPES[:1])),
    ],
)
def test_memory_is_estimated_within_a_quarter(model_type: str, dtype: torch.dtype) -> None:
    model = build(model_type).to(dtype)
    own = model_type in ("bloom", "gptj", "gpt_oss")  # an attention that holds more scores
    for length in (256, 1024):
        cost = forward_cost(model, length, chunk=32)
        assert within(cost, measured(model, length, chunk=32), 1.75 if own else 1.25)


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


# The backend, a constant that is made small beside the text, as it is beside long ones, the tokens of a piece, and how
# far the estimate may be above the peak.
WAYS: dict[str, tuple[str | None, str, int | None, float]] = {
    "kernels": (None, "", None, 1.25),
    "pieces on kernels": (None, "DENSE", 128, 1.15),
    "general": ("exact", "", None, 1.5),
    "pieces on the general path": ("exact", "", 256, 1.5),
    "general, block by block": ("exact", "SCRATCH", None, 1.25),
    "fused": (EmulatedFlash.name, "", None, 1.25),
}
ALWAYS = (
    *(("kernels", method) for method in ("yarn", "rerope", "alibi", "dynamic_ntk")),
    *(("pieces on kernels", method) for method in ("rerope", "yarn")),
    *(("general", "rerope"), ("pieces on the general path", "alibi")),
    *(("general, block by block", "rerope"), ("fused", "rerope"), ("fused", "dynamic_ntk")),
)


@pytest.mark.parametrize(
    ("way", "method", "dtype"),
    [
        *((*case, DTYPES[n % 2]) for n, case in enumerate(ALWAYS)),
        *late(WAYS, ["rerope", "dual_chunk"], DTYPES),
        *late([way for way in WAYS if way != "fused"], ["alibi"], DTYPES),
        *late(["kernels", "pieces on kernels"], ["yarn", "log_n"], DTYPES),
    ],
)
def test_patched_models(
    way: str, method: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(
        self: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any
    ) -> tuple[Tensor, Tensor, Any]:
        """Make the tensors of the operator, and no others."""
        lse = query.new_zeros(query.shape[1], query.shape[0], dtype=torch.float32)
        return query.new_zeros(*query.shape[:2], value.shape[2]), lse, (lse, lse)

    monkeypatch.setattr(EmulatedFlash, "attend", attend)
    backend, small, prefill, most = WAYS[way]
    for module in (masks, exact, estimate):
        if hasattr(module, small):
            monkeypatch.setattr(module, small, {"DENSE": 0, "SCRATCH": 2**14}[small])
    model = build("llama", max_position_embeddings=256).to(dtype)
    patch_model(model, method, **METHODS[method])
    with engine.forced(backend) if backend else contextlib.nullcontext():
        cost = forward_cost(model, 1024, chunk=16, prefill_chunk=prefill)
        assert within(cost, measured(model, 1024, chunk=16, prefill=prefill), most)
        if way == "fused":
            assert estimate.backends(model) == {EmulatedFlash.name: True}


def test_a_backend_that_was_never_checked_here_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patch_model(build("llama", max_position_embeddings=256), "rerope", window=64)
    untried = engine.Backend("untried", lambda *_: True, exact.exact, proven=False)
    monkeypatch.setattr(engine, "BACKENDS", (untried, *engine.BACKENDS))
    assert estimate.backends(model) == {"untried": False}
    assert not engine._checked  # nor was it now


def test_full_logits_are_held_whole() -> None:
    model = build("llama", vocab_size=4096)
    cost = forward_cost(model, 512, chunk=16, full_logits=True)
    assert within(cost, measured(model, 512, chunk=16, full_logits=True))
    assert cost.logits > 512 * 4096 * 4


def test_windows_of_a_batch() -> None:
    model = build("llama")
    one, four = (forward_cost(model, 256, windows=n, chunk=16) for n in (1, 4))
    assert (four.flops, four.tokens) == (4 * one.flops, 4 * 256)
    assert four.activations == 4 * one.activations
    assert four.logits == one.logits  # the windows share a chunk
    assert within(four, measured(model, 256, windows=4, chunk=16))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    with quietly():
        yield
    logging.disable(logging.NOTSET)
