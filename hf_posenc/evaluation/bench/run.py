"""Benchmark of methods on one model: perplexity, retrieval and the speed of the prefill, in one table."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.bench.suites import Suite, get_suite
from hf_posenc.evaluation.device.speed import SpeedResult, SpeedRun, window_of
from hf_posenc.evaluation.documents import Entry
from hf_posenc.evaluation.documents.source import Source
from hf_posenc.evaluation.grid import (
    Field,
    Grid,
    Result,
    auto_scale_note,
    escaped,
    failure_field,
    length_head,
    listed,
    number,
    number_range,
    percent,
    percent_range,
    to_markdown,
)
from hf_posenc.evaluation.measuring.candidates import (
    original_length,
    parse_candidates,
    within_reach,
)
from hf_posenc.evaluation.measuring.execute import Measurement, Progress, silent
from hf_posenc.evaluation.measuring.store import ALONE, Shard
from hf_posenc.evaluation.options import (
    BenchOptions,
    PerplexityOptions,
    ProtocolOptions,
    output_folder,
    with_fields,
)
from hf_posenc.evaluation.perplexity import run as measurement
from hf_posenc.evaluation.perplexity.result import COLUMNS, PerplexityResult
from hf_posenc.evaluation.plots import position_figure
from hf_posenc.evaluation.retrieval.result import Cell as RetrievalCell
from hf_posenc.evaluation.retrieval.result import (
    Failure,
    Record,
    RetrievalResult,
    summarize,
)
from hf_posenc.evaluation.retrieval.run import RetrievalRun
from hf_posenc.evaluation.retrieval.tasks import RetrievalSettings
from hf_posenc.evaluation.scoring.memory import OUT_OF_MEMORY
from hf_posenc.files import finite, to_csv
from hf_posenc.model.unwrapping import unwrap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT = 1
GIB = 2**30

_PARTS: dict[str, Any] = {
    "perplexity": PerplexityResult,
    "retrieval": RetrievalResult,
    "speed": SpeedResult,
}


def pooled(
    result: RetrievalResult, method: str, tasks: Collection[str] | None = None
) -> RetrievalCell | str:
    """Pool the samples of a method in some tasks, which have equally many, at all lengths.

    A failure leaves no number but its reason: a share of the remaining samples would not be comparable.
    """
    tasks = result.settings.tasks if tasks is None else tasks

    def selected(entry: Failure | Record) -> bool:
        return entry.method == method and entry.task in tasks

    reasons = [failure.reason for failure in result.failures if selected(failure)]
    if reasons:
        return OUT_OF_MEMORY if OUT_OF_MEMORY in reasons else reasons[0]
    records = [dataclasses.replace(r, task="", length=0) for r in result.records if selected(r)]
    return summarize(records, by_depth=False)[0] if records else "too short for the task"


@dataclass(repr=False, kw_only=True)
class BenchResult(Result):
    """Result of `hf-posenc bench`.

    Attributes:
        retrieval: Retrieval in prompts of the same lengths; `None` if it was not measured.
        speed: The timed prefill at the longest length; `None` if it was not measured.
        remarks: Notes about parts that were left out.
    """

    kind = "bench"
    columns = COLUMNS
    formats = ("png",)
    width = 180

    perplexity: PerplexityResult
    suite: str
    retrieval: RetrievalResult | None = None
    speed: SpeedResult | None = None
    remarks: Sequence[str] = ()

    def __repr__(self) -> str:
        return f"BenchResult({self.suite}, {self.perplexity!r})"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON-ready values. All but `speed` is deterministic."""
        values: dict[str, Any] = {"format": FORMAT, "kind": self.kind, "suite": self.suite}
        parts = {name: getattr(self, name) for name in _PARTS}
        values |= {"remarks": self.remarks}
        values |= {name: part and part.to_dict() for name, part in parts.items()}
        ready: dict[str, Any] = finite(values)
        return ready

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BenchResult:
        """Read the values of `to_dict`."""
        parts = {n: values[n] and kind.from_dict(values[n]) for n, kind in _PARTS.items()}
        return cls(**parts, suite=values["suite"], remarks=values["remarks"])

    def files(self) -> dict[str, str]:
        """Return the text files: the CSV file has the perplexities, `retrieval.csv` the answers."""
        files = {**super().files(), "table.md": self._repr_markdown_()}
        if self.retrieval is not None:
            rows = self.retrieval.csv_rows()
            files["retrieval.csv"] = to_csv(list(self.retrieval.columns), rows)
        return files

    def csv_rows(self) -> Iterable[Mapping[str, Any]]:
        return self.perplexity.csv_rows()

    def _repr_markdown_(self) -> str:
        """A page for a pull request or a model card: tables, notes, and the command that reproduces them."""
        measured = self.perplexity
        model, versions = measured.model, measured.environment
        trained = f", trained at {measured.original:,} tokens" if measured.original else ""
        about = (
            f"{model['class']}, {model['parameters'] / 1e6:,.1f} M parameters{trained}; {model['dtype']} on "
            f"{model['device']}, {model['attention']} attention; hf-posenc {versions['hf-posenc']}, torch "
            f"{versions['torch']}, transformers {versions['transformers']}.\n"
        )
        first, *others = self.tables()
        lines = [
            *(f"# {model['name']}, suite {self.suite}\n", about, to_markdown(first)),
            *(f"\n## {grid.title}\n\n{to_markdown(grid)}" for grid in others),
            *("", *(f"- {escaped(line)}" for line in self.notes())),
        ]
        if measured.command is not None:
            lines.append(f"\nTo reproduce it:\n\n```bash\n{measured.command}\n```")
        return "\n".join(lines) + "\n"

    def figures(self) -> dict[str, Figure]:
        heatmap = self.heatmap()
        return {"curve": self.plot(), **({"heatmap": heatmap} if heatmap else {})}

    def plot(self) -> Figure:
        """Draw perplexity by position in the text if `prefix` was measured, else by length. Needs matplotlib."""
        measured = self.perplexity
        return position_figure(measured) if measured.curves else measured.plot()

    def heatmap(self) -> Figure | None:
        """Draw retrieval by length and depth of the needle, if it was measured. Needs matplotlib."""
        return None if self.retrieval is None else self.retrieval.plot()

    def tables(self) -> list[Grid]:
        """Return the main table, and retrieval by task if there are several."""
        retrieval = self.retrieval
        if retrieval is None or len(retrieval.settings.tasks) == 1:
            return [self.table()]
        tasks, longest = retrieval.settings.tasks, retrieval.settings.lengths[-1]
        grid = Grid.of(f"Retrieval by task, prompts of up to {longest:,} tokens", "method")
        for task in tasks:
            grid.column(task, numeric=True)
        for entry in retrieval.candidates:
            grid.row(entry.label, *(_share(retrieval, entry.label, [task]) for task in tasks))
        return [self.table(), grid]

    def table(self) -> Grid:
        """Return methods against lengths: a block per protocol; retrieval, speed and memory beside the first.

        A field has the perplexity, its interval, and the paired difference to the first method in parentheses.
        """
        measured = self.perplexity
        lengths, protocols = measured.settings.lengths, measured.settings.protocols
        title = f"Benchmark, suite {self.suite}: perplexity by method and context length"
        grid = Grid.of(title, "method")
        heads = [length_head(length, measured.original) for length in lengths]
        if self.retrieval is not None:
            tasks, longest = self.retrieval.settings.tasks, self.retrieval.settings.lengths[-1]
            heads.append(f"{tasks[0] if len(tasks) == 1 else 'retrieval'}\n≤{longest:,}")
        if self.speed is not None:
            heads += [f"{name}\n@{self.speed.length:,}" for name in ("tok/s", "GiB")]
        for head in heads:
            grid.column(head, numeric=True)
        for protocol in protocols:
            first = protocol == protocols[0]
            grid.row(Field(protocol, "heading"), rule=not first)
            for entry in measured.candidates:
                fields = [self._perplexity(entry.label, protocol, length) for length in lengths]
                grid.row(entry.label, *fields, *(self._beside(entry.label) if first else ()))
        return grid

    def _perplexity(self, method: str, protocol: str, length: int) -> Field:
        measured = self.perplexity
        cell = measured.cell(method, protocol, length)
        if cell is None:
            return failure_field(measured.failure(method, protocol, length))
        lowest = cell.perplexity == measured.lowest(protocol, length)
        field = Field(number(cell.perplexity), "best" if lowest else "", cell.perplexity)
        if cell.interval is not None and math.isfinite(cell.perplexity):
            field.append(f"\n{number_range(cell.interval, 3)}", "aside")
        compared = cell.ratio is not None and 0 < cell.ratio < math.inf
        if compared and method != measured.candidates[0].label:
            rounded = round(math.log(cell.ratio or 1), 3) or 0.0  # no -0.000
            field.append(f"\n({rounded:+.3f}){'*' * bool(cell.differs)}")
        return field

    def _beside(self, method: str) -> Iterator[Field]:
        """Yield retrieval, speed and memory of a method."""
        if self.retrieval is not None:
            yield _share(self.retrieval, method, None)
        if self.speed is not None:
            row = self.speed.row(method)
            if row.tokens_per_second is None:
                yield from [failure_field(row.failed)] * 2
                return
            speed = Field(f"{row.tokens_per_second:,.0f}")
            if row.speedup is not None and method != self.speed.methods[0]:
                speed.append(f"\nx{row.speedup:.2f}", "aside")
            yield speed
            yield Field("-" if row.peak_bytes is None else number(row.peak_bytes / GIB, 3))

    def notes(self) -> Iterator[str]:
        measured, settings = self.perplexity, self.perplexity.settings
        count, baseline = len(measured.documents), measured.candidates[0].label
        for protocol in settings.protocols:
            yield f"{protocol}: {settings.definition(protocol)}."
        yield (
            f"In each field the perplexity over {count} document{'s' * (count != 1)}, its 95 % interval over "
            f"documents, and in parentheses the difference in log-perplexity (nats per token) "
            f"to {baseline} on the same documents; *: its paired interval excludes 0 (all of a column "
            "hold together in 95 % of samples)."
        )
        yield from measured.sample_sizes()
        yield from self.remarks
        yield from auto_scale_note(measured.candidates)
        if self.retrieval is not None:
            yield from _retrieval_notes(self.retrieval)
        if self.speed is not None:
            yield from _speed_notes(self.speed, measured.head_replay != "off")
        yield from measured.guide()

    def problems(self) -> Iterator[str]:
        yield from self.perplexity.problems()
        if self.retrieval is not None:
            yield from self.retrieval.problems()
        for row in map(self.speed.row, self.speed.methods) if self.speed is not None else ():
            if row.failed is not None:
                yield f"{row.method}: the prefill failed at length {row.length:,}: {row.failed}"


def _share(result: RetrievalResult, method: str, tasks: list[str] | None) -> Field:
    cell = pooled(result, method, tasks)
    if isinstance(cell, str):
        left_out = not any(failure.method == method for failure in result.failures)
        return Field("-", "none") if left_out else failure_field(cell)
    field = Field(percent(cell.accuracy)).append(f"\n{percent_range(cell.interval)}", "aside")
    if cell.first is not None and cell.first_interval is not None and cell.chance is not None:
        above = cell.first_interval[0] > cell.chance
        field.append(f"\n1st {percent(cell.first)}{'*' * above}")
    return field


def _retrieval_notes(result: RetrievalResult) -> Iterator[str]:
    settings = result.settings
    count = len(settings.depths) * settings.samples
    yield (
        f"Retrieval: share of right answers to {', '.join(settings.tasks)} at all lengths ({count} samples each), with "
        "a 95 % Wilson interval."
    )
    if settings.ranks:
        yield (
            f"1st: how often the right answer is the most probable of {settings.distractors + 1} (fewer where the task "
            "offers fewer); *: more often than chance."
        )
    for task in settings.tasks:
        short = [entry.length for entry in result.left_out if entry.task == task]
        if short:
            yield f"{task} has no prompt as short as {listed(short)} tokens."


def _speed_notes(speed: SpeedResult, replays: bool) -> Iterator[str]:
    count = speed.threads
    threads = "" if count is None else f", {count} thread{'s' * (count != 1)}"
    logits = "the last token" if replays else "every token, as this model cannot do with fewer"
    yield (
        f"tok/s: prefill of {speed.length:,} tokens (one forward without a key-value cache, logits of {logits}), "
        f"median of {len(speed.rounds)} after a warm-up each, methods in turn, on {speed.device}{threads}; x: times as "
        f"fast as {speed.methods[0]}, median over the rounds."
    )
    if speed.memory is not None:
        yield f"GiB: {speed.memory}, in the timed forward."
    for method in speed.methods:
        if (size := speed.pieces(method)) is not None:
            yield f"{method}: prefill in pieces of {size:,} tokens."


# The measurement.


def suite_lengths(suite: Suite, original: int | None, target: int | None = None) -> tuple[int, ...]:
    """Return the lengths of a suite for a model: doublings of the trained length, the target last."""
    if original is None:
        raise PosencError("The model's config names no context length: give --lengths.")
    if target is not None and target < original:
        raise PosencError(
            f"--target-length {target}: the model was trained at {original} tokens already. Give a longer one, or "
            "--lengths to measure short texts."
        )
    last = original * suite.reach if target is None else target
    doublings = [original]
    while doublings[-1] * 2 < last:
        doublings.append(doublings[-1] * 2)
    every = [length for length in doublings if length < last] + [last]
    count = len(every) if suite.lengths is None else min(suite.lengths, len(every))
    step = (len(every) - 1) / max(1, count - 1)
    return tuple(every[len(every) - 1 - round(index * step)] for index in reversed(range(count)))


@dataclass
class BenchJob:
    """Benchmark whose model, documents and prompts are ready.

    Processes share `perplexity` and, if a task has prompts of these lengths, `retrieval`; one of them times the
    prefill. `about` are the other fields of the result, `missing` the items that other processes have not stored yet.
    """

    perplexity: measurement.PerplexityRun
    shared: Mapping[str, Measurement[Any, Any]]
    speed: SpeedRun | None
    about: Mapping[str, Any]
    missing: int = 0

    @property
    def total(self) -> int:
        """Number of items that are shared."""
        return sum(run.total for run in self.shared.values())

    def run(
        self,
        folder: Path | None = None,
        shard: Shard = ALONE,
        progress: Progress = silent,
        waiting: Callable[[int], None] = silent,
    ) -> BenchResult | None:
        """Measure this process's share of what is missing, as `Measurement.run`; the last process times the prefill."""
        counted = {name: part.work(shard.mine(part.items)) for name, part in self.shared.items()}
        if self.speed is not None:
            counted["speed"] = self.speed.work(self.speed.items)
        work = {name: sum(each.values()) for name, each in counted.items()}
        ends = dict(zip(work, itertools.accumulate(work.values()), strict=True))

        def report(name: str, label: str, done: int, total: int) -> None:
            shown = f"{name}, {label}" if label else name
            progress(shown, ends[name] - (total - done), sum(work.values()))

        results: dict[str, Any] = {
            name: part.run(folder, shard, partial(report, name), waiting)
            for name, part in self.shared.items()
        }
        self.missing = sum(part.missing for part in self.shared.values())
        if None in results.values():
            return None
        if self.speed is not None:
            results["speed"] = self.speed.run(folder, progress=partial(report, "speed"))
        return BenchResult(**results, **self.about)


def bench(
    model: nn.Module,
    tokenizer: Any,
    documents: Iterable[str | Entry] | None = None,
    options: BenchOptions | None = None,
    *,
    output: Path | str | None = None,
    progress: Progress = silent,
    **fields: Any,
) -> BenchResult:
    """Measure methods against each other: perplexity, retrieval, speed and memory.

    Each method is patched in and undone, so the model is unchanged at the end.

    Args:
        model: A causal language model of transformers.
        tokenizer: Its tokenizer.
        documents: Texts, or the entries of a reader of `hf_posenc.evaluation.documents`; by default the held-out
            modules of the standard library.
        options: The suite, and whatever differs from it.
        output: Folder of the records: an interrupted call, made again, resumes. `BenchResult.write` writes tables and
            figures.
        progress: Called after every forward with the part and the method, operations done and in all.
        **fields: Fields of `BenchOptions` that replace those of `options`, such as `methods` or `suite`.

    Returns:
        The results of the three parts, with a common table.

    Raises:
        PosencError: Options exclude each other, or no document can be used.
    """
    folder = output_folder(output, progress)
    options = with_fields(BenchOptions, options, fields)
    get_suite(options.suite)
    unwrap(model)  # raises for what is no model
    source = Source() if documents is None else Source.of(documents)
    job = prepare(model, tokenizer, source, options)
    result = job.run(folder, progress=progress)
    assert result is not None
    return result


def prepare(
    model: nn.Module,
    tokenizer: Any,
    source: Source,
    options: BenchOptions,
    *,
    name: str | None = None,
    command: str | None = None,
) -> BenchJob:
    """Check the methods against the model, read the documents and lay out the prompts."""
    suite = get_suite(options.suite).replaced(options)
    lengths, target = options.lengths, options.target_length
    if not lengths:
        candidates = [candidate.checked(model) for candidate in parse_candidates(suite.methods)]
        lengths = suite_lengths(suite, original_length(model, candidates), target)
        lengths = within_reach(model, candidates, lengths, given=target is not None)
    shared = {field.name: getattr(options, field.name) for field in fields(ProtocolOptions)}
    shared |= {"limit": suite.documents, "methods": suite.methods, "lengths": lengths}
    run = measurement.prepare(
        model, tokenizer, source, PerplexityOptions(**shared), name=name, command=command
    )
    remarks, settings = [], run.settings
    if run.read < suite.documents:
        remarks.append(f"{run.read} documents are long enough; {suite.documents} were requested.")
    metadata = {name: run.metadata[name] for name in ("model", "original", "command")}
    parts: dict[str, Measurement[Any, Any]] = {"perplexity": run}
    if suite.tasks:
        prompts = RetrievalSettings(
            lengths=settings.lengths,
            tasks=suite.tasks,
            depths=suite.depths,
            samples=suite.samples,
            seed=options.seed,
            chunk=settings.chunk,
        )
        special, noise = run.special.tolist(), {**metadata, "haystack": {"kind": "noise"}}
        try:
            parts["retrieval"] = RetrievalRun(
                model, tokenizer, run.candidates, prompts, special=special, metadata=noise
            )
        except PosencError as error:
            remarks.append(f"No retrieval: {error}")
    speed = None
    if suite.rounds:
        speed = SpeedRun(
            model,
            window_of(run.documents, settings.lengths[-1], run.special),
            run.candidates,
            rounds=suite.rounds,
            chunk=settings.chunk,
            prefill=settings.prefill,
            metadata=metadata,
        )
    about = {"suite": options.suite, "remarks": tuple(remarks)}
    return BenchJob(run, parts, speed, about)
