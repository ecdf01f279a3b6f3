"""From queries and keys to scores, and from scores to the output: grouped key heads, sinks, rows that see nothing."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_posenc.attention.flash_cpu import accumulation_dtype


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
