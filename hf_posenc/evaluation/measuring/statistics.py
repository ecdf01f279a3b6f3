"""Perplexities with intervals from sums per document."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

RESAMPLES = 10_000
INTERVAL = (0.025, 0.975)
"""Quantiles at the ends of every interval: 95 %."""

ROUNDING = 1e-4
"""A ratio of perplexities this close to 1 is rounding: other kernels on the same numbers."""


@dataclass(frozen=True)
class Record:
    """The sums of one document under one method, never a ratio.

    Attributes:
        length: Context length in tokens, special tokens included.
        nats: Sum of the negative log-likelihoods of the scored `tokens`, in nats; NaN if one of them was not finite.
        bytes: UTF-8 bytes of the text of the scored tokens; `None` where the tokenizer has no offsets.
        words: Words that begin in them; `None` likewise.
        weighted: Sum of the windows' mean losses, each times its weight in the aggregate.
        weight: Sum of those weights. Under the aggregate `tokens` these are `nats` and `tokens`.
    """

    method: str
    protocol: str
    length: int
    document: str
    nats: float
    tokens: int
    bytes: int | None
    words: int | None
    weighted: float
    weight: float


@dataclass(frozen=True)
class Failure:
    """A number that could not be measured, and why."""

    method: str
    protocol: str
    length: int
    reason: str


def edges(length: int, buckets: int) -> list[int]:
    """Return the first token of every bucket of the longest prefix, and its end: equal parts, of whole tokens."""
    count = min(buckets, length)
    return [length * index // count for index in range(count + 1)]


def curve(losses: Tensor, first: int, length: int, buckets: int) -> dict[str, list[Any]]:
    """Return nats and tokens per bucket, of losses that begin at token `first` of the prefix."""
    bounds = [max(0, edge - first) for edge in edges(length, buckets)]
    parts = [losses[begin:end] for begin, end in itertools.pairwise(bounds)]
    return {"nats": [float(part.sum()) for part in parts], "tokens": [len(part) for part in parts]}


@dataclass(frozen=True)
class Cell:
    """One number of the table: a method under a protocol at a length, over all documents.

    Attributes:
        perplexity: `exp(total nats / total tokens)`, or as the run's aggregate says; NaN if a loss was not finite.
        interval: 95 % bootstrap interval of the perplexity over documents; `None` with fewer than two documents.
        ratio: Perplexity divided by the baseline's (the run's first method) at the same protocol and length.
        ratio_interval: 95 % interval of the ratio over the same resamples: paired, and so much tighter than `interval`.
        bits_per_byte: `total nats / (ln 2 x total bytes)`: comparable between tokenizers.
        word_perplexity: `exp(total nats / total words)`, PG19's unit: comparable between tokenizers too.
        nats: Total of the negative log-likelihoods, as the following are totals of the `Record`s.
    """

    method: str
    protocol: str
    length: int
    perplexity: float
    interval: tuple[float, float] | None
    ratio: float | None
    ratio_interval: tuple[float, float] | None
    bits_per_byte: float | None
    word_perplexity: float | None
    nats: float
    tokens: int
    bytes: int | None
    words: int | None
    documents: int

    @property
    def differs(self) -> int:
        """-1 if significantly lower than the baseline, 1 if higher, 0 if neither."""
        return side_of_one(self.ratio_interval)


def side_of_one(interval: tuple[float, float] | None) -> int:
    """Return the side of 1 of a whole interval, beyond rounding: -1, 1, or 0 for neither."""
    if interval is None:
        return 0
    low, high = interval
    return int(low > 1 + ROUNDING) - int(high < 1 - ROUNDING)


class Bootstrap:
    """Seeded resampling over documents; every cell of a run has the same resamples, so differences are paired."""

    def __init__(self, documents: int, seed: int, resamples: int = RESAMPLES) -> None:
        draws = np.random.default_rng(seed).multinomial(
            documents, [1 / documents] * documents, size=resamples
        )
        self._counts = draws.astype(np.float64)  # of every document, shape (resamples, documents)

    def means(self, sums: Sequence[float], weights: Sequence[float]) -> np.ndarray[Any, Any]:
        """Return the mean loss of every resample with scored tokens, shape (up to resamples,)."""
        with np.errstate(invalid="ignore"):  # an infinite sum that was not drawn: inf times 0
            total = self._counts @ np.asarray(sums, dtype=np.float64)
        weight = self._counts @ np.asarray(weights, dtype=np.float64)
        return np.asarray(total[weight > 0] / weight[weight > 0])


def summarize(
    records: Sequence[Record],
    *,
    seed: int,
    resamples: int = RESAMPLES,
    aggregate: str = "tokens",
    base: float | None = None,
    baseline: str | None = None,
) -> list[Cell]:
    """Return the cell of each (method, protocol, length), in the order of their first appearance.

    With the aggregate `"documents"`, every document weighs the same; the others are in the records' weights. `base` is
    that of the power of the mean loss, by default e. Ratios refer to the method `baseline`, maybe without records where
    it failed; by default to that of the first record.
    """
    groups: dict[tuple[str, str, int], dict[str, Record]] = {}
    documents: dict[str, dict[str, None]] = {}  # of every protocol, in order
    for record in records:
        cell = record.method, record.protocol, record.length
        groups.setdefault(cell, {})[record.document] = record
        documents.setdefault(record.protocol, {})[record.document] = None
    if baseline is None and records:
        baseline = records[0].method
    counts = {len(names) for names in documents.values() if len(names) > 1}
    bootstraps = {count: Bootstrap(count, seed, resamples) for count in counts}
    cells = []
    for (_, protocol, length), group in groups.items():
        names = documents[protocol]
        if len(group) < len(names):
            continue  # a document failed here: a mean over others would not be comparable
        if not any(record.tokens for record in group.values()):
            continue  # no key token at all
        rows = [group[name] for name in names]
        reference = groups.get((baseline or "", protocol, length), {})
        others = [reference[name] for name in names if name in reference]
        cells.append(_cell(rows, others, bootstraps.get(len(rows)), aggregate, base))
    return cells


def _cell(
    rows: Sequence[Record],
    baseline: Sequence[Record],
    bootstrap: Bootstrap | None,
    aggregate: str,
    base: float | None,
) -> Cell:
    """Return the cell of records of all documents, and its ratio to the baseline if that is complete."""

    def power(loss: float) -> float:
        return exp_or_inf(loss) if base is None else exp_or_inf(loss * math.log(base))

    def interval_of(losses: np.ndarray[Any, Any]) -> tuple[float, float]:
        with np.errstate(invalid="ignore"):  # infinite losses have no interval
            low, high = np.quantile(losses, INTERVAL)
        return power(float(low)), power(float(high))

    sums, weights = _weighted(rows, aggregate)
    loss = math.fsum(sums) / math.fsum(weights)
    losses = None if bootstrap is None else bootstrap.means(sums, weights)
    ratio = ratio_interval = None
    if len(baseline) == len(rows):
        base_sums, base_weights = _weighted(baseline, aggregate)
        ratio = power(loss - math.fsum(base_sums) / math.fsum(base_weights))
        if bootstrap is not None and losses is not None:
            with np.errstate(invalid="ignore"):
                differences = losses - bootstrap.means(base_sums, base_weights)
            ratio_interval = interval_of(differences)
    nats = math.fsum(row.nats for row in rows)
    size, words = _total(row.bytes for row in rows), _total(row.words for row in rows)
    return Cell(
        rows[0].method,
        rows[0].protocol,
        rows[0].length,
        perplexity=power(loss),
        interval=None if losses is None else interval_of(losses),
        ratio=ratio,
        ratio_interval=ratio_interval,
        bits_per_byte=nats / math.log(2) / size if size else None,
        word_perplexity=exp_or_inf(nats / words) if words else None,
        nats=nats,
        tokens=sum(row.tokens for row in rows),
        bytes=size,
        words=words,
        documents=len(rows),
    )


def _weighted(rows: Sequence[Record], aggregate: str) -> tuple[list[float], list[float]]:
    if aggregate == "documents":
        means = [row.weighted / row.weight if row.weight else 0.0 for row in rows]
        return means, [1.0 if row.weight else 0.0 for row in rows]
    return [row.weighted for row in rows], [row.weight for row in rows]


def _total(values: Iterable[int | None]) -> int | None:
    """Return the sum; `None` if a value is missing."""
    numbers = list(values)
    return None if None in numbers else sum(number for number in numbers if number is not None)


def exp_or_inf(value: float) -> float:
    """Return `exp(value)`, infinity where it overflows; NaN stays NaN."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
