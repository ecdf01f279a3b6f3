"""Results of sweep and search: methods, losses, rows, the table and the recipe that `hf_posenc.load_patch` reads."""

from __future__ import annotations

import abc
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from hf_posenc.evaluation.grid import Field, Grid, Result, failure_field, number, number_range
from hf_posenc.evaluation.measuring.candidates import TRUNCATION, Candidate
from hf_posenc.evaluation.measuring.result import listed_fields
from hf_posenc.evaluation.measuring.statistics import FEW_DOCUMENTS, TOO_FEW, Interval
from hf_posenc.evaluation.tuning import Board, Comparison, Loss, Losses, Row, TailJob, TailSettings
from hf_posenc.files import finite
from hf_posenc.patch.patching import get_patch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ResultT = TypeVar("ResultT", bound="TuningResult")

FORMAT = 1
_ABOUT = ("model", "source", "environment", "command")
_ORDER = (
    *("documents", "searched", "skipped", "methods", "rungs", "summary", "winner", "undecided"),
    *("best", "kept", "recipe", "needles", "records", "steps"),
)
"""The values of the JSON file from the documents on, of a sweep or a search."""


@dataclass(frozen=True)
class Trial:
    """Method of a sweep or a search, with its `--patch` and its call of `patch_model`.

    The model as loaded has neither a name nor a call. A control is measured on every document, and cannot win.
    """

    label: str
    spec: str
    method: str | None
    scale: float | None
    control: bool
    call: str | None

    @classmethod
    def of(cls, candidate: Candidate, *, control: bool = False) -> Trial:
        """Describe a candidate whose scale is set."""
        about = candidate.label, candidate.spec, candidate.method, candidate.scale
        return cls(*about, control, candidate.call if candidate.parts else None)


@dataclass(repr=False, kw_only=True)
class TuningResult(Result):
    """Losses of methods, and the rows and the recipe that follow from them.

    Attributes:
        about: The model, the source of the documents, the versions, the command.
        trials: The methods: the controls first.
        documents: The documents, as `TokenizedDocument.to_dict` returns them.
        losses: By label, length and the document's index.
        recipe: The best method as `load_patch` reads it; `None` if there is none.
        chosen: The label of the best method; `None` if no method gave numbers within the bound.
    """

    title: ClassVar[str]

    about: dict[str, Any]
    settings: TailSettings
    trials: Sequence[Trial]
    documents: Sequence[dict[str, Any]]
    skipped: Sequence[dict[str, Any]]
    losses: Losses
    recipe: dict[str, Any] | None = None
    rows: list[Row] = field(init=False)
    chosen: str | None = field(init=False)

    @classmethod
    def measured(
        cls: type[ResultT],
        job: TailJob[Any],
        candidates: Sequence[tuple[Candidate, bool]],
        losses: Losses,
        own: Mapping[str, Any],
    ) -> ResultT:
        """Return the result of a job's course with its recipe; losses are by the candidates' keys."""
        labels = {candidate.key: candidate.label for candidate, _ in candidates}
        keys = list(labels)
        ordered = sorted(losses.items(), key=lambda item: (keys.index(item[0][0]), *item[0][1:]))
        result = cls(
            about=job.about,
            settings=job.settings,
            trials=[Trial.of(candidate, control=control) for candidate, control in candidates],
            documents=[document.to_dict() for document in job.documents],
            skipped=listed_fields(job.skipped),
            losses={(labels[key], length, d): loss for (key, length, d), loss in ordered},
            **own,
        )
        chosen = next((c for c, _ in candidates if c.label == result.chosen), None)
        if chosen is not None:
            result.recipe = recipe(chosen, job.model, result, *result._origin())
        return result

    @property
    def kept(self) -> Row | None:
        """A method to use instead of the best one, which did not beat it; `None` if the recipe is to be used."""
        return None

    @abc.abstractmethod
    def plot(self) -> Figure:
        """Draw the figure. Needs matplotlib."""

    @abc.abstractmethod
    def _origin(self) -> tuple[str, str]:
        """Return the source of the recipe, and the measured perplexity of the best method in a sentence."""

    @abc.abstractmethod
    def _own(self) -> dict[str, Any]:
        """The values of `to_dict` that only this kind of result has, and its own `settings`."""

    @property
    @abc.abstractmethod
    def comparisons(self) -> int:
        """Number of comparisons with the best method that could have been made; their intervals hold together."""

    @property
    def board(self) -> Board:
        """The comparisons of the losses."""
        return Board(self.losses, self.settings, self.trials[0].label, self.comparisons)

    def row(self, label: str) -> Row:
        """Return the row of a method."""
        return next(row for row in self.rows if row.label == label)

    def trial(self, label: str) -> Trial:
        """Return the method of a label."""
        return next(trial for trial in self.trials if trial.label == label)

    def to_dict(self) -> dict[str, Any]:
        own = self._own()
        values = {
            **own,
            "documents": self.documents,
            "skipped": self.skipped,
            "methods": listed_fields(self.trials),
            "summary": listed_fields(self.rows),
            "recipe": self.recipe,
            "records": [
                {"method": label, "length": length, "document": document, **loss.to_dict()}
                for (label, length, document), loss in self.losses.items()
            ],
        }
        ready: dict[str, Any] = finite(
            {
                "format": FORMAT,
                "kind": self.kind,
                **self.about,
                "settings": {**dataclasses.asdict(self.settings), **own["settings"]},
                "comparisons": self.comparisons,
                "protocol": self.settings.protocol.definition("tail"),
                **{name: values[name] for name in _ORDER if name in values},
            }
        )
        return ready

    @classmethod
    def from_dict(cls: type[ResultT], values: Mapping[str, Any]) -> ResultT:
        """Read what `to_dict` returned; everything that follows from the losses is computed again."""
        own = dict(values["settings"])
        shared = {entry.name: own.pop(entry.name) for entry in dataclasses.fields(TailSettings)}
        return cls(
            about={name: values[name] for name in _ABOUT},
            settings=TailSettings(**shared),
            trials=[Trial(**trial) for trial in values["methods"]],
            documents=values["documents"],
            skipped=values["skipped"],
            losses={
                (record["method"], record["length"], record["document"]): Loss.from_dict(record)
                for record in values["records"]
            },
            recipe=values["recipe"],
            **cls._own_fields(values, own),
        )

    @classmethod
    def _own_fields(cls, values: Mapping[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
        """Read the fields of the subclass from the values of `to_dict` and its own settings."""
        return settings

    def files(self) -> dict[str, str]:
        return super().files() | recipe_file(self.kind, self.recipe)

    def figures(self) -> dict[str, Figure]:
        return {self.kind: self.plot()}

    def problems(self) -> Iterator[str]:
        for row in self.rows:
            if row.failed is not None:
                yield f"{row.label}: failed: {row.failed}"

    def tables(self) -> list[Grid]:
        """Return tail perplexities at the target length, the price on short texts, comparisons to the best method."""
        return [self._grid(self.rows)]

    def _grid(
        self, rows: Sequence[Row], title: str = "", scored: str = "tail", word: str = "best"
    ) -> Grid:
        """Return the table of some rows.

        `scored` names the tokens that the perplexity is of, `word` the chosen method: `chosen` where it was chosen by
        other tokens, else `best`.
        """
        settings = self.settings
        grid = Grid(title or f"{self.title}, tail: {settings.protocol.definition('tail')}")
        grid.column("method", least=12)  # longer text is wrapped
        grid.column("docu-\nments", numeric=True)
        grid.column(f"{scored} at\n{settings.target:,}", numeric=True)
        grid.column(f"at {settings.original:,}, by\nunpatched", numeric=True)
        grid.column(f"by the\n{word}", numeric=True)
        grid.column("", least=9)
        for row in rows:
            best = row.to_best
            grid.row(
                row.label,
                f"{row.documents:,}",
                "-" if row.failed is not None else with_range(row.perplexity, row.interval, 3),
                _percent(row.short),
                "" if best is None else with_range(best.ratio, best.interval),
                verdict(row, settings, self.chosen, word),
                mark="best" if row.label == self.chosen else "control" if row.control else "",
            )
        return grid


def recipe(
    chosen: Candidate, model: Any, result: Any, source: str, description: str
) -> dict[str, Any]:
    """Return a candidate as `save_patch` writes it, with its name and origin."""
    with chosen.applied(model, 1):
        patch = get_patch(model)
    assert patch is not None
    about = {
        "name": result.kind,
        "model_types": [model.config.model_type],
        "checkpoint": result.about["model"]["name"],
        "source": source,
        "description": description,
    }
    return {**patch.config.to_dict(), "recipe": about}


def recipe_file(kind: str, recipe: dict[str, Any] | None) -> dict[str, str]:
    """Return the file of a recipe, formatted as those in the package; none without one."""
    if recipe is None:
        return {}
    return {f"{kind}_recipe.json": json.dumps(recipe, indent=2, allow_nan=False) + "\n"}


def verdict(
    row: Row, settings: TailSettings, best: str | None, word_of_best: str = "best"
) -> Field:
    """Return the comparison of a row to the best method in a word; "undecided" if it is not significant.

    With fewer than five documents, or if it left a sweep early, there is no word about it.
    """
    if row.failed is not None:
        return failure_field(row.failed)
    if row.label == best:
        return Field(word_of_best)
    bound = settings.max_regression
    if bound is not None and row.short is not None and row.short.ratio > 1 + bound:
        word = "past the bound"
    elif row.to_best is None:
        return Field("control" if row.control else "")
    elif row.left:
        word = "left early"
    elif row.documents < FEW_DOCUMENTS:
        word = TOO_FEW
    elif row.significant:
        word = "worse" if row.to_best.ratio > 1 else "better"
    else:
        word = "undecided"
    return Field(word + (", control" if row.control else ""))


def family_note(comparisons: int) -> str:
    """Describe the intervals of the ratios in a table."""
    return (
        f"those of the ratios are paired, and all {comparisons:,} comparisons that could have been made hold together "
        "in 95 % of samples (Bonferroni)"
    )


def on_short(row: Row, settings: TailSettings) -> str:
    """Return the price on short texts, as the end of a sentence."""
    return "" if row.short is None else f", {_percent(row.short)} at {settings.original:,}"


def against(control: Row, settings: TailSettings) -> str:
    """Compare the best method to a control, as a sentence."""
    if control.to_best is None:
        return f"{control.label} gave no number to compare with."
    name = {
        "none": "the unpatched model",
        TRUNCATION: f"{TRUNCATION}, which reads only the last {settings.original:,} tokens",
    }.get(control.label, control.label)
    if control.documents < FEW_DOCUMENTS:
        return f"There are {TOO_FEW} to compare it with {name}."
    if not control.significant:
        return f"It is not significantly different from {name}."
    if control.to_best.ratio > 1:
        return f"It is better than {name}."
    return f"It is worse than {name}: on these documents, no method here benefits from the longer context."


def _percent(short: Comparison | None) -> str:
    return "" if short is None else f"{100 * (short.ratio - 1):+.1f} %"


def with_range(value: float, interval: Interval | None, digits: int = 4) -> Field:
    """Return a field of a number, and below it the ends of its interval with so many digits."""
    field = Field(number(value), value=value)
    return field.append(f"\n{number_range(interval, digits)}", "aside") if interval else field
