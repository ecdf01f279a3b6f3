"""Where the commands print: results on stdout, everything else on stderr."""

from __future__ import annotations

import warnings
from typing import Any

import typer
from rich.console import Console


def out() -> Console:
    """The console for results."""
    return Console(highlight=False)


def err() -> Console:
    """The console for progress, warnings and errors."""
    return Console(stderr=True, highlight=False)


def print_error(message: str) -> None:
    """One line, whatever the message; not wrapped, so that it can be searched for."""
    typer.echo(f"error: {' '.join(message.split())}", err=True)


def print_warning(message: str) -> None:
    """One line."""
    typer.echo(f"warning: {' '.join(message.split())}", err=True)


def quiet_transformers() -> None:
    """Keeps transformers' own log lines and progress bars out of the commands' output; errors are still raised."""
    import transformers

    log: Any = transformers.logging
    log.set_verbosity_error()
    log.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
