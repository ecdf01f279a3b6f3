"""`hf-posenc report`: one HTML page from the results of many runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_posenc.cli.console import out, print_warning


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...",
            help="Output folders of perplexity, retrieval, bench or sweep, folders of such folders, or result files.",
        ),
    ],
    output: Annotated[Path, typer.Option(metavar="FILE", help="The page that is written.")] = Path(
        "report.html"
    ),
    title: Annotated[str | None, typer.Option(metavar="TEXT", help="The page's heading.")] = None,
) -> None:
    """Put the results of many runs and machines into one HTML page: tables, plots, settings, how to do it again.

    Needs no model and no network. The page loads nothing and opens from a file. Results that may not be compared (other
    protocol, documents or tokenizer) stand in separate tables, with the reason. Of an unfinished run it says so.
    """
    from hf_posenc.evaluation import plots
    from hf_posenc.evaluation.files import write_atomically
    from hf_posenc.evaluation.page import collect, render
    from hf_posenc.evaluation.page.render import TITLE

    found = collect(runs)
    for remark in found.remarks:
        print_warning(remark)
    if not plots.available():
        print_warning("no plots: they need matplotlib (pip install 'hf-posenc[plot]').")
    write_atomically(output, render(found, title=title or TITLE))
    count, waiting = len(found.sources), len(found.unfinished)
    also = f" and {waiting} unfinished run{'s' * (waiting != 1)}" if waiting else ""
    results = f"{count} result{'s' * (count != 1)}"
    out().print(f"Wrote {output}: {results}{also}", markup=False)


def register(app: typer.Typer) -> None:
    """Adds the subcommand of this file."""
    app.command()(report)
