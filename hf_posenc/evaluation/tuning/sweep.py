"""Sweep of methods times scales by successive halving (Jamieson and Talwalkar 2016, arXiv 1502.07943, section 2).

All methods are compared on a few documents, the better half of them on twice as many, and so on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents.source import Source
from hf_posenc.evaluation.grid import number
from hf_posenc.evaluation.measuring.candidates import Candidate, agreed, crossed, original_length
from hf_posenc.evaluation.measuring.result import listed_fields
from hf_posenc.evaluation.measuring.statistics import FEW_DOCUMENTS, FEW_NOTE
from hf_posenc.evaluation.options import SWEEP_METHODS, SweepOptions
from hf_posenc.evaluation.plots.results import sweep_figure
from hf_posenc.evaluation.tuning import Batch, Board, Course, Loss, Row, TailJob, prepared
from hf_posenc.evaluation.tuning.results import TuningResult, against, family_note, on_short

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEAST = 2
"""Least number of methods in the last round, so that the best one is compared on every document."""


def tried(
    model: nn.Module, candidates: Sequence[tuple[Candidate, bool]], original: int | None = None
) -> list[tuple[Candidate, bool]]:
    """Check the candidates on a model; unless it refuses all, a refused one becomes a cell without a number."""
    checked, errors = [], []
    for candidate, control in candidates:
        try:
            checked.append(candidate.checked(model))
        except PosencError as error:
            checked.append(candidate)
            errors += [] if control else [error]
    controls = [control for _, control in candidates]
    if errors and len(errors) == controls.count(False):
        raise errors[0]
    return list(zip(agreed(model, checked, original), controls, strict=True))


@dataclass(frozen=True)
class Rung:
    """One round on the first `documents`."""

    documents: int
    entered: tuple[str, ...]  # in their own order
    kept: tuple[str, ...]  # those of the next round, the best first; in the last all with numbers


def rung_sizes(documents: int, first: int) -> list[int]:
    """Return the number of documents of each round: `first`, then twice as many each time, finally all."""
    sizes = [first]
    while sizes[-1] < documents:
        sizes.append(sizes[-1] * 2)
    return [*sizes[:-1], documents]


def kept_of(entered: int) -> int:
    """Return the number of methods that a round keeps."""
    return min(entered, max(LEAST, -(-entered // 2)))


def run_rungs(
    racers: Sequence[str],
    sizes: Sequence[int],
    rank: Callable[[Sequence[str], Sequence[int]], list[str]],
    measure: Callable[[Sequence[str], Sequence[int]], None] = lambda entered, documents: None,
) -> list[Rung]:
    """Run all rounds, up to one that no method survives: a deterministic function of the measurements.

    `measure` measures whatever is missing of some methods on some documents; `rank` ranks them by their losses on
    these, and leaves out those without numbers.
    """
    rungs: list[Rung] = []
    entered = tuple(racers)
    for index, size in enumerate(sizes):
        measure(entered, range(size))
        ranked = rank(entered, range(size))
        last = index + 1 == len(sizes)
        kept = tuple(ranked if last else ranked[: kept_of(len(entered))])
        rungs.append(Rung(size, entered, kept))
        entered = tuple(label for label in racers if label in kept)
        if not entered:
            break
    return rungs


@dataclass(repr=False, kw_only=True)
class SweepResult(TuningResult):
    """Result of `hf-posenc sweep`; rounds, winner and rows follow from the losses.

    Attributes:
        rows: A row for every method: the controls, the winner, the others by the round that they reached, then by
            their rank in it.
    """

    kind = "sweep"
    title = "Sweep"

    first_documents: int
    rungs: list[Rung] = field(init=False)

    def __repr__(self) -> str:
        return f"SweepResult({len(self.trials)} methods, {len(self.documents)} documents; best: {self.winner})"

    def __post_init__(self) -> None:
        board = self.board
        racers = [trial.label for trial in self.trials if not trial.control]
        sizes = rung_sizes(len(self.documents), self.first_documents)
        self.rungs = run_rungs(racers, sizes, board.rank)
        last = self.rungs[-1]
        within = last.kept and not board.past(last.kept[0], range(last.documents))
        self.chosen = last.kept[0] if within else None
        read = {trial.label: range(last.documents) for trial in self.trials if trial.control}
        controls = set(read)
        for rung in reversed(self.rungs):
            entered = [label for label in rung.entered if label not in read]
            ranked = board.rank(entered, range(rung.documents))
            read |= dict.fromkeys([*ranked, *entered], range(rung.documents))
        self.rows = [
            board.row(
                label,
                documents,
                self.chosen,
                control=label in controls,
                left=label not in controls and label not in last.entered,
            )
            for label, documents in read.items()
        ]

    @property
    def winner(self) -> str | None:
        """The label of the winner; `None` if no method gave numbers within the bound."""
        return self.chosen

    @property
    def comparisons(self) -> int:
        """Number of pairs of methods: the measurements choose the winner and those compared to it on all documents."""
        return math.comb(len(self.trials), 2)

    def undecided(self) -> list[Row]:
        """Return the methods of the last round that do not differ significantly from the winner, the nearest first."""
        racing = (row for row in self.rows if not (row.control or row.left or row.significant))
        near = {row.label: row.to_best.ratio for row in racing if row.to_best}
        return sorted(map(self.row, near), key=lambda row: near[row.label])

    def _own(self) -> dict[str, Any]:
        return {
            "settings": {"first_documents": self.first_documents},
            "rungs": listed_fields(self.rungs),
            "winner": self.winner,
            "undecided": [row.label for row in self.undecided()],
        }

    def plot(self) -> Figure:
        """Draw every method with its interval, and the controls as lines. Needs matplotlib."""
        documents = self.rungs[-1].documents
        return sweep_figure(self.rows, self.winner, documents, self.settings.target)

    def notes(self) -> Iterator[str]:
        settings = self.settings
        rounds = "; ".join(
            f"{len(rung.entered)} on {rung.documents} document{'s' * (rung.documents > 1)}"
            for rung in self.rungs
        )
        yield (
            f"Rounds: {rounds}. Ranges: 95 % intervals over documents; {family_note(self.comparisons)}. A method that "
            "left early gets no verdict; its ratio is of the documents that it has read."
        )
        if self.rungs[-1].documents < FEW_DOCUMENTS:
            yield FEW_NOTE
        if self.winner is None:
            yield self._no_winner()
            return
        best = self.row(self.winner)
        yield (
            f"Best: {best.label}, {number(best.perplexity)} at {settings.target:,} tokens"
            f"{on_short(best, settings)}. It was chosen on these documents, which flatters it a little."
        )
        if undecided := [row.label for row in self.undecided()]:
            yield f"Not significantly different from it on these documents: {', '.join(undecided)}."
        elif len(self.rungs[0].entered) > 1:
            yield "It is significantly different from every other method of the last round."
        yield from (against(row, settings) for row in self.rows if row.control)

    def _no_winner(self) -> str:
        bound, original = self.settings.max_regression, self.settings.original
        racing = [row for row in self.rows if not row.control and row.failed is None]
        shorts = [(row.short.ratio, row.label) for row in racing if row.short is not None]
        if bound is None or not shorts:
            return "No method gave a number: there is no winner."
        ratio, label = min(shorts)
        return (
            f"No method stays within +{100 * bound:.1f} % at {original:,} tokens; the nearest is {label} with "
            f"{100 * (ratio - 1):+.1f} %. There is no winner: allow more, or try a method that leaves short texts "
            "alone, such as dynamic_yarn."
        )

    def _origin(self) -> tuple[str, str]:
        row, settings = self.row(str(self.winner)), self.settings
        price = row.short and f"; {row.short.ratio - 1:+.1%} at {settings.original:,} tokens"
        plain = self.row(self.trials[0].label).perplexity
        return "hf-posenc sweep: methods times scales by successive halving", (
            f"{row.label}: tail perplexity {row.perplexity:.5g} at {settings.target:,} tokens on {row.documents} "
            f"documents, unpatched {plain:.5g}{price or ''}."
        )


@dataclass(kw_only=True)
class SweepJob(TailJob[SweepResult]):
    """Sweep whose model and documents are ready; the candidates are those of `crossed`."""

    result = SweepResult

    candidates: Sequence[tuple[Candidate, bool]]
    first_documents: int = 5

    def course(self, measure: Batch) -> Course:
        controls = [candidate for candidate, control in self.candidates if control]
        racers = {c.key: c for c, control in self.candidates if not control}
        losses: dict[tuple[str, int, int], Loss] = {}

        def measure_round(entered: Sequence[str], documents: Sequence[int]) -> None:
            batch = [*controls, *(racers[key] for key in entered)]
            losses.update(measure(batch, documents, self.settings.lengths))

        sizes = rung_sizes(len(self.documents), self.first_documents)
        board = Board(losses, self.settings, controls[0].key)
        run_rungs(list(racers), sizes, board.rank, measure_round)
        return self.candidates, losses, {"first_documents": self.first_documents}

    def cost_line(self) -> str:
        every = itertools.product(self.candidates, self.settings.lengths, range(len(self.texts)))
        full = sum(self.tokens(text, length, each.most) for (each, _), length, text in every)
        return f"{self.forwarded:,} tokens instead of {full:,} for everything on every document."


def prepare_sweep(
    model: nn.Module, tokenizer: Any, source: Source, options: SweepOptions, **about: Any
) -> SweepJob:
    """Check the methods on the model, and read documents of at least the target length; `about` as for `prepared`."""
    methods = options.methods or SWEEP_METHODS
    candidates = tried(model, crossed(methods, options.scales or (2.0,)))
    original = original_length(model, [candidate for candidate, _ in candidates])
    fields = prepared(model, tokenizer, source, options, original, embedded_limit=20, **about)
    if options.scales is None:
        settings = fields["settings"]
        originals = {repr(c.beside): c.original for c, _ in candidates if c.patches}

        def scales(candidate: Candidate) -> tuple[float, float]:
            """The scale that extends the original length of its options to the target, and twice that."""
            scale = settings.target / (originals.get(repr(candidate.beside)) or settings.original)
            return scale, 2 * scale

        candidates = tried(model, crossed(methods, scales))
    return SweepJob(**fields, candidates=candidates, first_documents=options.first_documents)
