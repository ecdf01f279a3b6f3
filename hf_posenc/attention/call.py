"""One call of attention: its tensors, positions and mask, and the keys kept from the step before."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Run:
    """One causal sequence within a call: query i sees the keys 0 .. offset + i of the run, or the last `window`.

    A run has as many keys as offset + queries.
    """

    batch: slice
    queries: slice
    keys: slice
    offset: int
    window: int | None = None


class Mask:
    """The keys that a query sees, without a matrix of queries times keys; this one shows all."""

    def rows(self, start: int, stop: int) -> Tensor | None:
        """Return the visible keys of some queries: bool, shape (batch or 1, 1, stop - start, keys); `None`: all."""
        return None

    def added(self, start: int, stop: int) -> Tensor | None:
        """Return what a mask adds to visible scores, of a shape as `rows` has; `None`: nothing."""
        return None

    def seen(self) -> Tensor | None:
        """Return the keys that any query sees: bool, shape (batch or 1, keys); `None`: all."""
        return None

    def runs(self, positions: Tensor) -> tuple[Run, ...] | None:
        """Return the causal sequences of a call with these query positions; `None` where it is more complex than that.

        Queries in no run are padding.
        """
        return None

    def decided(self, question: Hashable, answer: Callable[[], Answer]) -> Answer:
        """Return the answer to a question that reads tensors, which the layers of a forward share with the mask.

        The host waits for a device once per forward, and not once per layer.
        """
        if torch.compiler.is_compiling():
            return answer()
        answers: dict[Hashable, Answer] = self.__dict__.setdefault("_answers", {})
        if question not in answers:
            answers[question] = answer()
        return answers[question]


@dataclass(frozen=True, eq=False)
class CausalMask(Mask):
    """No mask but causality: the last query sees all keys, and each one before it one less."""

    queries: int
    keys: int
    device: torch.device

    def rows(self, start: int, stop: int) -> Tensor | None:
        if self.queries == 1:
            return None
        index = torch.arange(self.keys, device=self.device)
        last = index[self.keys - self.queries :]
        return (index <= last[start:stop, None])[None, None]

    def runs(self, positions: Tensor) -> tuple[Run, ...] | None:
        whole = slice(None)
        return (Run(whole, whole, whole, self.keys - self.queries),)


@dataclass(frozen=True)
class Beside:
    """Keys of another text, which the same softmax reads as the model rotates them: without a method.

    Attributes:
        key: Shape (batch, key heads, keys, head_dim).
        mask: The visible ones.
    """

    key: Tensor
    mask: Mask


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of one call of attention.

    Attributes:
        query: Shape (batch, heads, queries, head_dim), rotated to the position at which keys are cached.
        key: Shape (batch, key heads, keys, head_dim), rotated likewise.
        value: Shape (batch, key heads, keys, value_dim). Its dtype is that of products: queries and keys may be of a
            wider one until they are turned, so that they are rounded once.
        query_position: Shape (batch or 1, queries), integer.
        key_position: Shape (batch or 1, keys), integer; arbitrary where a key is masked.
        mask: The visible keys.
        scaling: The factor on q.k.
        softcap: Scores become `softcap * tanh(score / softcap)` (Gemma 2); `None`: they stay.
        sinks: One logit per head that takes part in the softmax and has no value (GPT-OSS), shape (heads,).
        dropout: Probability of leaving out an attention weight.
        weights: Return the attention weights.
        lengths: The length in force for each row of the batch with `update="request"`, shape (batch,).
        rotated: The keys kept from one step of a generation to the next; `None`: none.
        beside: Keys of another text, whose values come after those of `key`; `None`: none.
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
    beside: Beside | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of products."""
        return self.value.dtype

    @property
    def plain(self) -> bool:
        """True if the call consists of scores, mask and softmax only."""
        return self.softcap is None and self.sinks is None and not self.dropout and not self.weights

    def runs(self) -> tuple[Run, ...] | None:
        """Return the causal sequences of the call, as `Mask.runs`."""
        return self.mask.decided("runs", lambda: self.mask.runs(self.query_position))

    def count_up(self, from_zero: bool) -> bool:
        """True if the positions of every run count up, the same in all its rows."""
        runs = self.runs() or ()
        return self.mask.decided(
            ("count up", from_zero), lambda: all(self._counts_up(run, from_zero) for run in runs)
        )

    def _counts_up(self, run: Run, from_zero: bool) -> bool:
        queries, keys = self.positions_of(run)
        first = torch.zeros_like(keys[:1, :1]) if from_zero else keys[:1, :1]
        counted = torch.arange(keys.shape[1], device=keys.device) + first
        return bool((keys == counted).all() & (queries == counted[:, run.offset :]).all())

    def positions_of(self, run: Run) -> tuple[Tensor, Tensor]:
        """Return the positions of a run's queries and keys, shapes (rows or 1, queries) and (rows or 1, keys)."""
        queries = _rows(self.query_position, run.batch)[:, run.queries]
        return queries, _rows(self.key_position, run.batch)[:, run.keys]

    def of_row(self, row: int) -> Call:
        """Return the call of one row of the batch."""
        part = slice(row, row + 1)
        return replace(
            self,
            query=self.query[part],
            key=self.key[part],
            value=self.value[part],
            query_position=_rows(self.query_position, part),
            key_position=_rows(self.key_position, part),
            mask=RowOf(self.mask, part),
            lengths=None if self.lengths is None else self.lengths[part],
            beside=self.beside and Beside(self.beside.key[part], RowOf(self.beside.mask, part)),
        )


@dataclass(frozen=True)
class RowOf(Mask):
    """The mask of one row of a batch."""

    mask: Mask
    row: slice

    def rows(self, start: int, stop: int) -> Tensor | None:
        return self._own(self.mask.rows(start, stop))

    def added(self, start: int, stop: int) -> Tensor | None:
        return self._own(self.mask.added(start, stop))

    def seen(self) -> Tensor | None:
        return self._own(self.mask.seen())

    def decided(self, question: Hashable, answer: Callable[[], Answer]) -> Answer:
        return self.mask.decided((question, self.row.start), answer)

    def _own(self, every: Tensor | None) -> Tensor | None:
        return None if every is None else _rows(every, self.row)


def _rows(of_batch: Tensor, rows: slice) -> Tensor:
    return of_batch if len(of_batch) == 1 else of_batch[rows]


Turn = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From queries or keys, their positions and a length in force to them as they are rotated for it, as `Branch.key`."""


class RotatedKeys:
    """The keys of one layer's cache as they were rotated in the step before.

    Under frequencies that move with the length, every cached key is rotated for the length in force. Kept from one
    step to the next, a step rotates its own keys alone, until the length moves by a bucket.

    The watch of the cache calls `check` before a step. A cache that was cropped, reordered or exchanged holds another
    tensor than that step left there, and one that is written in place another version.
    """

    def __init__(self) -> None:
        self._cached: weakref.ref[Tensor] | None = None
        self._version = math.nan
        # Rotated keys, their positions, and the length in force of each row.
        self._kept: tuple[Tensor, Tensor, Tensor] | None = None

    def __reduce__(self) -> tuple[type[RotatedKeys], tuple[()]]:
        return RotatedKeys, ()  # a copy of the model has caches of its own

    def check(self, cached: Tensor | None) -> None:
        """Forget the keys unless they are of the keys in the cache before the step; `None`: it has none to see."""
        same = self._cached is not None and self._cached() is cached
        if not same or _version(cached) != self._version:
            self._kept = None

    def rotated(self, call: Call, turn: Turn, origins: Tensor) -> Tensor:
        """Return all keys of a call, turned for the length in force of each row: (batch,), on the CPU."""
        positions, keys = call.key_position, None
        if self._kept is not None:
            before, known, lengths = self._kept
            start = known.shape[1]
            # One tensor serves all layers; it is part of the answer, so that its id stays its own.
            same, _ = call.mask.decided(
                ("known", id(known)), lambda: (torch.equal(known, positions[:, :start]), known)
            )
            if same and torch.equal(lengths, origins):
                new = by_origin(turn, call.key[:, :, start:], positions[:, start:], origins)
                keys = torch.cat((before, new), 2)
        if keys is None:
            keys = by_origin(turn, call.key, positions, origins)
        if not torch.is_grad_enabled():
            self._cached, self._version = weakref.ref(call.key), _version(call.key)
            self._kept = keys, positions, origins
        return keys


def by_origin(turn: Turn, x: Tensor, positions: Tensor, origins: Tensor) -> Tensor:
    """Turn a batch, of which each row has its own origin: (batch,), on the CPU."""
    if len({*origins.tolist()}) == 1:
        return turn(x, positions, origins[0])
    rows = positions.expand(len(x), -1).split(1)
    return torch.cat([turn(*row) for row in zip(x.split(1), rows, origins, strict=True)])


def _version(tensor: Tensor | None) -> float:
    """The number of writes in place; a number that equals none where PyTorch does not count them."""
    return math.nan if tensor is None or tensor.is_inference() else tensor._version


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a tensor is multiplied: that of `torch.autocast` in its region, else its own."""
    kind = x.device.type
    if x.dtype == torch.float64 or kind == "meta" or not torch.is_autocast_enabled(kind):
        return x.dtype  # autocast leaves float64 as it is, and has no region for meta
    return torch.get_autocast_dtype(kind)


def outside_autocast(kind: str) -> contextlib.AbstractContextManager[None]:
    """Return a context in which tensors on a kind of device are multiplied in their own dtype."""
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return contextlib.nullcontext()
    return torch.autocast(kind, enabled=False)


# A mask answers questions once for all layers of a forward, so the layers must share it: by the tensor that every
# layer is given, a mask or the positions.
_shared: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
Made = TypeVar("Made")


def shared(tensor: Tensor, key: Hashable, make: Callable[[], Made]) -> Made:
    """Return what belongs to a tensor of a forward and a key, such as a mask and its size; made once for all layers.

    What is made must not hold the tensor or a view of it, since neither would then ever be freed.
    """
    if torch.compiler.is_compiling():
        return make()
    of_tensor: dict[Hashable, Made] = _shared.setdefault(tensor, {})
    if key not in of_tensor:
        of_tensor[key] = make()
    return of_tensor[key]


def forget(*given: Any) -> None:
    """Forget what belongs to tensors, before a forward: they may have been written in place since the last one."""
    for value in given:
        if isinstance(value, Tensor):
            _shared.pop(value, None)
