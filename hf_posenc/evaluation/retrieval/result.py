"""The result of a retrieval run, with everything that decides whether two results are comparable."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.grid import (
    Field,
    Grid,
    Result,
    auto_scale_note,
    failure_field,
    length_head,
    listed,
    percent,
    percent_range,
)
from hf_posenc.evaluation.perplexity.result import MethodEntry, nan_if_none
from hf_posenc.evaluation.plots.retrieval import HeatMap, heat_figure
from hf_posenc.evaluation.retrieval.statistics import (
    PI_SUCCESS,
    YARN_SUCCESS,
    Cell,
    Failure,
    LeftOut,
    Record,
    k_max,
    passing,
    summarize,
)
from hf_posenc.evaluation.retrieval.tasks import DECODES, RetrievalSettings, get_task
from hf_posenc.files import finite

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT = 1
COLUMNS = (
    *("method", "task", "length", "depth", "scale", "samples"),
    *("accuracy", "accuracy_low", "accuracy_high", "score"),
    *("first", "first_low", "first_high", "chance", "rank", "beaten", "nats", "distance", "status"),
)
"""The columns of the CSV; `depth` is empty in the rows over all depths."""
VALUES = {
    "accuracy": "answers right",
    "beaten": "distractors less probable\nthan the answer (chance: 50 %)",
}
"""Attributes of `Cell` that heat maps show, with their names."""


@dataclass(repr=False, kw_only=True)
class RetrievalResult(Result):
    """Answers measured by `hf-posenc retrieval`.

    Attributes:
        model: The measured model (`describe_model`).
        haystack: The text between the needles: `{"kind": "noise"}`, or the user's own text with its hash.
        settings: Tasks, lengths and the other numbers.
        original: The context length that the model was trained on, in tokens, where it is known.
        candidates: The methods, in the order of the table.
        records: The outcome of every sample.
        failures: Cells without a number.
        left_out: Tasks and lengths for which there is no prompt.
        head_replay: Outcome of the scorer's probe, which compares it with full logits.
        environment: Versions of the packages that computed.
        command: The command that reproduces this result.
        fingerprint: Hash of everything that determines a number; the records are stored under it.
        cells: One for each method, task and length, computed from the records.
        depth_cells: One for each depth as well.
    """

    kind = "retrieval"
    columns = COLUMNS

    settings: RetrievalSettings
    candidates: Sequence[MethodEntry]
    records: Sequence[Record]
    failures: Sequence[Failure]
    left_out: Sequence[LeftOut]
    model: dict[str, Any] = field(default_factory=dict)
    haystack: dict[str, Any] = field(default_factory=dict)
    original: int | None = None
    head_replay: str = "off"
    environment: dict[str, Any] = field(default_factory=dict)
    command: str | None = None
    fingerprint: str | None = None
    cells: list[Cell] = field(init=False)
    depth_cells: list[Cell] = field(init=False)

    def __repr__(self) -> str:
        methods = ", ".join(entry.label for entry in self.candidates)
        return f"RetrievalResult({methods}; {', '.join(self.settings.tasks)}, lengths {list(self.settings.lengths)})"

    def __post_init__(self) -> None:
        self.cells = summarize(self.records, by_depth=False)
        self.depth_cells = summarize(self.records, by_depth=True)
        self._by_key = {(c.method, c.task, c.length): c for c in self.cells}

    def cell(self, method: str, task: str, length: int) -> Cell | None:
        """Return the number of a method in a task at a length; `None` where there is none."""
        return self._by_key.get((method, task, length))

    def by_depth(self, method: str, task: str, length: int) -> list[Cell]:
        """Return the numbers by depth, from the front to the back."""
        key = (method, task, length)
        return [c for c in self.depth_cells if (c.method, c.task, c.length) == key]

    def failure(self, method: str, task: str, length: int) -> str | None:
        """Return the reason why there is no number."""
        key = (method, task, length)
        reasons = (f.reason for f in self.failures if (f.method, f.task, f.length) == key)
        return next(reasons, None)

    def is_left_out(self, task: str, length: int) -> bool:
        """Return whether the task has no prompt of this length."""
        return any((entry.task, entry.length) == (task, length) for entry in self.left_out)

    def k_max(self, method: str, task: str, length: int) -> int | None:
        """Return Position Interpolation's effective context at a length; see `statistics.k_max`."""
        return k_max(self.by_depth(method, task, length))

    def passing(self, method: str, task: str) -> tuple[int | None, float | None]:
        """Return YaRN's passkey context and accuracy; see `statistics.passing`."""
        return passing([c for c in self.cells if (c.method, c.task) == (method, task)])

    def to_dict(self) -> dict[str, Any]:
        settings = self.settings
        values = {
            "format": FORMAT,
            "kind": self.kind,
            "command": self.command,
            "fingerprint": self.fingerprint,
            "model": self.model,
            "original_max_position_embeddings": self.original,
            "tasks": {name: get_task(name).definition for name in settings.tasks},
            "decode": DECODES[settings.decode],
            "settings": settings.to_dict(),
            "environment": self.environment,
            "head_replay": self.head_replay,
            "methods": [_without_prefix(entry) for entry in self.candidates],
            "haystack": self.haystack,
            "left_out": [dataclasses.asdict(entry) for entry in self.left_out],
            "summary": [dataclasses.asdict(cell) for cell in self.cells],
            "by_depth": [dataclasses.asdict(cell) for cell in self.depth_cells],
            "scores": self._scores(),
            "failures": [dataclasses.asdict(failure) for failure in self.failures],
            "records": [dataclasses.asdict(record) for record in self.records],
        }
        ready: dict[str, Any] = finite(values)
        return ready

    def _scores(self) -> list[dict[str, Any]]:
        """The papers' numbers for every method and task."""
        scores = []
        for entry in self.candidates:
            for task in self.settings.tasks:
                context, accuracy = self.passing(entry.label, task)
                reached = {
                    str(length): self.k_max(entry.label, task, length)
                    for length in self.settings.lengths
                }
                scores.append(
                    {
                        "method": entry.label,
                        "task": task,
                        "k_max": reached,
                        "passing_context": context,
                        "passing_accuracy": accuracy,
                    }
                )
        return scores

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RetrievalResult:
        """Read what `to_dict` returned; everything that follows from the records is computed again."""
        return cls(
            model=dict(values["model"]),
            haystack=dict(values["haystack"]),
            settings=RetrievalSettings.from_dict(values["settings"]),
            original=values["original_max_position_embeddings"],
            candidates=[MethodEntry(**entry) for entry in values["methods"]],
            records=[Record(**entry) for entry in values["records"]],
            failures=[Failure(**entry) for entry in values["failures"]],
            left_out=[LeftOut(**entry) for entry in values["left_out"]],
            head_replay=values["head_replay"],
            environment=dict(values["environment"]),
            command=values["command"],
            fingerprint=values["fingerprint"],
        )

    # Files

    def csv_rows(self) -> Iterator[Mapping[str, Any]]:
        """Yield a row for each method, task and length, and one for each depth."""
        for entry in self.candidates:
            for task in self.settings.tasks:
                for length in self.settings.lengths:
                    yield from self._csv_rows(entry, task, length)

    def _csv_rows(self, entry: MethodEntry, task: str, length: int) -> list[dict[str, Any]]:
        key = {"method": entry.label, "task": task, "length": length}
        key["scale"] = entry.scale_at(length)
        cell = self.cell(entry.label, task, length)
        if cell is None:
            short = "too short for the task" if self.is_left_out(task, length) else None
            return [{**key, "status": short or self.failure(entry.label, task, length)}]
        depths = self.by_depth(entry.label, task, length) if get_task(task).has_depth else []
        return [{**_flat(cell), **key, "status": "ok"} for cell in (cell, *depths)]

    # Figures

    def figures(self) -> dict[str, Figure]:
        figures = {"retrieval": self.plot("accuracy")}
        if self.settings.ranks:
            figures["retrieval_ranks"] = self.plot("beaten")
        return figures

    def plot(self, value: str | None = None) -> Figure:
        """Draw heat maps of depth and length, one for each task and method. Needs matplotlib.

        Args:
            value: `"accuracy"`, or `"beaten"`, the share of distractors that are less probable than the answer; by
                default accuracy, unless it is 0 everywhere and answers are ranked.

        Raises:
            PosencError: matplotlib is not installed, or this result does not have the value.
        """
        ranks = self.settings.ranks
        if value is None:
            hidden = ranks and not any(cell.accuracy for cell in self.cells)
            value = "beaten" if hidden else "accuracy"
        if value not in VALUES or (value == "beaten" and not ranks):
            raise PosencError(
                f"This result has no {value!r} to draw: accuracy, or beaten where answers are ranked."
            )
        maps = [
            self._heat_map(task, entry.label, value)
            for task in self.settings.tasks
            for entry in self.candidates
        ]
        return heat_figure(maps, self.settings.lengths, self.original, VALUES[value])

    def _heat_map(self, task: str, method: str, value: str) -> HeatMap:
        lengths = self.settings.lengths
        depths = self.settings.depths if get_task(task).has_depth else (None,)
        cells = {(c.depth, n): c for n in lengths for c in self.by_depth(method, task, n)}
        shares = [
            [nan_if_none(getattr(cells.get((depth, n)), value, None)) for n in lengths]
            for depth in depths
        ]
        return HeatMap(
            task,
            method,
            depths,
            shares,
            [[percent(share).removesuffix("%") for share in row] for row in shares],
            [self._missing(method, task, length) for length in lengths],
        )

    def _missing(self, method: str, task: str, length: int) -> str:
        if self.cell(method, task, length) is not None:
            return ""
        if self.is_left_out(task, length):
            return "too short"
        return failure_field(self.failure(method, task, length)).text

    # Tables

    def tables(self) -> list[Grid]:
        """Return one table per task: accuracy by method and length, and how often the answer is ranked first."""
        return [self._table(task) for task in self.settings.tasks]

    def _table(self, task: str) -> Grid:
        settings, definition = self.settings, get_task(task)
        lengths = settings.lengths
        fitting = [length for length in lengths if not self.is_left_out(task, length)]
        grid = Grid(f"Retrieval, {task}: {definition.definition}")
        grid.column("method", footer="first by chance" if settings.ranks else "")
        best: dict[int, tuple[float, float]] = {}
        for length in lengths:
            cells = [cell for cell in self.cells if (cell.task, cell.length) == (task, length)]
            best[length] = max(map(_quality, cells), default=(0.0, 0.0))
            chances = [cell.chance for cell in cells if cell.chance is not None]
            footer = percent(max(chances)) if chances else "-"
            grid.column(
                length_head(length, self.original),
                numeric=True,
                footer=footer if settings.ranks else "",
            )
        grid.column(f"passes\n{YARN_SUCCESS:.0%}", numeric=True)
        by_distance = definition.has_depth and bool(fitting)
        if by_distance:
            grid.column(f"k_max\n{PI_SUCCESS:.0%}", numeric=True)
        for entry in self.candidates:
            fields = [self._field(entry.label, task, n, best[n]) for n in lengths]
            reached = [self.passing(entry.label, task)[0]]
            if by_distance:
                reached.append(self.k_max(entry.label, task, max(fitting)))
            tokens = ["-" if length is None else f"{length:,}" for length in reached]
            grid.row(entry.label, *fields, *tokens)
        return grid

    def _field(self, method: str, task: str, length: int, best: tuple[float, float]) -> Field:
        if self.is_left_out(task, length):
            return Field("-", "none")
        cell = self.cell(method, task, length)
        if cell is None:
            return failure_field(self.failure(method, task, length))
        top = best > (0, 0) and _quality(cell) == best
        text = Field(percent(cell.accuracy), "best" if top else "")
        text.append(f"\n{percent_range(cell.interval)}", "aside")
        if cell.first is not None and cell.first_interval is not None:
            above = cell.chance is not None and cell.first_interval[0] > cell.chance
            text.append(f"\n1st {percent(cell.first)}", "" if above else "aside")
            text.append(f"\n{percent_range(cell.first_interval)}", "aside")
        return text

    def notes(self) -> Iterator[str]:
        settings = self.settings
        depths, samples = len(settings.depths), settings.samples
        yield (
            f"{depths * samples} samples at every length ({depths} depths, {samples} each; seed {settings.seed}): "
            f"{DECODES[settings.decode]}. Ranges: 95 %, Wilson."
        )
        if settings.ranks:
            yield (
                f"1st: how often the answer is the most probable of {settings.distractors + 1} candidates, each after "
                "the same prompt; dim where chance (last row) is within its range."
            )
        yield (
            f"passes {YARN_SUCCESS:.0%}: YaRN's passkey context, the longest with that accuracy. k_max "
            f"{PI_SUCCESS:.0%}: Position Interpolation's effective context, the largest distance up to which at least "
            "that many are found, at the longest length."
        )
        if self.haystack.get("kind") != "noise":
            yield (
                "Haystack: your own text instead of the noise sentences; not comparable with published numbers."
            )
        yield from auto_scale_note(self.candidates)
        for task in settings.tasks:
            needed = [entry.needed for entry in self.left_out if entry.task == task]
            if needed:
                yield f"-: {task} needs at least {max(needed):,} tokens with this tokenizer."

    def guide(self) -> Iterator[str]:
        if not self.settings.ranks:
            return
        for task in self.settings.tasks:
            ranked = [
                (cell, cell.first_interval[0] > cell.chance)
                for cell in self.cells
                if cell.task == task and cell.first_interval is not None and cell.chance is not None
            ]
            if ranked and not any(above for _, above in ranked):
                yield f"{task}: no method ranks the answer first more often than chance; this model cannot do the task."
            elif ranked and not any(cell.accuracy for cell, _ in ranked):
                yield (
                    f"{task}: the model never gives an answer outright, but the ranks show whether it has seen the "
                    "needle."
                )

    def problems(self) -> Iterator[str]:
        reasons: dict[tuple[str, str, str], list[int]] = {}
        for failure in self.failures:
            key = (failure.method, failure.task, failure.reason)
            reasons.setdefault(key, []).append(failure.length)
        for (method, task, reason), lengths in reasons.items():
            yield f"{method}: {task} failed at length {listed(sorted(lengths))}: {reason}"


def _flat(cell: Cell) -> dict[str, Any]:
    values = dataclasses.asdict(cell)
    for name, key in (("accuracy", "interval"), ("first", "first_interval")):
        values[f"{name}_low"], values[f"{name}_high"] = values.pop(key) or (None, None)
    return values


def _without_prefix(entry: MethodEntry) -> dict[str, Any]:
    values = dataclasses.asdict(entry)
    del values["prefix_from_one_forward"]  # perplexity's
    return values


def _quality(cell: Cell) -> tuple[float, float]:
    return cell.accuracy, cell.first or 0.0
