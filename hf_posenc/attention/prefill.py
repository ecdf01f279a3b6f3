"""The fast path for whole sequences on a CPU: kernels whose cost is about that of one plain causal attention.

Two bands by distance, three by chunk, and causal attention are plain attention calls on slices. The far band of two is
causal attention between the rows from the window on and the keys shifted by it, without a mask. A bias by distance is
in `toeplitz`.

Shapes: queries (B, H, Q, D), keys (B, HK, offset + Q, D), values (B, HK, offset + Q, DV), results (B, H, Q, DV); H is a
multiple of HK. `offset` counts the tokens in the cache: row i has position offset + i. `scaling` multiplies the scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hf_posenc.attention import windowed
from hf_posenc.attention.call import Call, Run
from hf_posenc.attention.encoding import BandPlan, Encoding
from hf_posenc.attention.parts import Part, attend_parts
from hf_posenc.attention.softmax import accumulation_dtype
from hf_posenc.attention.toeplitz import DROPPED, provable_windows, toeplitz
from hf_posenc.methods import DistanceBias

ROWS = 64
"""Fewer queries than this are left to other paths."""
NEAR_ROWS = (64, 256)
"""Rows of one block of the near band, for narrow and for wide windows. In a block of C rows each computes C keys too
many, but tall blocks are faster matrix products."""


def accepts(call: Call, encoding: Encoding) -> bool:
    """True if the kernels compute this call."""
    bias = encoding.bias
    if call.query.device.type != "cpu" or call.query.shape[2] < ROWS:
        return False
    by_distance = isinstance(bias, DistanceBias) and not bias.of_query and encoding.method is None
    return (bias is None or by_distance) and call.plain and windowed.in_runs(call, encoding)


def prefill(call: Call, encoding: Encoding) -> tuple[Tensor, None]:
    """Compute attention over causal sequences, each by one kernel; queries in none are padding and give zeros."""
    runs = call.runs()
    assert runs is not None
    batch, heads, queries, _ = call.query.shape
    if call.lengths is not None and bool((call.lengths != call.lengths[0]).any()):
        rows = [(run, row) for run in runs for row in range(batch)[run.batch]]
        runs = tuple(replace(run, batch=slice(row, row + 1)) for run, row in rows)
    everything = slice(None)
    if len(runs) == 1 and (runs[0].batch, runs[0].queries, runs[0].keys) == (everything,) * 3:
        return _one(call, encoding, runs[0]), None
    out = call.value.new_zeros(batch, heads, queries, call.value.shape[-1])
    for run in runs:
        out[run.batch, :, run.queries] = _one(call, encoding, run)
    return out, None


def _one(call: Call, encoding: Encoding, run: Run) -> Tensor:
    query = call.query[run.batch, :, run.queries]
    key, value = call.key[run.batch, :, run.keys], call.value[run.batch, :, run.keys]
    scaling, offset, plan = call.scaling, run.offset, encoding.plan
    m, n = (positions[:1] for positions in call.positions_of(run))  # the same in all rows
    query = encoding.scaled(query, m)
    if isinstance(encoding.bias, DistanceBias):
        return _biased(encoding, query, key, value, scaling, offset)
    if plan.kernel == "buckets":
        # Every bucket of queries with keys rotated for it; one plain causal attention up to the original length.
        lengths = None if call.lengths is None else call.lengths[run.batch]
        outs, start = [], 0
        for size in plan.bucket(m[0]).unique_consecutive(return_counts=True)[1].tolist():
            rows, seen = slice(start, start + size), slice(offset + start + size)
            origin = plan.origin(m[:, rows], lengths)
            own = plan.query(query[:, :, rows], m[:, rows], origin)
            read = plan.key(key[:, :, seen], n[:, seen], origin)
            outs.append(causal(own, read, value[:, :, seen], scaling, offset=offset + start))
            start += size
        return torch.cat(outs, 2)
    origin = n.new_zeros(())
    queries = [branch.query(query, m, origin) for branch in plan.branches]
    if run.window is not None:
        pair = query, key
        return two_bands(pair, pair, value, run.window, scaling, offset=offset, far_keys=0)
    keys = [branch.key(key, n, origin) for branch in plan.branches]
    if not isinstance(plan, BandPlan):
        return causal(queries[0], keys[0], value, scaling, offset=offset)
    first, last = plan.bands[0], plan.bands[-1]
    if plan.kernel == "chunks":
        assert first.chunk is not None
        return three_chunks(queries, keys[0], value, first.chunk, scaling, offset=offset)
    near, far = (queries[0], keys[0]), (queries[-1], keys[-1])
    if first.below is None:
        return causal(*near, value, scaling, offset=offset)
    far_keys = 0 if first is last else last.keys
    return two_bands(near, far, value, first.below, scaling, offset=offset, far_keys=far_keys)


def _biased(
    encoding: Encoding, query: Tensor, key: Tensor, value: Tensor, scaling: float, offset: int
) -> Tensor:
    method, heads = encoding.bias, encoding.all_heads
    assert isinstance(method, DistanceBias)
    exact = torch.promote_types(query.dtype, torch.float32)
    distance = torch.arange(key.shape[2], device=key.device, dtype=exact)
    parameters = encoding.parameters or {}
    table = encoding.own(method.bias(distance, heads, parameters)).to(exact)

    def horizon(drop: Tensor) -> Tensor | None:
        every = method.horizon(drop.repeat(encoding.share[1]), heads, parameters)
        return None if every is None else encoding.own(every)

    windows = None
    if not table.requires_grad and horizon(torch.ones(encoding.heads)) is not None:
        windows = provable_windows(query, key, horizon, scaling, DROPPED)
    return toeplitz(query, key, value, table, scaling, offset=offset, windows=windows)


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
            near_keys = offset + first - window, offset + end
            own_mask = mask[: end - first, : window + end - first]
            parts.append(Part((first, end), near_keys, mask=own_mask, merge=bool(far_parts)))
    return attend_parts(parts, (near[0], far[0]), keys, value, scaling)


def three_chunks(
    queries: Sequence[Tensor],
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
            parts += _causal_parts(part.rows, part.keys[0], part.keys[1] - part.length[0])
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
    mask = torch.zeros(hidden.shape, dtype=accumulation_dtype(like.dtype), device=like.device)
    return mask.masked_fill_(hidden, -torch.inf)
