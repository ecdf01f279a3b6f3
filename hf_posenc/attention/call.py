"""One call of attention, as the engine sees it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hf_posenc.attention.moving import RotatedKeys


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
