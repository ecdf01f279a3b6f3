"""Results of sweep and search: perplexities, the best method, the table, the recipe that `load_patch` reads."""

from __future__ import annotations

import abc
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from hf_posenc.evaluation.documents import Skipped
from hf_posenc.evaluation.grid import Field, Grid, failure_field, number, number_range
from hf_posenc.evaluation.measuring import identity
from hf_posenc.evaluation.measuring.candidates import TRUNCATION, UNPATCHED, Candidate
from hf_posenc.evaluation.measuring.result import MethodEntry
from hf_posenc.evaluation.measuring.statistics import (
    FEW_DOCUMENTS,
    NEEDED,
    TOO_FEW,
    Failure,
    Interval,
)
from hf_posenc.evaluation.measuring.store import fingerprint_of
from hf_posenc.evaluation.perplexity.protocols import Settings
from hf_posenc.evaluation.perplexity.result import PerplexityResult, record_of
from hf_posenc.evaluation.tuning import Race
from hf_posenc.evaluation.tuning.board import Board, Row
from hf_posenc.files import finite
from hf_posenc.patch.patching import get_patch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ResultT = TypeVar("ResultT", bound="TuningResult")


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
    title: ClassVar[str]
    stored: ClassVar[Sequence[str]] = ()
    """Fields of the subclass in the JSON file."""

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
    def _origin(self) -> tuple[str, str]:
        """Return the source of the recipe, and the measured perplexity of the best method in a sentence."""

    @abc.abstractmethod
    def _own(self) -> dict[str, Any]:
        """The values of `to_dict` that only this kind of result has."""

    @property
    @abc.abstractmethod
    def comparisons(self) -> int:
        """Number of comparisons with the best method that could have been made; their intervals hold together."""

    @classmethod
    def measured(
        cls: type[ResultT],
        race: Race[Any],
        candidates: Sequence[tuple[Candidate, bool]],
        own: Mapping[str, Any],
        board: Board,
    ) -> ResultT:
        """Return the result of a race with its recipe; the first of the candidates is the unpatched model."""
        whole, by_label = race.whole, {candidate.label: candidate for candidate, _ in candidates}
        documents = [document.to_dict() for document in whole.documents]
        order = {name: index for index, name in enumerate(by_label)}
        order |= {each["name"]: n for n, each in enumerate((*documents, *own.get("needles", ())))}
        records = (record for record in board.records.values() if record.method in by_label)
        result = cls(
            settings=race.settings,
            candidates=list(map(MethodEntry.of, by_label.values())),
            controls=[candidate.label for candidate, control in candidates if control],
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
            about = str(result.model["name"]), *result._origin()
            result.recipe = recipe(by_label[result.winner], whole.model, cls.kind, *about)
        return result

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

    def to_dict(self) -> dict[str, Any]:
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
        own: dict[str, Any] = finite(self._own())
        about = {"race": self.race, "controls": list(self.controls)}
        return {**described, **about, "comparisons": self.comparisons, **own}

    @classmethod
    def from_dict(cls: type[ResultT], values: Mapping[str, Any]) -> ResultT:
        """Read what `to_dict` returned; everything that follows from the records is computed again."""
        names = ("race", "controls", "source", "documents", "recipe", *cls.stored)
        return cls(
            **cls.description(values, {"skipped": Skipped, "failures": Failure}),
            settings=Settings(**values["settings"]),
            records=list(map(record_of, values["records"])),
            **{name: values[name] for name in names},
        )

    def files(self) -> dict[str, str]:
        return super().files() | recipe_file(self.kind, self.recipe)

    def figures(self) -> dict[str, Figure]:
        return {self.kind: self.plot()}

    def guide(self) -> Iterator[str]:
        return iter(())

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
        original, target = self.settings.lengths
        grid = Grid(title or f"{self.title}, tail: {self.settings.definition('tail')}")
        grid.column("method", least=12)  # longer text is wrapped
        heads = ("docu-\nments", f"{scored} at\n{target:,}", f"at {original:,}, by\nunpatched")
        for head in (*heads, f"by the\n{word}"):
            grid.column(head, numeric=True)
        grid.column("", least=9)
        for row in rows:
            grid.row(
                row.label,
                f"{row.documents:,}",
                "-" if row.failed is not None else with_range(row.perplexity, row.interval, 3),
                _percent(row.short),
                "" if row.ratio is None else with_range(row.ratio, row.ratio_interval),
                self.verdict(row, word),
                mark="best" if row.label == self.winner else "control" if row.control else "",
            )
        return grid

    def verdict(self, row: Row, word_of_best: str = "best") -> Field:
        """Return the comparison of a row to the best method in a word; "undecided" if it is not significant.

        With fewer than five documents, or if it left a sweep early, there is no word about it.
        """
        bound = self.board.max_regression
        if row.failed is not None:
            return failure_field(row.failed)
        if row.label == self.winner:
            return Field(word_of_best)
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
        original = self.settings.lengths[0]
        return "" if row.short is None else f", {_percent(row.short)} at {original:,}"

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


def recipe_file(kind: str, recipe: dict[str, Any] | None) -> dict[str, str]:
    """Return the file of a recipe, formatted as those in the package; none without one."""
    if recipe is None:
        return {}
    return {f"{kind}_recipe.json": json.dumps(recipe, indent=2, allow_nan=False) + "\n"}


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{100 * (ratio - 1):+.1f} %"


def with_range(value: float, interval: Interval | None, digits: int = 4) -> Field:
    """Return a field of a number, and below it the ends of its interval with so many digits."""
    field = Field(number(value), value=value)
    return field.append(f"\n{number_range(interval, digits)}", "aside") if interval else field
