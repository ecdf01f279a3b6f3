"""What `hf-posenc bench` shows when it is done, or before it begins."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hf_posenc.cli.console import out
from hf_posenc.cli.cost import print_cost
from hf_posenc.cli.presentation import exit_on, say_written, show_model

if TYPE_CHECKING:
    from hf_posenc.evaluation.bench import BenchResult
    from hf_posenc.evaluation.bench.work import Bench
    from hf_posenc.evaluation.processes import Shard


def print_costs(work: Bench) -> None:
    """Prints what the run will cost: the perplexities by method, the rest in tokens."""
    print_cost(work.perplexity)
    parts = (("retrieval", work.retrieval), ("timed prefill, warm-ups included", work.speed))
    for name, run in parts:
        if run is not None:
            out().print(f"{name}: {run.forwarded:,} tokens", markup=False)


def finish(result: BenchResult, output: Path, with_plot: bool) -> None:
    """Prints the tables and writes the files.

    Raises:
        PosencError: A file cannot be written.
        typer.Exit: Status 1 where a number is missing, after everything that was measured has been written.
    """
    from hf_posenc.evaluation.bench import report

    show_model(result.perplexity.model)
    console = out()
    for table in report.tables(result):
        console.print(table)
    for line in (*report.notes(result), ""):
        console.print(line, markup=False)
    say_written(result.write(output, plots=with_plot), output)
    exit_on(report.problems(result))


def say_unfinished(work: Bench, shard: Shard) -> None:
    """Says what this process leaves to others."""
    if shard.launched:
        return
    out().print(
        f"Share {shard.index + 1} of {shard.count} is done; {work.missing:,} parts are the others'. The last process "
        "to finish times the prefill and prints the result, as does the same command without --shard.",
        markup=False,
    )
