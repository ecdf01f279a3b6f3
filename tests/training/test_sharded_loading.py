"""Weights of a sharded training: read once for all processes of a machine, in the dtype of the checkpoint."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_posenc import PosencError, patch_model
from hf_posenc.evaluation.loading import load_model
from hf_posenc.methods import KerpleLog, YaRN
from hf_posenc.training.processes import loading_dtype, partition_weights, whole_weights

SWITCH = "FSDP_CPU_RAM_EFFICIENT_LOADING"


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that scripts/configs/fsdp2.yaml sets."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv(SWITCH, "true")


def given(rank: int = 1, bf16: bool = True) -> Any:
    """Arguments of one process of an FSDP2 training."""
    others: Any = {"fp16": False, "fsdp": None, "deepspeed_plugin": None}
    return SimpleNamespace(process_index=rank, bf16=bf16, **others)


def checkpoint(folder: Path, dtype: torch.dtype, **sizes: int) -> Path:
    small: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(num_attention_heads=4, **{"vocab_size": 64, **small, **sizes})
    model: Any = LlamaForCausalLM(config)
    patched: Any = patch_model(model.to(dtype), [YaRN(scale=2), KerpleLog(keep_rope=True)])
    patched.save_pretrained(folder, max_shard_size="50MB")
    return folder


def anonymous_memory() -> int:
    """MiB of memory that no file backs."""
    return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) // 1024


@pytest.mark.slow  # weights large enough to be seen in a process's memory
def test_a_process_holds_no_weights_of_its_own(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    folder = checkpoint(tmp_path, torch.bfloat16, vocab_size=16_000, **sizes)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors")) >> 20
    assert size > 90
    arguments, before, peak = given(), 0, 0
    for turn in range(2):  # the first one allocates what stays
        before = anonymous_memory() if turn else 0
        dtype = loading_dtype(str(folder), "float32", arguments)
        with whole_weights(arguments):
            model = load_model(str(folder), dtype=dtype, device="cpu")
        assert model.dtype == torch.bfloat16
        model(input_ids=torch.arange(12)[None])
        peak = anonymous_memory()
        partition_weights(model, arguments)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        peak = max(peak, anonymous_memory()) - before
        del model
    assert peak < size / 4, f"{peak} MiB for weights of {size} MiB"


def test_the_first_process_keeps_its_weights_and_all_their_tables(tmp_path: Path) -> None:
    folder = str(checkpoint(tmp_path, torch.bfloat16))
    models = [load_model(folder, dtype="bfloat16", device="cpu") for _ in range(3)]
    for rank, model in enumerate(models[:2]):
        partition_weights(model, given(rank))
    first, other, whole = (dict(model.named_parameters()) for model in models)
    assert set(first) == set(other) == set(whole)
    assert all(torch.equal(first[name], whole[name].float()) for name in whole)
    assert all(other[name].shape == whole[name].shape for name in whole)
    tables = dict(models[2].named_buffers())
    for model in models[:2]:
        assert all(torch.equal(table, tables[name]) for name, table in model.named_buffers())


def test_the_checkpoints_dtype_counts_where_the_training_copies_to_float32(tmp_path: Path) -> None:
    half, mixed, full = (str(tmp_path / name) for name in ("half", "mixed", "full"))
    checkpoint(Path(half), torch.bfloat16)
    model: Any = load_model(half, dtype="bfloat16", device="cpu")
    model.get_submodule("model.norm").float()
    model.save_pretrained(mixed)
    checkpoint(Path(full), torch.float32)
    assert loading_dtype(half, "float32", given()) == "bfloat16"
    assert loading_dtype(half, "float32", given(bf16=False)) == "float32"
    assert loading_dtype(half, "float16", given()) == "float16"
    assert [loading_dtype(name, "float32", given()) for name in (mixed, full)] == ["float32"] * 2


def test_transformers_leaves_no_process_without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    with whole_weights(given()):
        assert os.environ[SWITCH] == "false"
    assert os.environ[SWITCH] == "true"
    monkeypatch.setenv(SWITCH, "false")
    model = nn.Linear(2, 2)
    weight = model.weight.clone()
    partition_weights(model, given())
    assert torch.equal(model.weight, weight)


def test_buffers_that_accelerate_cannot_distribute_are_refused() -> None:
    with pytest.raises(PosencError, match="distribute running_mean, a buffer that BatchNorm1d"):
        partition_weights(nn.BatchNorm1d(2), given())


def test_the_arithmetic_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "finetuning.md").read_text()
    rows = re.findall(r"\| (\d+) P( / n)? \| ([\d.]+) GB \|", page)
    assert len(rows) == 4
    for factor, shared, size in rows:
        assert float(size) == round(int(factor) * 8.03 / (8 if shared else 1), 1)
