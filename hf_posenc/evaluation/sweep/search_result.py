"""The result of a search: the path, the factors found, and what they do to documents that the search has not read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_posenc.evaluation.files import finite
from hf_posenc.evaluation.sweep.board import Board, Losses, Row
from hf_posenc.evaluation.sweep.factors import LABEL, Genome
from hf_posenc.evaluation.sweep.losses import Intervals
from hf_posenc.evaluation.sweep.result import FORMAT, about_of, losses_of, records_of
from hf_posenc.evaluation.sweep.settings import TailSettings
from hf_posenc.evaluation.sweep.trials import Trial

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Step:
    """One individual that was scored.

    Attributes:
        kind: The start that it is, or `mutation`, or `crossover`.
        genome: Its factors.
        score: Log tail perplexity at the target length over the search documents; infinite where it failed or was past
            the bound.
    """

    kind: str
    genome: Genome
    score: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        score = self.score if math.isfinite(self.score) else None
        return {"kind": self.kind, **dataclasses.asdict(self.genome), "score": score}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Step:
        """What `to_dict` wrote."""
        genome = Genome(tuple(values["factors"]), values["attention_factor"])
        score = values["score"]
        return cls(values["kind"], genome, math.inf if score is None else score)


@dataclass(repr=False)
class SearchResult:
    """What `hf-posenc search` found.

    Attributes:
        about: The model, the source of the documents, the versions.
        settings: Lengths, tail, bound, seed.
        search: The search's own settings: budget, short texts, a given factor on cos and sin.
        steps: Every individual in the order in which it was scored.
        trials: What was measured on the held-out documents: the controls, the starts, the search's best.
        documents: All documents; those of `searched` were read by the search, the others are held out.
        searched: Indices of the documents that the search read.
        skipped: Documents that were not used, and why.
        losses: On the held-out documents, by label, length and the document's index.
        recipe: The best as `load_patch` reads it; `None` where nothing gave numbers within the bound.
        best: The step with the lowest score; `None` as above.
        rows: A line for every trial, over the held-out documents.
    """

    about: dict[str, Any]
    settings: TailSettings
    search: dict[str, Any]
    steps: Sequence[Step]
    trials: Sequence[Trial]
    documents: Sequence[dict[str, Any]]
    searched: Sequence[int]
    skipped: Sequence[dict[str, Any]]
    losses: Losses
    recipe: dict[str, Any] | None = None
    best: Step | None = field(init=False)
    rows: list[Row] = field(init=False)

    def __repr__(self) -> str:
        return f"SearchResult({len(self.steps)} evaluations, {len(self.documents)} documents)"

    def __post_init__(self) -> None:
        self.best = best_of(self.steps)
        labels = {trial.label for trial in self.trials}
        reference = LABEL if LABEL in labels else None
        self.rows = [
            self.board.row(trial.label, self.held_out, reference, control=trial.control)
            for trial in self.trials
        ]

    @property
    def held_out(self) -> list[int]:
        """Indices of the documents that the search has not read."""
        return [index for index in range(len(self.documents)) if index not in self.searched]

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

    def best_start(self) -> Row | None:
        """The published method among the starts that does best on the held-out documents."""
        names = {step.kind for step in self.steps} - {"mutation", "crossover"}
        methods = {trial.label: trial.method for trial in self.trials}
        rows = [r for r in self.rows if methods[r.label] in names and r.failed is None]
        return min(rows, key=lambda row: row.perplexity, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON-ready values; a number that is not finite becomes `None`."""
        values = {
            "format": FORMAT,
            "kind": "search",
            **self.about,
            "settings": {**self.settings.to_dict(), **self.search},
            "protocol": self.settings.protocol.definition("tail"),
            "documents": list(self.documents),
            "searched": list(self.searched),
            "skipped": list(self.skipped),
            "methods": [dataclasses.asdict(trial) for trial in self.trials],
            "summary": [dataclasses.asdict(row) for row in self.rows],
            "best": None if self.best is None else self.best.to_dict(),
            "recipe": self.recipe,
            "records": records_of(self.losses),
            "steps": [step.to_dict() for step in self.steps],
        }
        ready: dict[str, Any] = finite(values)
        return ready

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SearchResult:
        """Reads what `to_dict` wrote."""
        known = {entry.name for entry in dataclasses.fields(TailSettings)}
        settings = values["settings"]
        return cls(
            about=about_of(values),
            settings=TailSettings.from_dict({k: v for k, v in settings.items() if k in known}),
            search={k: v for k, v in settings.items() if k not in known},
            steps=[Step.from_dict(step) for step in values["steps"]],
            trials=[Trial(**trial) for trial in values["methods"]],
            documents=values["documents"],
            searched=values["searched"],
            skipped=values["skipped"],
            losses=losses_of(values["records"]),
            recipe=values["recipe"],
        )

    def plot(self) -> Figure:
        """The path of the search, and the factors found beside those it began with, as a matplotlib figure."""
        from hf_posenc.evaluation.sweep.figures import search_figure

        return search_figure(self)

    def _repr_html_(self) -> str:
        from hf_posenc.evaluation.report import as_html
        from hf_posenc.evaluation.sweep.search_report import search_lines, search_table

        return as_html([search_table(self)], search_lines(self))


def best_of(steps: Sequence[Step]) -> Step | None:
    """The lowest score, of equals the first; `None` where none is finite."""
    working = [step for step in steps if math.isfinite(step.score)]
    return min(working, key=lambda step: step.score, default=None)
