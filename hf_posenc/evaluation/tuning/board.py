"""The lines of a comparison: every method against the best one, over the documents that both have read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_posenc.evaluation.measuring.statistics import INTERVAL, Bootstrap, exp_or_inf, side_of_one

# What a method lost on a document, and what may be said of several of them.


@dataclass(frozen=True)
class Loss:
    """The tail tokens of one document, read at one length.

    Attributes:
        nats: Sum of their negative log-likelihoods; NaN where one was not finite, or where there is no number.
        tokens: How many they are.
        failed: Why there is no number.
    """

    nats: float
    tokens: int
    failed: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        if self.failed is not None:
            return {"failed": self.failed}
        return {"nats": self.nats if math.isfinite(self.nats) else None, "tokens": self.tokens}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Loss:
        """What `to_dict` wrote."""
        if "failed" in values:
            return cls(math.nan, 0, str(values["failed"]))
        nats = values["nats"]
        return cls(math.nan if nats is None else float(nats), int(values["tokens"]))


def log_perplexity(losses: Sequence[Loss]) -> float:
    """Total nats by total tokens; NaN where any document gave no number."""
    tokens = sum(loss.tokens for loss in losses)
    return math.fsum(loss.nats for loss in losses) / tokens if tokens else math.nan


def failure_of(losses: Sequence[Loss]) -> str | None:
    """Why there is no perplexity; `None` where there is one."""
    reason = next((loss.failed for loss in losses if loss.failed is not None), None)
    if reason is None and not math.isfinite(log_perplexity(losses)):
        return "the loss is not a finite number"
    return reason


@dataclass(frozen=True)
class Comparison:
    """A ratio of two perplexities over the same documents.

    Attributes:
        ratio: The first by the second.
        interval: 95 % paired bootstrap interval over documents; `None` with fewer than two documents.
    """

    ratio: float
    interval: tuple[float, float] | None

    @property
    def decided(self) -> bool:
        """Whether the interval leaves out 1, no difference. Without an interval nothing is decided."""
        return side_of_one(self.interval) != 0


class Intervals:
    """Intervals of perplexities and of their ratios, from one seed.

    Args:
        seed: Seed of the bootstrap.
        resamples: Its number of resamples.
    """

    def __init__(self, seed: int, resamples: int) -> None:
        self._seed, self._resamples = seed, resamples
        self._bootstraps: dict[int, Bootstrap] = {}

    def interval(self, losses: Sequence[Loss]) -> tuple[float, float] | None:
        """95 % bootstrap interval of the perplexity over documents; `None` where there is none."""
        if len(losses) < 2 or failure_of(losses) is not None:
            return None
        return _interval(self._resampled(losses))

    def compare(self, losses: Sequence[Loss], others: Sequence[Loss]) -> Comparison | None:
        """The paired ratio over the same documents; `None` where one side has no number."""
        if failure_of(losses) is not None or failure_of(others) is not None:
            return None
        ratio = exp_or_inf(log_perplexity(losses) - log_perplexity(others))
        if len(losses) < 2:
            return Comparison(ratio, None)
        return Comparison(ratio, _interval(self._resampled(losses) - self._resampled(others)))

    def _resampled(self, losses: Sequence[Loss]) -> np.ndarray[Any, Any]:
        count = len(losses)
        if count not in self._bootstraps:
            self._bootstraps[count] = Bootstrap(count, self._seed, self._resamples)
        return self._bootstraps[count].means(
            [loss.nats for loss in losses], [loss.tokens for loss in losses]
        )


def perplexity(losses: Sequence[Loss]) -> float:
    """`exp` of `log_perplexity`; infinity where that overflows."""
    return exp_or_inf(log_perplexity(losses))


def _interval(logs: np.ndarray[Any, Any]) -> tuple[float, float]:
    low, high = np.quantile(logs, INTERVAL)
    return exp_or_inf(float(low)), exp_or_inf(float(high))


Losses = Mapping[tuple[str, int, int], Loss]
"""By label, length and the document's index."""


@dataclass(frozen=True)
class Row:
    """One line.

    Attributes:
        label: The method.
        control: Whether it is a control.
        documents: How many documents it was measured on, counted from the first.
        perplexity: At the target length; NaN where it failed.
        interval: Its 95 % bootstrap interval over documents.
        short: Its perplexity at the original length by that of the model as loaded, same tokens and documents: 1.02 is
            a regression of 2 %. `None` where one of them failed.
        to_best: Its perplexity at the target length by that of the best method, over the documents of this line.
        failed: Why there is no number.
    """

    label: str
    control: bool
    documents: int
    perplexity: float
    interval: tuple[float, float] | None
    short: Comparison | None
    to_best: Comparison | None
    failed: str | None


@dataclass(frozen=True)
class Board:
    """What was measured, and how to look at it.

    Attributes:
        losses: Everything measured.
        original: The original length, in tokens.
        target: The target length.
        baseline: The label of the model as loaded.
        intervals: Makes intervals, by seed and number of resamples.
    """

    losses: Losses
    original: int
    target: int
    baseline: str
    intervals: Intervals

    def of(self, label: str, length: int, documents: Sequence[int]) -> list[Loss]:
        """The losses of a method at a length on some documents."""
        return [self.losses[label, length, document] for document in documents]

    def short(self, label: str, documents: Sequence[int]) -> Comparison | None:
        """Short-text regression, as a ratio."""
        ours, plain = (self.of(name, self.original, documents) for name in (label, self.baseline))
        return self.intervals.compare(ours, plain)

    def objective(self, label: str, documents: Sequence[int]) -> float:
        """Log tail perplexity at the target length; infinite where there is no number."""
        losses = self.of(label, self.target, documents)
        return math.inf if failure_of(losses) is not None else log_perplexity(losses)

    def within(self, label: str, documents: Sequence[int], bound: float | None) -> bool:
        """Whether a method's short-text regression stays within a bound; with no bound, always."""
        if bound is None:
            return True
        short = self.short(label, documents)
        return short is not None and short.ratio <= 1 + bound

    def ranking(self, bound: float | None) -> Callable[[Sequence[str], Sequence[int]], list[str]]:
        """Orders those that gave numbers on some documents, the best first.

        One past the bound stands behind all within it, and the one that is nearest to the bound first of these, so
        that few documents do not throw out what more of them would let in.
        """

        def rank(labels: Sequence[str], documents: Sequence[int]) -> list[str]:
            def place(label: str) -> tuple[float, float]:
                objective = self.objective(label, documents)
                if self.within(label, documents, bound):
                    return 0.0, objective
                short = self.short(label, documents)
                return (math.inf if short is None else short.ratio), objective

            working = [label for label in labels if math.isfinite(self.objective(label, documents))]
            return sorted(working, key=place)  # stable: of equals the first named

        return rank

    def row(self, label: str, documents: Sequence[int], best: str | None, *, control: bool) -> Row:
        """The line of a method over some documents."""
        losses = self.of(label, self.target, documents)
        to_best = None
        if best is not None and best != label:
            to_best = self.intervals.compare(losses, self.of(best, self.target, documents))
        return Row(
            label=label,
            control=control,
            documents=len(documents),
            perplexity=perplexity(losses),
            interval=self.intervals.interval(losses),
            short=None if label == self.baseline else self.short(label, documents),
            to_best=to_best,
            failed=failure_of(losses),
        )
