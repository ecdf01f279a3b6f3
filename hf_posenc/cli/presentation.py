"""What `hf-posenc perplexity` shows while it runs and when it is done."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hf_posenc.cli.console import err, out, print_error, print_warning
from hf_posenc.errors import PosencError

if TYPE_CHECKING:
    from hf_posenc.evaluation.documents import Skipped, TokenizedDocument
    from hf_posenc.evaluation.protocols import Settings
    from hf_posenc.evaluation.result import PerplexityResult

SHOWN_SKIPPED = 5


@contextlib.contextmanager
def reading(rank: int) -> Iterator[Callable[[str], None]]:
    """Shows which document is being read; gives what to call with its name."""
    console = err()
    if rank or not console.is_terminal:
        yield lambda name: None
        return
    with console.status("Reading documents") as status:
        yield lambda name: status.update(f"Reading {name}")


@contextlib.contextmanager
def progress_bar(rank: int) -> Iterator[Callable[[str, int, int], None]]:
    """Shows the tokens forwarded and the time left; gives what `measure` calls."""
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
    shown = rank == 0 and console.is_terminal
    # a long memory: short windows run many more tokens per second than long ones
    with Progress(
        *columns, console=console, disable=not shown, transient=True, speed_estimate_period=600
    ) as bars:
        task = bars.add_task("starting", total=1)
        yield lambda label, done, total: bars.update(
            task, description=label, completed=done, total=total
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


def finish(result: PerplexityResult, output: Path, with_plot: bool) -> None:
    """Prints the tables, writes the files, and exits with status 1 where a number is missing.

    Raises:
        PosencError: The files cannot be written.
        typer.Exit: Status 1, after everything that was measured has been written.
    """
    from hf_posenc.evaluation import report
    from hf_posenc.evaluation.plot import write_plot

    console = out()
    model = result.model
    console.print(
        f"\n[bold]{model['name']}[/bold]: {model['class']}, {model['parameters'] / 1e6:,.1f} M parameters, "
        f"{model['dtype']} on {model['device']}, {model['attention']} attention\n"
    )
    for protocol in result.settings.protocols:
        console.print(report.table(result, protocol))
    for line in (*report.notes(result), "", *report.reading_guide(result), ""):
        console.print(line, markup=False)
    try:
        result.write_json(output / "perplexity.json")
        result.write_csv(output / "perplexity.csv")
        written = "perplexity.json, perplexity.csv"
        if with_plot:
            write_plot(result, output / "perplexity.png", output / "perplexity.svg")
            written += ", perplexity.png, perplexity.svg"
    except OSError as error:
        raise PosencError(
            f"The result cannot be written to {output}: {error.strerror or error}"
        ) from error
    console.print(f"Wrote {written} to {output}", markup=False)
    if not with_plot:
        console.print("No plot: it needs matplotlib (pip install 'hf-posenc[plot]').", markup=False)
    problems = list(report.problems(result))
    for line in problems:
        print_error(line)
    if problems:
        raise typer.Exit(1)
