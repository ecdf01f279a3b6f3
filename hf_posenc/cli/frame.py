"""The course of a command that measures: share, costs, progress, other processes, files, exit status."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import time
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import typer

from hf_posenc.cli.command import command_line
from hf_posenc.cli.console import err, out, print_error, print_json, print_note, print_warning
from hf_posenc.cli.loading import default_device, open_session, open_sizes
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.flags import duration
from hf_posenc.evaluation.options import DocumentOptions, ModelOptions, OutputOptions, RunOptions
from hf_posenc.files import disk_errors, finite

if TYPE_CHECKING:
    from hf_posenc.evaluation.bench.run import BenchJob
    from hf_posenc.evaluation.documents import Skipped
    from hf_posenc.evaluation.extend import ExtendJob
    from hf_posenc.evaluation.grid import Grid, Result
    from hf_posenc.evaluation.measuring.execute import Measurement, Progress
    from hf_posenc.evaluation.perplexity.protocols import Settings
    from hf_posenc.evaluation.perplexity.run import PerplexityRun
    from hf_posenc.evaluation.retrieval.run import RetrievalRun
    from hf_posenc.evaluation.scoring.estimate import Cost
    from hf_posenc.evaluation.tuning import TailJob

    Job = Measurement[Any, Any] | BenchJob | TailJob[Any] | ExtendJob

PreparedT = TypeVar("PreparedT")
SHOWN_SKIPPED = 5
GIB = 2**30
_MORE_FILES = {"bench": ("table.md", "curve.*", "heatmap.*")}
MENTIONED = 60.0
"""Seconds from which on the time left is printed."""
FAR_OFF = 1.5
"""Factor of an expected time, beyond which another one is printed."""
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
        self, context: typer.Context, options: OutputOptions, methods: Sequence[str] = ()
    ) -> None:
        from hf_posenc.evaluation.grid import check_trackers
        from hf_posenc.evaluation.measuring.store import current_shard

        check_trackers(options.report_to)
        self.trackers = options.report_to
        self.shard, self.output = current_shard(options.shard), options.output
        self._dry_run = isinstance(options, RunOptions) and options.dry_run
        if self.output.is_file() and not self._dry_run:
            raise PosencError(f"--output {self.output} is a file: give a folder.")
        from hf_posenc.evaluation.plots import available

        if options.plot and not available():
            raise PosencError("--plot needs matplotlib: pip install 'hf-posenc[plot]'.")
        self.plots = available() if options.plot is None else options.plot
        if not self._dry_run:
            with disk_errors(f"--output {self.output} cannot be written to"):
                self.output.mkdir(parents=True, exist_ok=True)
        self.methods, self.command = methods, command_line(context)

    def prepare(
        self,
        prepare: Callable[..., PreparedT],
        model: ModelOptions,
        documents: DocumentOptions | None,
        *options: Any,
        **more: Any,
    ) -> PreparedT:
        """Load the model, and prepare a measurement of it; show the document that is being read."""
        from rich.markup import escape

        from hf_posenc.evaluation.documents.source import source_of
        from hf_posenc.patch.patching import get_patch

        source = None if documents is None else source_of(documents)
        opened = open_sizes if self._dry_run and not self._trained(options) else open_session
        (loaded, tokenizer, name), console = opened(model), err()
        self.device = default_device(model.device)
        if get_patch(loaded) is None:  # else it is measured as it is
            options = tuple(self._with_methods(one) for one in options)
        more |= {"name": name, "command": self.command}
        if source is None:
            return prepare(loaded, tokenizer, *options, **more)
        if self.shard.index or not console.is_terminal:
            return prepare(loaded, tokenizer, source, *options, **more)
        with console.status("Reading documents") as status:
            shown = dataclasses.replace(
                source, seen=lambda name: status.update(f"Reading {escape(name)}")
            )
            return prepare(loaded, tokenizer, shown, *options, **more)

    def _trained(self, options: Sequence[Any]) -> bool:
        """Return whether a method adds parameters, which are made for loaded weights only."""
        from hf_posenc.evaluation.measuring.candidates import parse_candidates
        from hf_posenc.methods import get_method

        specs = next(filter(None, (getattr(one, "methods", None) for one in options)), ())
        parts = (part for candidate in parse_candidates(specs) for part in candidate.parts)
        return any(get_method(part.method).trainable for part in parts)

    def _with_methods(self, options: Any) -> Any:
        """Return options with the default methods where they name none."""
        if not self.methods or getattr(options, "methods", True):
            return options
        return dataclasses.replace(options, methods=self.methods)

    def announce(self, settings: Settings, skipped: Sequence[Skipped]) -> None:
        """Print, before the run, the documents that it leaves out and the tokens that it scores."""
        if self.shard.index:
            return
        for entry in skipped[:SHOWN_SKIPPED]:
            print_warning(f"skipped {entry.name}: {entry.reason}")
        if len(skipped) > SHOWN_SKIPPED:
            print_warning(f"skipped {len(skipped) - SHOWN_SKIPPED} more documents; see the JSON")
        if "tail" in settings.protocols:
            err().print(
                f"tail: the last {settings.tail_tokens:,} tokens of each document are scored.",
                style="dim",
            )

    def measure(self, job: Job, print_cost: Callable[[], None] | None = None) -> Any:
        """Measure this process's share; with `--dry-run`, print the cost instead.

        The result is `None` where nothing was measured, or where another process reports it.
        """
        if self._dry_run and print_cost is not None:
            print_cost()
            return None
        from hf_posenc.evaluation.measuring.execute import RESUMPTION, Resumption

        with self._progress() as progress:
            progress = progress if self.shard.index else _with_time(progress)
            token = RESUMPTION.set(resumption := Resumption(_report_resumed))
            try:
                result = job.run(self.output, self.shard, progress, _report_waiting)
            finally:
                RESUMPTION.reset(token)
        if not resumption.reported:
            _report_resumed(resumption.found, 0)
        if result is None and job.missing and not self.shard.launched:
            print_json({"shard": self.shard.index + 1, "missing": job.missing, "parts": job.total})
            print_note(
                f"Share {self.shard.index + 1} of {self.shard.count} is done; {job.missing:,} of {job.total:,} parts "
                "are the others'. The last process prints the result, as does the same command without --shard."
            )
        return result

    @contextlib.contextmanager
    def _progress(self) -> Iterator[Progress]:
        """Show the tokens read and the time left; gives the function that is called after every forward."""
        from rich import progress
        from rich.markup import escape

        console = err()
        columns = (
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TaskProgressColumn(),
            progress.TextColumn("{task.completed:,.0f} of {task.total:,.0f} tokens"),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
        )
        shown = self.shard.index == 0 and console.is_terminal
        # a long memory: short windows run many more tokens per second than long ones
        with progress.Progress(
            *columns, console=console, disable=not shown, transient=True, speed_estimate_period=600
        ) as bars:
            task = bars.add_task("starting", total=1)
            yield lambda label, done, total: bars.update(
                task, description=escape(label) or None, completed=done, total=total
            )

    def present(
        self,
        result: Result,
        model: Mapping[str, Any],
        beside: Iterable[tuple[Grid, Iterable[str]]] = (),
    ) -> None:
        """Write the files of a result; print it under its model, and further tables with their notes."""
        from rich.markup import escape

        from hf_posenc.evaluation.grid import to_rich, track
        from hf_posenc.evaluation.plots import available

        kept = _keep_other_run(result, self.output)
        console, names = out(), result.write(self.output, plots=self.plots)
        print_json(result.to_dict())
        console.print(
            f"\n[bold]{escape(str(model['name']))}[/bold]: {model['class']}, {model['parameters'] / 1e6:,.1f} M "
            f"parameters, {model['dtype']} on {model['device']}, {model['attention']} attention\n"
        )
        guide = list(result.guide())
        for grid in result.tables():
            console.print(to_rich(grid))
        for line in (*result.notes(), *(["", *guide] if guide else []), ""):
            console.print(line, markup=False)
        for grid, lines in beside:
            console.print(to_rich(grid))
            for line in lines:
                console.print(line, markup=False)
        print_note(f"Wrote {', '.join(names)} to {self.output}")
        for name in self.trackers:
            track(result, name, self.output)
        if kept:
            print_note(kept)
        if not available():
            print_note("No plot: it needs matplotlib (pip install 'hf-posenc[plot]').")


def _with_time(progress: Progress, clock: Callable[[], float] = time.monotonic) -> Progress:
    """Return a progress that also prints the time left after the first window, and again if that was far off.

    Longer windows take longer for each token, so the first, short ones may promise too much.
    """
    at, read, spent, expected, last = clock(), 0, 0.0, 0.0, 0

    def report(label: str, done: int, total: int) -> None:
        nonlocal at, read, spent, expected, last
        progress(label, done, total)
        now = clock()
        if label:  # else nothing was read: so much was stored already
            read, spent = read + done - last, spent + now - at
        at, last = now, done
        if not label or read <= 0 or done >= total:
            return
        left = (total - done) * spent / read
        far_off = not 1 / FAR_OFF < (spent + left) / expected < FAR_OFF if expected else True
        if left >= MENTIONED and far_off:
            expected = spent + left
            err().print(
                f"about {duration(left)} left: {read:,} tokens took {spent:,.0f} s, {total - done:,} are left.",
                style="dim",
            )

    return report


def _keep_other_run(result: Result, folder: Path) -> str:
    """Move the result of another run out of the way, unless the new one has all its records; return a line on it."""
    path = folder / f"{result.kind}.json"
    if not path.exists():
        return ""
    command = "not a result of hf-posenc, or damaged"
    damage = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
    with contextlib.suppress(*damage):
        values = json.loads(path.read_bytes())
        if values["kind"] == result.kind:
            earlier = _parts(values)
            command = next((p["command"] for p in earlier if p.get("command")), "called in Python")
            if _records(earlier) <= _records(_parts(finite(result.to_dict()))):
                return ""
    places = (folder / f"{result.kind}-{number}" for number in itertools.count(1))
    place = next(place for place in places if not (place / path.name).exists())
    patterns = (f"{result.kind}.*", f"{result.kind}_*", *_MORE_FILES.get(result.kind, ()))
    files = [file for pattern in patterns for file in folder.glob(pattern) if file != path]
    try:
        place.mkdir(exist_ok=True)
        for file in (*files, path):  # it comes last: a kill before that is repaired by the next run
            file.replace(place / file.name)
    except OSError as error:
        raise PosencError(
            f"{folder} has the {path.name} of another run ({command}), which cannot be moved to {place}: "
            f"{error.strerror or error}. Give another --output."
        ) from error
    return f"The {path.name} of another run, which was there, is kept in {place}: {command}"


def _parts(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [values, *(part for part in values.values() if isinstance(part, dict))]


def _records(parts: Iterable[Mapping[str, Any]]) -> set[str]:
    return {json.dumps(record) for part in parts for record in part.get("records", ())}


def _report_resumed(found: int, left: int) -> None:
    """Print what is taken from the records; a sweep, a search or a benchmark has further parts after `left`."""
    if found:
        err().print(
            f"Items taken from the records of an earlier run: {found:,}; left to measure: {left:,}.",
            style="dim",
        )


def _report_waiting(count: int) -> None:
    err().print(
        f"Waiting for the other processes: {count:,} parts are still missing. All must write to the same --output.",
        style="dim",
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
    from hf_posenc.evaluation.grid import Grid, to_rich
    from hf_posenc.evaluation.scoring.rates import estimated
    from hf_posenc.model.memory import free_memory

    rows: list[tuple[Any, ...]] = []
    jobs = cast("list[Any]", run.items)
    for label, group in itertools.groupby(jobs, key=lambda item: item.label):
        items = list(group)
        same = itertools.groupby(items, key=_lengths)
        costs, attention = zip(*(_cost(run, list(each)) for _, each in same), strict=True)
        tokens, flops = sum(cost.tokens for cost in costs), sum(cost.flops for cost in costs)
        windows = sum(len(_windows(item)) for item in items)
        most = max(costs, key=lambda cost: cost.total)
        rows.append((label, windows, tokens, flops, most, ChainMap(*attention)))
    names = ("method", "forwards", "tokens", "flops")
    records = [
        dict(zip(names, row, strict=False))
        | {"peak_bytes": row[4].total, "logit_bytes": row[4].logits, "attention": dict(row[5])}
        for row in rows
    ]
    seconds, takes = estimated(sum(row[3] for row in rows), device)
    if print_json(
        {"cost": records, "weight_bytes": rows[0][4].weights, "seconds": seconds, **more}
    ):
        return
    grid = Grid()
    grid.column("method", footer="in all")
    grid.column("forwards", numeric=True, footer=f"{sum(row[1] for row in rows):,}")
    grid.column("tokens", numeric=True, footer=f"{sum(row[2] for row in rows):,}")
    grid.column("FLOPs", numeric=True, footer=f"{sum(row[3] for row in rows):.3g}")
    peak = max(row[4].total for row in rows) / GIB
    grid.column("GiB at the peak", numeric=True, footer=f"{peak:,.2f}")
    grid.column("of it logits", numeric=True)
    grid.column("attention by")
    for label, windows, tokens, flops, cost, attention in rows:
        memory = (f"{cost.total / GIB:,.2f}", f"{cost.logits / GIB:,.2f}")
        by = ", ".join(f"{name}{'' if shown else '?'}" for name, shown in attention.items())
        grid.row(label, f"{windows:,}", f"{tokens:,}", f"{flops:.3g}", *memory, by)
    console = out()
    console.print(to_rich(grid))
    free = free_memory(device)
    rest = "" if free is None else f"{free / GIB:,.1f} GiB are free on {device}."
    console.print(
        f"{rows[0][4].weights / GIB:,.2f} GiB are the weights. {rest} An estimate from the model's sizes, on the "
        f"high side (hf_posenc/evaluation/scoring/estimate.py lists the terms). {takes} Nothing was run.",
        markup=False,
    )
    if not all(shown for row in rows for shown in row[5].values()):
        console.print(
            f"?: never checked here. The run does so first, as does hf-posenc selftest --device {device.type}.",
            markup=False,
        )


def _lengths(item: Any) -> tuple[int, ...]:
    return tuple(getattr(item, "lengths", (item.length,)))


def _windows(item: Any) -> list[tuple[int, int]]:
    """Return the tokens of every forward of an item and how many of them are scored; of a prompt, its answer."""
    if hasattr(item, "windows"):
        return [(w.forwarded, w.tokens - w.first_scored) for w in item.windows]
    return [(item.length, min(item.length, ANSWER))]


def _cost(run: PerplexityRun | RetrievalRun, items: list[Any]) -> tuple[Cost, dict[str, bool]]:
    """Return the cost of items of one method and the same lengths, and what computes their attention."""
    from hf_posenc.evaluation.scoring.estimate import backends, run_cost

    settings, candidate = run.settings, items[0].candidate
    assert candidate is not None
    prefill = None if candidate.length_dependent else getattr(settings, "prefill", None)
    with candidate.applied(run.model, _lengths(items[0])[-1]):
        cost = run_cost(
            run.model,
            [window for item in items for window in _windows(item)],
            batch=getattr(settings, "batch", 1),
            chunk=settings.chunk,
            prefill_chunk=prefill,
            full_logits=not run.scorer.scorer.replays,
        )
        return cost, backends(run.model)
