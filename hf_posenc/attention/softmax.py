"""Scores and their softmax, in float32 whatever the dtype of queries and keys, as every fused kernel computes them.

A product of halves that is rounded to a half before the softmax costs most of the precision: at scores with a standard
deviation of 9, ten times the error of a fused kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

CONVERTED = 1 << 17
"""Elements of the keys that are converted to float32 at a time, at least: half a megabyte, which a cache holds."""


is_transformed: Callable[[], bool] = getattr(
    torch._C, "_are_functorch_transforms_active", lambda: False
)
"""Return whether a transform of `torch.func` runs, which differentiates PyTorch's own operations alone."""


def is_exporting() -> bool:
    """Return whether `torch.export` traces; an older PyTorch does not tell.

    `torch.compiler.is_exporting()` is no help: in PyTorch 2.11 it is true in any compiled graph, in 2.13 no longer.
    """
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of scores, masks, biases, log-sum-exps and sums: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def grouped_scores(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """Compute `q.k * scaling` of queries (B, H, Q, D) and keys (B, HK, KV, D), float32 (float64 for float64).

    The queries of one key head are rows of one product, so that every key is read once.
    """
    key = _for_heads(key, query.shape[1])
    # Scores are the largest thing in memory: as few copies as possible. A half is scaled after the product, so that it
    # is rounded once.
    shape = *query.shape[:-1], key.shape[2]
    if query.dtype == accumulation_dtype(query.dtype):
        return (folded(query * scaling, key.shape[1]) @ key.transpose(-1, -2)).view(shape)
    rows = folded(query, key.shape[1])
    if torch.compiler.is_compiling() or is_transformed():
        scores = rows.float() @ key.float().transpose(-1, -2)
    else:
        rows, key = rows.flatten(0, 1), key.flatten(0, 1)
        scores = _Products.apply(rows, key)  # type: ignore[no-untyped-call]
    return scores.view(shape).mul_(scaling)


def _for_heads(x: Tensor, heads: int) -> Tensor:
    """Return keys or values (B, HK, KV, D); while exporting, whose guards forbid folded rows, one for each head."""
    return x.repeat_interleave(heads // x.shape[1], 1) if is_exporting() else x


class _Products(torch.autograd.Function):
    """Products of rows (B, R, D) and keys (B, KV, D), both halves, as float32 (B, R, KV).

    The forward must not return a view: what follows changes the scores in place.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, keys: Tensor) -> Tensor:
        ctx.save_for_backward(rows, keys)
        return _products(rows, keys)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        rows, keys = ctx.saved_tensors
        grad = grad.to(rows.dtype)  # a product of halves sums in float32 and is rounded once
        return grad @ keys, grad.transpose(-1, -2) @ rows


class _WeightedSum(torch.autograd.Function):
    """Values (B, HK, KV, DV), halves, weighted by float32 (B, HK, R, KV) and rounded once, (B, HK, R, DV)."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(weights, value)
        batch, heads, length, features = value.shape
        if _returns_float32(value.device, value.dtype):
            # A fused kernel rounds `exp(score - largest)`, of which the largest, 1, needs no rounding.
            largest = weights.amax(-1, keepdim=True).clamp_min_(torch.finfo(weights.dtype).tiny)
            pair = (weights / largest).to(value.dtype).flatten(0, 1), value.flatten(0, 1)
            out = torch.bmm(*pair, out_dtype=torch.float32).view(*weights.shape[:-1], features)
            return out.mul_(largest).to(value.dtype)
        step = _converted(weights.numel(), batch * heads * features)
        total: Tensor | None = None
        for start in range(0, length, step):
            stop = start + step
            part = weights[..., start:stop] @ value[:, :, start:stop].float()
            total = part if total is None else total.add_(part)
        assert total is not None
        return total.to(value.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        weights, value = ctx.saved_tensors
        of_weights = _products(grad.flatten(0, 1), value.flatten(0, 1)).view_as(weights)
        return of_weights, weights.to(value.dtype).transpose(-1, -2) @ grad


def _products(rows: Tensor, keys: Tensor) -> Tensor:
    """Return rows times keys, of halves, summed and returned in float32."""
    batch, count, features = rows.shape
    length = keys.shape[1]
    if _returns_float32(rows.device, rows.dtype):
        return torch.bmm(rows, keys.transpose(1, 2), out_dtype=torch.float32)
    step = _converted(batch * count * length, batch * features)
    exact = rows.float()
    if step >= length:
        return exact @ keys.float().transpose(-1, -2)
    scores = exact.new_empty(batch, count, length)
    for start in range(0, length, step):
        stop = start + step
        scores[..., start:stop] = exact @ keys[:, start:stop].float().transpose(-1, -2)
    return scores


def _converted(scores: int, size: int) -> int:
    """The number of keys of some size that are converted at a time: a quarter of the elements of the scores.

    With a product of theirs, that is the memory of scores that are halves at first, which these never are.
    """
    return max(1, max(CONVERTED, scores // 4) // max(1, size))


@functools.cache
def _returns_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """True if the installed PyTorch multiplies halves into float32 on a device; one product is tried."""
    some = torch.zeros(1, 8, 8, device=device, dtype=dtype)
    try:
        return torch.bmm(some, some, out_dtype=torch.float32).dtype == torch.float32
    except (TypeError, RuntimeError):  # an older PyTorch; another device (NotImplementedError)
        return False


def weighted_values(
    scores: Tensor,
    value: Tensor,
    visible: Tensor | None = None,
    *,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return values (B, HK, KV, DV) weighted by the softmax of scores (B, H, Q, KV), and that softmax.

    The scores are overwritten. A query without any visible key gives zeros. `sinks`, (H,), are logits that take part in
    the softmax and have no value (gpt-oss).
    """
    if visible is not None:
        # Finite, since a row of nothing but -inf has neither a softmax nor a gradient; it is emptied below.
        scores = scores.masked_fill_(~visible, torch.finfo(scores.dtype).min)
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        sink = sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    weights = F.dropout(weights, dropout, training=dropout > 0)
    value = _for_heads(value, weights.shape[1])
    rows = folded(weights, value.shape[1])
    if weights.dtype == value.dtype:
        out = rows @ value
    elif torch.compiler.is_compiling() or is_transformed():
        out = (rows @ value.float()).to(value.dtype)
    else:
        out = _WeightedSum.apply(rows, value)  # type: ignore[no-untyped-call]
    out = out.view(*weights.shape[:-1], value.shape[-1])
    if visible is not None:
        empty = ~visible.any(-1, keepdim=True)
        out, weights = out.masked_fill(empty, 0.0), weights.masked_fill(empty, 0.0)
    return out, weights


def folded(rows: Tensor, key_heads: int) -> Tensor:
    """From (B, H, Q, N) to (B, HK, H / HK * Q, N): the rows of all query heads that share a key head."""
    batch, heads, length, features = rows.shape
    return rows.reshape(batch, key_heads, heads // key_heads * length, features)
