"""The fast path for whole sequences on a CPU: kernels whose cost is about that of one plain causal attention."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hf_posenc.attention.banded import causal, three_chunks, two_bands
from hf_posenc.attention.call import Call, Run
from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.toeplitz import provable_windows, toeplitz
from hf_posenc.methods import Band, DistanceBias, RotaryBands

ROWS = 64
"""Fewer queries than this are left to other paths."""
DROPPED = 1e-8
"""Share of the softmax that keys beyond a provable window may have, together, at the most."""


def accepts(call: Call, encoding: Encoding) -> bool:
    """Whether the kernels compute this call."""
    if (
        call.query.device.type != "cpu"
        or call.query.shape[2] < ROWS
        or torch.compiler.is_compiling()
        or not call.plain
        or not _kernel_knows(encoding)
    ):
        return False
    if encoding.plain:
        return call.mask.runs() is not None
    runs = call.sequences(from_zero=encoding.counts_from_zero)
    return runs is not None and all(run.window is None for run in runs)


def prefill(call: Call, encoding: Encoding) -> tuple[Tensor, None]:
    """Attention over causal sequences, each by one kernel; what belongs to none is padding and gives zeros."""
    if call.lengths is not None and bool((call.lengths != call.lengths[0]).any()):
        return torch.cat([prefill(row, encoding)[0] for row in call.by_row()]), None
    runs = call.mask.runs()
    assert runs is not None
    everything = slice(None)
    if [replace(run, offset=0, window=None) for run in runs] == [
        Run(everything, everything, everything, 0)
    ]:
        return _one(call, encoding, runs[0]), None
    batch, heads, queries, _ = call.query.shape
    out = call.query.new_zeros(batch, heads, queries, call.value.shape[-1])
    for run in runs:
        out[run.batch, :, run.queries] = _one(call, encoding, run)
    return out, None


def _kernel_knows(encoding: Encoding) -> bool:
    if encoding.pairs is not None:
        return False
    if encoding.bias is not None:
        alone = encoding.bands is None and encoding.moving is None
        return alone and isinstance(encoding.bias, DistanceBias) and not encoding.bias.of_query
    if encoding.moving is not None or encoding.bands is None:
        return True
    return _shape(encoding.bands, encoding.original) is not None


def _shape(method: RotaryBands, original: int) -> str | None:
    """Which kernel computes these bands; `None`: none does."""
    bands = method.bands(original)
    near = bands[0]
    if len(bands) == 3 and near.chunk is not None:
        steps = [(band.least, band.below, band.keys, band.chunk) for band in bands]
        size = near.chunk
        wanted = [(0, 1, None, size), (1, 2, None, size), (2, None, None, size)]
        return "chunks" if steps == wanted else None
    if any(band.chunk is not None for band in bands) or near.least or near.keys is not None:
        return None
    if len(bands) == 1 or (
        len(bands) == 2 and bands[1].least == near.below and bands[1].below is None
    ):
        return "bands"
    return None


def _one(call: Call, encoding: Encoding, run: Run) -> Tensor:
    query = call.query[run.batch, :, run.queries]
    key, value = call.key[run.batch, :, run.keys], call.value[run.batch, :, run.keys]
    scaling, offset = call.scaling, run.offset
    m, n = (positions[:1] for positions in call.positions_of(run))  # the same in all rows
    query = encoding.scaled(query, m)
    if isinstance(encoding.bias, DistanceBias):
        return _biased(encoding, query, key, value, scaling, offset)
    if encoding.moving is not None:
        lengths = None if call.lengths is None else call.lengths[run.batch]
        return _by_bucket(encoding, query, key, value, scaling, m, n, lengths)
    branches, nowhere = encoding.branches(), n.new_zeros(())
    queries = [branch.query(query, m, nowhere) for branch in branches]
    if run.window is not None:
        pair = query, key
        return two_bands(pair, pair, value, run.window, scaling, offset=offset, far_keys=0)
    if encoding.bands is None:
        return causal(queries[0], branches[0].key(key, n, nowhere), value, scaling, offset=offset)
    bands = encoding.bands.bands(encoding.original)
    keys = [branch.key(key, n, nowhere) for branch in branches]
    if len(bands) == 3:
        assert bands[0].chunk is not None
        first, second, third = queries
        return three_chunks(
            (first, second, third), keys[0], value, bands[0].chunk, scaling, offset=offset
        )
    near, far = (queries[0], keys[0]), (queries[-1], keys[-1])
    if bands[0].below is None:
        return causal(*near, value, scaling, offset=offset)
    return two_bands(
        near, far, value, bands[0].below, scaling, offset=offset, far_keys=_far_keys(bands)
    )


def _far_keys(bands: tuple[Band, ...]) -> int | None:
    return 0 if len(bands) == 1 else bands[1].keys


def _biased(
    encoding: Encoding, query: Tensor, key: Tensor, value: Tensor, scaling: float, offset: int
) -> Tensor:
    method, heads = encoding.bias, encoding.heads
    assert isinstance(method, DistanceBias)
    exact = torch.promote_types(query.dtype, torch.float32)
    distance = torch.arange(key.shape[2], device=key.device, dtype=exact)
    parameters = encoding.parameters or {}
    table = method.bias(distance, heads, parameters).to(exact)
    windows = None
    if not table.requires_grad and method.horizon(torch.ones(heads), heads, parameters) is not None:

        def horizon(drop: Tensor) -> Tensor:
            reach = method.horizon(drop, heads, parameters)
            assert reach is not None
            return reach

        windows = provable_windows(query, key, horizon, scaling, DROPPED)
    return toeplitz(query, key, value, table, scaling, offset=offset, windows=windows)


def _by_bucket(
    encoding: Encoding,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    m: Tensor,
    n: Tensor,
    lengths: Tensor | None,
) -> Tensor:
    """Every bucket of queries with keys rotated for it; one plain causal attention up to the original length."""
    (branch,) = encoding.branches()
    sizes = encoding.bucket(m[0]).unique_consecutive(return_counts=True)[1].tolist()
    outs, start, offset = [], 0, n.shape[1] - m.shape[1]
    for size in sizes:
        stop = start + size
        asking, seen = m[:, start:stop], n[:, : offset + stop]
        origin = encoding.origin(asking, lengths)
        outs.append(
            causal(
                branch.query(query[:, :, start:stop], asking, origin),
                branch.key(key[:, :, : offset + stop], seen, origin),
                value[:, :, : offset + stop],
                scaling,
                offset=offset + start,
            )
        )
        start = stop
    return torch.cat(outs, 2)
