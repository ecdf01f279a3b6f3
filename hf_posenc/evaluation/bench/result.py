"""The result of a benchmark."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from hf_posenc.evaluation.bench.speed import SpeedResult
from hf_posenc.evaluation.grid import length_head, number, percent, percent_range
from hf_posenc.evaluation.measuring.statistics import Cell
from hf_posenc.evaluation.perplexity.result import (
    FEW_DOCUMENTS,
    PerplexityResult,
    as_html,
    failed,
)
from hf_posenc.evaluation.published import PublishedTable, beside, get, remarks
from hf_posenc.evaluation.retrieval import RetrievalResult
from hf_posenc.evaluation.retrieval.statistics import Cell as RetrievalCell
from hf_posenc.evaluation.retrieval.statistics import summarize
from hf_posenc.evaluation.scoring.memory import OUT_OF_MEMORY
from hf_posenc.files import finite, to_csv, to_json, write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Retrieval over several tasks and lengths as one share.


@dataclass(frozen=True)
class Pooled:
    """A share over several tasks and lengths, or why there is none.

    Attributes:
        cell: Over all samples; `None` where there are none, or one of them failed.
        failure: Why.
    """

    cell: RetrievalCell | None
    failure: str | None = None


def pooled(
    result: RetrievalResult,
    method: str,
    *,
    tasks: Collection[str] | None = None,
    lengths: Collection[int] | None = None,
) -> Pooled:
    """All samples of a method as one cell: every sample counts the same, as all tasks and lengths have as many.

    Where anything failed there is no number: a share of what is left would not be comparable.

    Args:
        result: The measured samples.
        method: The label of the method.
        tasks: Some of the tasks only.
        lengths: Some of the lengths only.
    """

    def wanted(task: str, length: int) -> bool:
        return (tasks is None or task in tasks) and (lengths is None or length in lengths)

    reasons = [f.reason for f in result.failures if f.method == method and wanted(f.task, f.length)]
    if reasons:
        return Pooled(None, OUT_OF_MEMORY if OUT_OF_MEMORY in reasons else reasons[0])
    records = [
        dataclasses.replace(record, task="", length=0)
        for record in result.records
        if record.method == method and wanted(record.task, record.length)
    ]
    if not records:
        return Pooled(None, "too short for the task")
    return Pooled(summarize(records, by_depth=False)[0])


FORMAT = 1
_OF_PROTOCOL = (
    *("perplexity", "perplexity_low", "perplexity_high"),
    *("difference", "difference_low", "difference_high", "status"),
)
_OF_RETRIEVAL = (
    *("samples", "accuracy", "accuracy_low", "accuracy_high", "first", "first_low", "first_high"),
    *("chance", "status"),
)
_OF_SPEED = ("tokens_per_second", "lowest", "highest", "ratio", "peak_bytes", "status")


@dataclass(repr=False)
class BenchResult:
    """What `hf-posenc bench` measured.

    Attributes:
        perplexity: Perplexities by method, protocol and length, and what they were measured on.
        retrieval: What was found in prompts of the same lengths; `None` where that was not measured.
        speed: The timed prefill at the longest length; `None` where that was not measured.
        suite: The suite's name.
        compare: Published tables to show beside it, by their names.
        remarks: What a reader must know of what was left out.
    """

    perplexity: PerplexityResult
    retrieval: RetrievalResult | None
    speed: SpeedResult | None
    suite: str
    compare: Sequence[str] = ()
    remarks: Sequence[str] = ()

    def __repr__(self) -> str:
        return f"BenchResult({self.suite}, {self.perplexity!r})"

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON-ready values. All but `speed` is the same whenever the same is measured again."""
        values = {
            "format": FORMAT,
            "kind": "bench",
            "suite": self.suite,
            "compare": list(self.compare),
            "remarks": list(self.remarks),
            "perplexity": self.perplexity.to_dict(),
            "retrieval": None if self.retrieval is None else self.retrieval.to_dict(),
            "speed": None if self.speed is None else self.speed.to_dict(),
        }
        made: dict[str, Any] = finite(values)
        return made

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BenchResult:
        """Reads what `to_dict` wrote."""
        retrieval, speed = values["retrieval"], values["speed"]
        return cls(
            perplexity=PerplexityResult.from_dict(values["perplexity"]),
            retrieval=None if retrieval is None else RetrievalResult.from_dict(retrieval),
            speed=None if speed is None else SpeedResult.from_dict(speed),
            suite=values["suite"],
            compare=tuple(values["compare"]),
            remarks=tuple(values["remarks"]),
        )

    def plot(self) -> Figure:
        """Perplexity by position in the text, where `prefix` was measured, else by length; needs matplotlib."""
        from hf_posenc.evaluation.plots import position_figure

        return (
            position_figure(self.perplexity) if self.perplexity.curves else self.perplexity.plot()
        )

    def heatmap(self) -> Figure | None:
        """Retrieval by length and depth of the needle, where it was measured; needs matplotlib."""
        return None if self.retrieval is None else self.retrieval.plot()

    def _repr_html_(self) -> str:

        return to_html(self)

    def _repr_markdown_(self) -> str:

        return to_markdown(self)

    def write(self, folder: Path, *, plots: bool = True) -> list[str]:
        """Writes bench.json, bench.csv, table.md and the figures, each whole or not at all.

        Args:
            folder: Where to.
            plots: Whether to draw curve.png and heatmap.png, which needs matplotlib.

        Returns:
            The names of the files.

        Raises:
            PosencError: A file cannot be written, or matplotlib is not installed.
        """
        from hf_posenc.evaluation.plots import write_figure

        write_atomically(folder / "bench.json", to_json(self.to_dict()))
        write_atomically(folder / "bench.csv", self._csv())
        write_atomically(folder / "table.md", self._repr_markdown_())
        written = ["bench.json", "bench.csv", "table.md"]
        for name, figure in (("curve.png", self.plot), ("heatmap.png", self.heatmap)):
            drawn = figure() if plots else None
            if drawn is not None:
                write_figure(drawn, folder / name)
                written.append(name)
        return written

    def _csv(self) -> str:
        """A row for each method and length: perplexities of all protocols, retrieval, and speed at the longest."""
        protocols = self.perplexity.settings.protocols
        columns = ["method", "length", "scale"]
        for prefix, names in (
            *((protocol, _OF_PROTOCOL) for protocol in protocols),
            ("retrieval", _OF_RETRIEVAL),
            ("speed", _OF_SPEED),
        ):
            columns += [f"{prefix}_{name}" for name in names]
        rows = []
        for entry in self.perplexity.candidates:
            for length in self.perplexity.settings.lengths:
                row: dict[str, Any] = {
                    "method": entry.label,
                    "length": length,
                    "scale": entry.scale_at(length),
                }
                for protocol in protocols:
                    row |= _prefixed(protocol, self._of_protocol(entry.label, protocol, length))
                row |= _prefixed("retrieval", self._of_retrieval(entry.label, length))
                row |= _prefixed("speed", self._of_speed(entry.label, length))
                rows.append(row)
        return to_csv(columns, rows)

    def _of_protocol(self, method: str, protocol: str, length: int) -> dict[str, Any]:
        cell = self.perplexity.cell(method, protocol, length)
        if cell is None:
            return {"status": self.perplexity.failure(method, protocol, length)}
        low, high = cell.interval or (None, None)
        values = (cell.perplexity, low, high, *difference(cell))
        status = "ok" if math.isfinite(cell.nats) else "not finite"
        return dict(zip(_OF_PROTOCOL, (*values, status), strict=True))

    def _of_retrieval(self, method: str, length: int) -> dict[str, Any]:
        if self.retrieval is None:
            return {}
        found = pooled(self.retrieval, method, lengths=[length])
        if found.cell is None:
            return {"status": found.failure}
        cell = found.cell
        first = cell.first_interval or (None, None)
        values = (cell.samples, cell.accuracy, *cell.interval, cell.first, *first, cell.chance)
        return dict(zip(_OF_RETRIEVAL, (*values, "ok"), strict=True))

    def _of_speed(self, method: str, length: int) -> dict[str, Any]:
        if self.speed is None or length != self.speed.length:
            return {}
        cell = self.speed.cell(method)
        values = {name: getattr(cell, name) for name in _OF_SPEED[:-1]}
        return {**values, "status": cell.failed or "ok"}


def difference(cell: Cell) -> tuple[float | None, float | None, float | None]:
    """A cell's mean loss less the baseline's, in nats per token, and the ends of its paired interval."""
    low, high = cell.ratio_interval or (None, None)
    return _log(cell.ratio), _log(low), _log(high)


def _log(ratio: float | None) -> float | None:
    if ratio is None:
        return None
    return math.log(ratio) if ratio > 0 else -math.inf


def _prefixed(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}_{name}": value for name, value in values.items()}


# The table of a benchmark, and what a reader must know beside it.


BOUND = 1000.0
"""Perplexities above are shown as papers do; the JSON has them exactly."""

GIB = 2**30


def table(result: BenchResult) -> Table:
    """Methods against lengths: a block for every protocol; retrieval, speed and memory at the right of the first.

    A field has the perplexity, its interval, and the paired difference to the first method in parentheses.
    """
    measured = result.perplexity
    lengths, settings = measured.settings.lengths, measured.settings
    made = _empty(f"Benchmark, suite {result.suite}: perplexity by method and context length")
    made.add_column("method", overflow="fold")  # what gives way on a narrow terminal
    for length in lengths:
        made.add_column(length_head(length, measured.original), justify="right", no_wrap=True)
    for name in _beside_headings(result):
        made.add_column(name, justify="right", no_wrap=True)
    for place, protocol in enumerate(settings.protocols):
        if place:
            made.add_section()
        made.add_row(Text(protocol, style="bold italic"))
        lowest = {length: _lowest(result, protocol, length) for length in lengths}
        for entry in measured.candidates:
            fields = [_perplexity(result, entry.label, protocol, n, lowest[n]) for n in lengths]
            more = [] if place else _beside(result, entry.label)
            made.add_row(entry.label, *fields, *more)
    return made


def task_table(result: BenchResult) -> Table | None:
    """Retrieval by task, over all lengths; `None` with fewer than two tasks."""
    found = result.retrieval
    if found is None or len(found.settings.tasks) < 2:
        return None
    made = _empty(f"Retrieval by task, prompts of up to {found.settings.lengths[-1]:,} tokens")
    made.add_column("method", overflow="fold")
    for task in found.settings.tasks:
        made.add_column(task, justify="right", no_wrap=True)
    for entry in found.candidates:
        fields = [_share(found, entry.label, [task]) for task in found.settings.tasks]
        made.add_row(entry.label, *fields)
    return made


def published(result: BenchResult) -> list[tuple[PublishedTable, Table]]:
    """The published tables that were asked for, beside the perplexities."""
    return [(wanted, beside(wanted, result.perplexity)) for wanted in map(get, result.compare)]


def tables(result: BenchResult) -> Iterator[Table]:
    """All of them, in the order in which they are shown."""
    yield table(result)
    by_task = task_table(result)
    if by_task is not None:
        yield by_task
    for _, made in published(result):
        yield made


def notes(result: BenchResult) -> Iterator[str]:
    """What a reader must know beside the tables."""
    measured, settings = result.perplexity, result.perplexity.settings
    baseline, count = measured.candidates[0].label, len(measured.documents)
    for protocol in settings.protocols:
        yield f"{protocol}: {settings.definition(protocol)}."
    yield (
        f"In each field the perplexity over {count} document{'s' * (count != 1)}, its 95 % bootstrap interval over "
        f"documents (seed {settings.seed}), and in parentheses the difference in log-perplexity (nats per token) to "
        f"{baseline} on the same documents; *: the paired 95 % interval of that difference leaves out 0."
    )
    if any(_above(cell) for cell in measured.cells):
        yield f">1e3: above {BOUND:,.0f}; bench.json has the number."
    if count < FEW_DOCUMENTS:
        yield f"Fewer than {FEW_DOCUMENTS} documents: the intervals say little."
    yield from result.remarks
    auto = next((entry for entry in measured.candidates if entry.auto_scale), None)
    if auto is not None:
        yield f"(auto): scale = length / {auto.original:,}, the trained length, set anew at every length."
    yield from _about_retrieval(result)
    yield from _about_speed(result)
    for wanted in result.compare:
        yield from remarks(get(wanted))
    yield from measured.guide()


def problems(result: BenchResult) -> Iterator[str]:
    """One line for everything that has no number; with any of them a run has failed."""
    yield from result.perplexity.problems()
    if result.retrieval is not None:
        yield from result.retrieval.problems()
    if result.speed is not None:
        for cell in result.speed.cells:
            if cell.failed is not None:
                yield f"{cell.method}: the prefill failed at length {result.speed.length:,}: {cell.failed}"


def to_html(result: BenchResult) -> str:
    """The tables and notes, for a notebook."""
    return as_html(tables(result), notes(result), width=180)


def _empty(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )


def _perplexity(
    result: BenchResult, method: str, protocol: str, length: int, lowest: float
) -> Text:
    cell = result.perplexity.cell(method, protocol, length)
    if cell is None:
        return failed(result.perplexity.failure(method, protocol, length))
    text = Text(_bounded(cell.perplexity), style="bold" if cell.perplexity == lowest else "")
    if cell.interval is not None and math.isfinite(cell.perplexity):
        low, high = (_bounded(end, 3) for end in cell.interval)
        text.append(f"\n{low}-{high}", style="dim not bold")
    change, *_ = difference(cell)
    if change is not None and math.isfinite(change) and method != _baseline(result):
        shown = round(change, 3) or 0.0  # no -0.000
        text.append(f"\n({shown:+.3f}){'*' * bool(cell.differs)}", style="not bold")
    return text


def _baseline(result: BenchResult) -> str:
    return result.perplexity.candidates[0].label


def _bounded(value: float, digits: int = 4) -> str:
    return ">1e3" if value > BOUND else number(value, digits)


def _above(cell: Cell) -> bool:
    return any(value > BOUND for value in (cell.perplexity, *(cell.interval or ())))


def _lowest(result: BenchResult, protocol: str, length: int) -> float:
    cells = result.perplexity.cells
    values = [c.perplexity for c in cells if (c.protocol, c.length) == (protocol, length)]
    return min((value for value in values if math.isfinite(value)), default=math.nan)


def _beside_headings(result: BenchResult) -> list[str]:
    headings = []
    if result.retrieval is not None:
        tasks, longest = result.retrieval.settings.tasks, result.retrieval.settings.lengths[-1]
        name = tasks[0] if len(tasks) == 1 else "retrieval"
        headings.append(f"{name}\n≤{longest:,}")
    if result.speed is not None:
        headings += [f"{name}\n@{result.speed.length:,}" for name in ("tok/s", "GiB")]
    return headings


def _beside(result: BenchResult, method: str) -> list[Text]:
    fields = []
    if result.retrieval is not None:
        fields.append(_share(result.retrieval, method, None))
    if result.speed is not None:
        cell = result.speed.cell(method)
        if cell.tokens_per_second is None:
            return [*fields, failed(cell.failed), failed(cell.failed)]
        speed = Text(f"{cell.tokens_per_second:,.0f}")
        if cell.ratio is not None and method != _baseline(result):
            speed.append(f"\nx{cell.ratio:.2f}", style="dim")
        memory = "-" if cell.peak_bytes is None else number(cell.peak_bytes / GIB, 3)
        fields += [speed, Text(memory)]
    return fields


def _share(result: RetrievalResult, method: str, tasks: list[str] | None) -> Text:
    found = pooled(result, method, tasks=tasks)
    if found.cell is None:
        left_out = not any(failure.method == method for failure in result.failures)
        return Text("-", style="dim") if left_out else failed(found.failure)
    cell = found.cell
    text = Text(percent(cell.accuracy))
    text.append(f"\n{percent_range(cell.interval)}", style="dim")
    if cell.first is not None and cell.first_interval is not None and cell.chance is not None:
        above = cell.first_interval[0] > cell.chance
        text.append(f"\n1st {percent(cell.first)}{'*' * above}")
    return text


def _about_retrieval(result: BenchResult) -> Iterator[str]:
    if result.retrieval is None:
        return
    settings = result.retrieval.settings
    count = len(settings.depths) * settings.samples
    cell = next(
        (
            p.cell
            for e in result.retrieval.candidates
            if (p := pooled(result.retrieval, e.label)).cell
        ),
        None,
    )
    samples = "" if cell is None else f", {cell.samples} in all"
    first = ""
    if cell is not None and cell.chance is not None:
        first = (
            f" 1st: how often the right answer is the most probable of {settings.distractors + 1}; *: more often than "
            f"chance ({percent(cell.chance)})."
        )
    yield (
        f"Retrieval: answers that are right, of {', '.join(settings.tasks)} at all lengths ({count} samples each"
        f"{samples}), with a 95 % Wilson interval.{first}"
    )
    for task in settings.tasks:
        short = [entry for entry in result.retrieval.left_out if entry.task == task]
        if short:
            lengths = ", ".join(f"{entry.length:,}" for entry in short)
            yield f"{task} has no prompt as short as {lengths} tokens."


def _about_speed(result: BenchResult) -> Iterator[str]:
    speed = result.speed
    if speed is None:
        return
    threads = (
        "" if speed.threads is None else f", {speed.threads} thread{'s' * (speed.threads != 1)}"
    )
    replays = result.perplexity.head_replay != "off"
    logits = "the last token" if replays else "every token, as this model cannot do with fewer"
    yield (
        f"tok/s: prefill of {speed.length:,} tokens (one forward without a key-value cache, logits of {logits}), "
        f"median of {len(speed.rounds)} after a warm-up each, methods in turn, on {speed.device}{threads}; x: times as "
        f"fast as {_baseline(result)}, median over the rounds."
    )
    if speed.memory is not None:
        yield f"GiB: {speed.memory}, in the timed forward."
    for cell in speed.cells:
        if cell.prefill is not None:
            yield f"{cell.method}: prefill in pieces of {cell.prefill:,} tokens."


# A benchmark as Markdown, to be pasted into a pull request or a model card.


def to_markdown(result: BenchResult) -> str:
    """The tables, what a reader must know, and the command that gives them again."""
    return "\n".join(_lines(result)) + "\n"


def _lines(result: BenchResult) -> Iterator[str]:
    measured = result.perplexity
    model, versions = measured.model, measured.environment
    yield f"# {model['name']}, suite {result.suite}"
    yield ""
    trained = f", trained at {measured.original:,} tokens" if measured.original else ""
    yield (
        f"{model['class']}, {model['parameters'] / 1e6:,.1f} M parameters{trained}; {model['dtype']} on "
        f"{model['device']}, {model['attention']} attention; hf-posenc {versions['hf-posenc']}, torch "
        f"{versions['torch']}, transformers {versions['transformers']}."
    )
    yield ""
    yield from table_lines(table(result))
    by_task = task_table(result)
    shown = [] if by_task is None else [by_task]
    for made in (*shown, *(made for _, made in published(result))):
        yield ""
        yield f"## {made.title}"
        yield ""
        yield from table_lines(made)
    yield ""
    for line in notes(result):
        yield f"- {_escaped(line)}"
    if measured.command is not None:
        yield ""
        yield "To do it again:"
        yield ""
        yield "```bash"
        yield measured.command
        yield "```"


def table_lines(made: Table) -> Iterator[str]:
    """A table of rich as one of Markdown: lines within a field are kept, the rest of its looks but bold is not."""
    heads = [_field(column.header) for column in made.columns]
    yield _row(heads)
    yield _row(["---:" if column.justify == "right" else "---" for column in made.columns])
    for fields in zip(*(column.cells for column in made.columns), strict=True):
        yield _row([_field(field) for field in fields])


def _row(fields: list[str]) -> str:
    return f"| {' | '.join(fields)} |"


def _field(value: object) -> str:
    plain = value.plain if isinstance(value, Text) else str(value)
    first, *others = plain.split("\n")
    shown = _escaped(first)
    if isinstance(value, Text) and "bold" in str(value.style) and first:
        shown = f"**{shown}**"
    return "<br>".join((shown, *map(_escaped, others)))


def _escaped(text: str) -> str:
    """The same text, with nothing in it that Markdown would take for its own here (underscores stand within words)."""
    for letter in "\\*|<>`":
        text = text.replace(letter, f"\\{letter}")
    return text
