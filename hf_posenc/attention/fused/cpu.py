"""PyTorch's fused attention for the CPU.

The op offers more than `F.scaled_dot_product_attention`: it returns the log-sum-exp, has grouped-query heads forward
and backward, and reads any mask that broadcasts or overlaps (as_strided) in place.
Traps: `causal` is aligned to the TOP LEFT (row t sees the keys up to t, whatever the number of keys); a row without
a visible key gives 0 and a log-sum-exp of 0, not -inf, so no part may have one; query, key and value have one head
dimension; and in its backward, the log-sum-exp has the memory layout (batch, rows, heads).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_posenc.attention.fused.protocol import Attended, Gradients, Saved, Shape, merge

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class CpuFlash:
    """`Fused` by the CPU op."""

    name = "cpu flash"
    windows = False
    squares: int | None = None
    merge = staticmethod(merge)

    def serves(self, device: torch.device, dtype: torch.dtype, features: int) -> bool:
        return device.type == "cpu"

    def forward(self, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Attended:
        tensors = (_dense(x) for x in (query, key, value))
        options = {"attn_mask": shape.mask, "scale": shape.scaling}
        out, lse = _FORWARD(*tensors, 0.0, shape.causal, **options)
        return out, lse, None

    def backward(self, grad: Tensor, saved: Saved, shape: Shape, state: Any) -> Gradients:
        tensors = (_dense(x) for x in (grad, *saved[:3]))
        options = {"attn_mask": shape.mask, "scale": shape.scaling}
        gradients: Gradients = _BACKWARD(*tensors, *saved[3:], 0.0, shape.causal, **options)
        return gradients


def _dense(x: Tensor) -> Tensor:
    """The tensor, copied only if its last dimension is not dense, as the op requires."""
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)
