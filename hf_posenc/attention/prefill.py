"""The fast path for whole sequences on a CPU: kernels whose cost is about that of one plain causal attention."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hf_posenc.attention.banded import causal, three_chunks, two_bands
from hf_posenc.attention.call import Call, Run
from hf_posenc.attention.encoding import BandPlan, Encoding
from hf_posenc.attention.toeplitz import provable_windows, toeplitz
from hf_posenc.attention.windowed import in_runs
from hf_posenc.methods import DistanceBias

ROWS = 64
"""Fewer queries than this are left to other paths."""
DROPPED = 1e-8
"""Share of the softmax that keys beyond a provable window may have, together, at most."""


def accepts(call: Call, encoding: Encoding) -> bool:
    """True if the kernels compute this call."""
    bias = encoding.bias
    if call.query.device.type != "cpu" or call.query.shape[2] < ROWS:
        return False
    by_distance = isinstance(bias, DistanceBias) and not bias.of_query and encoding.method is None
    return (bias is None or by_distance) and in_runs(call, encoding)


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
            pair = (
                plan.query(query[:, :, rows], m[:, rows], origin),
                plan.key(key[:, :, seen], n[:, seen], origin),
            )
            outs.append(causal(*pair, value[:, :, seen], scaling, offset=offset + start))
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
        own, before, older = queries
        return three_chunks(
            (own, before, older), keys[0], value, first.chunk, scaling, offset=offset
        )
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
