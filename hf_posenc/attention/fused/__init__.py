"""The contract of a fused attention that returns its log-sum-exp, so that parts of one softmax can be merged."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

Merge = Callable[[Tensor, Tensor, Sequence[tuple[Any, Tensor, Tensor]]], None]
"""Merges parts of a softmax, each with its output and log-sum-exp, into an output (1, H, R, D) and its log-sum-exp
(1, H, R), in place. Parts of new rows come first; if there are any, they cover all rows."""
Attended = tuple[Tensor, Tensor, Any]
"""The output, its log-sum-exp, and what the backward needs beside them."""
Gradients = tuple[Tensor, Tensor, Tensor]
"""Those of query, key and value."""


Pairs = Sequence[tuple[tuple[int, int], tuple[int, int]]]
"""First rows and ends, with first keys and ends."""


@dataclass(frozen=True, eq=False)
class Segments:
    """Sequences that lie one behind the other in one call, each of which attends to itself alone.

    Attributes:
        queries: Where each sequence starts among the rows, and the end; from 0.
        keys: The same among the keys. A sequence without keys gives rows of zeros and a log-sum-exp of `EMPTY`.
        counts: The numbers of keys, of sequences that share some: no operator has a backward for these (`apart`).
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    counts: tuple[int, ...] | None = None
    _tensors: dict[torch.device, tuple[Tensor, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, pairs: Pairs, rows: int, keys: int) -> Segments:
        """Return the sequences of (first row, end), (first key, end), in order; the rest attends to nothing."""
        if any(one[1][1] > other[1][0] for one, other in itertools.pairwise(pairs)):
            return cls._sharing(pairs, rows)
        queries, starts = [0], [0]
        for (first, end), (begin, stop) in (*pairs, ((rows, rows), (keys, keys))):
            # Rows in no sequence are one without keys; keys in none are one without rows.
            for row, key in ((first, starts[-1]), (first, begin), (end, stop)):
                if (row, key) != (queries[-1], starts[-1]):
                    queries.append(row)
                    starts.append(key)
        return cls(tuple(queries), tuple(starts))

    @classmethod
    def _sharing(cls, pairs: Pairs, rows: int) -> Segments:
        # The end of each sequence, its first key and its number of keys; rows in none are one without keys.
        edges = [(0, 0, 0)]
        for (first, end), (begin, stop) in (*pairs, ((rows, rows), (0, 0))):
            for edge in ((first, 0, 0), (end, begin, stop - begin)):
                if edge[0] > edges[-1][0]:
                    edges.append(edge)
        ends, starts, counts = zip(*edges, strict=True)
        return cls(ends, (*starts[1:], 0), counts[1:])

    @functools.cached_property
    def pairs(self) -> Pairs:
        """The sequences as (first row, end), (first key, end)."""
        counts = self.counts or [end - first for first, end in itertools.pairwise(self.keys)]
        keys = [(first, first + count) for first, count in zip(self.keys, counts, strict=False)]
        return [*zip(itertools.pairwise(self.queries), keys, strict=True)]

    @property
    def longest(self) -> tuple[int, int]:
        """At least the number of rows and of keys of the longest sequence of each.

        Of several sequences, rows are never said to be 1 at most: FlashAttention-2 then assumes one row in each, takes
        grouped heads for rows and misplaces their log-sum-exps.
        """
        rows, keys = (
            max(end - first for first, end in each) for each in zip(*self.pairs, strict=True)
        )
        return max(rows, 2) if len(self.queries) > 2 else rows, keys

    def on(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return both starts, and any `counts`, as int32 tensors, copied to a device once."""
        if device not in self._tensors:
            numbers = (self.queries, self.keys, self.counts)
            self._tensors[device] = tuple(_copied(x, device) for x in numbers if x is not None)
        return self._tensors[device]


def _copied(starts: Sequence[int], device: torch.device) -> Tensor:
    first, *_, end = starts
    if len(starts) == 2 and end > first:  # no copy, for which the host would wait
        return torch.arange(first, end + 1, end - first, dtype=torch.int32, device=device)
    copied = torch.tensor(starts, dtype=torch.int32, pin_memory=device.type == "cuda")
    return copied.to(device, non_blocking=True)


EMPTY = -1e30
"""The log-sum-exp of a row without keys in a part: finite, since the difference of two infinite ones is none."""


@functools.lru_cache(maxsize=64)
def one_segment(rows: int, keys: int) -> Segments:
    """Return the one sequence of all rows and keys; kept, since its tensors are copied to the device."""
    return Segments((0, rows), (0, keys))


@dataclass(frozen=True)
class Shape:
    """The pairs that one call sees, and the factor on their scores.

    Attributes:
        causal: A row sees the keys up to its own, aligned as the operator aligns.
        window: Of those, the last so many; `None`: all.
        mask: Added to the scores, of `accumulation_dtype`; broadcasts to (B, heads, rows, keys).
        segments: The sequences of a call over several; `None`: it is one.
        scaling: The factor on q.k.
        softcap: As in `Call`; only for an attention with `softcaps`.
    """

    causal: bool = False
    window: int | None = None
    mask: Tensor | None = None
    segments: Segments | None = None
    scaling: float = 1.0
    softcap: float | None = None

    @property
    def limits(self) -> tuple[int, int]:
        """The keys before and after its own that a row sees; -1: all."""
        if self.window is not None:
            return self.window - 1, 0
        return -1, 0 if self.causal else -1

    def sequences(self, query: Tensor, key: Tensor) -> Segments:
        """Return the sequences of a call with queries (rows, heads, features) and keys."""
        return self.segments or one_segment(len(query), len(key))


class Saved(NamedTuple):
    """Tensors of a forward that its backward reads; the output and log-sum-exp are those of the whole softmax."""

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor


class Fused:
    """A fused attention; queries (B, H, R, D), keys and values (B, HK, N, D) of any strides, H a multiple of HK."""

    name: str
    merge: Merge | None = None
    """A kernel that merges all parts; without one, each is merged when it is computed."""
    windows = False
    """True if it has windows and segments and aligns causal calls to the bottom right: the last row sees the last key.
    It then takes no masks. Else causal calls are aligned to the top left, and masks are taken."""

    softcaps = False  # True if it has soft caps of the scores
    squares: int | None = None
    """`None`, or that it has neither windows nor that alignment: parts are taken in squares (`parts.in_squares`), but
    for windows below so many tokens."""

    def serves(self, device: torch.device, dtype: torch.dtype, features: int) -> bool:
        """True if it computes heads of so many features on a device."""
        raise NotImplementedError

    def forward(self, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Attended:
        """Return the output (B, H, R, D) and its log-sum-exp (B, H, R)."""
        raise NotImplementedError

    def backward(self, grad: Tensor, saved: Saved, shape: Shape, state: Any) -> Gradients:
        """Return the gradients, given what the forward left for them."""
        raise NotImplementedError
