"""Causal attention whose pairs have rotary positions by band: two bands by distance, or three by chunk.

All of it is plain attention calls on slices, so the cost is that of one causal attention. The far band of two is
causal attention between the rows from the window on and the keys shifted by it, without a mask.

Shapes: queries (B, H, Q, D), keys (B, HK, offset + Q, D), values (B, HK, offset + Q, DV), results (B, H, Q, DV); H is a
multiple of HK. `offset` counts the tokens in the cache: row i has position offset + i. `scaling` multiplies the scores.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hf_posenc.attention import windowed
from hf_posenc.attention.parts import Part, attend_parts
from hf_posenc.attention.softmax import accumulation_dtype

NEAR_ROWS = (64, 256)
"""Rows of one block of the near band, for narrow and for wide windows. In a block of C rows each computes C keys too
many, but tall blocks are faster matrix products."""


def causal(query: Tensor, key: Tensor, value: Tensor, scaling: float, *, offset: int = 0) -> Tensor:
    """Compute plain causal attention, exact."""
    parts = _causal_parts((0, query.shape[2]), 0, offset)
    return attend_parts(parts, (query,), (key,), value, scaling)


def two_bands(
    near: tuple[Tensor, Tensor],
    far: tuple[Tensor, Tensor],
    value: Tensor,
    window: int,
    scaling: float,
    *,
    offset: int = 0,
    far_keys: int | None = None,
) -> Tensor:
    """Compute causal attention with one rotation for near and one for far pairs (ReRoPE, sinks, ...), exact.

    `near` is the query and key of pairs less than `window` tokens apart, `far` those of the others; their keys may be
    one tensor. Of the far pairs, only those with the first `far_keys` keys count; 0: a sliding window alone.
    """
    rows = near[0].shape[2]
    keys = (near[1],) if near[1] is far[1] else (near[1], far[1])
    start = min(rows, max(0, window - offset))  # the rows before it have near keys only
    parts = _causal_parts((0, start), 0, offset) if start else []
    if start < rows:
        # The first of these rows sees the far keys up to `shift`, each next row one more.
        shift = offset + start - window
        far_parts = _causal_parts(
            (start, rows), 0, shift, keys=far_keys, query=1, key=len(keys) - 1
        )
        parts += far_parts
        least, most = NEAR_ROWS
        block = max(least, min(most, window // 8 // least * least))
        mask = _band_mask(min(block, rows - start), window, value)
        for first in range(start, rows, block):
            end = min(rows, first + block)
            count = end - first
            parts.append(
                Part(
                    (first, end),
                    (offset + first - window, offset + end),
                    mask=mask[:count, : window + count],
                    merge=bool(far_parts),
                )
            )
    return attend_parts(parts, (near[0], far[0]), keys, value, scaling)


def three_chunks(
    queries: tuple[Tensor, Tensor, Tensor],
    key: Tensor,
    value: Tensor,
    chunk: int,
    scaling: float,
    *,
    offset: int = 0,
) -> Tensor:
    """Compute dual chunk attention (An et al. 2024, arXiv 2402.17463, sec. 3), exact.

    The pair of positions (m, n) uses `queries[min(m // chunk - n // chunk, 2)]`. Between two chunks every pair is
    visible, so no part needs a mask.
    """
    parts: list[Part] = []
    for part in windowed.three_chunks(queries[0].shape[2], offset, chunk).values():
        if part.causal:  # aligned to the bottom right
            (first, end), (least, stop) = part.rows, part.keys
            parts += _causal_parts((first, end), least, stop - (end - first))
        else:
            parts.append(replace(part, merge=True))
    return attend_parts(parts, queries, (key,), value, scaling)


def _causal_parts(
    rows: tuple[int, int],
    least: int,
    before: int,
    *,
    keys: int | None = None,
    query: int = 0,
    key: int = 0,
) -> list[Part]:
    """Rows of which the first sees the keys `least` to `before`, both included, and each next row one more.

    The parts are the keys that all rows see, and the triangle; either may be missing. `keys` limits both to the keys
    below it; `query` and `key` are those of `Part`.
    """
    first, end = rows
    last = before + end - first
    stop = last if keys is None else min(keys, last)
    # A single row has no triangle.
    shared = min(stop, last if end - first == 1 else before)
    parts = []
    if shared > least:
        parts.append(Part(rows, (least, shared), query=query, key=key))
    if stop > shared and stop > least:
        merge = bool(parts)
        parts.append(Part(rows, (shared, stop), query=query, key=key, causal=True, merge=merge))
    return parts


def _band_mask(rows: int, window: int, like: Tensor) -> Tensor:
    """Shape (rows, rows + window): row t sees the `window` keys up to its own, which is column t + window."""
    row = torch.arange(rows, device=like.device)[:, None]
    column = torch.arange(rows + window, device=like.device)
    hidden = (column <= row) | (column > row + window)
    mask = torch.zeros(
        rows, rows + window, dtype=accumulation_dtype(like.dtype), device=like.device
    )
    return mask.masked_fill_(hidden, -torch.inf)
