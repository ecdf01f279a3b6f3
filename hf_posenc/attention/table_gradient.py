"""The backward of attention with a trainable bias by distance: one pass over tiles of the score matrix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hf_posenc.attention.flash_cpu import accumulation_dtype

TILE_ROWS = 128
TILE_KEYS = 1024
"""A tile of float32 scores is half a megabyte: three of them stay in a core's own cache."""


def backward_with_table(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    reversed_table: Tensor,
    out: Tensor,
    lse: Tensor,
    scaling: float,
    size: int,
    starts: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value and of the reversed table.

    The fused op's own backward gives no gradient of a mask, and beside it the scores would be computed twice; so
    here each tile's weights and score gradients serve all four. With the rows from last to first, a diagonal of the
    score matrix, which is a distance, is an anti-diagonal: `row + column` is one number on it.

    Args:
        grad: Gradient of the output, shape (B, H, Q, D).
        query: Shape (B, H, Q, D).
        key: Shape (B, HK, KV, D).
        value: Shape (B, HK, KV, D).
        reversed_table: Shape (H, size + at least `TILE_ROWS`), entry x is the bias at distance `size - 1 - x`, below
            zero hidden.
        out: Output, shape (B, H, Q, D).
        lse: Log-sum-exp, shape (B, H, Q).
        scaling: Factor on the scores.
        size: Distances in the table.
        starts: Per head, how many keys before the first of a tile's rows are left in (the head's window).
    """
    batch, heads, length, _ = query.shape
    key_heads, known = key.shape[1:3]
    dtype = accumulation_dtype(query.dtype)
    grad_query = torch.empty_like(query, dtype=dtype)
    grad_key = torch.zeros_like(key, dtype=dtype)
    grad_value = torch.zeros_like(value, dtype=dtype)
    grad_table = torch.zeros_like(reversed_table)
    scratch = [query.new_empty(TILE_ROWS * (TILE_KEYS + TILE_ROWS), dtype=dtype) for _ in range(2)]
    for row, kv_head in ((row, head) for row in range(batch) for head in range(key_heads)):
        keys = _with_column(key[row, kv_head].to(dtype), torch.ones(known, dtype=dtype))
        values = _with_column(value[row, kv_head].to(dtype), torch.ones(known, dtype=dtype))
        group = heads // key_heads
        for head in range(kv_head * group, (kv_head + 1) * group):
            flipped = [x[row, head].flip(0).to(dtype) for x in (query, grad, out, lse)]
            scaled, weighed = flipped[0] * scaling, flipped[1]
            correction = (weighed * flipped[2]).sum(-1)
            rows = _with_column(scaled, -flipped[3])
            weighed_rows = _with_column(weighed, -correction)
            of_rows = torch.zeros_like(scaled)
            for first, end, begin, stop in _tiles(length, known, starts[head]):
                count, width = end - first, stop - begin
                at = size - known + first + begin
                bias = reversed_table.as_strided(
                    (count, width), (1, 1), head * reversed_table.stride(0) + at
                )
                weights = scratch[0][: count * width].view(count, width)
                torch.mm(rows[first:end], keys[begin:stop].T, out=weights)
                weights.add_(bias).exp_()
                # One column more than the anti-diagonals need, so that they become columns of a narrower view.
                skewed = scratch[1][: count * (width + count)].view(count, width + count)
                skewed[:, width:] = 0
                of_scores = skewed[:, :width]
                torch.mm(weighed_rows[first:end], values[begin:stop].T, out=of_scores)
                of_scores.mul_(weights)
                diagonals = scratch[1][: count * (width + count - 1)].view(count, -1)
                grad_table[head, at : at + width + count - 1] += diagonals.sum(0)
                of_rows[first:end].addmm_(of_scores, keys[begin:stop, :-1])
                grad_key[row, kv_head, begin:stop].addmm_(of_scores.T, scaled[first:end])
                grad_value[row, kv_head, begin:stop].addmm_(weights.T, weighed[first:end])
            grad_query[row, head] = of_rows.flip(0).mul_(scaling)
    of_inputs = [x.to(query.dtype) for x in (grad_query, grad_key, grad_value)]
    return of_inputs[0], of_inputs[1], of_inputs[2], grad_table


def _with_column(x: Tensor, column: Tensor) -> Tensor:
    """Appends a feature, through which a product of rows and keys subtracts a number from each row's scores."""
    return torch.cat((x, column.unsqueeze(-1).to(x.dtype)), -1)


def _tiles(length: int, known: int, window: int) -> Iterator[tuple[int, int, int, int]]:
    """First row and end (from the last row on), first key and end of the tiles that hold visible pairs."""
    for first in range(0, length, TILE_ROWS):
        end = min(length, first + TILE_ROWS)
        least = max(0, known - end - window)
        for begin in range(least, known - first, TILE_KEYS):
            yield first, end, begin, min(known - first, begin + TILE_KEYS)
