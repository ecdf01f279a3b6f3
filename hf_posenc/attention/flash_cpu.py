"""PyTorch's fused attention for the CPU, with its log-sum-exp, so that parts of one softmax can be merged.

What the op does that `F.scaled_dot_product_attention` does not offer: it returns the log-sum-exp, has grouped-query
heads forward and backward, and reads any mask that broadcasts or overlaps (as_strided) in place.
Traps: `causal` is aligned to the TOP LEFT (row t sees the keys up to t, whatever the number of keys); a row without
a visible key gives 0 and a log-sum-exp of 0, not -inf, so no part may have one; query, key and value have one head
dimension; and in its backward, the log-sum-exp has the memory layout (batch, rows, heads).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_OP = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of masks, biases, log-sum-exps and sums: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One fused attention call.

    Args:
        query: Shape (B, H, rows, D); any strides.
        key: Shape (B, HK, keys, D), H a multiple of HK.
        value: Shape (B, HK, keys, D).
        scaling: Factor on the scores.
        causal: Row t sees the keys up to t.
        mask: Added to the scores, of `accumulation_dtype`; broadcasts to (B, H, rows, keys).

    Returns:
        The output, shape (B, H, rows, D), and the natural log-sum-exp of each row, shape (B, H, rows).
    """
    query, key, value = dense_features(query), dense_features(key), dense_features(value)
    out, lse = _OP(query, key, value, 0.0, causal, attn_mask=mask, scale=scaling)
    return out, lse


def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scaling: float,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of one part of a softmax, for query, key and value.

    With the output and log-sum-exp of the *whole* softmax, `exp(s - lse)` are the weights and `rowsum(grad * out)` the
    correction of the whole, so the gradients of the parts sum to the whole's and none is needed through a
    log-sum-exp (as in ring attention, Liu et al. 2023, arXiv 2310.01889).

    Args:
        grad: Gradient of the output, shape (B, H, rows, D).
        query: As in `attend`.
        key: As in `attend`.
        value: As in `attend`.
        out: Output of the whole softmax, shape (B, H, rows, D).
        lse: Log-sum-exp of the whole softmax, shape (B, H, rows).
        scaling: As in `attend`.
        causal: As in `attend`.
        mask: As in `attend`.
    """
    query, key, value = dense_features(query), dense_features(key), dense_features(value)
    grads: tuple[Tensor, Tensor, Tensor] = _BACKWARD(
        dense_features(grad),
        query,
        key,
        value,
        out,
        lse,
        0.0,
        causal,
        attn_mask=mask,
        scale=scaling,
    )
    return grads


def dense_features(x: Tensor) -> Tensor:
    """The tensor, copied only if its last dimension is not dense, which the op takes for granted."""
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def pad_features(x: Tensor, features: int) -> Tensor:
    """The tensor with zeros appended to its last dimension, up to that size; no gradient is lost."""
    return x if x.shape[-1] == features else F.pad(x, (0, features - x.shape[-1]))
