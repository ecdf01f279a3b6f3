"""Estimates of operations against PyTorch's own count; runs of many windows; models without weights."""

from __future__ import annotations

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

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.scoring.estimate import (
    Attention,
    Cost,
    read_layer,
    run_cost,
    visible_pairs,
)
from hf_posenc.model import memory
from tests.support import zoo
from tests.support.live_bytes import attentions, build, forward_cost
from tests.support.selection import late
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


def test_totals() -> None:
    cost = Cost(tokens=1, flops=1.0, weights=1000, activations=30, cache=200, hidden=4, logits=50)
    assert cost.total == 1254
    assert dataclasses.replace(cost, logits=20).beside_weights == 234


def test_what_cannot_be_estimated() -> None:
    model = zoo.build("llama")
    with pytest.raises(PosencError, match="no window"):
        run_cost(model, [])
    for name in ("length", "chunk", "prefill_chunk", "windows"):
        options: dict[str, Any] = {"length": 64, name: 0}
        with pytest.raises(PosencError, match=f"{name} is at least 1, not 0"):
            forward_cost(model, **options)
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


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    with quietly():
        yield
    logging.disable(logging.NOTSET)
