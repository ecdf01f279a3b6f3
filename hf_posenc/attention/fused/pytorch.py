"""PyTorch's fused attention: for the CPU, flash attention for CUDA in its variable-length form, and cuDNN's.

All three are called below their public functions, which return no log-sum-exp, or have no backward that takes another
output and log-sum-exp than its own. What each computes was read in PyTorch's source and seen on an H200; the tests have
operators of the same contracts. CONTRIBUTING.md has the contracts of PyTorch 2.13's other operators, and why they are
used or not.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from hf_posenc.attention.fused import EMPTY, Attended, Fused, Gradients, Merge, Saved, Shape

ATEN = torch.ops.aten


class CpuFlash(Fused):
    """The operator of the CPU.

    It has grouped-query heads forward and backward, and reads any mask that broadcasts or overlaps (as_strided) in
    place. Traps: `causal` is aligned to the TOP LEFT (row t sees the keys up to t, whatever the number of keys); a row
    without a visible key gives 0 and a log-sum-exp of 0, not -inf, so no part may have one; query, key and value have
    one head dimension; and in its backward, the log-sum-exp has the memory layout (batch, rows, heads).
    """

    name = "cpu flash"

    def serves(self, device: torch.device, dtype: torch.dtype, features: int) -> bool:
        return device.type == "cpu"

    def forward(self, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Attended:
        tensors = (_dense(x) for x in (query, key, value))
        options = {"attn_mask": shape.mask, "scale": shape.scaling}
        operator = ATEN._scaled_dot_product_flash_attention_for_cpu
        out, lse = operator(*tensors, 0.0, shape.causal, **options)
        return out, lse, None

    def backward(self, grad: Tensor, saved: Saved, shape: Shape, state: Any) -> Gradients:
        tensors = (_dense(x) for x in (grad, *saved[:3]))
        options = {"attn_mask": shape.mask, "scale": shape.scaling}
        operator = ATEN._scaled_dot_product_flash_attention_for_cpu_backward
        gradients: Gradients = operator(*tensors, *saved[3:], 0.0, shape.causal, **options)
        return gradients


def _dense(x: Tensor) -> Tensor:
    """The tensor, copied only if its last dimension is not dense, as the operator requires."""
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


class CudaFlash(Fused):
    """Flash attention for CUDA.

    It takes float16 and bfloat16 on compute capability 8.0 and later, and a multiple of 8 features. Causal calls and
    windows are aligned to the BOTTOM RIGHT of every sequence; a window of (w - 1, 0) is w keys. A sequence without keys
    gives 0 and a log-sum-exp of +inf, and the gradients of rows without keys, and of keys without rows, are 0.
    """

    name = "cuda flash"
    windows = True
    largest = 256
    """The most features of a head."""

    def __init__(self, merge: Merge | None = None) -> None:
        self.merge = merge

    def serves(self, device: torch.device, dtype: torch.dtype, features: int) -> bool:
        return features <= self.largest and serves(device, dtype)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Attended:
        q, k, v = (_flattened(x) for x in (query, key, value))
        out, lse, state = self.attend(q, k, v, shape)
        pairs = () if shape.segments is None else shape.segments.pairs
        if any(rows[0] < rows[1] and keys[0] == keys[1] for rows, keys in pairs):
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
        *starts, used = (*segments.on(query.device), None)[:3]
        given = (query, key, value, *starts, *segments.longest)
        sizes = {"window_size_left": left, "window_size_right": right, "seqused_k": used}
        causal = (left, right) == (-1, 0)
        operator = ATEN._flash_attention_forward
        out, lse, *state = operator(*given, 0.0, causal, False, scale=shape.scaling, **sizes)
        return out, lse, state

    def attend_backward(self, grad: Tensor, saved: Saved, shape: Shape, state: Any) -> Gradients:
        """Return the gradients, as `backward`, of tensors as `attend` has them."""
        query, key, value, out, lse = saved
        segments, (left, right) = shape.sequences(query, key), shape.limits
        sizes = {} if left < 0 else {"window_size_left": left, "window_size_right": right}
        seed, unused, *_ = state  # without dropout, no random numbers are read
        gradients: Gradients = ATEN._flash_attention_backward(
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
    """True if flash attention computes halves of this dtype on a device, with windows, backward included."""
    if device.type != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return False
    if dtype not in (torch.float16, torch.bfloat16):
        return False
    for operator in (ATEN._flash_attention_forward, ATEN._flash_attention_backward):
        names = {argument.name for argument in operator.default._schema.arguments}
        if not {"cum_seq_q", "window_size_left", "window_size_right", "scale"} <= names:
            return False
    flash: bool = torch.backends.cuda.is_flash_attention_available()
    return flash and torch.cuda.get_device_capability(device) >= (8, 0)


class CudnnAttention(Fused):
    """cuDNN's attention where it has a form for a call, and another operator, `rest`, elsewhere.

    It is faster than flash attention on Hopper and Blackwell GPUs. It has neither windows nor several sequences in a
    call, and PyTorch does not say how it aligns causal calls of more keys than rows, so parts are taken in squares
    (`parts.in_squares`). The log-sum-exp has the shape (B, H, R, 1); the backward takes another output and log-sum-exp
    than its own.
    """

    windows = True
    squares = 1024  # narrower windows are left to flash attention, for which they are cheap
    largest = 128
    """The most features of a head."""
    least = 64
    """Calls of fewer rows or keys are left to the other operator."""

    def __init__(self, rest: CudaFlash, name: str = "cudnn") -> None:
        self.rest, self.merge, self.name = rest, rest.merge, name

    def serves(self, device: torch.device, dtype: torch.dtype, features: int) -> bool:
        if features > self.largest or not self.rest.serves(device, dtype, features):
            return False
        if device.type != "cuda":
            return True
        # From Hopper on it is the faster operator; the user may have switched it off.
        allowed = torch.backends.cudnn.is_available() and torch.backends.cuda.cudnn_sdp_enabled()
        return bool(allowed) and torch.cuda.get_device_capability(device) >= (9, 0)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Attended:
        attend = self.square if self._takes(query, key, shape) else self.rest.forward
        return attend(query, key, value, shape)

    def backward(self, grad: Tensor, saved: Saved, shape: Shape, state: Any) -> Gradients:
        own = self._takes(saved.query, saved.key, shape)
        return (self.square_backward if own else self.rest.backward)(grad, saved, shape, state)

    def _takes(self, query: Tensor, key: Tensor, shape: Shape) -> bool:
        """True for all pairs of one sequence, and for a causal square."""
        rows, keys = query.shape[2], key.shape[2]
        if shape.segments is not None or shape.window is not None or min(rows, keys) < self.least:
            return False
        return rows == keys or not shape.causal

    def square(self, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Attended:
        """Call the operator; a causal call has as many rows as keys."""
        given = (query, key, value, None, True, 0.0, shape.causal, False)
        out, lse, *state = ATEN._scaled_dot_product_cudnn_attention(*given, scale=shape.scaling)[:8]
        return out, lse.flatten(2), state

    def square_backward(self, grad: Tensor, saved: Saved, shape: Shape, state: Any) -> Gradients:
        """Return the gradients, as `backward`."""
        *sequences, seed, offset = state
        lse = saved.lse.contiguous()[..., None]
        given = (grad, *saved[:4], lse, seed, offset, None, *sequences, 0.0, shape.causal)
        operator = ATEN._scaled_dot_product_cudnn_attention_backward
        gradients: Gradients = operator(*given, scale=shape.scaling)
        return gradients
