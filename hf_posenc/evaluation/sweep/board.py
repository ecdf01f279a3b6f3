"""The lines of a comparison: every method against the best one, over the documents that both have read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hf_posenc.evaluation.sweep.losses import (
    Comparison,
    Intervals,
    Loss,
    failure_of,
    log_perplexity,
    perplexity,
)

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
