"""The course of a command that measures: share, costs, progress, other processes, files, exit status."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import typer

from hf_posenc.cli.command import command_line
from hf_posenc.cli.console import (
    err,
    print_error,
    print_heading,
    print_items,
    print_json,
    print_note,
    print_warning,
)
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.loading import open_session, open_sizes
from hf_posenc.evaluation.options import DocumentOptions, ModelOptions, RunOptions
from hf_posenc.files import disk_errors, finite

if TYPE_CHECKING:
    from pathlib import Path

    from hf_posenc.evaluation.bench import BenchJob
    from hf_posenc.evaluation.documents import Skipped
    from hf_posenc.evaluation.extend import ExtendJob
    from hf_posenc.evaluation.grid import Result
    from hf_posenc.evaluation.measuring.execute import Measurement, Progress
    from hf_posenc.evaluation.perplexity.protocols import Settings
    from hf_posenc.evaluation.perplexity.run import PerplexityRun
    from hf_posenc.evaluation.retrieval.run import RetrievalRun
    from hf_posenc.evaluation.tuning import Race

    Job = Measurement[Any, Any] | BenchJob | Race[Any] | ExtendJob

PreparedT = TypeVar("PreparedT")
SHOWN_SKIPPED = 5
GIB = 2**30
ANSWER = 64  # tokens of an answer, in the estimate of a retrieval's cost


class Frame:
    """One run of a command that measures. Refuses a wrong share or output before a model is loaded.

    Attributes:
        shard: This process's place among those of the run.
        output: Folder of the results.
        plots: Draw the plots.
        methods: Methods that are measured by default, unless the model carries a patch.
        command: The command line that gives the same result again.
    """

    def __init__(
        self, context: typer.Context, options: RunOptions, methods: Sequence[str] = ()
    ) -> None:
        from hf_posenc.evaluation.measuring.store import current_shard
        from hf_posenc.evaluation.plots import available

        self._dry_run = options.dry_run
        self.shard, self.output = current_shard(options.shard), options.output
        if options.plot and not available():
            raise PosencError("--plot needs matplotlib: pip install 'hf-posenc[plot]'.")
        self.plots = available() if options.plot is None else options.plot
        if not self._dry_run:
            if self.output.is_file():
                raise PosencError(f"--output {self.output} is a file: give a folder.")
            with disk_errors(f"--output {self.output} cannot be written to"):
                self.output.mkdir(parents=True, exist_ok=True)
        self.methods, self.command = methods, command_line(context)

    def prepare(
        self,
        prepare: Callable[..., PreparedT],
        model: ModelOptions,
        documents: DocumentOptions | None,
        options: Any,
        *settings: Any,
        **more: Any,
    ) -> PreparedT:
        """Load the model, and prepare a measurement of it; show the document that is being read."""
        from rich.markup import escape

        from hf_posenc.evaluation.device import device_of
        from hf_posenc.evaluation.documents.source import source_of
        from hf_posenc.patch.patching import get_patch

        source = None if documents is None else source_of(documents)
        loaded, tokenizer, name = (open_sizes if self._dry_run else open_session)(model)
        self.device = device_of(model.device)
        # A model with a patch is measured as it is.
        if self.methods and not options.methods and get_patch(loaded) is None:
            options = dataclasses.replace(options, methods=self.methods)
        more |= {"name": name, "command": self.command}
        if source is None:
            return prepare(loaded, tokenizer, options, *settings, **more)
        console = err()
        with contextlib.ExitStack() as stack:
            if console.is_terminal and not self.shard.index:
                status = stack.enter_context(console.status("Reading documents"))
                source = dataclasses.replace(
                    source, seen=lambda name: status.update(f"Reading {escape(name)}")
                )
            return prepare(loaded, tokenizer, source, options, *settings, **more)

    def announce(self, settings: Settings, skipped: Sequence[Skipped]) -> None:
        """Print, before the run, the documents that it leaves out and the tokens that it scores."""
        if self.shard.index:
            return
        for entry in skipped[:SHOWN_SKIPPED]:
            print_warning(f"skipped {entry.name}: {entry.reason}")
        if len(skipped) > SHOWN_SKIPPED:
            print_warning(f"skipped {len(skipped) - SHOWN_SKIPPED} more documents; see the JSON")
        if "tail" in settings.protocols:
            _print_dim(
                f"tail: the last {settings.tail_tokens:,} tokens of each document are scored."
            )

    def measure(self, job: Job, print_cost: Callable[[], None]) -> Any:
        """Measure this process's share; with `--dry-run`, print the cost instead.

        The result is `None` where nothing was measured, or where another process reports it.
        """
        if self._dry_run:
            print_cost()
            return None
        from hf_posenc.evaluation.measuring.execute import RESUMED

        found = left = 0  # of the parts of the job, until one of them has something to measure

        def resumed(stored: int, todo: int) -> None:
            nonlocal found, left
            if not left:
                found, left = found + stored, todo
                if todo:
                    _report_resumed(found, todo)

        token = RESUMED.set(resumed)
        try:
            with self._progress() as progress:
                result = job.run(self.output, self.shard, progress, _report_waiting)
        finally:
            RESUMED.reset(token)
        if not left:
            _report_resumed(found, 0)
        if result is None and job.missing and not self.shard.launched:
            print_json({"shard": self.shard.index + 1, "missing": job.missing, "parts": job.total})
            print_note(
                f"Share {self.shard.index + 1} of {self.shard.count} is done; {job.missing:,} of {job.total:,} parts "
                "are the others'. The last process prints the result, as does the same command without --shard."
            )
        return result

    @contextlib.contextmanager
    def _progress(self) -> Iterator[Progress]:
        """Show what is measured and the time left; gives the function that is called after every forward."""
        from rich import progress
        from rich.markup import escape

        console = err()
        columns = (
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TaskProgressColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
        )
        hidden = self.shard.index > 0 or not console.is_terminal
        # a long memory: methods and lengths differ in the operations that they do in a second
        with progress.Progress(
            *columns, console=console, disable=hidden, transient=True, speed_estimate_period=600
        ) as bars:
            task = bars.add_task("starting", total=None)

            def report(label: str, done: int, total: int) -> None:
                # what is in the records took no time
                show = bars.reset if bars.tasks[0].total is None else bars.update
                show(task, total=total, completed=done, description=escape(label) or None)

            yield report

    def finish(self, job: Job, print_cost: Callable[[], None]) -> None:
        """Measure and present the result; exit with status 1 where a number is missing."""
        result = self.measure(job, print_cost)
        if result is not None:
            self.present(result)
            exit_on(result.problems())

    def present(self, result: Result) -> None:
        """Write the files of a result; print it under its model."""
        from hf_posenc.evaluation.plots import available

        model = result.measured_model
        kept = _keep_other_run(result, self.output)
        names = result.write(self.output, plots=self.plots)
        print_json(result.to_dict())
        size = f"{model['parameters'] / 1e6:,.1f} M parameters, {model['dtype']}"
        where = f"on {model['device']}, {model['attention']} attention"
        print_items("")
        print_heading(str(model["name"]), f"{model['class']}, {size} {where}\n")
        guide = list(result.guide())
        print_items(*result.tables(), *result.notes(), *(["", *guide] if guide else []), "")
        print_note(f"Wrote {', '.join(names)} to {self.output}")
        if kept is not None:
            print_note(f"The {result.kind}.json of another run, which was there, is kept in {kept}")
        if not available():
            print_note("No plot: it needs matplotlib (pip install 'hf-posenc[plot]').")


def _keep_other_run(result: Result, folder: Path) -> Path | None:
    """Move the result of another run to a folder of its own, unless the new one has all its records."""
    path = folder / f"{result.kind}.json"
    if not path.exists():
        return None
    with contextlib.suppress(
        OSError, ValueError, AttributeError
    ):  # damaged, or of no such form: it is kept
        if _records(json.loads(path.read_bytes())) <= _records(finite(result.to_dict())):
            return None
    numbered = (folder / f"{result.kind}-{number}" for number in itertools.count(1))
    place = next(each for each in numbered if not (each / path.name).exists())
    names = {*result.files(), *(file.name for file in folder.glob(f"{result.kind}[._]*"))}
    others = [folder / name for name in names - {path.name} if (folder / name).exists()]
    with disk_errors(f"{path} is of another run and cannot be kept", "Give another --output."):
        place.mkdir(exist_ok=True)
        for file in (
            *others,
            path,
        ):  # it comes last: a kill before that is repaired by the next run
            file.replace(place / file.name)
    return place


def _records(values: dict[str, Any]) -> set[str]:
    parts = [values, *(part for part in values.values() if isinstance(part, dict))]
    return {json.dumps(record) for part in parts for record in part.get("records", ())}


def _print_dim(line: str) -> None:
    err().print(line, style="dim")


def _report_resumed(found: int, left: int) -> None:
    """Print what is taken from the records; a sweep, a search or a benchmark has further parts after `left`."""
    if found:
        _print_dim(
            f"Items taken from the records of an earlier run: {found:,}; left to measure: {left:,}."
        )


def _report_waiting(count: int) -> None:
    _print_dim(
        f"Waiting for the other processes: {count:,} parts are still missing. All must write to the same --output."
    )


def exit_on(problems: Iterable[str]) -> None:
    """Print the problems, one line each, and exit with status 1 where there is any."""
    lines = list(problems)
    for line in lines:
        print_error(line)
    if lines:
        raise typer.Exit(1)


# `--dry-run`: the cost of a run, method by method, before anything is run.


def print_cost(run: PerplexityRun | RetrievalRun, device: Any, **more: Any) -> None:
    """Print tokens, operations and peak memory of every method, and the free memory of the device of the run."""
    from hf_posenc.evaluation.grid import Grid
    from hf_posenc.evaluation.scoring.estimate import estimated
    from hf_posenc.model.weights import free_memory

    jobs = cast("list[Any]", run.items)
    by_method = itertools.groupby(jobs, key=lambda item: item.label)
    rows = [{"method": label} | _cost(run, list(items)) for label, items in by_method]
    forwards, tokens, flops = (
        sum(row[name] for row in rows) for name in ("forwards", "tokens", "flops")
    )
    peak, weights = max(row["peak_bytes"] for row in rows), rows[0].pop("weight_bytes")
    for row in rows[1:]:
        del row["weight_bytes"]
    seconds, takes = estimated(flops, device)
    if print_json({"cost": rows, "weight_bytes": weights, "seconds": seconds, **more}):
        return
    grid = Grid()
    grid.column("method", footer="in all")
    grid.column("forwards", numeric=True, footer=f"{forwards:,}")
    grid.column("tokens", numeric=True, footer=f"{tokens:,}")
    grid.column("FLOPs", numeric=True, footer=f"{flops:.3g}")
    grid.column("GiB at the peak", numeric=True, footer=f"{peak / GIB:,.2f}")
    grid.column("of it logits", numeric=True)
    grid.column("attention by")
    for row in rows:
        counts = (f"{row['forwards']:,}", f"{row['tokens']:,}", f"{row['flops']:.3g}")
        memory = (f"{row[name] / GIB:,.2f}" for name in ("peak_bytes", "logit_bytes"))
        by = (f"{name}{'' if checked else '?'}" for name, checked in row["attention"].items())
        grid.row(row["method"], *counts, *memory, ", ".join(by))
    free = free_memory(device)
    rest = "" if free is None else f"{free / GIB:,.1f} GiB are free on {device}."
    print_items(
        grid,
        f"{weights / GIB:,.2f} GiB are the weights. {rest} A coarse estimate from the model's sizes "
        f"(docs/evaluation.md, Memory). {takes} Nothing was run.",
    )
    if not all(checked for row in rows for checked in row["attention"].values()):
        print_items(
            f"?: never checked here. The run does so first, as does hf-posenc selftest --device {device.type}."
        )


def _cost(run: PerplexityRun | RetrievalRun, items: list[Any]) -> dict[str, Any]:
    """Return the cost of the items of one method, and what computes their attention."""
    from hf_posenc.evaluation.scoring.estimate import backends, run_cost

    settings, candidate, costs = run.settings, items[0].candidate, []
    prefill = None if candidate.length_dependent else getattr(settings, "prefill", None)
    attention: ChainMap[str, bool] = ChainMap()
    for lengths, group in itertools.groupby(items, key=_lengths):
        windows = [window for item in group for window in _windows(item)]
        with candidate.applied(run.model, lengths[-1]):
            cost = run_cost(
                run.model,
                windows,
                batch=getattr(settings, "batch", 1),
                chunk=settings.chunk,
                prefill_chunk=prefill,
                full_logits=not run.scorer.replays,
            )
            attention.maps.append(backends(run.model))
        costs.append(cost)
    most = max(costs, key=lambda cost: cost.total)
    return {
        "forwards": sum(len(_windows(item)) for item in items),
        "tokens": sum(cost.tokens for cost in costs),
        "flops": sum(cost.flops for cost in costs),
        "peak_bytes": most.total,
        "logit_bytes": most.logits,
        "weight_bytes": most.weights,
        "attention": dict(attention),
    }


def _lengths(item: Any) -> tuple[int, ...]:
    return tuple(getattr(item, "lengths", (item.length,)))


def _windows(item: Any) -> list[tuple[int, int]]:
    """Return the tokens of every forward of an item and how many of them are scored; of a prompt, its answer."""
    if hasattr(item, "windows"):
        return [(w.forwarded, w.tokens - w.first_scored) for w in item.windows]
    return [(item.length, min(item.length, ANSWER))]
