"""Output of the commands: results on stdout, everything else on stderr."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from hf_posenc.evaluation import loading
from hf_posenc.evaluation.options import output_option
from hf_posenc.files import to_json

if TYPE_CHECKING:
    from rich.console import Console

    from hf_posenc.evaluation.grid import Grid


@dataclass(frozen=True, kw_only=True)
class TerminalOptions:
    """Options that every command has.

    Attributes:
        json: Print the result as JSON, and nothing else on stdout.
        quiet: Print the result alone: no progress, warnings or names of written files.
        verbose: Print transformers' messages and tracebacks too.
    """

    json: bool = output_option(False, rank=2)
    quiet: bool = output_option(False, rank=2)
    verbose: bool = output_option(False, rank=2)


class _Terminal:
    """The options of the command that runs, and its stdout."""

    options = TerminalOptions()
    stdout: TextIO = sys.stdout


@contextlib.contextmanager
def terminal(options: TerminalOptions) -> Iterator[None]:
    """Print as these options say; with `--json`, whatever else is written to stdout goes to stderr."""
    _Terminal.options, _Terminal.stdout = options, sys.stdout
    loading.verbose = options.verbose
    try:
        with contextlib.redirect_stdout(sys.stderr if options.json else sys.stdout):
            yield
    finally:  # this stdout may be closed by the next command of the process
        _Terminal.options = TerminalOptions(verbose=options.verbose)


def is_verbose() -> bool:
    """Return true where `--verbose` was given."""
    return _Terminal.options.verbose


def prepare_terminal() -> None:
    """Let stdout and stderr escape what their encoding lacks, instead of raising; forget earlier options."""
    _Terminal.options = TerminalOptions()
    if os.environ.get("COLUMNS") == "0":  # of a terminal without a width: rich would print nothing
        del os.environ["COLUMNS"]
    for name in ("stdout", "stderr"):  # None where the shell closed it: hf-posenc methods >&-
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def out() -> Console:
    """Return the console for results in words, which `--json` replaces."""
    from rich.console import Console

    return Console(highlight=False, quiet=_Terminal.options.json)


def err() -> Console:
    """Return the console for progress, warnings and errors."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, quiet=_Terminal.options.quiet)


def print_items(*items: str | Grid, style: str | None = None, wrap: bool = True) -> None:
    """Print results in words: texts as they are, and tables."""
    console = out()
    for item in items:
        if isinstance(item, str):
            console.print(item, markup=False, style=style, soft_wrap=not wrap)
        else:
            console.print(item)


def print_heading(name: str, about: str, *, wrap: bool = True) -> None:
    """Print what a result is about, with its name in bold."""
    from rich.markup import escape

    out().print(f"[bold]{escape(name)}[/bold]: {escape(about)}", soft_wrap=not wrap)


def print_json(values: Any) -> bool:
    """Print a result as JSON if `--json` was given; return true if so."""
    if _Terminal.options.json:
        _Terminal.stdout.write(to_json(values))
        _Terminal.stdout.flush()  # a closed pipe is noticed here, and not at the end of the process
    return _Terminal.options.json


def print_note(text: str) -> None:
    """Print a line about what was done, such as the files that were written."""
    if not _Terminal.options.quiet:
        (err() if _Terminal.options.json else out()).print(text, markup=False, soft_wrap=True)


def print_error(message: str) -> None:
    """Print an error on one line, not wrapped, so that it can be searched for."""
    sys.stderr.write(f"error: {' '.join(message.split())}\n")


def print_warning(message: str) -> None:
    """Print a warning on one line."""
    if not _Terminal.options.quiet:
        sys.stderr.write(f"warning: {' '.join(message.split())}\n")


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
