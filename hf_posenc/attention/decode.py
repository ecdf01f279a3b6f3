"""Steps of a generation: few queries over all cached keys, with one matrix product per key head."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from hf_posenc.attention.call import Call, RotatedKeys, by_origin
from hf_posenc.attention.encoding import BandBranch, Encoding, MovingPlan
from hf_posenc.attention.exact import score_bias
from hf_posenc.attention.softmax import grouped_scores, weighted_values
from hf_posenc.attention.windowed import branched

QUERIES = 8
"""More queries than this are left to other paths."""


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    *,
    near: tuple[Tensor, Tensor, Tensor] | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention with all scores of a few rows in memory, exact, differentiable; on any device, traceable.

    Grouped query heads are rows of one product, so that each key is read once and not once per query head. Keys are
    never sliced: a product with a slice of a cache falls off the fast path.

    Args:
        query: Shape (B, H, Q, D), of the far band where there are two.
        key: Shape (B, HK, KV, D), H a multiple of HK.
        value: Shape (B, HK, KV, DV).
        scaling: Factor on the scores.
        near: The near band's query (B, H, Q, D), the last W keys as that band rotates them (B, HK, W, D), and a mask
            of the near pairs, (B or 1, 1, Q, W), bool: their scores replace the far band's.
        bias: Added to the scores; broadcasts to (B, H, Q, KV).
        mask: The visible keys, broadcasts to (B, 1, Q, KV), bool; a row without any gives zeros.
        softcap: Scores become `softcap * tanh(scores / softcap)` before bias and mask (Gemma 2, arXiv 2408.00118).
        sinks: As in `weighted_values`, which gives the result.
    """
    scores = grouped_scores(query, key, scaling)
    if near is not None:
        near_query, near_key, is_near = near
        tail = scores[..., key.shape[2] - near_key.shape[2] :]
        tail.copy_(torch.where(is_near, grouped_scores(near_query, near_key, scaling), tail))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores.add_(bias)
    return weighted_values(scores, value, mask, sinks=sinks)


def accepts_few(call: Call, encoding: Encoding) -> bool:
    """True if keys are read as they are cached, but for the last ones."""
    plan = encoding.plan
    if call.query.shape[2] > QUERIES or call.dropout or not plan.shares_keys:
        return False
    if len(plan.branches) > 2 or not plan.branches[-1].shares_cache:
        return False
    if len(plan.branches) == 1:
        return True
    window = _window(encoding)
    return window is not None and _ends_with_the_text(call, _width(call, window))


def few(call: Call, encoding: Encoding) -> tuple[Tensor, Tensor | None]:
    """Compute attention by one product with the cached keys, in which the scores of the last keys are replaced."""
    m, n = call.query_position, call.key_position
    query = encoding.scaled(call.query, m)
    branches, origin = encoding.plan.branches, m.new_zeros(())
    two, count = len(branches) == 2, call.key.shape[2]
    width = _width(call, _window(encoding) or 0) if two else 0
    tail = n[:, n.shape[1] - width :]
    if query.device.type != "cpu" and not torch.compiler.is_compiling():
        queries, near_keys = branched(call, encoding, query, [(count - width, count)] * two)
    else:
        queries = [branch.query(query, m, origin) for branch in branches]
        near_keys = [branches[0].key(call.key[:, :, count - width :], tail, origin)] if two else []
    near = None
    for near_key in near_keys:
        inside = call.mask.decided(
            ("near", width, *encoding.outline),
            lambda: branches[0].contains(m[:, None, :, None], tail[:, None, None, :]),
        )
        assert inside is not None
        near = queries[0], near_key, inside
    visible = call.mask.decided(("visible", *encoding.outline), lambda: _visible(call, encoding))
    bias = call.mask.added(0, query.shape[2])
    if encoding.bias is not None:
        own = score_bias(call, encoding, query)
        bias = own if bias is None else bias + own
    return _decoded(call, queries[-1], call.key, near=near, bias=bias, mask=visible)


def _decoded(
    call: Call, query: Tensor, key: Tensor, **options: Any
) -> tuple[Tensor, Tensor | None]:
    options |= {"softcap": call.softcap, "sinks": call.sinks}
    out, weights = decode(query, key, call.value, call.scaling, **options)
    return out, weights.to(call.query.dtype) if call.weights else None


def _visible(call: Call, encoding: Encoding) -> Tensor | None:
    """The keys that the mask shows and a band contains."""
    m, n = call.query_position, call.key_position
    visible = call.mask.rows(0, call.query.shape[2])
    pairs = m[:, None, :, None], n[:, None, None, :]
    covered = [branch.contains(*pairs) for branch in encoding.plan.branches]
    if covered[0] is None:
        return visible
    inside = torch.stack([part for part in covered if part is not None]).any(0)
    return inside if visible is None else visible & inside


def _window(encoding: Encoding) -> int | None:
    """The width of the near band, if the distance alone separates the bands."""
    first = encoding.plan.branches[0]
    if not isinstance(first, BandBranch) or first.band.chunk is not None or first.band.least:
        return None
    return first.band.below


def _width(call: Call, window: int) -> int:
    """The number of last keys among which are all near ones, of every query."""
    return min(call.key.shape[2], window + call.query.shape[2] - 1)


def _ends_with_the_text(call: Call, width: int) -> bool:
    """True if the last keys are the last tokens, without padding among them or empty slots of a static cache."""
    queries = call.query.shape[2]
    visible = call.mask.rows(queries - 1, queries)
    if visible is None:
        return True
    if torch.compiler.is_compiling():
        return False  # a tensor's value decides
    last = visible[..., -width:]

    def whole() -> bool:
        complete = last.sum(-1) == visible.sum(-1).clamp(max=width)
        return bool((last[..., -1] & complete).all())

    return call.mask.decided(("ends with the text", width), whole)


def accepts_moving(call: Call, encoding: Encoding) -> bool:
    """True if frequencies move with the length, and all queries of a row are of one bucket."""
    if encoding.plan.kernel != "buckets" or encoding.bias is not None:
        return False
    if torch.compiler.is_compiling() or call.query.shape[2] > QUERIES or call.dropout:
        return False
    plan, m = encoding.plan, call.query_position
    if m.shape[1] == 1:
        return True

    def alike() -> bool:
        bucket = plan.bucket(m)
        return bool((bucket == bucket[:, :1]).all())

    return call.mask.decided(("one bucket", id(encoding.method), encoding.original), alike)


def moving(call: Call, encoding: Encoding) -> tuple[Tensor, Tensor | None]:
    """Compute attention over keys of which only the new ones are rotated."""
    m = call.query_position
    query = encoding.scaled(call.query, m)
    plan = encoding.plan
    assert isinstance(plan, MovingPlan)

    def read() -> Tensor:
        of_rows = plan.bucket(m)[:, 0].expand(len(query)) if call.lengths is None else call.lengths
        return of_rows.cpu()

    origins = call.mask.decided(("origins", id(encoding.method), encoding.original), read)
    keys = RotatedKeys() if call.rotated is None else call.rotated
    turn_query, turn_key = plan.query, plan.key
    if len({*origins.tolist()}) == 1:
        turn_query = functools.partial(_moved, call, plan, of_keys=False)
        turn_key = functools.partial(_moved, call, plan, of_keys=True)
    key = keys.rotated(call, turn_key, origins)
    query = by_origin(turn_query, query, m, origins)
    rows = query.shape[2]
    return _decoded(call, query, key, bias=call.mask.added(0, rows), mask=call.mask.rows(0, rows))


def _moved(
    call: Call, plan: MovingPlan, x: Tensor, positions: Tensor, length: Tensor, *, of_keys: bool
) -> Tensor:
    """Rotate queries or keys of all rows for one length in force, by tables that all layers share."""
    moved, factor = plan.table(length, x.device)
    if moved is None:
        return x
    assert isinstance(factor, float)
    factor = 1.0 if of_keys else factor
    rotation = plan.rotation.of_keys if of_keys else plan.rotation
    # The last so many positions; one method object serves all layers.
    which = rotation, of_keys, x.dtype, x.shape[2], id(plan.method), plan.original
    tables = call.mask.decided(
        ("moved", *which), lambda: rotation.tables(positions[None], x.dtype, moved, factor)
    )
    return rotation.turned(x, tables)[0]
