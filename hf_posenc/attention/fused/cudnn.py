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
from hf_posenc.attention.fused.protocol import Saved, Shape

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

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float, shape: Shape
    ) -> tuple[Tensor, Tensor, Any]:
        if not self._takes(query, key, shape):
            return self.rest.forward(query, key, value, scaling, shape)
        return self.square(query, key, value, scaling, shape.causal)

    def backward(
        self, grad: Tensor, saved: Saved, scaling: float, shape: Shape, state: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not self._takes(saved.query, saved.key, shape):
            return self.rest.backward(grad, saved, scaling, shape, state)
        return self.square_backward(grad, saved, scaling, shape.causal, state)

    def _takes(self, query: Tensor, key: Tensor, shape: Shape) -> bool:
        """True for all pairs of one sequence, and for a causal square."""
        rows, keys = query.shape[2], key.shape[2]
        if shape.segments is not None or shape.window is not None or min(rows, keys) < self.least:
            return False
        return rows == keys or not shape.causal

    def square(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: bool
    ) -> tuple[Tensor, Tensor, Any]:
        """Call the operator; a causal call has as many rows as keys."""
        out, lse, *state = _FORWARD(
            query, key, value, None, True, 0.0, causal, False, scale=scaling
        )[:8]
        return out, lse.flatten(2), state

    def square_backward(
        self, grad: Tensor, saved: Saved, scaling: float, causal: bool, state: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value."""
        *sequences, seed, offset = state
        lse = saved.lse.contiguous()[..., None]
        gradients: tuple[Tensor, Tensor, Tensor] = _BACKWARD(
            *(grad, *saved[:4], lse, seed, offset, None, *sequences, 0.0, causal), scale=scaling
        )
        return gradients


def _has_cudnn(device: torch.device) -> bool:
    """True on Hopper and later, where it is the faster operator, unless the user has switched it off."""
    if not torch.backends.cudnn.is_available() or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)
