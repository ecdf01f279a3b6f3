"""PyTorch's flash attention for CUDA, in its variable-length form.

By the operators below the public `torch.nn.attention.varlen`, which has no backward that takes another output and
log-sum-exp than its own.

Read in PyTorch's and flash-attention's source, and seen on an H200: float16 and bfloat16, compute capability 8.0 and
later, at most 256 features, a multiple of 8; causal calls and windows are aligned to the BOTTOM RIGHT of every
sequence; a window of (w - 1, 0) is w keys; a sequence without keys gives 0 and a log-sum-exp of +inf, and the
gradients of rows without keys, and of keys without rows, are 0. The tests have an operator of the same contract.

docs/gpu.md has the contracts of the other fused operators of PyTorch 2.13, and why they are used or not.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from hf_posenc.attention.fused.protocol import (
    EMPTY,
    Attended,
    Gradients,
    Merge,
    Saved,
    Shape,
    merge,
)

LARGEST = 256
"""The most features of a head."""
_FORWARD = torch.ops.aten._flash_attention_forward
_BACKWARD = torch.ops.aten._flash_attention_backward


class CudaFlash:
    """`Fused` by the CUDA operator."""

    name = "cuda flash"
    windows = True
    squares: int | None = None

    def __init__(self, merge: Merge = merge) -> None:
        self.merge = merge

    def serves(self, device: torch.device, dtype: torch.dtype, features: int) -> bool:
        return features <= LARGEST and serves(device, dtype)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Attended:
        q, k, v = (_flattened(x) for x in (query, key, value))
        out, lse, state = self.attend(q, k, v, shape)
        if shape.segments is not None:
            lse = lse.nan_to_num_(nan=torch.nan, posinf=EMPTY, neginf=EMPTY)
        return out.transpose(0, 1)[None], lse[None], state

    def backward(self, grad: Tensor, saved: Saved, shape: Shape, state: Any) -> Gradients:
        q, k, v, out = (_flattened(x) for x in saved[:4])
        flat = Saved(q, k, v, out, saved.lse[0])
        gradients = self.attend_backward(_flattened(grad), flat, shape, state)
        of_query, of_key, of_value = (x.transpose(0, 1)[None] for x in gradients)
        return of_query, of_key, of_value

    def attend(self, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Attended:
        """Call the operator on tensors (length, heads, features); the log-sum-exp is (heads, rows)."""
        segments, (left, right) = shape.sequences(query, key), shape.limits
        given = (query, key, value, *segments.on(query.device), *segments.longest)
        sizes = {"window_size_left": left, "window_size_right": right}
        causal = (left, right) == (-1, 0)
        out, lse, *state = _FORWARD(*given, 0.0, causal, False, scale=shape.scaling, **sizes)
        return out, lse, state

    def attend_backward(self, grad: Tensor, saved: Saved, shape: Shape, state: Any) -> Gradients:
        """Return the gradients, as `backward`, of tensors as `attend` has them."""
        query, key, value, out, lse = saved
        segments, (left, right) = shape.sequences(query, key), shape.limits
        sizes = {} if left < 0 else {"window_size_left": left, "window_size_right": right}
        seed, unused, *_ = state  # without dropout, no random numbers are read
        gradients: Gradients = _BACKWARD(
            *(grad.contiguous(), query, key, value, out.contiguous(), lse.contiguous()),
            *(*segments.on(query.device), *segments.longest),
            *(0.0, (left, right) == (-1, 0), seed, unused),
            scale=shape.scaling,
            **sizes,
        )
        return gradients


def _flattened(x: Tensor) -> Tensor:
    """From (1, heads, length, features) to (length, heads, features), a view."""
    return x[0].transpose(0, 1)


@functools.cache
def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """True if the operator computes halves of this dtype on a device, with windows, backward included."""
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return False
    if dtype not in (torch.float16, torch.bfloat16):
        return False
    for operator in (_FORWARD, _BACKWARD):
        names = {argument.name for argument in operator.default._schema.arguments}
        if not {"cum_seq_q", "window_size_left", "window_size_right", "scale"} <= names:
            return False
    flash: bool = torch.backends.cuda.is_flash_attention_available()
    return flash and torch.cuda.get_device_capability(device) >= (8, 0)
