"""Causal sequences by a fused operator with windows: a few calls for all of them, on any device that has one.

The operator aligns causal calls to the bottom right and has windows and sequences of any length in one call, so a band
is one call without a mask. A row that a call gives no key has a log-sum-exp that no merge counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_posenc.attention.call import Call, Run
from hf_posenc.attention.encoding import BandBranch, BandPlan, Encoding, MovingPlan
from hf_posenc.attention.fused import Fused, Segments
from hf_posenc.attention.parts import Part, attend_parts
from hf_posenc.attention.rotation import Rotation

Label = tuple[str, int]
Rectangles = Mapping[Label, Part]
"""The parts of one sequence, whose first cover all its rows; parts of one name are one call over all sequences."""

Turn = tuple[Rotation, Tensor, tuple[Tensor, Tensor]]
"""A tensor that a rotation turns by tables, as `Rotation.turned` takes them."""
Turned = Callable[[Sequence[Turn]], list[Tensor]]
"""`turned`, or a kernel that computes it."""


def turned(turns: Sequence[Turn]) -> list[Tensor]:
    """Turn each tensor by every entry of its tables; the results are (entries, *x.shape)."""
    return [rotation.turned(x, tables) for rotation, x, tables in turns]


def accepts(
    call: Call,
    encoding: Encoding,
    fused: Fused,
    turns: Callable[[Call, Encoding], bool] | None = None,
) -> bool:
    """True if the operator computes this call; `turns`: if a kernel turns its queries and keys."""
    features = max(call.query.shape[-1], call.value.shape[-1])
    return (
        encoding.bias is None
        and (call.softcap is None or fused.softcaps)
        and (turns is None or turns(call, encoding))
        and fused.serves(call.query.device, call.dtype, features)
        and in_runs(call, encoding)
    )


def in_runs(call: Call, encoding: Encoding) -> bool:
    """True if a call is attention over causal sequences, whose positions count up where a method reads them."""
    plan = encoding.plan
    if plan.kernel is None or call.dropout or call.weights or torch.compiler.is_compiling():
        return False
    runs = call.runs()
    if runs is None or encoding.plain:
        return runs is not None
    return all(run.window is None for run in runs) and call.count_up(plan.counts_from_zero)


def attend(
    call: Call, encoding: Encoding, fused: Fused, turned: Turned = turned
) -> tuple[Tensor, None]:
    """Compute attention over causal sequences; queries in none are padding and give zeros."""
    runs = call.runs()
    assert runs is not None
    compute = functools.partial(
        attend_parts, scaling=call.scaling, softcap=call.softcap, sinks=call.sinks, fused=fused
    )
    if encoding.plan.kernel == "buckets":
        return _by_bucket(call, encoding, runs, compute, turned), None
    batch, _, rows, _ = call.query.shape
    key_count = call.key.shape[2]
    parts = call.mask.decided(
        ("parts", encoding.outline, rows, key_count),
        lambda: joined(
            [_placed(place, encoding) for place in _places(runs, batch, rows, key_count)],
            batch * rows,
            batch * key_count,
        ),
    )
    ends = []
    for index in range(len(encoding.plan.branches)):
        read = [part.keys for part in parts if part.key == index]
        first = min((start for start, _ in read), default=0) if batch == 1 else 0
        stop = max((stop for _, stop in read), default=0) if batch == 1 else key_count
        ends.append((first, stop))
    parts = [replace(part, first_key=ends[part.key][0]) for part in parts]
    query = encoding.scaled(call.query, call.query_position)
    queries, keys = (map(_in_a_row, each) for each in branched(call, encoding, query, ends, turned))
    out = compute(parts, [*queries], [*keys], _in_a_row(call.value))
    return out.unflatten(2, (batch, rows))[0].transpose(0, 1), None


def branched(
    call: Call,
    encoding: Encoding,
    query: Tensor,
    ends: Sequence[tuple[int, int]],
    turned: Turned = turned,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the queries of every branch, and the keys of the first ones from a first key to an end.

    Those of bands are turned together, by angles that all layers share.
    """
    branches, m = encoding.plan.branches, call.query_position
    turns = dict[int, Turn]()  # of keys by the index of their branch, of all queries at -1
    turning = [b for b in branches if isinstance(b, BandBranch) and not b.keeps_query]
    if turning:
        rotation, outline = turning[0].rotation, encoding.outline
        tables = call.mask.decided(
            ("queries", rotation, query.dtype, *outline),
            lambda: rotation.tables(torch.stack([b.query_turn(m) for b in turning]), query.dtype),
        )
        turns[-1] = rotation, query, tables
    keys = list[Tensor]()
    for index, (branch, (first, stop)) in enumerate(zip(branches, ends, strict=False)):
        key, n = call.key[:, :, first:stop], call.key_position[:, first:stop]
        if not isinstance(branch, BandBranch):
            key = branch.key(key, n, n.new_zeros(()))
        elif not branch.shares_cache and key.shape[2]:
            rotation, turn = branch.rotation.of_keys, branch.key_turn
            tables = call.mask.decided(
                ("keys", rotation, query.dtype, index, first, stop, *encoding.outline),
                lambda: rotation.tables(turn(n)[None], query.dtype),  # noqa: B023 (called at once)
            )
            turns[index] = rotation, key, tables
        keys.append(key)
    results = dict(zip(turns, turned([*turns.values()]), strict=True))
    keys = [results[index][0] if index in results else key for index, key in enumerate(keys)]
    if not turning:
        return [branch.query(query, m, m.new_zeros(())) for branch in branches], keys
    each = iter(results[-1])
    return [next(each) if branch in turning else query for branch in branches], keys


def _in_a_row(x: Tensor) -> Tensor:
    """From (batch, heads, length, features) to (1, heads, batch * length, features); a view of one row."""
    if len(x) == 1:
        return x
    return x.transpose(1, 2).reshape(1, -1, x.shape[1], x.shape[3]).transpose(1, 2)


@dataclass(frozen=True)
class Place:
    """One sequence: its first row and key among those of all rows of the batch, and its numbers of both."""

    row: int
    key: int
    rows: int
    keys: int
    window: int | None


def _places(runs: Sequence[Run], batch: int, rows: int, keys: int) -> list[Place]:
    places = []
    for run in runs:
        first, end, _ = run.queries.indices(rows)
        begin, stop, _ = run.keys.indices(keys)
        for row in range(batch)[run.batch]:
            counts = end - first, stop - begin
            places.append(Place(row * rows + first, row * keys + begin, *counts, run.window))
    return sorted(places, key=lambda place: place.row)


def _placed(place: Place, encoding: Encoding) -> tuple[Place, Rectangles]:
    plan, rows, offset = encoding.plan, place.rows, place.keys - place.rows
    if place.window is not None:
        return place, two_bands(rows, offset, place.window, far_keys=0)
    if not isinstance(plan, BandPlan):
        return place, causal(rows, offset)
    first, last = plan.bands[0], plan.bands[-1]
    if plan.kernel == "chunks":
        assert first.chunk is not None
        return place, three_chunks(rows, offset, first.chunk)
    if first.below is None:
        return place, causal(rows, offset)
    return place, two_bands(rows, offset, first.below, far_keys=0 if first is last else last.keys)


def causal(rows: int, offset: int) -> Rectangles:
    """Return the parts of causal attention of rows behind `offset` keys."""
    return {("near", 0): Part((0, rows), (0, offset + rows), causal=True)}


def two_bands(rows: int, offset: int, window: int, *, far_keys: int | None = None) -> Rectangles:
    """Return the parts of two bands, as `prefill.two_bands`; queries and keys 0 are near, 1 far.

    Row t has the position i = offset + t. Near: the keys i - window + 1 to i. Far: the keys up to i - window, for the
    rows from `first` on. The last of them sees the keys below `keys - window`, so with these keys the call is
    causal. Where the far keys end before, the last part is a rectangle.
    """
    keys = offset + rows
    least = max(0, offset - window)  # one key that no row sees, for whole chunks (`in_squares`)
    parts = {("near", 0): Part((0, rows), (least, keys), causal=True, window=window)}
    first = max(0, window - offset)
    if first >= rows or far_keys == 0:
        return parts
    far_part = functools.partial(Part, query=1, key=1)
    if far_keys is None or far_keys >= keys - window:
        parts["far", 0] = far_part((first, rows), (0, keys - window), causal=True)
        return parts
    # From this row on, all far keys are seen.
    corner = max(first, min(rows, far_keys + window - 1 - offset))
    if corner > first:
        parts["far", 0] = far_part((first, corner), (0, corner + offset - window), causal=True)
    if corner < rows:
        parts["first", 0] = far_part((corner, rows), (0, far_keys))
    return parts


def three_chunks(rows: int, offset: int, chunk: int) -> Rectangles:
    """Return the parts of dual chunk attention, as `prefill.three_chunks`; all of them read key 0."""
    parts: dict[Label, Part] = {}
    first = 0
    while first < rows:
        number, border = (offset + first) // chunk, (offset + first) // chunk * chunk
        end = min(rows, border + chunk - offset)
        own = first, end
        parts["intra", number] = Part(own, (border, offset + end), causal=True)
        if border:
            parts["before", number] = Part(own, (border - chunk, border), query=1)
        if border > chunk:
            parts["older", number] = Part(own, (0, border - chunk), query=2)
        first = end
    return parts


def joined(plans: Sequence[tuple[Place, Rectangles]], rows: int, keys: int) -> list[Part]:
    """Return the calls for all sequences, of `rows` and `keys` in all: one for each name."""
    by_name: dict[str, list[Part]] = {}
    for place, parts in plans:
        for (name, _), part in parts.items():
            placed = replace(
                part,
                rows=(place.row + part.rows[0], place.row + part.rows[1]),
                keys=(place.key + part.keys[0], place.key + part.keys[1]),
            )
            by_name.setdefault(name, []).append(placed)
    calls: list[Part] = []
    for named in by_name.values():
        first, last = named[0], named[-1]
        span, reach = (first.rows[0], last.rows[1]), (first.keys[0], last.keys[1])
        if not calls:  # it defines all rows, those of no sequence too
            span = 0, rows
        segments = None
        # Several, of which one may have no rows, or one between rows of none.
        if len(named) > 1 or span != first.rows:
            (row, end), (key, stop) = span, reach
            own = ((part.rows, part.keys) for part in named)
            pairs = [((a - row, b - row), (c - key, d - key)) for (a, b), (c, d) in own]
            segments = Segments.of(pairs, end - row, stop - key)
        calls.append(replace(first, rows=span, keys=reach, segments=segments, merge=bool(calls)))
    return calls


def _by_bucket(
    call: Call,
    encoding: Encoding,
    runs: Sequence[Run],
    attend: Callable[..., Tensor],
    turned: Turned,
) -> Tensor:
    """Compute every bucket of queries with keys rotated for it, by one call."""
    plan, (batch, heads, rows, _) = encoding.plan, call.query.shape
    assert isinstance(plan, MovingPlan)
    rotation, dtype = plan.rotation, call.query.dtype
    out = call.value.new_zeros(batch, rows, heads, call.value.shape[-1]).transpose(1, 2)
    # One method object serves all layers.
    same = id(encoding.method), encoding.original
    buckets = call.mask.decided(("buckets", *same), lambda: _buckets(call, encoding, runs))
    for index, (run, of_run) in enumerate(zip(runs, buckets, strict=True)):
        m, n = (positions[:1] for positions in call.positions_of(run))
        for row in range(batch)[run.batch]:
            own = slice(row, row + 1)
            query = encoding.scaled(call.query[own, :, run.queries], m)
            key, value = call.key[own, :, run.keys], call.value[own, :, run.keys]
            outs, start = [], 0
            for size, lengths in of_run:
                part, seen = slice(start, start + size), run.offset + start + size
                own_query, own_key = query[:, :, part], key[:, :, :seen]
                moved, factor = plan.table(lengths[row], query.device)
                if moved is not None:
                    queries = functools.partial(rotation.tables, m[None, :, part], dtype)
                    # Those of the keys would be a matrix of queries times keys in all buckets.
                    tables = call.mask.decided(
                        ("bucket", rotation, dtype, index, row, start, *same),
                        functools.partial(queries, moved, factor),
                    )
                    turn = rotation, own_query, tables
                    tables = rotation.tables(n[None, :, :seen], dtype, moved)
                    turns = turn, (rotation.of_keys, own_key, tables)
                    own_query, own_key = (x[0] for x in turned(turns))
                whole = [Part((0, size), (0, seen), causal=True)]
                outs.append(attend(whole, (own_query,), (own_key,), value[:, :, :seen]))
                start += size
            out[own, :, run.queries] = outs[0] if len(outs) == 1 else torch.cat(outs, 2)
    return out


def _buckets(
    call: Call, encoding: Encoding, runs: Sequence[Run]
) -> list[list[tuple[int, list[int]]]]:
    """The buckets of each run: their numbers of queries, and the length in force in each row of the batch."""
    plan, batch = encoding.plan, len(call.query)
    lengths = None if call.lengths is None else call.lengths.tolist()
    found = []
    for run in runs:
        buckets = plan.bucket(call.positions_of(run)[0][0].cpu())
        values, counts = buckets.unique_consecutive(return_counts=True)
        of_rows = [lengths or [value] * batch for value in values.tolist()]
        found.append([*zip(counts.tolist(), of_rows, strict=True)])
    return found
