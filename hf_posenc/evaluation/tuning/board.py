"""Comparisons of methods by tail perplexity: the statistics of every rung, from a sweep to the proof of `extend`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_posenc.evaluation.measuring.candidates import UNPATCHED
from hf_posenc.evaluation.measuring.statistics import (
    Cell,
    Failure,
    Interval,
    Record,
    side_of_one,
    summarize,
)

if TYPE_CHECKING:
    from hf_posenc.evaluation.perplexity.protocols import Settings
    from hf_posenc.evaluation.perplexity.result import PerplexityResult


@dataclass(frozen=True)
class Row:
    """Row of the table: a method over so many documents, or the reason why it `failed`.

    Attributes:
        perplexity: At the target length, with its 95 % interval over documents; NaN if it failed.
        ratio: Its perplexity at the target length by that of the best method, over the documents of this row. The
            interval is one of the board's `comparisons`; there is none on too few documents, or if it left early.
        needed: Documents with which a ratio of 1.01 would be significant in 80 % of samples.
        short: Its perplexity at the original length by that of the model as loaded, same tokens and documents: 1.02 is
            a regression of 2 %. `None` if one of them failed.
        left: True if it left a sweep before the last round: no verdict, since a bad start made it leave.
    """

    label: str
    control: bool
    documents: int
    perplexity: float
    interval: Interval | None
    ratio: float | None
    ratio_interval: Interval | None
    short: float | None
    failed: str | None
    left: bool = False
    needed: int | None = None

    @property
    def significant(self) -> bool:
        """True if it differs significantly from the best method, all comparisons of the table considered."""
        return side_of_one(self.ratio_interval) != 0


@dataclass
class Board:
    """Comparisons of everything measured so far; methods have their labels, documents their names.

    Attributes:
        max_regression: The accepted growth of the perplexity of short texts, against `control` there.
        comparisons: Comparisons with the best method that could have been made: their intervals hold together.
        measured: Measures candidates on documents at lengths; its result has `records` and `failures`.
    """

    settings: Settings
    max_regression: float | None = None
    comparisons: int = 1
    control: str = UNPATCHED
    measured: Callable[..., Any] | None = None
    records: dict[tuple[str, int, str], Record] = field(default_factory=dict)
    failures: dict[tuple[str, int], str] = field(default_factory=dict)

    @classmethod
    def of(cls, result: PerplexityResult, *bounds: Any) -> Board:
        """Return the comparisons of a result; `bounds` are the other arguments."""
        board = cls(result.settings, *bounds)
        board.add(result.records, result.failures)
        return board

    def add(self, records: Iterable[Record], failures: Iterable[Failure]) -> None:
        """Add what was measured."""
        for record in records:
            self.records.setdefault((record.method, record.length, record.document), record)
        for failure in failures:
            self.failures.setdefault((failure.method, failure.length), failure.reason)

    def measure(self, *batch: Any) -> None:
        """Measure candidates on documents at lengths, and add what was measured."""
        assert self.measured is not None
        result = self.measured(*batch)
        self.add(result.records, result.failures)

    def records_of(self, label: str, length: int, documents: Sequence[str]) -> list[Record]:
        """Return the records of a method at a length on some documents, as far as there are any."""
        found = (self.records.get((label, length, document)) for document in documents)
        return [record for record in found if record is not None]

    def failure(self, label: str, length: int, documents: Sequence[str]) -> str | None:
        """Return the reason why there is no perplexity; `None` if there is one."""
        if len(self.records_of(label, length, documents)) < len(documents):
            return self.failures.get((label, length), "not measured")
        finite = math.isfinite(self._loss(label, length, documents))
        return None if finite else "the loss is not a finite number"

    def _loss(self, label: str, length: int, documents: Sequence[str]) -> float:
        """Return total nats by total tokens; NaN without any."""
        records = self.records_of(label, length, documents)
        tokens = sum(record.tokens for record in records)
        return math.fsum(record.nats for record in records) / tokens if tokens else math.nan

    def cell(
        self,
        label: str,
        length: int,
        documents: Sequence[str],
        other: str | None = None,
        comparisons: int = 1,
    ) -> Cell | None:
        """Return the perplexity of a method, and its paired ratio to another; `None` if it failed."""
        if self.failure(label, length, documents) is not None:
            return None
        records = self.records_of(label, length, documents)
        if other is not None and self.failure(other, length, documents) is None:
            records += self.records_of(other, length, documents)
        return summarize(records, baseline=other or "", comparisons=comparisons)[0]

    def past(self, label: str, documents: Sequence[str]) -> float:
        """Return 0 within the bound on short texts, else the ratio there; infinite if there is none."""
        if self.max_regression is None:
            return 0.0
        short = self.cell(label, self.settings.lengths[0], documents, self.control)
        if short is None or short.ratio is None:
            return math.inf
        return short.ratio if short.ratio > 1 + self.max_regression else 0.0

    def score(self, label: str, documents: Sequence[str], short: Sequence[str]) -> float:
        """Return the log perplexity at the target length; infinite if it failed or exceeds the bound on `short`."""
        target = self.settings.lengths[-1]
        if self.failure(label, target, documents) is not None or self.past(label, short):
            return math.inf
        return self._loss(label, target, documents)

    def rank(self, labels: Iterable[str], documents: Sequence[str]) -> list[str]:
        """Rank the methods that gave numbers on some documents, the best first.

        Methods past the bound follow those within it, the nearest to the bound first: few documents then do not
        exclude a method that more of them would admit.
        """
        target = self.settings.lengths[-1]
        order = {
            label: (self.past(label, documents), self._loss(label, target, documents))
            for label in labels
            if self.failure(label, target, documents) is None
        }
        return sorted(order, key=order.__getitem__)  # stable: the first named wins a tie

    def row(
        self,
        label: str,
        documents: Sequence[str],
        best: str | None,
        *,
        control: bool = False,
        short: Sequence[str] | None = None,
        left: bool = False,
    ) -> Row:
        """Return the row of a method over some documents; `short` are others for the regression, `left` as in `Row`."""
        original, target = self.settings.lengths
        cell = self.cell(label, target, documents, best, self.comparisons)
        near = self.cell(label, original, documents if short is None else short, self.control)
        ratio = None if cell is None or label == best else cell.ratio
        told = ratio is not None and not left
        return Row(
            label=label,
            control=control,
            documents=len(documents),
            perplexity=math.nan if cell is None else cell.perplexity,
            interval=None if cell is None else cell.interval,
            ratio=ratio,
            ratio_interval=cell.ratio_interval if cell is not None and told else None,
            short=None if near is None or label == self.control else near.ratio,
            failed=self.failure(label, target, documents),
            left=left,
            needed=None if cell is None else cell.needed,
        )
