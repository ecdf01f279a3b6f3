"""The result of a sweep: everything measured, the rounds, the winner, and what is left undecided."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_posenc.evaluation.files import finite
from hf_posenc.evaluation.sweep.board import Board, Losses, Row
from hf_posenc.evaluation.sweep.halving import Rung, run_rungs, rung_sizes
from hf_posenc.evaluation.sweep.losses import Intervals, Loss
from hf_posenc.evaluation.sweep.settings import TailSettings
from hf_posenc.evaluation.sweep.trials import Trial

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT = 1


@dataclass(repr=False)
class SweepResult:
    """What `hf-posenc sweep` measured. All but the losses and what was asked for is worked out from them.

    Attributes:
        about: The model, the source of the documents, the versions, the command: what does not enter any sum.
        settings: Lengths, tail, bound, seed.
        first_documents: Documents of the first round.
        trials: The lines: the controls first.
        documents: The documents, as `TokenizedDocument.to_dict` says them.
        skipped: Those that were not used, and why.
        losses: By label, length and the document's index.
        recipe: The winner as `load_patch` reads it; `None` where there is no winner.
        rungs: The rounds.
        winner: The label of the winner; `None` where no method gave numbers within the bound.
        rows: A line for every trial: the controls, the winner, the others by the round that they reached, then by how
            they stood in it.
    """

    about: dict[str, Any]
    settings: TailSettings
    first_documents: int
    trials: Sequence[Trial]
    documents: Sequence[dict[str, Any]]
    skipped: Sequence[dict[str, Any]]
    losses: Losses
    recipe: dict[str, Any] | None = None
    rungs: list[Rung] = field(init=False)
    winner: str | None = field(init=False)
    rows: list[Row] = field(init=False)

    def __repr__(self) -> str:
        return f"SweepResult({len(self.trials)} methods, {len(self.documents)} documents; best: {self.winner})"

    def __post_init__(self) -> None:
        racers = [trial.label for trial in self.trials if not trial.control]
        sizes = rung_sizes(len(self.documents), self.first_documents)
        self.rungs = run_rungs(racers, sizes, self.board.ranking(self.settings.max_regression))
        self.winner = self._winner()
        self.rows = self._rows()

    @property
    def board(self) -> Board:
        """The losses with what is asked of them."""
        settings = self.settings
        intervals = Intervals(settings.seed, settings.resamples)
        return Board(
            self.losses, settings.original, settings.target, self.trials[0].label, intervals
        )

    def row(self, label: str) -> Row:
        """The line of a method."""
        return next(row for row in self.rows if row.label == label)

    def trial(self, label: str) -> Trial:
        """What a line measures."""
        return next(trial for trial in self.trials if trial.label == label)

    def undecided(self) -> list[Row]:
        """The methods that the winner is not told apart from, the nearest first: the paired interval holds 1."""
        rows = [row for row in self.rows if not row.control and row.to_best is not None]
        open_ = [
            (row.to_best.ratio, row) for row in rows if row.to_best and not row.to_best.decided
        ]
        return [row for _, row in sorted(open_, key=lambda pair: pair[0])]

    def _winner(self) -> str | None:
        last = self.rungs[-1]
        bound = self.settings.max_regression
        if last.kept and self.board.within(last.kept[0], range(last.documents), bound):
            return last.kept[0]
        return None

    def _rows(self) -> list[Row]:
        board, count = self.board, self.rungs[-1].documents
        controls = [trial.label for trial in self.trials if trial.control]
        rows = [board.row(label, range(count), self.winner, control=True) for label in controls]
        seen: set[str] = set()
        for rung in reversed(self.rungs):
            documents = range(rung.documents)
            entered = [label for label in rung.entered if label not in seen]
            ranked = board.ranking(self.settings.max_regression)(entered, documents)
            order = [*ranked, *(label for label in entered if label not in ranked)]
            rows += [board.row(label, documents, self.winner, control=False) for label in order]
            seen.update(entered)
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON-ready values; a number that is not finite becomes `None`."""
        values = {
            "format": FORMAT,
            "kind": "sweep",
            **self.about,
            "settings": {**self.settings.to_dict(), "first_documents": self.first_documents},
            "protocol": self.settings.protocol.definition("tail"),
            "documents": list(self.documents),
            "skipped": list(self.skipped),
            "methods": [dataclasses.asdict(trial) for trial in self.trials],
            "rungs": [dataclasses.asdict(rung) for rung in self.rungs],
            "summary": [dataclasses.asdict(row) for row in self.rows],
            "winner": self.winner,
            "undecided": [row.label for row in self.undecided()],
            "recipe": self.recipe,
            "records": records_of(self.losses),
        }
        ready: dict[str, Any] = finite(values)
        return ready

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SweepResult:
        """Reads what `to_dict` wrote."""
        settings = dict(values["settings"])
        first = settings.pop("first_documents")
        return cls(
            about=about_of(values),
            settings=TailSettings.from_dict(settings),
            first_documents=first,
            trials=[Trial(**trial) for trial in values["methods"]],
            documents=values["documents"],
            skipped=values["skipped"],
            losses=losses_of(values["records"]),
            recipe=values["recipe"],
        )

    def plot(self) -> Figure:
        """Every method with its interval, the controls as lines, as a matplotlib figure."""
        from hf_posenc.evaluation.sweep.figures import sweep_figure

        return sweep_figure(self)

    def _repr_html_(self) -> str:
        from hf_posenc.evaluation.report import as_html
        from hf_posenc.evaluation.sweep.report import sweep_lines, sweep_table

        return as_html([sweep_table(self)], sweep_lines(self))


ABOUT = ("model", "source", "environment", "command")


def about_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a result says of itself that enters no sum."""
    return {name: values[name] for name in ABOUT}


def records_of(losses: Losses) -> list[dict[str, Any]]:
    """The losses as a list."""
    return [
        {"method": label, "length": length, "document": document, **loss.to_dict()}
        for (label, length, document), loss in losses.items()
    ]


def losses_of(records: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int, int], Loss]:
    """The losses from their list."""
    return {(r["method"], r["length"], r["document"]): Loss.from_dict(r) for r in records}
