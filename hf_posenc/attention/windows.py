"""Which keys a decaying bias leaves no share of the softmax: windows per head, proved from the norms of q and k."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hf_posenc.attention.flash_cpu import accumulation_dtype

ALIKE = 1.25
"""Neighbouring heads whose windows differ by at most this factor share their calls."""


def provable_windows(
    query: Tensor,
    key: Tensor,
    table_or_horizon: Tensor | Callable[[Tensor], Tensor],
    scaling: float,
    eps: float,
) -> Tensor:
    """Distances beyond which all keys together hold at most a share `eps` of any row's softmax, in O(length).

    The largest score of a row is at least that of its own key, and no score of its is above `|q| max|k| scaling`. So
    a key whose bias lies below the one at distance 0 by the difference of the two and `ln(length / eps)` has a share
    of at most `eps / length`.

    Args:
        query: Shape (B, H, Q, D).
        key: Shape (B, HK, KV, D); the rows are the last Q positions.
        table_or_horizon: The bias by distance, shape (H, at least KV); or a function from drops >= 0, shape (H,), to
            the distances beyond which the bias lies below `-drop`, for a bias that is 0 at distance 0.
        scaling: Factor on the scores, positive.
        eps: The share, such as 1e-8.

    Returns:
        Shape (H,), int64, at most KV.
    """
    heads, rows = query.shape[1:3]
    known = key.shape[2]
    group = heads // key.shape[1]
    dtype = accumulation_dtype(query.dtype)
    drops = torch.full((heads,), math.log(known / eps), dtype=torch.float64)
    for head in range(heads):  # one at a time: the scratch is small
        of_head = query[:, head].detach().to(dtype)
        keys = key[:, head // group].detach().to(dtype)
        longest = torch.linalg.vector_norm(keys, dim=-1).cummax(-1).values[:, known - rows :]
        own = (of_head * keys[:, known - rows :]).sum(-1)
        slack = torch.linalg.vector_norm(of_head, dim=-1) * longest - own
        drops[head] += max(0.0, float(slack.max()) * scaling)
    if isinstance(table_or_horizon, Tensor):
        table = table_or_horizon.detach()[:, :known].double()
        needed = table >= table[:, :1] - drops[:, None]
        return torch.where(needed, torch.arange(known), 0).amax(-1)
    return table_or_horizon(drops).ceil().clamp(0, known).long()


def runs_of_like_heads(reaches: Sequence[int], group: int) -> list[tuple[int, int]]:
    """Runs of heads with like windows, first and end: within a group of `group` query heads, or of whole groups."""
    runs: list[tuple[int, int]] = []
    for head in range(len(reaches)):
        if head % group and _like(reaches[runs[-1][0] : head + 1]):
            runs[-1] = runs[-1][0], head + 1
        else:
            runs.append((head, head + 1))
    merged = runs[:1]
    for first, end in runs[1:]:
        whole = first % group == 0 == end % group and merged[-1][0] % group == 0
        if whole and _like(reaches[merged[-1][0] : end]):
            merged[-1] = merged[-1][0], end
        else:
            merged.append((first, end))
    return merged


def _like(reaches: Sequence[int]) -> bool:
    return max(reaches) <= ALIKE * min(reaches)
