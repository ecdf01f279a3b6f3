"""From queries and keys to scores, and from scores to the output: grouped key heads, sinks, rows that see nothing."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_posenc.attention.flash import accumulation_dtype


def grouped_scores(query: Tensor, key: Tensor, scaling: float) -> Tensor:
    """`q.k * scaling`.

    The queries of one key head are rows of one product, so that every key is read once.

    Args:
        query: Shape (B, H, Q, D).
        key: Shape (B, HK, KV, D), H a multiple of HK.
        scaling: Factor on the scores.

    Returns:
        Shape (B, H, Q, KV), float32 (float64 for float64).
    """
    # Scores are the largest thing in memory: as few copies as can be. A half is scaled after the product, so that it
    # is rounded once.
    dtype = accumulation_dtype(query.dtype)
    early, late = (scaling, 1.0) if query.dtype == dtype else (1.0, scaling)
    scores = _folded(query * early, key.shape[1]) @ key.transpose(-1, -2)
    scores = scores.view(*query.shape[:-1], key.shape[2]).to(dtype)
    return scores if late == 1.0 else scores.mul_(late)


def weighted_values(
    scores: Tensor,
    value: Tensor,
    visible: Tensor | None = None,
    *,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The softmax of the scores, and the values weighted by it.

    Args:
        scores: Shape (B, H, Q, KV); written over.
        value: Shape (B, HK, KV, DV).
        visible: Bool, broadcasts with the scores; a query that sees nothing gives zeros.
        sinks: One logit per head that takes part in the softmax and has no value (gpt-oss), shape (H,).
        dropout: Probability of leaving out a weight.

    Returns:
        The output, shape (B, H, Q, DV), of the dtype of the values, and the weights, shape (B, H, Q, KV), of that of
        the scores.
    """
    if visible is not None:
        # Finite, since a row of nothing but -inf has no softmax, nor a gradient; it is emptied below.
        scores = scores.masked_fill_(~visible, torch.finfo(scores.dtype).min)
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        sink = sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    weights = F.dropout(weights, dropout, training=dropout > 0)
    out = _folded(weights.to(value.dtype), value.shape[1]) @ value
    out = out.view(*weights.shape[:-1], value.shape[-1])
    if visible is not None:
        empty = ~visible.any(-1, keepdim=True)
        out, weights = out.masked_fill(empty, 0.0), weights.masked_fill(empty, 0.0)
    return out, weights


def _folded(rows: Tensor, key_heads: int) -> Tensor:
    """From (B, H, Q, N) to (B, HK, H / HK * Q, N): the rows of all query heads that share a key head."""
    batch, heads, length, features = rows.shape
    return rows.reshape(batch, key_heads, heads // key_heads * length, features)


# Attention of few queries over all cached keys: the step of a generation, one matrix product per key head.


Near = tuple[Tensor, Tensor, Tensor]


@overload
def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    *,
    near: Near | None = ...,
    bias: Tensor | None = ...,
    mask: Tensor | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    weights: Literal[False] = ...,
) -> Tensor: ...
@overload
def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    *,
    near: Near | None = ...,
    bias: Tensor | None = ...,
    mask: Tensor | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    weights: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    *,
    near: Near | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with all scores of a few rows at hand, exact, differentiable; on any device, traceable.

    Grouped query heads are rows of one product, so that each key is read once and not once per query head. Keys are
    never sliced: a product with a slice of a cache falls off the fast path.

    Args:
        query: Shape (B, H, Q, D), of the far band where there are two.
        key: Shape (B, HK, KV, D), H a multiple of HK.
        value: Shape (B, HK, KV, DV).
        scaling: Factor on the scores.
        near: The near band's query (B, H, Q, D), the last W keys as that band rotates them (B, HK, W, D), and which
            of these pairs are near, (B or 1, 1, Q, W), bool: their scores replace the far band's.
        bias: Added to the scores; broadcasts to (B, H, Q, KV).
        mask: Which keys are visible, broadcasts to (B, 1, Q, KV), bool; a row without any gives zeros.
        softcap: Scores become `softcap * tanh(scores / softcap)` before bias and mask (Gemma 2, arXiv 2408.00118).
        sinks: A logit per query head, shape (H,), that takes part in the softmax and has no value (gpt-oss).
        weights: Return the weights as well.

    Returns:
        Shape (B, H, Q, DV); with `weights` also the softmax, (B, H, Q, KV), float32 (float64 for float64).
    """
    scores = grouped_scores(query, key, scaling)
    if near is not None:
        near_query, near_key, is_near = near
        width = near_key.shape[2]
        tail = scores[..., key.shape[2] - width :]
        near_scores = grouped_scores(near_query, near_key, scaling)
        tail.copy_(torch.where(is_near, near_scores, tail))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores.add_(bias)
    out, probabilities = weighted_values(scores, value, mask, sinks=sinks)
    return (out, probabilities) if weights else out
