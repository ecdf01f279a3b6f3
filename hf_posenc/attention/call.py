"""One call of attention, as the engine sees it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from hf_posenc.attention.branches import Branch
from hf_posenc.attention.decode import decode
from hf_posenc.attention.encoding import Encoding


@dataclass(frozen=True)
class Run:
    """One causal sequence within a call: query i sees the keys 0 .. offset + i of the run, or the last of them.

    Attributes:
        batch: Which rows of the batch.
        queries: Which queries.
        keys: Which keys; as many as offset + queries.
        offset: How many keys come before the first query.
        window: Only that many last keys; `None`: all.
    """

    batch: slice
    queries: slice
    keys: slice
    offset: int
    window: int | None = None


class Mask(Protocol):
    """Which keys a query sees, without a matrix of queries times keys."""

    def rows(self, start: int, stop: int) -> Tensor | None:
        """Visible keys of some queries: bool, shape (batch or 1, 1, stop - start, keys); `None`: all."""

    def added(self, start: int, stop: int) -> Tensor | None:
        """What a mask adds to visible scores, of a shape as `rows` has; `None`: nothing."""

    def seen(self) -> Tensor | None:
        """Keys that any query sees: bool, shape (batch or 1, keys); `None`: all."""

    def runs(self) -> tuple[Run, ...] | None:
        """The causal sequences that the call consists of; `None` where it is more involved than that.

        Queries in no run are padding.
        """


@dataclass(frozen=True, eq=False)
class Call:
    """What a model hands over to attention.

    Attributes:
        query: Shape (batch, heads, queries, head_dim), rotated to the position at which keys are cached.
        key: Shape (batch, key heads, keys, head_dim), rotated likewise.
        value: Shape (batch, key heads, keys, value_dim).
        query_position: Shape (batch or 1, queries), integer.
        key_position: Shape (batch or 1, keys), integer; arbitrary where a key is masked.
        mask: What is visible.
        scaling: The factor on q.k.
        softcap: Scores become `softcap * tanh(score / softcap)` (Gemma 2); `None`: they stay.
        sinks: One logit per head that takes part in the softmax and has no value (GPT-OSS), shape (heads,).
        dropout: Probability of leaving out an attention weight.
        weights: Whether the attention weights are asked for.
        lengths: The length in force for each row of the batch with `update="request"`, shape (batch,).
        rotated: What is kept from one step of a generation to the next; `None`: nothing.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_position: Tensor
    key_position: Tensor
    mask: Mask
    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0
    weights: bool = False
    lengths: Tensor | None = None
    rotated: RotatedKeys | None = None

    @property
    def plain(self) -> bool:
        """Whether nothing but scores, mask and softmax is asked for."""
        return self.softcap is None and self.sinks is None and not self.dropout and not self.weights

    def sequences(self, *, from_zero: bool) -> tuple[Run, ...] | None:
        """The runs of the mask, if positions count up in each of them, the same in all its rows.

        Args:
            from_zero: They have to start at 0.
        """
        runs = self.mask.runs()
        if runs is None or not all(self._counts_up(run, from_zero) for run in runs):
            return None
        return runs

    def positions_of(self, run: Run) -> tuple[Tensor, Tensor]:
        """The positions of a run's queries and keys, shapes (rows or 1, queries) and (rows or 1, keys)."""
        queries = _rows(self.query_position, run.batch)[:, run.queries]
        return queries, _rows(self.key_position, run.batch)[:, run.keys]

    def _counts_up(self, run: Run, from_zero: bool) -> bool:
        queries, keys = self.positions_of(run)
        first = torch.zeros_like(keys[:1, :1]) if from_zero else keys[:1, :1]
        counted = torch.arange(keys.shape[1], device=keys.device) + first
        return bool((keys == counted).all() & (queries == counted[:, run.offset :]).all())

    def by_row(self) -> Iterator[Call]:
        """The call for each row of the batch alone."""
        for row in range(len(self.query)):
            part = slice(row, row + 1)
            yield replace(
                self,
                query=self.query[part],
                key=self.key[part],
                value=self.value[part],
                query_position=_rows(self.query_position, part),
                key_position=_rows(self.key_position, part),
                mask=RowOf(self.mask, row),
                lengths=None if self.lengths is None else self.lengths[part],
            )


@dataclass(frozen=True)
class RowOf:
    """The mask of one row of a batch."""

    mask: Mask
    row: int

    def rows(self, start: int, stop: int) -> Tensor | None:
        visible = self.mask.rows(start, stop)
        return visible if visible is None or len(visible) == 1 else visible[self.row][None]

    def added(self, start: int, stop: int) -> Tensor | None:
        added = self.mask.added(start, stop)
        return added if added is None or len(added) == 1 else added[self.row][None]

    def seen(self) -> Tensor | None:
        visible = self.mask.seen()
        return visible if visible is None or len(visible) == 1 else visible[self.row][None]

    def runs(self) -> tuple[Run, ...] | None:
        return None


def _rows(positions: Tensor, rows: slice) -> Tensor:
    return positions if len(positions) == 1 else positions[rows]


# The fast path for a step of generation under frequencies that move with the length.
#
# Every cached key has to be rotated for the length in force. They are kept rotated from one step to the next, so that a
# step rotates its own keys alone, until the length moves on by a bucket.


QUERIES = 8
"""More queries than this are left to other paths."""


class RotatedKeys:
    """The keys of one layer's cache as they were rotated in the step before.

    Whoever sees the cache says before a step whether it still holds what that step left there (`check`): a cache
    that was cropped, reordered or exchanged holds another tensor, and one that is written in place another version.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drops everything."""
        self._cached: weakref.ref[Tensor] | None = None
        self._version = math.nan
        self._rotated: Tensor | None = None
        self._positions: Tensor | None = None
        self._origins: Tensor | None = None

    def __reduce__(self) -> tuple[type[RotatedKeys], tuple[()]]:
        return RotatedKeys, ()  # a copy of the model has caches of its own

    def check(self, cached: Tensor | None) -> None:
        """Forgets the keys unless the cache still holds them.

        Args:
            cached: The keys in the cache before the step; `None`: none, or somewhere else.
        """
        if (
            self._cached is None
            or self._cached() is not cached
            or _version(cached) != self._version
        ):
            self.forget()

    def rotated(self, call: Call, branch: Branch, origins: Tensor) -> Tensor:
        """All keys of a call, rotated for the length in force.

        Args:
            call: The call.
            branch: What rotates.
            origins: That length for each row of the batch, shape (batch,).
        """
        positions = call.key_position
        known = 0 if self._positions is None else self._positions.shape[1]
        if (
            self._rotated is not None
            and self._positions is not None
            and self._origins is not None
            and known <= positions.shape[1]
            and torch.equal(self._positions, positions[:, :known])
            and torch.equal(self._origins, origins)
        ):
            new = _rotated(call.key[:, :, known:], positions[:, known:], branch, origins)
            keys = torch.cat((self._rotated, new), 2)
        else:
            keys = _rotated(call.key, positions, branch, origins)
        if not torch.is_grad_enabled():
            self._cached, self._version = weakref.ref(call.key), _version(call.key)
            self._rotated, self._positions, self._origins = keys, positions, origins
        return keys


def accepts(call: Call, encoding: Encoding) -> bool:
    """Whether this path computes the call: all queries of a row are of one bucket."""
    if encoding.moving is None or encoding.bias is not None or torch.compiler.is_compiling():
        return False
    if call.query.shape[2] > QUERIES or call.dropout:
        return False
    bucket = encoding.bucket(call.query_position)
    return bool((bucket == bucket[:, :1]).all())


def step(call: Call, encoding: Encoding) -> tuple[Tensor, Tensor | None]:
    """Attention of few queries over keys of which only the new ones are rotated."""
    m = call.query_position
    query = encoding.scaled(call.query, m)
    (branch,) = encoding.branches()
    origins = encoding.bucket(m)[:, 0].expand(len(query)) if call.lengths is None else call.lengths
    keys = RotatedKeys() if call.rotated is None else call.rotated
    out, weights = decode(
        _rotated_queries(query, m, branch, origins),
        keys.rotated(call, branch, origins),
        call.value,
        call.scaling,
        bias=call.mask.added(0, query.shape[2]),
        mask=call.mask.rows(0, query.shape[2]),
        softcap=call.softcap,
        sinks=call.sinks,
        weights=True,
    )
    return out, weights.to(call.value.dtype) if call.weights else None


def _rotated(keys: Tensor, positions: Tensor, branch: Branch, origins: Tensor) -> Tensor:
    if len({*origins.tolist()}) == 1:
        return branch.key(keys, positions, origins[0])
    rows = positions.expand(len(keys), -1).split(1)
    return torch.cat([branch.key(*row) for row in zip(keys.split(1), rows, origins, strict=True)])


def _rotated_queries(queries: Tensor, positions: Tensor, branch: Branch, origins: Tensor) -> Tensor:
    rows = positions.expand(len(queries), -1).split(1)
    return torch.cat(
        [branch.query(*row) for row in zip(queries.split(1), rows, origins, strict=True)]
    )


def _version(tensor: Tensor | None) -> float:
    """How often a tensor was written in place; never the same twice where nobody counts."""
    return math.nan if tensor is None or tensor.is_inference() else tensor._version
