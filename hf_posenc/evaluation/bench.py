"""Benchmark of methods on one model: perplexity, retrieval and the speed of the prefill, in one table."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from torch import nn

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.device.result import to_page
from hf_posenc.evaluation.device.run import SpeedResult, SpeedRun, window_of
from hf_posenc.evaluation.documents import Entry
from hf_posenc.evaluation.documents.source import Source
from hf_posenc.evaluation.grid import Grid, Result
from hf_posenc.evaluation.measuring.candidates import checked_candidates, within_reach
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
from hf_posenc.evaluation.retrieval.result import RetrievalResult
from hf_posenc.evaluation.retrieval.run import RetrievalRun
from hf_posenc.evaluation.retrieval.tasks import RetrievalSettings
from hf_posenc.evaluation.suites import Suite, get_suite
from hf_posenc.files import to_csv
from hf_posenc.model.unwrapping import unwrap

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(repr=False, kw_only=True)
class BenchResult(Result):
    """Result of `hf-posenc bench`: the tables and notes of its parts, one after the other.

    All but `speed` is deterministic.

    Attributes:
        retrieval: Retrieval in prompts of the same lengths; `None` if it was not measured.
        speed: The timed prefill at the longest length; `None` if it was not measured.
        remarks: Notes about parts that were left out.
    """

    kind = "bench"
    columns = COLUMNS
    formats = ("png",)
    _stored = ("suite", "remarks")
    _parts: ClassVar[Mapping[str, type[Any]]] = {
        "perplexity": PerplexityResult,
        "retrieval": RetrievalResult,
        "speed": SpeedResult,
    }

    perplexity: PerplexityResult
    suite: str
    retrieval: RetrievalResult | None = None
    speed: SpeedResult | None = None
    remarks: Sequence[str] = ()

    def __repr__(self) -> str:
        return f"BenchResult({self.suite}, {self.perplexity!r})"

    def files(self) -> dict[str, str]:
        """Return the text files: `bench.csv` has the perplexities, `bench_retrieval.csv` the answers."""
        files = {**super().files(), "table.md": self._repr_markdown_()}
        if self.retrieval is not None:
            rows = self.retrieval.csv_rows()
            files["bench_retrieval.csv"] = to_csv(list(self.retrieval.columns), rows)
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
            f"{versions['torch']}, transformers {versions['transformers']}."
        )
        head, lines = f"# {model['name']}, suite {self.suite}", (*self.notes(), *self.guide())
        return to_page(f"{head}\n\n{about}", self.tables(), lines, measured.command)

    def figures(self) -> dict[str, Figure]:
        figures = {"curve": self.plot(), "heatmap": self.heatmap()}
        return {name: figure for name, figure in figures.items() if figure is not None}

    def plot(self) -> Figure:
        """Draw perplexity by position in the text if `prefix` was measured, else by length. Needs matplotlib."""
        measured = self.perplexity
        return position_figure(measured) if measured.curves else measured.plot()

    def heatmap(self) -> Figure | None:
        """Draw retrieval by length and depth of the needle, if it was measured. Needs matplotlib."""
        return None if self.retrieval is None else self.retrieval.plot()

    @property
    def _measured(self) -> list[Any]:
        return [part for name in self._parts if (part := getattr(self, name)) is not None]

    def tables(self) -> list[Grid]:
        """Return the tables of perplexity, of retrieval, and of speed and memory."""
        return [grid for part in self._measured for grid in part.tables()]

    def notes(self) -> Iterator[str]:
        yield from self.remarks
        notes = (note for part in self._measured for note in part.notes())
        yield from dict.fromkeys(notes)  # parts may share the note on automatic scales

    def guide(self) -> Iterator[str]:
        yield from self.perplexity.guide()
        if self.retrieval is not None:
            yield from self.retrieval.guide()

    def findings(self) -> Iterator[str]:
        yield from self.perplexity.findings()
        if self.retrieval is not None:
            yield from self.retrieval.findings()

    def problems(self) -> Iterator[str]:
        return (problem for part in self._measured for problem in part.problems())


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
    doublings = (original << number for number in itertools.count())
    every = [*itertools.takewhile(lambda length: length < last, doublings), last]
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
        The results of the three parts.

    Raises:
        PosencError: Options exclude each other, or no document can be used.
    """
    folder = output_folder(output, progress)
    options = with_fields(BenchOptions, options, fields)
    get_suite(options.suite)
    unwrap(model)  # raises for what is no model
    source = Source() if documents is None else Source.of(documents)
    job = prepare(model, tokenizer, source, options)
    return cast(BenchResult, job.run(folder, progress=progress))


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
    given: dict[str, Any] = {"documents": options.limit}
    given |= {name: getattr(options, name) for name in ("methods", "tasks", "rounds")}
    changes = {name: value for name, value in given.items() if value is not None}
    suite = replace(get_suite(options.suite), **changes)
    lengths, target = options.lengths, options.target_length
    if not lengths:
        candidates, original = checked_candidates(model, suite.methods)
        lengths = suite_lengths(suite, original, target)
        lengths = within_reach(model, candidates, lengths, given=target is not None)
    shared = {field.name: getattr(options, field.name) for field in fields(ProtocolOptions)}
    shared |= {"limit": suite.documents, "methods": suite.methods, "lengths": lengths}
    run = measurement.prepare(
        model, tokenizer, source, PerplexityOptions(**shared), name=name, command=command
    )
    remarks, settings = [], run.settings
    sizes: dict[str, Any] = {"chunk": settings.chunk, "prefill": settings.prefill}
    if run.read < suite.documents:
        remarks.append(f"{run.read} documents are long enough; {suite.documents} were requested.")
    metadata = {name: run.metadata[name] for name in ("model", "original", "command")}
    parts: dict[str, Measurement[Any, Any]] = {"perplexity": run}
    if suite.tasks:
        drawn = {name: getattr(suite, name) for name in ("tasks", "depths", "samples")}
        prompts = RetrievalSettings(lengths=settings.lengths, seed=options.seed, **drawn, **sizes)
        special, noise = run.special.tolist(), {**metadata, "haystack": {"kind": "noise"}}
        try:
            parts["retrieval"] = RetrievalRun(
                model, tokenizer, run.candidates, prompts, special=special, metadata=noise
            )
        except PosencError as error:
            remarks.append(f"No retrieval: {error}")
    speed = None
    if suite.rounds:
        window = window_of(run.documents, settings.lengths[-1], run.special)
        sizes |= {"rounds": suite.rounds, "metadata": metadata}
        speed = SpeedRun(model, window, run.candidates, **sizes)
    return BenchJob(run, parts, speed, {"suite": options.suite, "remarks": tuple(remarks)})
