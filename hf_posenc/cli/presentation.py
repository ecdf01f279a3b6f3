"""What the commands that measure show while they run and when they are done."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.markup import escape

from hf_posenc.cli.console import err, out, print_error, print_warning

if TYPE_CHECKING:
    from hf_posenc.evaluation.bench.run import Bench
    from hf_posenc.evaluation.documents import Skipped, TokenizedDocument
    from hf_posenc.evaluation.grid import Result
    from hf_posenc.evaluation.measuring.execute import Measurement
    from hf_posenc.evaluation.measuring.store import Shard, Store
    from hf_posenc.evaluation.perplexity.measurement import Item, PerplexityRun
    from hf_posenc.evaluation.perplexity.protocols import Settings
    from hf_posenc.evaluation.perplexity.result import PerplexityResult
    from hf_posenc.evaluation.published import PublishedTable
    from hf_posenc.evaluation.scoring.estimate import Cost

SHOWN_SKIPPED = 5


@contextlib.contextmanager
def reading(shard: Shard) -> Iterator[Callable[[str], None]]:
    """Shows which document is being read; gives what to call with its name."""
    console = err()
    if shard.index or not console.is_terminal:
        yield lambda name: None
        return
    with console.status("Reading documents") as status:
        yield lambda name: status.update(f"Reading {escape(name)}")


@contextlib.contextmanager
def progress_bar(shard: Shard) -> Iterator[Callable[[str, int, int], None]]:
    """Shows the tokens forwarded and the time left; gives what `Run.measure` calls."""
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = err()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} tokens"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    shown = shard.index == 0 and console.is_terminal
    # a long memory: short windows run many more tokens per second than long ones
    with Progress(
        *columns, console=console, disable=not shown, transient=True, speed_estimate_period=600
    ) as bars:
        task = bars.add_task("starting", total=1)
        yield lambda label, done, total: bars.update(
            task, description=escape(label), completed=done, total=total
        )


def announce(settings: Settings, usable: list[TokenizedDocument], skipped: list[Skipped]) -> None:
    """Says, before the run, what it leaves out and what it scores."""
    for entry in skipped[:SHOWN_SKIPPED]:
        print_warning(f"skipped {entry.name}: {entry.reason}")
    if len(skipped) > SHOWN_SKIPPED:
        print_warning(
            f"skipped {len(skipped) - SHOWN_SKIPPED} more documents; the JSON names them all"
        )
    if "tail" in settings.protocols:
        err().print(
            f"tail: the last {settings.tail_tokens:,} tokens of each document are scored.",
            style="dim",
        )


def finish(
    run: PerplexityRun,
    shard: Shard,
    output: Path,
    with_plot: bool,
    tables: Sequence[PublishedTable],
    **known: Any,
) -> None:
    """Measures this process's share; the process that sees the whole prints the tables and writes the files.

    Args:
        run: What to measure.
        shard: This process's place among those of the run.
        output: Folder of the records and the results.
        with_plot: Whether to draw.
        tables: Published tables to print beside.
        **known: What the result stores beside the numbers.

    Raises:
        PosencError: The files cannot be written, or another process has the same share.
        typer.Exit: Status 1 where a number is missing, after everything that was measured has been written.
    """
    from hf_posenc.evaluation.measuring.execute import execute, wait_for_all, write_timings
    from hf_posenc.evaluation.perplexity.runs import open_store, result_of

    with open_store(output, run, known["model"], shard, known["command"]) as store:
        with progress_bar(shard) as progress:
            execute(run, store, shard, progress)
        if not wait_for_all(run, store, shard, say_waiting):
            say_unfinished(run, store, shard)
            return
        if shard.launched and shard.index:
            return
        result = result_of(run, store, **known)
        assert result is not None
        write_timings(run, store, output / "timings.json")
    show_model(result.model)
    show_tables(result)
    show_published(result, tables)
    say_written(result.write(output, plots=with_plot), output)
    exit_on(result.problems())


def show_model(model: Mapping[str, Any]) -> None:
    """Prints what was measured: the heading of every result."""
    out().print(
        f"\n[bold]{escape(str(model['name']))}[/bold]: {model['class']}, {model['parameters'] / 1e6:,.1f} M "
        f"parameters, {model['dtype']} on {model['device']}, {model['attention']} attention\n"
    )


def present(result: Result, model: Mapping[str, Any], output: Path, with_plot: bool) -> None:
    """Print a result and write its files.

    Args:
        result: The result.
        model: The description of the model, for the heading.
        output: Folder of the files.
        with_plot: Draw the figures.

    Raises:
        PosencError: A file cannot be written.
        typer.Exit: Status 1 where a number is missing, after everything has been written.
    """
    show_model(model)
    show_tables(result)
    say_written(result.write(output, plots=with_plot), output)
    exit_on(result.problems())


def show_tables(result: Result) -> None:
    """Print the tables of a result and the lines below them."""
    from hf_posenc.evaluation.grid import to_rich

    console = out()
    for grid in result.tables():
        console.print(to_rich(grid))
    guide = list(result.guide())
    for line in (*result.notes(), *(["", *guide] if guide else []), ""):
        console.print(line, markup=False)


def show_published(result: PerplexityResult, tables: Sequence[PublishedTable]) -> None:
    """Prints published tables beside the result."""
    from hf_posenc.evaluation.grid import to_rich
    from hf_posenc.evaluation.published import beside, remarks

    console = out()
    for table in tables:
        console.print(to_rich(beside(table, result)))
        for line in remarks(table):
            console.print(line, markup=False)


def say_written(names: Sequence[str], output: Path) -> None:
    """Says which files were written, and why there is no plot among them where there cannot be."""
    from hf_posenc.evaluation.plots import available

    console = out()
    console.print(f"Wrote {', '.join(names)} to {output}", markup=False)
    if not available():
        console.print("No plot: it needs matplotlib (pip install 'hf-posenc[plot]').", markup=False)


def exit_on(problems: Iterable[str]) -> None:
    """Prints what has no number, one line each.

    Raises:
        typer.Exit: Status 1, where there is any.
    """
    found = list(problems)
    for line in found:
        print_error(line)
    if found:
        raise typer.Exit(1)


def say_waiting(count: int) -> None:
    """Says what the first process waits for."""
    err().print(
        f"Waiting for the other processes: {count:,} parts are still missing. All must write to the same --output.",
        style="dim",
    )


def say_unfinished(run: Measurement[Any, Any], store: Store, shard: Shard) -> None:
    """Says that this share is done and others are not; under a launcher the first process knows."""
    from hf_posenc.evaluation.measuring.store import missing

    if shard.launched:
        return
    left, parts = len(missing(store, (item.key for item in run.items))), len(run.items)
    out().print(
        f"Share {shard.index + 1} of {shard.count} is done; {left:,} of {parts:,} parts are the others'. "
        "The last process to finish prints the result, as does the same command without --shard.",
        markup=False,
    )


# `--dry-run`: what a run will cost, method by method, before anything is run.


GIB = 2**30


def print_cost(run: PerplexityRun) -> None:
    """Prints tokens, operations and the peak of memory of every method, and what memory there is."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=True)
    made.add_column("method", footer="in all")
    rows = []
    for _, group in itertools.groupby(run.items, key=lambda item: item.label):
        items = list(group)
        costs = [
            _cost(run, list(same)) for _, same in itertools.groupby(items, key=lambda i: i.lengths)
        ]
        tokens, flops = sum(cost.tokens for cost in costs), sum(cost.flops for cost in costs)
        windows = sum(len(item.windows) for item in items)
        peak = max(costs, key=lambda cost: cost.total)
        rows.append((items[0].label, windows, tokens, flops, peak))
    heads = (
        ("forwards", f"{sum(row[1] for row in rows):,}"),
        ("tokens", f"{sum(row[2] for row in rows):,}"),
        ("FLOPs", f"{sum(row[3] for row in rows):.3g}"),
        ("GiB at the peak", f"{max(row[4].total for row in rows) / GIB:,.2f}"),
        ("of it logits", ""),
    )
    for name, footer in heads:
        made.add_column(name, footer=footer, justify="right")
    for label, windows, tokens, flops, peak in rows:
        made.add_row(
            label,
            f"{windows:,}",
            f"{tokens:,}",
            f"{flops:.3g}",
            f"{peak.total / GIB:,.2f}",
            f"{peak.logits / GIB:,.2f}",
        )
    console = out()
    console.print(made)
    weights = rows[0][4].weights / GIB
    console.print(
        f"{weights:,.2f} GiB are the weights. {_free(run)} An estimate from the model's sizes, on the high side "
        "(hf_posenc/evaluation/estimate.py says what is counted); nothing was run.",
        markup=False,
    )


def _cost(run: PerplexityRun, items: list[Item]) -> Cost:
    """What the items of one method and the same lengths take, with the method in force."""
    from hf_posenc.evaluation.scoring.estimate import run_cost

    settings, candidate = run.settings, items[0].candidate
    assert candidate is not None
    windows = [(w.forwarded, w.tokens - w.first_scored) for item in items for w in item.windows]
    with candidate.applied(run.model, items[0].lengths[-1]):
        return run_cost(
            run.model,
            windows,
            batch=settings.batch,
            chunk=settings.chunk,
            prefill_chunk=None if candidate.length_dependent else settings.prefill,
            full_logits=not run.scorer.scorer.replays,
        )


def _free(run: PerplexityRun) -> str:
    from hf_posenc.evaluation.scoring.memory import free_memory

    device = next(run.model.parameters()).device
    free = free_memory(device)
    return "" if free is None else f"{free / GIB:,.1f} GiB are free on {device}."


# What `hf-posenc bench` shows when it is done, or before it begins.


def print_costs(work: Bench) -> None:
    """Prints what the run will cost: the perplexities by method, the rest in tokens."""
    print_cost(work.perplexity)
    parts = (("retrieval", work.retrieval), ("timed prefill, warm-ups included", work.speed))
    for name, run in parts:
        if run is not None:
            out().print(f"{name}: {run.forwarded:,} tokens", markup=False)


def say_bench_unfinished(work: Bench, shard: Shard) -> None:
    """Says what this process leaves to others."""
    if shard.launched:
        return
    out().print(
        f"Share {shard.index + 1} of {shard.count} is done; {work.missing:,} parts are the others'. The last process "
        "to finish times the prefill and prints the result, as does the same command without --shard.",
        markup=False,
    )
