"""Output of the commands: results on stdout, everything else on stderr."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import typer
from rich.console import Console


def out() -> Console:
    """Return the console for results."""
    return Console(highlight=False)


def err() -> Console:
    """Return the console for progress, warnings and errors."""
    return Console(stderr=True, highlight=False)


def print_error(message: str) -> None:
    """Print an error on one line, not wrapped, so that it can be searched for."""
    typer.echo(f"error: {' '.join(message.split())}", err=True)


def print_warning(message: str) -> None:
    """Print a warning on one line."""
    typer.echo(f"warning: {' '.join(message.split())}", err=True)


@contextlib.contextmanager
def one_line_warnings() -> Iterator[None]:
    """Print each of Python's warnings once and on one line, without its file and line number."""
    seen: set[str] = set()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if str(message) not in seen:
            seen.add(str(message))
            print_warning(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        yield


def quiet_transformers() -> None:
    """Disable the log lines and progress bars of transformers and its hub client; errors are still raised."""
    import transformers
    from huggingface_hub.utils import logging

    log: Any = transformers.logging
    hub_log: Any = logging
    log.set_verbosity_error()
    log.disable_progress_bar()
    hub_log.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning)
