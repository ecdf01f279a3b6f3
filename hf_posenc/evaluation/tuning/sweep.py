"""A race of methods by tail perplexity, and the sweep: successive halving of methods times scales.

`Race` and `TuningResult` are what sweep and search share. In a sweep (Jamieson and Talwalkar 2016, arXiv 1502.07943,
section 2) all methods are compared on a few documents, the better half of them on twice as many, and so on.
"""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import nn

from hf_posenc.evaluation.documents.source import Source
from hf_posenc.evaluation.grid import Field, Grid, MethodEntry, failure_field, number, number_range
from hf_posenc.evaluation.measuring import identity
from hf_posenc.evaluation.measuring.candidates import TRUNCATION, UNPATCHED, Candidate, crossed
from hf_posenc.evaluation.measuring.statistics import (
    FEW_DOCUMENTS,
    FEW_NOTE,
    NEEDED,
    TOO_FEW,
    Failure,
    Interval,
    Record,
)
from hf_posenc.evaluation.measuring.store import Key, fingerprint_of
from hf_posenc.evaluation.options import SWEEP_METHODS, SweepOptions
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.evaluation.plots import sweep_figure
from hf_posenc.evaluation.scoring.estimate import estimated, run_cost
from hf_posenc.evaluation.tuning import Board, Course, Row, Rung, check_unpatched, prepared, tried
from hf_posenc.patch.patching import get_patch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ResultT = TypeVar("ResultT", bound="TuningResult")


@dataclass(kw_only=True)
class Race(Rung[ResultT]):
    """Sweep or search; the candidates of `whole` are those of each batch."""

    result: ClassVar[type[Any]]

    max_regression: float | None = None

    @abc.abstractmethod
    def course(self, board: Board) -> tuple[Sequence[tuple[Candidate, bool]], dict[str, Any]]:
        """Measure batch by batch by `board.measure`, each depending on those before it.

        Returns:
            The candidates of the table, each with True for a control, the unpatched model first; and the fields that
            only this kind of result has.
        """

    def conduct(self, course: Course) -> ResultT:
        course.total = self.forwarded
        board = Board(self.settings, self.max_regression)
        board.measured = lambda *batch: course(self.whole.part(*batch))
        compared, own = self.course(board)
        whole, by_label = self.whole, {candidate.label: candidate for candidate, _ in compared}
        documents = [document.to_dict() for document in whole.documents]
        order = {name: index for index, name in enumerate(by_label)}
        order |= {each["name"]: index for index, each in enumerate(documents)}
        records = (record for record in board.records.values() if record.method in by_label)
        result: ResultT = self.result(
            settings=self.settings,
            candidates=list(map(MethodEntry.of, by_label.values())),
            controls=[candidate.label for candidate, control in compared if control],
            documents=documents,
            records=sorted(records, key=lambda r: (order[r.method], r.length, order[r.document])),
            failures=[
                Failure(label, "tail", length, reason)
                for (label, length), reason in board.failures.items()
                if label in by_label
            ],
            head_replay=whole.scorer.head_replay,
            environment=identity.environment(),
            fingerprint=fingerprint_of(whole.decisive),
            **{**whole.metadata, **own},
        )
        if result.winner is not None:
            about = str(result.model["name"]), *result.origin()
            result.recipe = recipe(by_label[result.winner], whole.model, result.kind, *about)
        return result

    @functools.cached_property
    def planned(self) -> tuple[int, dict[str, Any]]:
        """The tokens that the model reads if no method fails, and the fields of a course that measures nothing."""
        costs: dict[Key, int] = {}

        def count(*batch: Any) -> Any:
            records = []
            for item in self.whole.part(*batch).items:
                costs[item.key] = item.cost
                for protocol, length in item.cells:
                    # each is better than those before it, and the same on short texts: a search never returns to one
                    nats = -float(len(costs) * (length == self.settings.lengths[-1]))
                    about = item.label, str(protocol), int(length), item.document
                    records.append(Record(*about, nats, 1, None, None, nats, 1.0))
            return SimpleNamespace(records=records, failures=())

        _, own = self.course(Board(self.settings, self.max_regression, measured=count))
        return sum(costs.values()), own

    @property
    def forwarded(self) -> int:
        """Tokens that the model reads in the whole course."""
        return self.planned[0]

    @abc.abstractmethod
    def cost_line(self) -> str:
        """Return the tokens in one sentence."""

    def estimate(self, device: torch.device) -> dict[str, Any]:
        target = self.settings.lengths[-1]
        window = run_cost(self.whole.model, [(target, self.settings.tail_tokens)])
        seconds, takes = estimated(self.forwarded * (window.flops / target), device)
        line = f"{self.cost_line()} {takes}"
        return {"tokens": self.forwarded, "cost": line, "seconds": seconds}


@dataclass(repr=False, kw_only=True)
class TuningResult(PerplexityResult):
    """Tail perplexities of methods at the original and the target length, and what follows from them.

    Attributes:
        race: The command's own settings, `max_regression` among them.
        controls: Labels of the methods that are measured on every document and cannot win.
        recipe: The best method as `load_patch` reads it; `None` if there is none.
        rows: The rows of the table.
        winner: The label of the best method; `None` if no method gave numbers within the bound.
    """

    version = 2
    _stored = (*PerplexityResult._stored, "race", "controls", "recipe")
    title: ClassVar[str]

    race: dict[str, Any]
    controls: Sequence[str]
    recipe: dict[str, Any] | None = None
    rows: list[Row] = field(init=False)
    winner: str | None = field(init=False)

    def __post_init__(self) -> None:
        self.board = Board.of(self, self.race.get("max_regression"), self.comparisons)
        self.rows = []
        read = self._compare()
        cells = (
            self.board.cell(label, length, documents, UNPATCHED, max(1, len(read) - 1))
            for label, documents in read.items()
            for length in self.settings.lengths
        )
        self.cells = [cell for cell in cells if cell is not None]

    @abc.abstractmethod
    def _compare(self) -> dict[str, Sequence[str]]:
        """Choose the best method, and fill `rows`; return the documents of each method, by label."""

    @abc.abstractmethod
    def origin(self) -> tuple[str, str]:
        """Return the source of the recipe, and the measured perplexity of the best method in a sentence."""

    @property
    @abc.abstractmethod
    def comparisons(self) -> int:
        """Number of comparisons with the best method that could have been made; their intervals hold together."""

    @property
    def target(self) -> int:
        """The target length, in tokens."""
        return self.settings.lengths[-1]

    @property
    def kept(self) -> Row | None:
        """A method to use instead of the best one, which did not beat it; `None` if the recipe is to be used."""
        return None

    def row(self, label: str) -> Row:
        """Return the row of a method."""
        return next(row for row in self.rows if row.label == label)

    def entry(self, label: str) -> MethodEntry:
        """Return the method of a label."""
        return next(entry for entry in self.candidates if entry.label == label)

    def call(self, label: str) -> str:
        """Return the call of `patch_model` for a method."""
        return Candidate.parse(self.entry(label).spec).call

    def _values(self) -> dict[str, Any]:
        described = self.described(
            {"protocols": {"tail": self.settings.definition("tail")}},
            source=self.source,
            documents=self.documents,
            skipped=self.skipped,
            summary=self.rows,
            recipe=self.recipe,
            failures=self.failures,
            records=self.records,
        )
        about = {"race": self.race, "controls": self.controls, "comparisons": self.comparisons}
        return {**described, **about}

    @classmethod
    def _fields_of(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        return super()._fields_of({"curve": {"methods": {}}, **values})

    def guide(self) -> Iterator[str]:
        return iter(())

    def tables(self) -> list[Grid]:
        """Return tail perplexities at the target length, the price on short texts, comparisons to the best method."""
        original, target = self.settings.lengths
        grid = Grid(f"{self.title}, tail: {self.settings.definition('tail')}")
        grid.column("method", least=12)  # longer text is wrapped
        heads = ("docu-\nments", f"tail at\n{target:,}", f"at {original:,}, by\nunpatched")
        for head in (*heads, "by the\nbest"):
            grid.column(head, numeric=True)
        grid.column("", least=9)
        for row in self.rows:
            grid.row(
                row.label,
                f"{row.documents:,}",
                "-" if row.failed is not None else with_range(row.perplexity, row.interval, 3),
                _percent(row.short),
                "" if row.ratio is None else with_range(row.ratio, row.ratio_interval),
                self.verdict(row),
                mark="best" if row.label == self.winner else "control" if row.control else "",
            )
        return [grid]

    def findings(self) -> Iterator[str]:
        return iter(())  # the notes compare the best method

    def verdict(self, row: Row) -> Field:
        """Return the comparison of a row to the best method in a word; "undecided" if it is not significant.

        With fewer than five documents, or if it left a sweep early, there is no word about it.
        """
        bound = self.board.max_regression
        if row.failed is not None:
            return failure_field(row.failed)
        if row.label == self.winner:
            return Field("best")
        if bound is not None and row.short is not None and row.short > 1 + bound:
            word = "past the bound"
        elif row.ratio is None:
            return Field("control" if row.control else "")
        elif row.left:
            word = "left early"
        elif row.documents < FEW_DOCUMENTS:
            word = TOO_FEW
        else:
            word = ("worse" if row.ratio > 1 else "better") if row.significant else "undecided"
        return Field(word + (", control" if row.control else ""))

    # Sentences of the notes.

    def _family(self) -> str:
        """Describe the intervals of the ratios in a table."""
        return (
            f"those of the ratios are paired, and all {self.comparisons:,} comparisons that could have been made hold "
            "together in 95 % of samples (Bonferroni)"
        )

    def _on_short(self, row: Row) -> str:
        """Return the price on short texts, as the end of a sentence."""
        at = self.settings.lengths[0]
        return "" if row.short is None else f", {_percent(row.short)} at {at:,}"

    def _against(self, rows: Sequence[Row]) -> Iterator[str]:
        """Compare the best method to each control among some rows, as a sentence."""
        window = f"{TRUNCATION}, which reads only the last {self.settings.lengths[0]:,} tokens"
        for row in (row for row in rows if row.control):
            names = {UNPATCHED: "the unpatched model", TRUNCATION: window}
            name = names.get(row.label, row.label)
            if row.ratio is None:
                yield f"{row.label} gave no number to compare with."
            elif row.documents < FEW_DOCUMENTS:
                yield f"There are {TOO_FEW} to compare it with {name}."
            elif not row.significant:
                needs = NEEDED.format(row.needed or 0)
                yield f"It is not significantly different from {name} ({needs})."
            elif row.ratio > 1:
                yield f"It is better than {name}."
            else:
                yield (
                    f"It is worse than {name}: on these documents, no method here benefits from the longer context."
                )


def recipe(
    chosen: Candidate, model: Any, kind: str, checkpoint: str, source: str, description: str
) -> dict[str, Any]:
    """Return a candidate as `save_patch` writes it, with its name (the kind of the result) and origin."""
    with chosen.applied(model, 1):
        patch = get_patch(model)
    assert patch is not None
    about = {
        "name": kind,
        "model_types": [model.config.model_type],
        "checkpoint": checkpoint,
        "source": source,
        "description": description,
    }
    return {**patch.config.to_dict(), "recipe": about}


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{100 * (ratio - 1):+.1f} %"


def with_range(value: float, interval: Interval | None, digits: int = 4) -> Field:
    """Return a field of a number, and below it the ends of its interval with so many digits."""
    field = Field(number(value), value=value)
    return field.append(f"\n{number_range(interval, digits)}", "aside") if interval else field


# The sweep.


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
        half = min(len(entered), max(LEAST, -(-len(entered) // 2)))
        kept = tuple(ranked if index + 1 == len(sizes) else ranked[:half])
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
        near = {row.label: row.ratio for row in racing if row.ratio and row.ratio_interval}
        return sorted(map(self.row, near), key=lambda row: near[row.label])

    def _values(self) -> dict[str, Any]:
        return {
            **super()._values(),
            "rungs": self.rungs,
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
            bound, original = self.board.max_regression, self.settings.lengths[0]
            racing = [row for row in self.rows if not row.control and row.failed is None]
            shorts = [(row.short, row.label) for row in racing if row.short is not None]
            if bound is None or not shorts:
                yield "No method gave a number: there is no winner."
                return
            ratio, label = min(shorts)
            yield (
                f"No method stays within +{100 * bound:.1f} % at {original:,} tokens; the nearest is {label} with "
                f"{100 * (ratio - 1):+.1f} %. There is no winner: allow more, or try a method that leaves short texts "
                "alone, such as dynamic_yarn."
            )
            return
        best = self.row(self.winner)
        yield (
            f"Best: {best.label}, {number(best.perplexity)} at {self.target:,} tokens{self._on_short(best)}. It was "
            "chosen on these documents, which flatters it a little."
        )
        if undecided := [row.label for row in self.undecided()]:
            yield f"Not significantly different from it on these documents: {', '.join(undecided)}."
        elif any(row.significant and not (row.control or row.left) for row in self.rows):
            yield "It is significantly different from every other method of the last round."
        yield from self._against(self.rows)

    def origin(self) -> tuple[str, str]:
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
    check_unpatched(model)
    methods = options.methods or SWEEP_METHODS
    candidates = tried(model, crossed(methods, options.scales or (2.0,)))
    original = next(candidate.original for candidate, _ in candidates if candidate.truncates)
    whole = prepared(model, tokenizer, source, options, original, embedded_limit=20, **about)
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
