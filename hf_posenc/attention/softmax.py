"""From scores to the output, with grouped key heads and rows that see nothing."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def grouped_scores(query: Tensor, key: Tensor) -> Tensor:
    """`q.k` in at least float32.

    The queries of one key head are folded into rows, so that every key is read once.

    Args:
        query: Shape (batch, heads, queries, head_dim).
        key: Shape (batch, key heads, keys, head_dim); the key heads divide the heads.

    Returns:
        Shape (batch, heads, queries, keys).
    """
    batch, heads, queries, _ = query.shape
    groups = heads // key.shape[1]
    folded = query.reshape(batch, key.shape[1], groups * queries, query.shape[-1])
    scores = folded @ key.transpose(-1, -2)
    return scores.reshape(batch, heads, queries, key.shape[2]).to(
        torch.promote_types(query.dtype, torch.float32)
    )


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
        scores: Shape (batch, heads, queries, keys).
        value: Shape (batch, key heads, keys, value_dim).
        visible: Bool, broadcasts with the scores; a query that sees nothing gives zeros.
        sinks: One logit per head that takes part in the softmax and has no value, shape (heads,).
        dropout: Probability of leaving out a weight.

    Returns:
        The output, shape (batch, heads, queries, value_dim), and the weights, shape (batch, heads, queries, keys),
        both of the dtype of the values.
    """
    if visible is not None:
        # Not by -inf: a query that sees nothing would be 0/0, and its gradient too.
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    if sinks is None:
        weights = scores.softmax(-1)
        if visible is not None:
            weights = weights.masked_fill(~visible, 0.0)
    else:
        sink = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    weights = F.dropout(weights.to(value.dtype), dropout, training=dropout > 0)
    batch, heads, queries, keys = weights.shape
    folded = weights.reshape(batch, value.shape[1], -1, keys)
    out = folded @ value
    return out.reshape(batch, heads, queries, value.shape[-1]), weights
