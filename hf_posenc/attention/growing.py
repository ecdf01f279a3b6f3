"""Bands that follow the length of the text: one call of fixed bands for each length in force."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from hf_posenc.attention.call import Call, CausalMask, Mask, Run
from hf_posenc.attention.encoding import Encoding, GrowingPlan


@dataclass(frozen=True)
class _Stretch:
    """Queries of one causal sequence with one length in force, and the keys they see."""

    run: Run
    length: int
    mask: Mask


def accepts(call: Call, encoding: Encoding) -> bool:
    """True if the bands follow the length, and the call consists of causal sequences."""
    if not isinstance(encoding.plan, GrowingPlan) or torch.compiler.is_compiling() or call.weights:
        return False
    runs = call.runs()
    return runs is not None and all(run.window is None for run in runs)


def calls(call: Call, encoding: Encoding) -> Iterator[tuple[slice, slice, Call, Encoding]]:
    """Yield rows of the batch and queries with the call that computes them, and its encoding.

    Queries in no call are padding.
    """
    plan = encoding.plan
    assert isinstance(plan, GrowingPlan)
    stretches = call.mask.decided(
        ("stretches", id(encoding.method), encoding.original), lambda: [*_stretches(call, plan)]
    )
    for part in stretches:
        run = part.run
        m, n = call.positions_of(run)
        piece = replace(
            call,
            query=call.query[run.batch, :, run.queries],
            key=call.key[run.batch, :, run.keys],
            value=call.value[run.batch, :, run.keys],
            query_position=m,
            key_position=n,
            mask=part.mask,
            lengths=None,
        )
        yield run.batch, run.queries, piece, encoding.at_length(part.length)


def last(call: Call, encoding: Encoding) -> tuple[Call, Encoding]:
    """Return the call of the last length in force and its encoding; others come back as they are."""
    if accepts(call, encoding):
        *_, (_, _, call, encoding) = calls(call, encoding)
    return call, encoding


def _stretches(call: Call, plan: GrowingPlan) -> Iterator[_Stretch]:
    batch, queries, keys = len(call.query), call.query.shape[2], call.key.shape[2]
    lengths = None if call.lengths is None else call.lengths.cpu()
    together = (lengths is None or bool((lengths == lengths[0]).all())) and call.count_up(False)
    for run in call.runs() or ():
        (first, _, _), (start, _, _) = run.keys.indices(keys), run.queries.indices(queries)
        each = [slice(row, row + 1) for row in range(batch)[run.batch]]
        for rows in [run.batch] if together else each:
            m = call.positions_of(replace(run, batch=rows))[0][:1]
            buckets, counts = plan.bucket(m[0]).cpu().unique_consecutive(return_counts=True)
            in_force = buckets.tolist()
            if plan.method.update != "row":
                in_force = [int(plan.origin(m, None if lengths is None else lengths[rows]))]
            begin, seen = start, first + run.offset
            for length, count in zip(in_force, counts.tolist(), strict=True):
                seen += count
                mask = CausalMask(count, seen - first, call.query.device)
                if together:  # the whole counts up, so its parts do
                    mask.decided(("count up", False), lambda: True)
                places = slice(begin, begin + count), slice(first, seen)
                yield _Stretch(Run(rows, *places, seen - first - count), length, mask)
                begin += count
