"""cuDNN's attention through PyTorch: faster than PyTorch's flash attention on Hopper and Blackwell GPUs.

It has neither windows nor several sequences in a call, and PyTorch does not say how it aligns causal calls of more keys
than rows, so parts are taken in squares (`parts.in_squares`). Flash attention computes what is left. The log-sum-exp
has the shape (B, H, R, 1); the backward takes another output and log-sum-exp than its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_posenc.attention.fused import cuda
from hf_posenc.attention.fused.protocol import Attended, Gradients, Saved, Shape

LARGEST = 128
"""The most features of a head."""
NARROWEST = 1024
"""Windows below so many keys are left to flash attention, for which they are cheap."""
_FORWARD = torch.ops.aten._scaled_dot_product_cudnn_attention
_BACKWARD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward


class CudnnAttention:
    """`Fused` by cuDNN, and by another operator where it has no form for a call."""

    windows = True
    squares: int | None = NARROWEST
    least = 64
    """Calls of fewer rows or keys are left to the other operator."""

    def __init__(self, rest: cuda.CudaFlash, name: str = "cudnn") -> None:
        self.rest, self.merge, self.name = rest, rest.merge, name

    def serves(self, device: torch.device, dtype: torch.dtype, features: int) -> bool:
        return (
            features <= LARGEST
            and self.rest.serves(device, dtype, features)
            and (device.type != "cuda" or _has_cudnn(device))
        )

    def forward(self, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Attended:
        if not self._takes(query, key, shape):
            return self.rest.forward(query, key, value, shape)
        return self.square(query, key, value, shape)

    def backward(self, grad: Tensor, saved: Saved, shape: Shape, state: Any) -> Gradients:
        if not self._takes(saved.query, saved.key, shape):
            return self.rest.backward(grad, saved, shape, state)
        return self.square_backward(grad, saved, shape, state)

    def _takes(self, query: Tensor, key: Tensor, shape: Shape) -> bool:
        """True for all pairs of one sequence, and for a causal square."""
        rows, keys = query.shape[2], key.shape[2]
        if shape.segments is not None or shape.window is not None or min(rows, keys) < self.least:
            return False
        return rows == keys or not shape.causal

    def square(self, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Attended:
        """Call the operator; a causal call has as many rows as keys."""
        given = (query, key, value, None, True, 0.0, shape.causal, False)
        out, lse, *state = _FORWARD(*given, scale=shape.scaling)[:8]
        return out, lse.flatten(2), state

    def square_backward(self, grad: Tensor, saved: Saved, shape: Shape, state: Any) -> Gradients:
        """Return the gradients, as `backward`."""
        *sequences, seed, offset = state
        lse = saved.lse.contiguous()[..., None]
        given = (grad, *saved[:4], lse, seed, offset, None, *sequences, 0.0, shape.causal)
        gradients: Gradients = _BACKWARD(*given, scale=shape.scaling)
        return gradients


def _has_cudnn(device: torch.device) -> bool:
    """True on Hopper and later, where it is the faster operator, unless the user has switched it off."""
    if not torch.backends.cudnn.is_available() or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)
