"""The result of a run, with everything that is needed to tell whether two results may be compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from hf_posenc.evaluation.perplexity.result import MethodEntry, as_html, failed, heading
from hf_posenc.evaluation.retrieval.run import DECODES, Failure, LeftOut, RetrievalSettings
from hf_posenc.evaluation.retrieval.statistics import (
    PI_SUCCESS,
    YARN_SUCCESS,
    Cell,
    Record,
    k_max,
    passing,
    summarize,
)
from hf_posenc.evaluation.retrieval.tasks import get_task
from hf_posenc.files import finite, to_csv, to_json, write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT = 1
_PAIRS = ("interval", "first_interval")
COLUMNS = (
    *("method", "task", "length", "depth", "scale", "samples"),
    *("accuracy", "accuracy_low", "accuracy_high", "score"),
    *("first", "first_low", "first_high", "chance", "rank", "beaten", "nats", "distance", "status"),
)
"""The columns of the CSV; `depth` is empty in the rows over all depths."""


@dataclass(repr=False)
class RetrievalResult:
    """What `hf-posenc retrieval` measured.

    Attributes:
        model: What was measured (`describe_model`).
        haystack: What stood between the needles: `{"kind": "noise"}`, or the user's own text with its hash.
        settings: Tasks, lengths and the other numbers.
        original: The context length that the model was trained on, in tokens, where it is known.
        candidates: The methods, in the order of the table.
        records: What came out of every sample.
        failures: Cells without a number.
        left_out: Tasks and lengths for which there is no prompt.
        head_replay: How the scorer's probe compared with full logits.
        environment: Versions of the packages that computed.
        command: What gives this result again.
        fingerprint: Of everything that determines a number; the records lie under it.
        cells: One for each method, task and length, made from the records.
        depth_cells: One for each depth as well.
    """

    model: dict[str, Any]
    haystack: dict[str, Any]
    settings: RetrievalSettings
    original: int | None
    candidates: Sequence[MethodEntry]
    records: Sequence[Record]
    failures: Sequence[Failure]
    left_out: Sequence[LeftOut]
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
        """The number of a method in a task at a length; `None` where there is none."""
        return self._by_key.get((method, task, length))

    def by_depth(self, method: str, task: str, length: int) -> list[Cell]:
        """The same by depth, from the front to the back."""
        wanted = (method, task, length)
        return [c for c in self.depth_cells if (c.method, c.task, c.length) == wanted]

    def failure(self, method: str, task: str, length: int) -> str | None:
        """Why there is no number."""
        wanted = (method, task, length)
        found = (f.reason for f in self.failures if (f.method, f.task, f.length) == wanted)
        return next(found, None)

    def is_left_out(self, task: str, length: int) -> bool:
        """Whether the task has no prompt of this length."""
        return any((entry.task, entry.length) == (task, length) for entry in self.left_out)

    def k_max(self, method: str, task: str, length: int) -> int | None:
        """Position Interpolation's effective context at a length; see `statistics.k_max`."""
        return k_max(self.by_depth(method, task, length))

    def passing(self, method: str, task: str) -> tuple[int | None, float | None]:
        """YaRN's passkey context and accuracy; see `statistics.passing`."""
        return passing([c for c in self.cells if (c.method, c.task) == (method, task)])

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON-ready values."""
        settings = self.settings
        values = {
            "format": FORMAT,
            "kind": "retrieval",
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
        made: dict[str, Any] = finite(values)
        return made

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
        """Reads what `to_dict` wrote; everything that follows from the records is made anew."""
        return cls(
            model=dict(values["model"]),
            haystack=dict(values["haystack"]),
            settings=RetrievalSettings.from_dict(values["settings"]),
            original=values["original_max_position_embeddings"],
            candidates=[
                MethodEntry(**entry, prefix_from_one_forward=False) for entry in values["methods"]
            ],
            records=[Record(**entry) for entry in values["records"]],
            failures=[Failure(**entry) for entry in values["failures"]],
            left_out=[LeftOut(**entry) for entry in values["left_out"]],
            head_replay=values["head_replay"],
            environment=dict(values["environment"]),
            command=values["command"],
            fingerprint=values["fingerprint"],
        )

    def plot(self, value: str | None = None) -> Figure:
        """Heat maps of depth and length, one for each task and method; needs matplotlib.

        Args:
            value: `"accuracy"`, or `"beaten"`, the share of distractors that are less probable than the answer; by
                default accuracy, unless it is 0 everywhere.
        """
        from hf_posenc.evaluation.plots.retrieval import figure

        return figure(self, value)

    def _repr_html_(self) -> str:

        return to_html(self)

    def write_json(self, path: Path) -> None:
        """Writes everything."""
        write_atomically(path, to_json(self.to_dict()))

    def write_csv(self, path: Path) -> None:
        """Writes a row for each method, task and length, and one for each depth; `status` says why one is empty."""
        rows = (
            row
            for entry in self.candidates
            for task in self.settings.tasks
            for length in self.settings.lengths
            for row in self._rows(entry, task, length)
        )
        write_atomically(path, to_csv(COLUMNS, rows))

    def _rows(self, entry: MethodEntry, task: str, length: int) -> list[dict[str, Any]]:
        known = {"method": entry.label, "task": task, "length": length}
        known["scale"] = entry.scale_at(length)
        cell = self.cell(entry.label, task, length)
        if cell is None:
            short = "too short for the task" if self.is_left_out(task, length) else None
            return [{**known, "status": short or self.failure(entry.label, task, length)}]
        depths = self.by_depth(entry.label, task, length) if get_task(task).has_depth else []
        return [{**_flat(cell), **known, "status": "ok"} for cell in (cell, *depths)]


def _flat(cell: Cell) -> dict[str, Any]:
    values = dataclasses.asdict(cell)
    for name, pair in (("accuracy", cell.interval), ("first", cell.first_interval)):
        values[f"{name}_low"], values[f"{name}_high"] = pair or (None, None)
    return {name: value for name, value in values.items() if name not in _PAIRS}


def _without_prefix(entry: MethodEntry) -> dict[str, Any]:
    values = dataclasses.asdict(entry)
    del values["prefix_from_one_forward"]  # perplexity's
    return values


# The tables that a run prints, and what a reader must know beside them.


def table(result: RetrievalResult, task: str) -> Table:
    """Accuracy by method and length in one task, and how often the answer is ranked first; the best in bold."""
    settings = result.settings
    longest = _longest(result, task)
    made = Table(
        title=f"Retrieval, {task}: {get_task(task).definition}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_footer=settings.ranks,
        pad_edge=False,
        collapse_padding=True,
    )
    made.add_column("method", footer="first by chance", overflow="fold")
    best = {length: _best(result, task, length) for length in settings.lengths}
    for length in settings.lengths:
        chances = [c.chance for c in _column(result, task, length) if c.chance is not None]
        footer = percent(max(chances)) if chances else "-"
        made.add_column(heading(length, result.original), footer, justify="right", no_wrap=True)
    made.add_column(f"passes\n{YARN_SUCCESS:.0%}", justify="right", no_wrap=True)
    depths = get_task(task).has_depth and longest is not None
    if depths:
        made.add_column(f"k_max\n{PI_SUCCESS:.0%}", justify="right", no_wrap=True)
    for entry in result.candidates:
        shown = [_shown(result, entry.label, task, n, best[n]) for n in settings.lengths]
        context, _ = result.passing(entry.label, task)
        row = [*shown, Text("-" if context is None else f"{context:,}")]
        if depths and longest is not None:
            reached = result.k_max(entry.label, task, longest)
            row.append(Text("-" if reached is None else f"{reached:,}"))
        made.add_row(entry.label, *row)
    return made


def percent(share: float) -> str:
    """A share in whole percent; one digit more where it would read 0 or 100 and is not."""
    if 0 < share < 0.005 or 0.995 <= share < 1:
        return f"{share:.1%}"
    return f"{share:.0%}"


def _longest(result: RetrievalResult, task: str) -> int | None:
    fitting = (n for n in result.settings.lengths if not result.is_left_out(task, n))
    return max(fitting, default=None)


def _column(result: RetrievalResult, task: str, length: int) -> list[Cell]:
    return [cell for cell in result.cells if (cell.task, cell.length) == (task, length)]


def _best(result: RetrievalResult, task: str, length: int) -> tuple[float, float]:
    return max(
        ((c.accuracy, c.first or 0.0) for c in _column(result, task, length)), default=(2.0, 0.0)
    )


def _shown(
    result: RetrievalResult, method: str, task: str, length: int, best: tuple[float, float]
) -> Text:
    if result.is_left_out(task, length):
        return Text("-", style="dim")
    cell = result.cell(method, task, length)
    if cell is None:
        reason = result.failure(method, task, length)
        return failed(reason)
    top = best > (0, 0) and (cell.accuracy, cell.first or 0.0) == best
    text = Text(percent(cell.accuracy), style="bold" if top else "")
    text.append(f"\n{percent_range(cell.interval)}", style="dim not bold")
    if cell.first is not None and cell.first_interval is not None:
        above = cell.chance is not None and cell.first_interval[0] > cell.chance
        text.append(f"\n1st {percent(cell.first)}", style="not bold" if above else "dim not bold")
        text.append(f"\n{percent_range(cell.first_interval)}", style="dim not bold")
    return text


def percent_range(interval: tuple[float, float]) -> str:
    """Both ends of an interval of shares, in whole percent."""
    return f"{interval[0] * 100:.0f}-{interval[1] * 100:.0f}"


def notes(result: RetrievalResult) -> Iterator[str]:
    """What a reader must know beside the tables."""
    settings = result.settings
    depths, samples = len(settings.depths), settings.samples
    yield (
        f"{depths * samples} samples at every length ({depths} depths, {samples} each; seed {settings.seed}): "
        f"{DECODES[settings.decode]}. Ranges: 95 %, Wilson."
    )
    if settings.ranks:
        yield (
            f"1st: how often the answer is the most probable of {settings.distractors + 1} candidates, each behind the "
            "same prompt; dim where chance (last row) is within its range."
        )
    yield (
        f"passes {YARN_SUCCESS:.0%}: YaRN's passkey context, the longest with that accuracy. k_max {PI_SUCCESS:.0%}: "
        "Position Interpolation's effective context, the largest distance up to which at least that many are found, at "
        "the longest length."
    )
    if result.haystack.get("kind") != "noise":
        yield (
            "Haystack: your own text in the place of the noise sentences; not comparable with published numbers."
        )
    auto = next((entry for entry in result.candidates if entry.auto_scale), None)
    if auto is not None:
        yield f"(auto): scale = length / {auto.original:,}, the original length, set anew at every length."
    for task in settings.tasks:
        short = [entry for entry in result.left_out if entry.task == task]
        if short:
            yield f"-: {task} needs at least {max(e.needed for e in short):,} tokens with this tokenizer."


def reading_guide(result: RetrievalResult) -> Iterator[str]:
    """What the numbers say about a method."""
    if not result.settings.ranks:
        return
    ranked = [c for c in result.cells if c.first_interval is not None and c.chance is not None]
    for task in result.settings.tasks:
        mine = [c for c in ranked if c.task == task]
        if mine and all(c.first_interval[0] <= c.chance for c in mine):  # type: ignore[index,operator]
            yield f"{task}: no method ranks the answer first more often than chance; this model cannot do the task."
        elif mine and not any(c.accuracy for c in mine):
            yield (
                f"{task}: the model never gives an answer outright, but the ranks show whether it has seen the needle."
            )


def problems(result: RetrievalResult) -> Iterator[str]:
    """One line for every cell without a number; with any of them a run has failed."""
    reasons: dict[tuple[str, str, str], list[int]] = {}
    for failure in result.failures:
        reasons.setdefault((failure.method, failure.task, failure.reason), []).append(
            failure.length
        )
    for (method, task, reason), lengths in reasons.items():
        listed = ", ".join(f"{length:,}" for length in sorted(lengths))
        yield f"{method}: {task} failed at length {listed}: {reason}"


def to_html(result: RetrievalResult) -> str:
    """The tables and notes, for a notebook."""
    return as_html((table(result, task) for task in result.settings.tasks), notes(result))
