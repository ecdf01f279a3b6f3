"""Estimates: operations against PyTorch's own count, memory against every tensor; models without weights."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig

from hf_posenc import patch_model
from hf_posenc.attention import engine, exact
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.device.run import LLAMA_8B
from hf_posenc.evaluation.scoring import estimate
from hf_posenc.evaluation.scoring.estimate import Attention, run_cost, visible_pairs
from hf_posenc.model import masks, weights
from tests.support import zoo
from tests.support.emulated import EmulatedFlash
from tests.support.live_bytes import attentions, build, check, forward_cost
from tests.support.selection import covering, late
from tests.support.zoo_registry import quiet as quietly


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
        2 * each.heads * (each.key_dim + each.value_dim) * (length**2 - visible_pairs(each, length))
        for each in attentions(model)
    )
    cost = forward_cost(model, length, scored=length)
    counted = counted_flops(model, ids)
    # transformers up to 5.17 computes the angles of a rotation by a matrix product, which PyTorch counts
    assert 0 <= counted - (cost.flops + hidden_pairs) <= counted / 2000
    assert cost.tokens == length


def test_experts_in_a_list_of_modules_as_remote_code_has_them() -> None:
    model = zoo.build("mixtral")  # 4 experts, 2 for each token
    cost = forward_cost(model, 64)
    for layer in model.model.layers:
        sizes = layer.mlp.experts.gate_up_proj.shape[1], layer.mlp.experts.down_proj.shape[2]
        layer.mlp.experts = nn.ModuleList(
            nn.ModuleList([nn.Linear(64, sizes[0]), nn.Linear(sizes[1], 64)]) for _ in range(4)
        )
    assert forward_cost(model, 64).flops == cost.flops


@pytest.mark.parametrize("length", [1, 7, 8, 9, 40])
@pytest.mark.parametrize(("window", "chunked"), [(None, False), (8, False), (8, True), (64, True)])
def test_pairs_are_those_of_the_mask(length: int, window: int | None, chunked: bool) -> None:
    row, column = torch.arange(length)[:, None], torch.arange(length)
    mask = column <= row
    if window is not None:
        mask &= (column // window == row // window) if chunked else (row - column < window)
    assert visible_pairs(Attention(4, 2, 16, 16, window, chunked), length) == int(mask.sum())


@pytest.mark.parametrize(
    ("model_type", "windows"),
    [
        *(("mistral", [8] * 4), ("qwen2", [None] * 4)),
        *(("gemma3_text", [8, None, 8, None]), ("olmo3", [8, 8, 8, None])),
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


def test_a_run_adds_up_work_and_takes_the_dearest_window() -> None:
    model = build("llama")
    short, long = forward_cost(model, 64, scored=20), forward_cost(model, 256)
    run = run_cost(model, [(64, 20), (256, 255), (64, 20)])
    assert run == replace(long, tokens=64 + 64 + 256, flops=2 * short.flops + long.flops)


def meta(config: Any, dtype: torch.dtype) -> Any:
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        return auto.from_config(config, dtype=dtype)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt2", "mixtral", "bloom"])
def test_no_weights_are_needed(model_type: str) -> None:
    model: Any = zoo.build(model_type)
    empty = meta(model.config, torch.float32)
    for options in ({}, {"prefill_chunk": 32}):
        assert forward_cost(empty, 128, **options) == forward_cost(model, 128, **options)


def test_llama_3_8b() -> None:
    model = meta(LlamaConfig(**LLAMA_8B), torch.bfloat16)
    length, parameters = 131_072, 8_030_261_248  # as published
    cost = forward_cost(model, length)
    assert cost.weights == pytest.approx(2 * parameters, rel=1e-6)  # plus the table of frequencies
    attention = 32 * 4 * 4096 * (length**2 + length) / 2
    multiplied = parameters - 128256 * 4096 - 65 * 4096  # the embeddings are looked up; norms
    head = 2 * 128256 * 4096  # the last token is not scored
    assert cost.flops == 2.0 * length * multiplied - head + attention
    assert forward_cost(model, length, full_logits=True).logits > length * 128256 * 2


def test_another_dtype_and_shared_weights() -> None:
    model = zoo.build("llama", tie_word_embeddings=True)
    own = forward_cost(model, 64)
    untied = forward_cost(zoo.build("llama", tie_word_embeddings=False), 64)
    half = forward_cost(model.bfloat16(), 64)
    assert own.weights == pytest.approx(2 * half.weights, rel=1e-3)  # frequencies stay in float32
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
    assert weights.free_memory("meta") is None
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  900 kB\nMemAvailable:   100 kB\n", encoding="ascii")
    monkeypatch.setattr(weights, "_MEMINFO", meminfo)
    monkeypatch.setattr(weights, "_CGROUP", tmp_path)
    assert weights.free_memory("cpu") == 102_400
    for name, text in (("max", "max"), ("current", "5000"), ("stat", "anon 9\ninactive_file 70\n")):
        (tmp_path / f"memory.{name}").write_text(text, encoding="ascii")
    assert weights.free_memory(torch.device("cpu")) == 102_400  # no limit
    (tmp_path / "memory.max").write_text("9000\n", encoding="ascii")
    assert weights.free_memory("cpu") == 4070
    meminfo.unlink()
    (tmp_path / "memory.max").unlink()
    assert weights.free_memory("cpu") is None


# --- memory, against every tensor that a forward creates --------------------------------------------

DTYPES = (torch.float32, torch.bfloat16)
KINDS = ("llama", "gpt2", "mixtral", "deepseek_v3")
"""One for each form of attention and of what follows it."""
OTHERS = (
    *("qwen3", "cohere", "granite", "phi", "phi3", "olmo2", "stablelm", "opt"),
    *("gpt_neox", "qwen3_moe", "lfm2", "gemma2", "gemma3_text", "mistral"),
)


@pytest.mark.parametrize(("model_type", "dtype"), [*covering(KINDS, DTYPES), *late(OTHERS, DTYPES)])
def test_memory_of_families(model_type: str, dtype: torch.dtype) -> None:
    model = build(model_type).to(dtype)
    for length in (256, 1024):
        check(model, length)


MISTRAL = {"model_type": "mistral", "sliding_window": 32}
# The model, its attention, and the sizes of a run.
WAYS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "eager": ({}, "eager", {}),
    "windows": (MISTRAL, "sdpa", {}),
    "full logits": ({"vocab_size": 4096}, "sdpa", {"full_logits": True}),
    "many logits": ({"vocab_size": 32768}, "sdpa", {"chunk": 256}),
    "a batch": ({}, "sdpa", {"windows": 4}),
    "pieces": ({}, "sdpa", {"prefill": 128}),
    "pieces, eager": ({}, "eager", {"prefill": 128}),
    "pieces within windows": (MISTRAL, "sdpa", {"prefill": 64}),
}


@pytest.mark.parametrize(("way", "dtype"), covering(WAYS, DTYPES))
def test_memory_of_ways_to_run(way: str, dtype: torch.dtype) -> None:
    sizes, attention, run = WAYS[way]
    model = build(**{"model_type": "llama", **sizes}).to(dtype)
    model.set_attn_implementation(attention)
    cost = check(model, 1024, **run)
    whole = forward_cost(model, 1024, chunk=16)
    cached = [layer.cached * min(layer.window or 1024, 1024) for layer in attentions(model)]
    if "prefill" in run:
        assert whole.cache == 0
        assert cost.cache >= sum(cached) * dtype.itemsize
        assert cost.activations < whole.activations / 2
        assert cost.flops == whole.flops
        longer = forward_cost(model, 2048, chunk=16, prefill_chunk=run["prefill"])
        assert (longer.cache == cost.cache) == ("windows" in way)
    if way == "a batch":
        assert (cost.flops, cost.tokens) == (4 * whole.flops, 4 * 1024)
        assert cost.activations == 4 * whole.activations
        assert cost.logits == whole.logits  # the windows share a chunk


# The backend, a constant that is made small beside the text, as it is beside long ones, and the tokens of a piece.
BACKENDS: dict[str, tuple[str | None, str, int | None]] = {
    "kernels": (None, "", None),
    "pieces on kernels": (None, "DENSE", 128),
    "general": ("exact", "", None),
    "pieces on the general path": ("exact", "", 256),
    "general, block by block": ("exact", "SCRATCH", None),
    "fused": (EmulatedFlash.name, "", None),
}
METHODS: dict[str, dict[str, Any]] = {"rerope": {"window": 64}, "alibi": {}, "dual_chunk": {}}


@pytest.mark.parametrize(
    ("way", "method", "dtype"),
    [
        *((way, "rerope", DTYPES[n % 2]) for n, way in enumerate(BACKENDS)),
        *late([way for way in BACKENDS if way != "fused"], ["alibi", "dual_chunk"], DTYPES),
    ],
)
def test_memory_of_patched_models(
    way: str, method: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(self: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Any:
        """Make the tensors of the operator, and no others."""
        lse = query.new_zeros(query.shape[1], query.shape[0], dtype=torch.float32)
        return query.new_zeros(*query.shape[:2], value.shape[2]), lse, (lse, lse)

    monkeypatch.setattr(EmulatedFlash, "attend", attend)
    backend, small, prefill = BACKENDS[way]
    for module in (masks, exact, estimate):
        if hasattr(module, small):
            monkeypatch.setattr(module, small, {"DENSE": 0, "SCRATCH": 2**14}[small])
    model = build("llama", max_position_embeddings=256).to(dtype)
    patch_model(model, method, **METHODS[method])
    with engine.forced(backend) if backend else contextlib.nullcontext():
        check(model, 1024, prefill=prefill)
        if way == "fused":
            assert estimate.backends(model, 1024) == {EmulatedFlash.name: True}


def test_the_peaks_of_a_gpu() -> None:
    """Llama 3 8B in bfloat16 on an H200, as docs/gpu.md has it."""
    path = Path(__file__).parents[3] / "docs" / "data" / "gpu" / "h200_model.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["records"]
    peaks = [(r["length"], r["peak_bytes"]) for r in rows if r["phase"] == "perplexity"]
    assert len(peaks) > 5
    model = meta(LlamaConfig(**LLAMA_8B), torch.bfloat16)
    for length, peak in peaks:
        assert 0.95 < forward_cost(model, length).total / peak < 1.05


def test_a_backend_that_was_never_checked_here_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patch_model(build("llama", max_position_embeddings=256), "rerope", window=64)
    untried = engine.Backend("untried", lambda *_: True, exact.exact, proven=False)
    monkeypatch.setattr(engine, "BACKENDS", (untried, *engine.BACKENDS))
    assert estimate.backends(model, 64) == {"untried": False}
    assert not engine._checked  # nor was it now


@pytest.mark.parametrize("length", [70, 100])
@pytest.mark.parametrize("model_type", ["mistral", "gemma2", "gpt_oss"])
def test_the_backends_are_those_of_a_forward(model_type: str, length: int) -> None:
    sizes = {"sliding_window": 80} if model_type == "mistral" else {}
    model = patch_model(zoo.build(model_type, **sizes), "rerope", window=8)
    with mock.patch.object(engine, "choose", wraps=engine.choose) as chosen:
        zoo.logits(model, zoo.tokens(length))
    used = {engine.choose(*call.args).name for call in chosen.call_args_list}
    assert used == {*estimate.backends(model, length)} - {"hf_posenc"}


def test_a_slower_backend_of_a_gpu_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patch_model(build("llama", max_position_embeddings=256), "rerope", window=64)
    here = estimate.read_shape(model)
    backend = engine.Backend("exact", lambda *_: True, exact.exact)
    monkeypatch.setattr(estimate, "layer_backend", lambda *_: (backend, True))
    shapes = [replace(here, device=torch.device(name)) for name in ("cpu", "cuda")]
    plain, slow = (estimate.forward_flops(shape, 1000, 0) for shape in shapes)
    layer, layers = here.attentions[0], len(here.attentions)
    pairs = layers * layer.heads * (layer.key_dim + layer.value_dim) * (1000 * 1001)
    assert slow - plain == pytest.approx(99 * pairs)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    with quietly():
        yield
    logging.disable(logging.NOTSET)
