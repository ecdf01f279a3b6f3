"""PyTorch's flash attention for CUDA, in its variable-length form.

Forward by the public `torch.nn.attention.varlen` where the installed PyTorch has windows, grouped heads and the
log-sum-exp there, else by the operator below it; backward by the operator, since the public function has none that
takes another output and log-sum-exp than its own.

Read in PyTorch's and flash-attention's source, and seen on an H200: float16 and bfloat16, compute capability 8.0 and
later, at most 256 features, a multiple of 8; causal calls and windows are aligned to the BOTTOM RIGHT of every
sequence; a window of (w - 1, 0) is w keys; a sequence without keys gives 0 and a log-sum-exp of +inf, and the
gradients of rows without keys, and of keys without rows, are 0. `emulated` has the same contract.

docs/gpu.md has the contracts of the other fused operators of PyTorch 2.13, and why they are used or not.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from hf_posenc.attention.fused.merging import Merge, merge
from hf_posenc.attention.fused.protocol import EMPTY, Saved, Segments, Shape

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

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float, shape: Shape
    ) -> tuple[Tensor, Tensor, Any]:
        segments = shape.segments or one_segment(query.shape[2], key.shape[2])
        q, k, v = (_flattened(x) for x in (query, key, value))
        out, lse, state = self.attend(q, k, v, segments, scaling, window_of(shape))
        if shape.segments is not None:
            lse = lse.nan_to_num_(nan=torch.nan, posinf=EMPTY, neginf=EMPTY)
        return out.transpose(0, 1)[None], lse[None], state

    def backward(
        self, grad: Tensor, saved: Saved, scaling: float, shape: Shape, state: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        segments = shape.segments or one_segment(saved.query.shape[2], saved.key.shape[2])
        q, k, v, out = (_flattened(x) for x in saved[:4])
        flat = Saved(q, k, v, out, saved.lse[0])
        given = (_flattened(grad), flat, segments, scaling, window_of(shape), state)
        gradients = self.attend_backward(*given)
        of_query, of_key, of_value = (x.transpose(0, 1)[None] for x in gradients)
        return of_query, of_key, of_value

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        segments: Segments,
        scaling: float,
        window: tuple[int, int],
    ) -> tuple[Tensor, Tensor, Any]:
        """Call the operator on tensors (length, heads, features); the log-sum-exp is (heads, rows)."""
        starts, longest = segments.on(query.device), segments.longest
        public = varlen_attention()
        if public is not None:
            attend, aux = public
            options = {"scale": scaling, "window_size": window, "enable_gqa": True}
            return *attend(
                query, key, value, *starts, *longest, return_aux=aux(lse=True), **options
            ), None
        # The operator has "no window" as is_causal or not, as the public function translates it.
        causal, sizes = window == (-1, 0), {}
        if window != (-1, -1) and not causal:
            sizes = {"window_size_left": window[0], "window_size_right": window[1]}
        given = (query, key, value, *starts, *longest, 0.0, causal, False)
        out, lse, *state = _FORWARD(*given, scale=scaling, **sizes)
        return out, lse, state

    def attend_backward(
        self,
        grad: Tensor,
        saved: Saved,
        segments: Segments,
        scaling: float,
        window: tuple[int, int],
        state: Any,
    ) -> tuple[Tensor, ...]:
        """Return the gradients of query, key and value."""
        query, key, value, out, lse = saved
        left, right = window
        # Without dropout, no random numbers are read.
        seed, unused = state[:2] if state else (_no_seed(query.device), query.new_empty(0))
        gradients: tuple[Tensor, ...] = _BACKWARD(
            *(grad.contiguous(), query, key, value, out.contiguous(), lse.contiguous()),
            *segments.on(query.device),
            *segments.longest,
            0.0,
            window == (-1, 0),
            *(seed, unused),
            scale=scaling,
            **({} if left < 0 else {"window_size_left": left, "window_size_right": right}),
        )
        return gradients


def window_of(shape: Shape) -> tuple[int, int]:
    """Return the keys before and after a row's own that it sees; -1: all."""
    if shape.window is not None:
        return shape.window - 1, 0
    return (-1, 0) if shape.causal else (-1, -1)


def _flattened(x: Tensor) -> Tensor:
    """From (1, heads, length, features) to (length, heads, features), a view."""
    return x[0].transpose(0, 1)


@functools.lru_cache(maxsize=64)
def one_segment(rows: int, keys: int) -> Segments:
    """Return the one sequence of all rows and keys; kept, since its tensors are copied to the device."""
    return Segments((0, rows), (0, keys))


@functools.cache
def _no_seed(device: torch.device) -> Tensor:
    return torch.zeros(2, dtype=torch.uint64, device=device)


@functools.cache
def varlen_attention() -> tuple[Any, Any] | None:
    """Return PyTorch's public variable-length attention and its `AuxRequest`; `None` where it lacks an argument."""
    try:
        from torch.nn.attention.varlen import AuxRequest, varlen_attn
    except ImportError:  # before 2.10
        return None
    needed = {"return_aux", "scale", "window_size", "enable_gqa"}
    return (
        (varlen_attn, AuxRequest)
        if needed <= {*inspect.signature(varlen_attn).parameters}
        else None
    )


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
