"""Sweep of methods times scales by successive halving (Jamieson and Talwalkar 2016, arXiv 1502.07943, section 2).

All methods are compared on a few documents, the better half of them on twice as many, and so on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from hf_posenc.evaluation.documents.source import Source
from hf_posenc.evaluation.grid import number
from hf_posenc.evaluation.measuring.candidates import Candidate, crossed, original_length
from hf_posenc.evaluation.measuring.result import listed_fields
from hf_posenc.evaluation.measuring.statistics import FEW_DOCUMENTS, FEW_NOTE
from hf_posenc.evaluation.options import SWEEP_METHODS, SweepOptions
from hf_posenc.evaluation.perplexity.run import PerplexityRun
from hf_posenc.evaluation.plots import sweep_figure
from hf_posenc.evaluation.tuning import Race, prepared, tried
from hf_posenc.evaluation.tuning.board import Board, Row
from hf_posenc.evaluation.tuning.results import TuningResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEAST = 2
"""Least number of methods in the last round, so that the best one is compared on every document."""


@dataclass(frozen=True)
class Round:
    """One round on the first `documents`."""

    documents: int
    entered: tuple[str, ...]  # in their own order
    kept: tuple[str, ...]  # those of the next round, the best first; in the last all with numbers


def round_sizes(documents: int, first: int) -> list[int]:
    """Return the number of documents of each round: `first`, then twice as many each time, finally all."""
    sizes = [first]
    while sizes[-1] < documents:
        sizes.append(sizes[-1] * 2)
    return [*sizes[:-1], documents]


def kept_of(entered: int) -> int:
    """Return the number of methods that a round keeps."""
    return min(entered, max(LEAST, -(-entered // 2)))


def run_rounds(
    racers: Sequence[str],
    sizes: Sequence[int],
    rank: Callable[[Sequence[str], int], list[str]],
    measure: Callable[[Sequence[str], int], None] = lambda entered, documents: None,
) -> list[Round]:
    """Run all rounds, up to one that no method survives: a deterministic function of the measurements.

    `measure` measures whatever is missing of some methods on so many documents; `rank` ranks them by their losses on
    these, and leaves out those without numbers.
    """
    rungs: list[Round] = []
    entered = tuple(racers)
    for index, size in enumerate(sizes):
        measure(entered, size)
        ranked = rank(entered, size)
        last = index + 1 == len(sizes)
        kept = tuple(ranked if last else ranked[: kept_of(len(entered))])
        rungs.append(Round(size, entered, kept))
        entered = tuple(label for label in racers if label in kept)
        if not entered:
            break
    return rungs


@dataclass(repr=False, kw_only=True)
class SweepResult(TuningResult):
    """Result of `hf-posenc sweep`; rounds, winner and rows follow from the records.

    Attributes:
        rows: A row for every method: the controls, the winner, the others by the round that they reached, then by
            their rank in it.
    """

    kind = "sweep"
    title = "Sweep"

    rungs: list[Round] = field(init=False)

    def _compare(self) -> dict[str, Sequence[str]]:
        board, names = self.board, [document["name"] for document in self.documents]
        racers = [each.label for each in self.candidates if each.label not in self.controls]
        sizes = round_sizes(len(names), self.race["first_documents"])

        def rank(labels: Sequence[str], size: int) -> list[str]:
            return board.rank(labels, names[:size])

        self.rungs = run_rounds(racers, sizes, rank)
        last = self.rungs[-1]
        within = last.kept and not board.past(last.kept[0], names[: last.documents])
        self.winner = last.kept[0] if within else None
        read = dict.fromkeys(self.controls, last.documents)
        for rung in reversed(self.rungs):
            entered = [label for label in rung.entered if label not in read]
            read |= dict.fromkeys([*rank(entered, rung.documents), *entered], rung.documents)
        for label, size in read.items():
            control = label in self.controls
            left = not control and label not in last.entered
            row = board.row(label, names[:size], self.winner, control=control, left=left)
            self.rows.append(row)
        return {label: names[:size] for label, size in read.items()}

    @property
    def comparisons(self) -> int:
        """Number of pairs of methods: the measurements choose the winner and those compared to it on all documents."""
        return math.comb(len(self.candidates), 2)

    def undecided(self) -> list[Row]:
        """Return the methods of the last round that do not differ significantly from the winner, the nearest first."""
        racing = (row for row in self.rows if not (row.control or row.left or row.significant))
        near = {row.label: row.ratio for row in racing if row.ratio is not None}
        return sorted(map(self.row, near), key=lambda row: near[row.label])

    def _own(self) -> dict[str, Any]:
        return {
            "rungs": listed_fields(self.rungs),
            "winner": self.winner,
            "undecided": [row.label for row in self.undecided()],
        }

    def plot(self) -> Figure:
        """Draw every method with its interval, and the controls as lines. Needs matplotlib."""
        return sweep_figure(self.rows, self.winner, self.rungs[-1].documents, self.target)

    def notes(self) -> Iterator[str]:
        rounds = "; ".join(
            f"{len(rung.entered)} on {rung.documents} document{'s' * (rung.documents > 1)}"
            for rung in self.rungs
        )
        yield (
            f"Rounds: {rounds}. Ranges: 95 % intervals over documents; {self._family()}. A method that left early gets "
            "no verdict; its ratio is of the documents that it has read."
        )
        if self.rungs[-1].documents < FEW_DOCUMENTS:
            yield FEW_NOTE
        if self.winner is None:
            yield self._no_winner()
            return
        best = self.row(self.winner)
        yield (
            f"Best: {best.label}, {number(best.perplexity)} at {self.target:,} tokens{self._on_short(best)}. It was "
            "chosen on these documents, which flatters it a little."
        )
        if undecided := [row.label for row in self.undecided()]:
            yield f"Not significantly different from it on these documents: {', '.join(undecided)}."
        elif len(self.rungs[0].entered) > 1:
            yield "It is significantly different from every other method of the last round."
        yield from self._against(self.rows)

    def _no_winner(self) -> str:
        bound, original = self.board.max_regression, self.settings.lengths[0]
        racing = [row for row in self.rows if not row.control and row.failed is None]
        shorts = [(row.short, row.label) for row in racing if row.short is not None]
        if bound is None or not shorts:
            return "No method gave a number: there is no winner."
        ratio, label = min(shorts)
        return (
            f"No method stays within +{100 * bound:.1f} % at {original:,} tokens; the nearest is {label} with "
            f"{100 * (ratio - 1):+.1f} %. There is no winner: allow more, or try a method that leaves short texts "
            "alone, such as dynamic_yarn."
        )

    def _origin(self) -> tuple[str, str]:
        row, plain = self.row(str(self.winner)), self.rows[0].perplexity
        price = row.short and f"; {row.short - 1:+.1%} at {self.settings.lengths[0]:,} tokens"
        return "hf-posenc sweep: methods times scales by successive halving", (
            f"{row.label}: tail perplexity {row.perplexity:.5g} at {self.target:,} tokens on {row.documents} "
            f"documents, unpatched {plain:.5g}{price or ''}."
        )


@dataclass(kw_only=True)
class SweepJob(Race[SweepResult]):
    """Sweep whose model and documents are ready; the candidates are those of `crossed`."""

    result = SweepResult

    candidates: Sequence[tuple[Candidate, bool]]
    first_documents: int = 5

    def course(self, board: Board) -> tuple[Sequence[tuple[Candidate, bool]], dict[str, Any]]:
        controls = [candidate for candidate, control in self.candidates if control]
        racers = {c.label: c for c, control in self.candidates if not control}
        documents, lengths = self.whole.documents, self.settings.lengths
        names = [document.name for document in documents]

        def measure(entered: Sequence[str], size: int) -> None:
            batch = [*controls, *(racers[label] for label in entered)]
            board.measure(batch, documents[:size], lengths)

        sizes = round_sizes(len(names), self.first_documents)
        run_rounds(list(racers), sizes, lambda labels, n: board.rank(labels, names[:n]), measure)
        race = {"max_regression": self.max_regression, "first_documents": self.first_documents}
        return self.candidates, {"race": race}

    def cost_line(self) -> str:
        every = self.whole.part([each for each, _ in self.candidates], self.whole.documents)
        return f"{self.forwarded:,} tokens instead of {every.forwarded:,} for everything on every document."


def prepare_sweep(
    model: nn.Module, tokenizer: Any, source: Source, options: SweepOptions, **about: Any
) -> SweepJob:
    """Check the methods on the model, and read documents of at least the target length; `about` as for `prepared`."""
    methods = options.methods or SWEEP_METHODS
    candidates = tried(model, crossed(methods, options.scales or (2.0,)))
    original = original_length(model, [candidate for candidate, _ in candidates])
    about |= {"embedded_limit": 20, "kind": PerplexityRun}
    whole = prepared(model, tokenizer, source, options, original, **about)
    if options.scales is None:
        read, target = whole.settings.lengths
        originals = {repr(c.beside): c.original for c, _ in candidates if c.patches}

        def scales(candidate: Candidate) -> tuple[float, float]:
            """The scale that extends the original length of its options to the target, and twice that."""
            scale = target / (originals.get(repr(candidate.beside)) or read)
            return scale, 2 * scale

        candidates = tried(model, crossed(methods, scales))
    first, bound = options.first_documents, options.max_regression
    return SweepJob(whole=whole, candidates=candidates, first_documents=first, max_regression=bound)
