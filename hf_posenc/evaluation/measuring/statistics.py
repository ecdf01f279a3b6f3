"""Perplexities with intervals from sums per document.

A comparison that a word such as `better` may be read off has a *simultaneous* interval: it is widened so that all
comparisons of its family contain the true values together in 95 % of samples (Bonferroni's inequality; Dunn 1961,
"Multiple comparisons among means", JASA 56). Equal methods then get any such word in at most 5 % of tables, however
many are compared.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

COVERAGE = 0.95
"""Share of all samples of documents whose interval, or whose whole family of intervals, contains the true values."""
FEW_DOCUMENTS = 5
"""The fewest documents with an interval and a verdict: of equal weight, or worth so many (`estimate`).

With fewer, the interval of a mean is wider than the range from the lowest document to the highest (1.4 times with four,
2.6 with three), so the documents themselves say more. On measured ratios it also misses the truth more often: intervals
of 95 % contain it in 93 % of samples of five documents, in 90 % of samples of two.
"""
TOO_FEW = "too few documents"
"""Printed instead of a range or a verdict where there are fewer."""
FEW_NOTE = (
    f"{TOO_FEW.capitalize()} for ranges and verdicts: {FEW_DOCUMENTS} of equal weight are needed. One book can be cut "
    "into files: split -n l/12 book.txt part-"
)
CLAIM, POWER = 0.01, 0.8
"""The difference that `needed` documents show, as a share of the perplexity, in this share of samples."""
NEEDED = f"{100 * CLAIM:g} % would need {{:,}} documents"
"""Text for such a number beside a ratio."""

ROUNDING = 1e-4
"""A ratio of perplexities this close to 1 is rounding: other kernels on the same numbers."""

Interval = tuple[float, float]


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

    Most attributes are the columns of that name (`COLUMNS` of a `PerplexityResult`).

    Attributes:
        perplexity: `exp(total nats / total tokens)`, or as the run's aggregate says; NaN if a loss was not finite.
        interval: 95 % interval of the perplexity over documents; `None` with too few (`FEW_DOCUMENTS`).
        ratio_interval: Interval of the ratio, paired by document; the intervals of all methods under a protocol at a
            length hold together in 95 % of samples.
    """

    method: str
    protocol: str
    length: int
    perplexity: float
    interval: Interval | None
    ratio: float | None
    ratio_interval: Interval | None
    bits_per_byte: float | None
    word_perplexity: float | None
    nats: float
    tokens: int
    bytes: int | None
    words: int | None
    documents: int
    needed: int | None = None

    @property
    def differs(self) -> int:
        """-1 if significantly lower than the baseline, 1 if higher, 0 if neither."""
        return side_of_one(self.ratio_interval)


VERDICTS = {-1: "better", 0: "not told apart", 1: "worse"}
"""The word for a side of a ratio of perplexities."""


def side_of_one(interval: Interval | None) -> int:
    """Return the side of 1 of a whole interval, beyond rounding: -1, 1, or 0 for neither or too few documents."""
    if interval is None:
        return 0
    low, high = interval
    return int(low > 1 + ROUNDING) - int(high < 1 - ROUNDING)


def estimate(
    sums: Sequence[float],
    weights: Sequence[float],
    baseline: tuple[Sequence[float], Sequence[float]] | None = None,
    comparisons: int = 1,
) -> tuple[float, Interval | None]:
    """Return the total of the documents' sums by that of their weights, and its 95 % interval over documents.

    With the sums and weights of a baseline on the same documents, both are of the difference, paired by document.
    The interval is Student's t with the jackknife's standard error (Tukey 1958). Its degrees of freedom are those of as
    many equal documents as the unequal ones are worth, `total weight^2 / sum of squares - 1` (Kish 1965), at least 1.
    There is none with fewer than two documents, or where a sum is not finite. With several `comparisons`, it is one of
    as many that contain the true values together in 95 % of samples: each misses its own in 5 % / `comparisons`.
    """
    mean, error, worth = _jackknife(sums, weights, baseline)
    if error is None:
        return mean, None
    half = _student(max(1.0, worth - 1), comparisons) * error
    return mean, (mean - half, mean + half)


def documents_needed(
    sums: Sequence[float],
    weights: Sequence[float],
    baseline: tuple[Sequence[float], Sequence[float]],
    comparisons: int = 1,
    difference: float = math.log1p(CLAIM),
) -> int | None:
    """Return how many such documents show a difference of the means in 80 % of samples, by intervals as `estimate`'s.

    The spread of the paired differences is that of the given documents. The formula is Guenther's for t tests
    ("Sample size formulas for normal theory t tests", The American Statistician 35, 1981).
    """
    _, error, worth = _jackknife(sums, weights, baseline)
    if error is None:
        return None
    normal = statistics.NormalDist()
    level = normal.inv_cdf(1 - (1 - COVERAGE) / comparisons / 2)
    spread = error * math.sqrt(worth) / difference
    count = ((level + normal.inv_cdf(POWER)) * spread) ** 2 + level**2 / 2
    return max(FEW_DOCUMENTS, math.ceil(count))


@np.errstate(all="ignore")  # infinite sums; a single document with scored tokens
def _jackknife(
    sums: Sequence[float],
    weights: Sequence[float],
    baseline: tuple[Sequence[float], Sequence[float]] | None,
) -> tuple[float, float | None, float]:
    """Return a mean, its standard error, if there is any, and how many equal documents these are worth."""
    mean, shifts = _left_out(sums, weights)
    if baseline is not None:
        base, base_shifts = _left_out(*baseline)
        mean, shifts = mean - base, shifts - base_shifts
    count = sum(weight > 0 for weight in weights)
    if count < 2 or not math.isfinite(mean):
        return mean, None, 0.0
    worth = math.fsum(weights) ** 2 / math.fsum(weight**2 for weight in weights)
    return mean, math.sqrt((count - 1) / count * math.fsum(shifts**2)), worth


def _left_out(
    sums: Sequence[float], weights: Sequence[float]
) -> tuple[float, np.ndarray[Any, Any]]:
    """Return the mean loss, and how much it changes when each document is left out."""
    total, weight = math.fsum(sums), math.fsum(weights)
    one, size = np.asarray(sums, np.float64), np.asarray(weights, np.float64)
    return total / weight, (total / weight * size - one) / (weight - size)


@functools.lru_cache(maxsize=256)
def _student(freedom: float, comparisons: int) -> float:
    """Return the value that the absolute of Student's t exceeds with probability 5 % / `comparisons`.

    Its density in arctan(t / sqrt(df)) is proportional to cos^(df - 1).
    """
    from_the_end = np.linspace(0, 1, 2001) ** 2  # dense in the tail
    angles = min(math.pi / 2, 12 / math.sqrt(freedom)) * (1 - from_the_end)
    density = np.maximum(np.cos(angles), 0) ** (freedom - 1)
    tail = np.cumsum((density[1:] + density[:-1]) * (angles[:-1] - angles[1:]))
    end = np.interp((1 - COVERAGE) / comparisons * tail[-1], tail, angles[1:])
    return math.sqrt(freedom) * math.tan(end)


def summarize(
    records: Sequence[Record],
    *,
    aggregate: str = "tokens",
    base: float | None = None,
    baseline: str | None = None,
    comparisons: int | None = None,
) -> list[Cell]:
    """Return the cell of each (method, protocol, length), in the order of their first appearance.

    With the aggregate `"documents"`, every document weighs the same; the others are in the records' weights. `base` is
    that of the power of the mean loss, by default e. Ratios refer to the method `baseline`, maybe without records where
    it failed; by default to that of the first record. The methods compared to it under a protocol at a length are one
    family of `comparisons`: their intervals hold together. Name their number if the records are those of a part.
    """
    groups: dict[tuple[str, str, int], dict[str, Record]] = {}
    documents: dict[str, dict[str, None]] = {}  # of every protocol, in order
    for record in records:
        cell = record.method, record.protocol, record.length
        groups.setdefault(cell, {})[record.document] = record
        documents.setdefault(record.protocol, {})[record.document] = None
    if baseline is None and records:
        baseline = records[0].method
    compared = Counter(
        (protocol, length) for method, protocol, length in groups if method != baseline
    )
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
        family = comparisons or max(1, compared[protocol, length])
        cells.append(_cell(rows, others, aggregate, base, family))
    return cells


def _cell(
    rows: Sequence[Record],
    baseline: Sequence[Record],
    aggregate: str,
    base: float | None,
    comparisons: int,
) -> Cell:
    """Return the cell of records of all documents, and its ratio to the baseline if that is complete."""
    unit = 1.0 if base is None else math.log(base)
    own = _weighted(rows, aggregate)
    few = round(_jackknife(*own, None)[2]) < FEW_DOCUMENTS

    def power(loss: float) -> float:
        return exp_or_inf(loss * unit)

    def powers(interval: Interval | None) -> Interval | None:
        return None if interval is None or few else (power(interval[0]), power(interval[1]))

    loss, interval = estimate(*own)
    difference = ratio_interval = needed = None
    if len(baseline) == len(rows):
        reference = _weighted(baseline, aggregate)
        difference, ratio_interval = estimate(*own, reference, comparisons)
        if not few and baseline[0].method != rows[0].method:
            needed = documents_needed(*own, reference, comparisons, math.log1p(CLAIM) / unit)
    nats = math.fsum(row.nats for row in rows)
    size, words = _total(row.bytes for row in rows), _total(row.words for row in rows)
    return Cell(
        *(rows[0].method, rows[0].protocol, rows[0].length),
        perplexity=power(loss),
        interval=powers(interval),
        ratio=None if difference is None else power(difference),
        ratio_interval=powers(ratio_interval),
        bits_per_byte=nats / math.log(2) / size if size else None,
        word_perplexity=exp_or_inf(nats / words) if words else None,
        nats=nats,
        tokens=sum(row.tokens for row in rows),
        bytes=size,
        words=words,
        documents=sum(row.weight > 0 for row in rows),
        needed=needed,
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
