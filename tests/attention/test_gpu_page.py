"""The claims of docs/gpu.md that need no GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hf_posenc.attention.fused.pytorch import CudaFlash
from hf_posenc.methods import get_method
from scripts.gpu_table import PHASES, backends

BATCH, HEADS, ROWS, KEYS, FEATURES = 2, 4, 24, 40, 16
OPERATORS: Any = torch.ops.aten


def test_the_table_is_what_the_backends_declare(monkeypatch: pytest.MonkeyPatch) -> None:
    phases = dict(zip(PHASES, backends(get_method("rerope").from_options()), strict=True))
    assert phases["prefill"] == phases["training"] == "cuDNN"
    assert phases["step"] == "Triton"
    assert phases["prefill, float32"] == "PyTorch, in blocks"
    monkeypatch.setattr(CudaFlash, "largest", 8)  # another declaration gives another table
    changed = dict(zip(PHASES, backends(get_method("rerope").from_options()), strict=True))
    assert changed["prefill"] == "PyTorch, in blocks"
    assert changed["step"] == "Triton"


def test_log_sum_exps_of_library_kernels() -> None:
    """Their shapes, on tensors without values."""
    sizes = ((BATCH, HEADS, length, FEATURES) for length in (ROWS, KEYS, KEYS))
    tensors = [torch.empty(size, dtype=torch.bfloat16, device="meta") for size in sizes]
    rounded = math.ceil(ROWS / 32) * 32
    found = OPERATORS._scaled_dot_product_cudnn_attention(*tensors, None, True)[1]
    assert (found.shape, found.dtype) == ((BATCH, HEADS, ROWS, 1), torch.float32)
    found = OPERATORS._scaled_dot_product_efficient_attention(*tensors, None, True)[1]
    assert (found.shape, found.dtype) == ((BATCH, HEADS, rounded), torch.float32)
    rows = [x.transpose(1, 2) for x in tensors]
    none = (None,) * 5
    found = OPERATORS._efficient_attention_forward(*rows, *none, 0.0, 2, True, window_size=7)[1]
    assert (found.shape, found.dtype) == ((BATCH, HEADS, rounded), torch.float32)


def test_windows_of_library_kernels() -> None:
    names = {
        name: {argument.name for argument in getattr(OPERATORS, name).default._schema.arguments}
        for name in (
            "_flash_attention_forward",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_efficient_attention",
            "_efficient_attention_forward",
        )
    }
    windows = [sorted(n for n in every if "window" in n) for every in names.values()]
    assert windows == [["window_size_left", "window_size_right"], [], [], ["window_size"]]
    assert "custom_mask_type" in names["_efficient_attention_forward"]
