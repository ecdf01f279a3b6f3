"""The general path: any encoding under any mask, a block of queries at a time.

Right for everything, on every device, and differentiable. Scratch memory is a block of queries times the keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_posenc.attention.call import Beside, Call
from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.softmax import (
    grouped_scores,
    is_exporting,
    is_transformed,
    weighted_values,
)
from hf_posenc.errors import PosencError
from hf_posenc.methods import DistanceBias, LengthDependent, Method, RelativeKeys

SCRATCH = 1 << 24
"""Elements of the scores that are in memory at a time, at most."""


def exact(call: Call, encoding: Encoding) -> tuple[Tensor, Tensor | None]:
    """Compute attention with an encoding, as `engine.attend`."""
    plan = encoding.plan
    if is_exporting():
        _check_exported(call, encoding)
    # Each row has keys of its own, where a row decides; `len` would fix the batch size of an exported graph.
    if not plan.shares_keys and (
        len(call.query_position) > 1 or (call.lengths is not None and len(call.lengths) > 1)
    ):
        rows = [exact(call.of_row(row), encoding) for row in range(len(call.query))]
        weights = [weight for _, weight in rows if weight is not None]
        return torch.cat([out for out, _ in rows]), torch.cat(weights) if weights else None
    shared: list[Tensor] | None = None
    if plan.shares_keys:
        origin = call.key_position.new_zeros(())
        keys = [branch.key(call.key, call.key_position, origin) for branch in plan.branches]
        shared = [key.to(call.dtype) for key in keys]
    outs, weights = [], []
    needs_grad = torch.is_grad_enabled() and call.query.requires_grad
    for start, stop in _blocks(call, encoding):
        arguments = (call, encoding, shared, start, stop)
        if needs_grad and stop - start < call.query.shape[2] and not is_transformed():
            # Kept for the backward, the scores of all blocks would be a matrix of queries times keys. `torch.func`
            # keeps them: it has no hooks of saved tensors.
            out, weight = checkpoint(_block, *arguments, use_reentrant=False)
        else:
            out, weight = _block(*arguments)
        outs.append(out)
        weights.append(weight)
    return torch.cat(outs, 2), torch.cat(weights, 2) if call.weights else None


def _check_exported(call: Call, encoding: Encoding) -> None:
    """Refuse what reads positions or keeps a length while it computes, in a graph for all texts."""
    plan, queries, ways = encoding.plan, call.query.shape[2], []
    if plan.exported is not None and queries > plan.exported:
        method: Method | None = encoding.method
        reason = "computes several tokens of a call in groups that depend on their positions"
        ways = ["calls of one token each, with a static cache"] if plan.exported else []
    elif call.lengths is not None and call.key.shape[2] != queries:
        method, reason = encoding.method, "keeps the length of a text with its cache"
        ways = ["use_cache=False"]
    elif isinstance(encoding.bias, RelativeKeys) and encoding.bias.constant_from() is None:
        method, reason = encoding.bias, "makes one embedding for each distance that occurs"
    else:
        return
    assert method is not None
    ways += ['update="sequence"'] if isinstance(method, LengthDependent) else []
    way = f"What can be exported: {' or '.join(ways)}. " if ways else ""
    raise PosencError(
        f"torch.export cannot trace {method.name}, which {reason}. {way}torch.compile takes every method."
    )


def _blocks(call: Call, encoding: Encoding) -> Iterator[tuple[int, int]]:
    """Ranges of queries that read the same keys and whose scores fit into the scratch memory."""
    batch, heads, queries, _ = call.query.shape
    if is_exporting():  # any number of queries
        yield 0, queries
        return
    size = max(16, min(queries, SCRATCH // (batch * heads * max(1, call.value.shape[2]))))
    borders = [0, queries]
    if not encoding.plan.shares_keys and queries > 1:

        def changes() -> list[int]:
            bucket = encoding.plan.bucket(call.query_position[0])
            found: list[int] = ((bucket[1:] != bucket[:-1]).nonzero()[:, 0] + 1).tolist()
            return found

        # One method object serves all layers.
        question = "changes", id(encoding.method), encoding.original
        borders = [0, *call.mask.decided(question, changes), queries]
    for start, stop in itertools.pairwise(borders):
        for begin in range(start, stop, size):
            yield begin, min(begin + size, stop)


def _block(
    call: Call, encoding: Encoding, shared: list[Tensor] | None, start: int, stop: int
) -> tuple[Tensor, Tensor | None]:
    m, n = call.query_position[:, start:stop], call.key_position
    query = encoding.scaled(call.query[:, :, start:stop], m)
    # One method object serves all layers.
    origin = call.mask.decided(
        ("origin", start, stop, id(encoding.method), encoding.original),
        lambda: encoding.plan.origin(m, call.lengths),
    )
    pairs = (m[:, None, :, None], n[:, None, None, :])
    scores: Tensor | None = None
    covered: Tensor | None = None
    for index, branch in enumerate(encoding.plan.at(origin).branches):
        turned = branch.key(call.key, n, origin) if shared is None else shared[index]
        pair = branch.query(query, m, origin).to(call.dtype), turned.to(call.dtype)
        part = grouped_scores(*pair, call.scaling)
        inside = branch.contains(*pairs, origin)
        scores = part if inside is None or scores is None else torch.where(inside, part, scores)
        if inside is not None:
            covered = inside if covered is None else covered | inside
    assert scores is not None
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if encoding.bias is not None:
        scores = scores + score_bias(call, encoding, query, start, stop)
    added = call.mask.added(start, stop)
    if added is not None:
        scores = scores + added
    visible = call.mask.rows(start, stop)
    if covered is not None:
        visible = covered if visible is None else visible & covered
    if call.beside is not None:
        scores, visible = _beside(call, call.beside, encoding, scores, visible, start, stop)
    out, weights = weighted_values(
        scores, call.value, visible, sinks=call.sinks, dropout=call.dropout
    )
    return out, weights.to(call.query.dtype) if call.weights else None


def _beside(
    call: Call,
    other: Beside,
    encoding: Encoding,
    scores: Tensor,
    visible: Tensor | None,
    start: int,
    stop: int,
) -> tuple[Tensor, Tensor | None]:
    """Append the scores and the visible keys of another text, for queries as the model rotates them."""
    query, m = call.query[:, :, start:stop], call.query_position[:, start:stop]
    if encoding.rotation is not None:
        query = encoding.rotation.turn(query, m - encoding.key_place(m))
    found = grouped_scores(query.to(call.dtype), other.key.to(call.dtype), call.scaling)
    if call.softcap is not None:
        found = call.softcap * torch.tanh(found / call.softcap)
    added, shown = other.mask.added(start, stop), other.mask.rows(start, stop)
    if added is not None:
        found = found + added
    scores, both = torch.cat((scores, found), -1), ((visible, scores), (shown, found))
    heads = [part.shape[1] for part, _ in both if part is not None]
    if not heads:
        return scores, None
    every = torch.ones((), dtype=torch.bool, device=scores.device)
    parts = [
        (every if part is None else part).expand(len(scores), max(heads), *of.shape[2:])
        for part, of in both
    ]
    return scores, torch.cat(parts, -1)


def score_bias(
    call: Call, encoding: Encoding, query: Tensor, start: int = 0, stop: int | None = None
) -> Tensor:
    """Return what a bias adds to the scores of some scaled queries of a call, (batch or 1, heads, queries, keys)."""
    method, parameters = encoding.bias, encoding.parameters or {}
    m, n, scaling = call.query_position[:, start:stop], call.key_position, call.scaling
    distance = m[:, :, None] - n[:, None, :]
    distance = distance.abs() if encoding.bidirectional else distance.clamp(min=0)
    dtype = torch.promote_types(query.dtype, torch.float32)
    if isinstance(method, DistanceBias):
        position = m[:, :, None].to(dtype) if method.of_query else None
        bias = method.bias(distance.to(dtype), encoding.all_heads, parameters, position)
        return encoding.own(bias.to(dtype)).transpose(0, 1)
    assert method is not None
    # Content meets distance: one embedding for each distance that occurs, then each pair selects its own.
    constant = method.constant_from()
    if constant is None:
        # Of every query, read by the host once for all blocks and layers.
        farthest: list[int] = call.mask.decided(
            "farthest", lambda: (call.query_position - n.amin(-1, keepdim=True)).amax(0).tolist()
        )
        span = max(0, *farthest[start:stop]) + 1
    else:
        span = constant + 1
        distance = distance.clamp(max=constant)
    every = torch.arange(span, device=query.device, dtype=dtype)
    relative = encoding.own(method.relative(every, encoding.all_heads, query.shape[-1], parameters))
    # The embeddings meet the query as it was before the rotation and its factor; u is turned as the query is.
    rotation = encoding.rotation if encoding.rotates else None
    unrotated = query.to(dtype)
    if rotation is not None:
        unrotated = rotation.turn(unrotated, -m, factor=1 / rotation.factor)
    if (position_bias := method.position_bias(parameters)) is not None:
        unrotated = unrotated + encoding.own(position_bias)[None, :, None].to(dtype)
    by_distance = unrotated @ relative.to(dtype).transpose(-1, -2) * scaling
    index = distance[:, None].expand(-1, encoding.heads, -1, -1)
    bias = by_distance.gather(-1, index.expand(len(query), -1, -1, -1))
    if (content_bias := method.content_bias(parameters)) is not None:
        u = encoding.own(content_bias)[None, :, None].to(dtype)
        u = u.expand(len(query), -1, query.shape[2], -1)
        u = u if rotation is None else rotation.turn(u, m, factor=rotation.factor)
        bias = bias + grouped_scores(u, call.key.to(dtype), scaling)
    return bias
