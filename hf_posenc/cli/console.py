"""Output of the commands: results on stdout, everything else on stderr."""

from __future__ import annotations

import codecs
import contextlib
import io
import sys
import unicodedata
import warnings
from collections.abc import Iterator
from typing import Any

from rich.console import Console

SUBSTITUTES = dict(zip("×↑↓→…−–—·•‘’“”━╸", "x^v>~---.*''\"\"--", strict=True)) | {"≤": "<="}
"""Text in the place of a character that the terminal's encoding lacks. Columns of tables keep their width."""


def _substitute(error: UnicodeError) -> tuple[str, int]:
    """Return the text for characters that cannot be encoded, and where encoding resumes."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end]
    plain = (unicodedata.normalize("NFKD", letter).encode("ascii", "ignore") for letter in letters)
    texts = zip(letters, plain, strict=True)
    return "".join(
        SUBSTITUTES.get(letter, text.decode() or "?") for letter, text in texts
    ), error.end


codecs.register_error("hf_posenc", _substitute)


def accept_any_character() -> None:
    """Let stdout and stderr substitute what their encoding lacks, instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="hf_posenc")


def out() -> Console:
    """Return the console for results."""
    return Console(highlight=False)


def err() -> Console:
    """Return the console for progress, warnings and errors."""
    return Console(stderr=True, highlight=False)


def print_error(message: str) -> None:
    """Print an error on one line, not wrapped, so that it can be searched for."""
    sys.stderr.write(f"error: {' '.join(message.split())}\n")


def print_warning(message: str) -> None:
    """Print a warning on one line."""
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
