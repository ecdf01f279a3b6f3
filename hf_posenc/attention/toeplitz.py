"""Causal attention with a bias by distance, per head: any table, read in place as the mask of fused calls.

With the rows of a block from last to first, the bias of row t and key n depends on `t + n` alone (a Hankel matrix),
which a 1-D table viewed with strides (1, 1) is: O(length) memory, and exact for any function of the distance.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from hf_posenc.attention.parts import Part, attend_parts
from hf_posenc.attention.softmax import accumulation_dtype

BLOCK = 1024
"""Rows that read the keys before them in one call."""
STEP = 256
"""Rows of a call on the diagonal, or in a narrow window: half of a row's scores there are hidden."""
LEAST = -1e30
"""Replaces a bias of -inf, with which a call could have rows without any visible key."""
DROPPED = 1e-8
"""Share of the softmax that keys beyond a provable window may have, together, at most."""
ALIKE = 1.25
"""Neighbouring heads whose windows differ by at most this factor share their calls."""
TILE_ROWS = 128
TILE_KEYS = 1024
"""A tile of float32 scores is half a megabyte: three of them fit into a core's own cache."""


def toeplitz(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    scaling: float,
    *,
    offset: int = 0,
    windows: Tensor | None = None,
) -> Tensor:
    """Compute causal attention over the scores `query . key * scaling + table[h, m - n]`, exact.

    Shapes and `offset` are those of `prefill`. The table, (H, at least offset + Q), float32 or float64, gets a gradient
    too where it requires one. `windows`, (H,), integers, are distances beyond which keys may be left out (not: must).
    """
    heads, rows = query.shape[1:3]
    key_count = offset + rows
    key, value = key[:, :, :key_count], value[:, :, :key_count]
    reaches = [key_count] * heads
    if windows is not None:
        reaches = [max(0, min(key_count, int(window))) for window in windows.tolist()]
    flipped = _reversed(table[:, :key_count].to(accumulation_dtype(query.dtype)))
    parts = list(_parts(flipped.detach(), reaches, heads // key.shape[1], rows, offset))
    trained = None
    if torch.is_grad_enabled() and table.requires_grad:
        trained = flipped, functools.partial(_backward, scaling=scaling, reaches=reaches)
    return attend_parts(parts, (query,), (key,), value, scaling, trained=trained)


def _reversed(table: Tensor) -> Tensor:
    """The table from the largest distance to 0, then hidden entries for the distances below zero."""
    rows = table.clamp_min(LEAST).flip(-1)
    return torch.cat((rows, rows.new_full((rows.shape[0], max(STEP, TILE_ROWS)), -torch.inf)), -1)


def _parts(
    flipped: Tensor, reaches: Sequence[int], group: int, rows: int, offset: int
) -> Iterator[Part]:
    """The parts of all heads; `flipped` is a table of offset + rows distances from `_reversed`."""
    for heads in _runs_of_like_heads(reaches, group):
        reach = max(reaches[heads[0] : heads[1]])
        block = BLOCK if reach >= 2 * BLOCK else STEP
        for first in range(0, rows, block):
            last = min(rows, first + block)
            begin = max(0, offset + first - reach)
            # In a narrow window one call reads all keys: those before the block and those of the diagonal.
            before = offset + first if block > STEP else begin
            if before > begin:
                yield _part(flipped, heads, (first, last), (begin, before), rows)
            for step in range(first, last, STEP):
                end = min(last, step + STEP)
                keys = (before, offset + end)
                yield _part(flipped, heads, (step, end), keys, rows, merge=before > begin)


def _part(
    flipped: Tensor,
    heads: tuple[int, int],
    rows: tuple[int, int],
    keys: tuple[int, int],
    length: int,
    *,
    merge: bool = False,
) -> Part:
    """A part with its bias: row t (from the last on) and key n of the part read entry `start + t + n`."""
    start = length - rows[1] + keys[0] + heads[0] * flipped.stride(0)
    shape = (1, heads[1] - heads[0], rows[1] - rows[0], keys[1] - keys[0])
    mask = flipped.as_strided(shape, (0, flipped.stride(0), 1, 1), start)
    every = heads == (0, flipped.shape[0])
    return Part(rows, keys, mask=mask, merge=merge, reverse=True, heads=None if every else heads)


def provable_windows(
    query: Tensor,
    key: Tensor,
    horizon: Callable[[Tensor], Tensor | None],
    scaling: float,
    eps: float,
) -> Tensor:
    """Return distances, (H,), int64, beyond which all keys have at most a share `eps` of any row's softmax; O(length).

    The largest score of a row is at least that of its own key, and none is above `|q| max|k| scaling`. So a key has a
    share of at most `eps / length` if its bias is below the one at distance 0 by the difference of the two and
    `ln(length / eps)`. The bias is 0 at distance 0, and `horizon` is `DistanceBias.horizon` of its method; the rows are
    the last positions of the keys.
    """
    heads, rows = query.shape[1:3]
    key_count = key.shape[2]
    group = heads // key.shape[1]
    dtype = accumulation_dtype(query.dtype)
    first = math.log(key_count / eps)
    drops = torch.full((heads,), first, dtype=torch.float64, device=query.device)
    for head in range(heads):  # one at a time: the scratch is small
        of_head = query[:, head].detach().to(dtype)
        keys = key[:, head // group].detach().to(dtype)
        longest = torch.linalg.vector_norm(keys, dim=-1).cummax(-1).values[:, key_count - rows :]
        own = (of_head * keys[:, key_count - rows :]).sum(-1)
        slack = torch.linalg.vector_norm(of_head, dim=-1) * longest - own
        drops[head] += max(0.0, float(slack.max()) * scaling)
    reach = horizon(drops)
    assert reach is not None
    return reach.ceil().clamp(0, key_count).long()


def _runs_of_like_heads(reaches: Sequence[int], group: int) -> list[tuple[int, int]]:
    """Runs of heads with similar windows, first and end: within a group of `group` query heads, or of whole groups."""
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


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    flipped: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    scaling: float,
    reaches: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value and the reversed table, in one pass over tiles of the score matrix.

    The fused op's own backward gives no gradient of a mask, and beside it the scores would be computed twice; so
    here each tile's weights and score gradients serve all four. With the rows from last to first, a diagonal of the
    score matrix, which is a distance, is an anti-diagonal: `row + column` is one number on it.

    Shapes: (B, H, Q, D) of `grad`, `query` and `out`; (B, HK, KV, D) of key and value; (B, H, Q) of `lse`. Entry x of
    `flipped`, (H, KV + at least `TILE_ROWS`), is the bias at distance `KV - 1 - x`, below zero hidden. A head's reach
    is the number of keys before a tile's rows that are left in.
    """
    batch, heads, length, _ = query.shape
    key_heads, key_count = key.shape[1:3]
    dtype = accumulation_dtype(query.dtype)
    grad_query = torch.empty_like(query, dtype=dtype)
    grad_key = torch.zeros_like(key, dtype=dtype)
    grad_value = torch.zeros_like(value, dtype=dtype)
    grad_table = torch.zeros_like(flipped)
    scratch = [query.new_empty(TILE_ROWS * (TILE_KEYS + TILE_ROWS), dtype=dtype) for _ in range(2)]
    for row, kv_head in ((row, head) for row in range(batch) for head in range(key_heads)):
        keys = _with_column(key[row, kv_head].to(dtype), torch.ones(key_count, dtype=dtype))
        values = _with_column(value[row, kv_head].to(dtype), torch.ones(key_count, dtype=dtype))
        group = heads // key_heads
        for head in range(kv_head * group, (kv_head + 1) * group):
            last_first = (x[row, head].flip(0).to(dtype) for x in (query, grad, out, lse))
            queries, weighed, outputs, log_sums = last_first
            scaled, correction = queries * scaling, (weighed * outputs).sum(-1)
            rows = _with_column(scaled, -log_sums)
            weighed_rows = _with_column(weighed, -correction)
            of_rows = torch.zeros_like(scaled)
            for first, end, begin, stop in _tiles(length, key_count, reaches[head]):
                count, width = end - first, stop - begin
                at = first + begin
                bias = flipped.as_strided((count, width), (1, 1), head * flipped.stride(0) + at)
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
    """Append a feature, through which a product of rows and keys subtracts a number from each row's scores."""
    return torch.cat((x, column.unsqueeze(-1).to(x.dtype)), -1)


def _tiles(length: int, key_count: int, window: int) -> Iterator[tuple[int, int, int, int]]:
    """First row and end (from the last row on), first key and end of the tiles that hold visible pairs."""
    for first in range(0, length, TILE_ROWS):
        end = min(length, first + TILE_ROWS)
        least = max(0, key_count - end - window)
        for begin in range(least, key_count - first, TILE_KEYS):
            yield first, end, begin, min(key_count - first, begin + TILE_KEYS)
