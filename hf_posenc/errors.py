"""The errors that `hf_posenc` raises: one family, with messages that name what is possible and the way out."""

from __future__ import annotations

import contextlib
import difflib
import itertools
from collections.abc import Iterable, Iterator


class PosencError(ValueError):
    """A request that cannot be carried out; nothing was changed."""


class UnsupportedModelError(PosencError):
    """This model, or this method on this model, cannot be patched; the message gives the reason."""


class VerificationError(PosencError):
    """The model does not compute the requested patch; it was restored."""


class UntrainedWarning(UserWarning):
    """A method was patched in whose parameters are not trained yet."""


def unknown(kind: str, given: object, possible: Iterable[str], otherwise: str = "") -> PosencError:
    """Return the error for an unknown name of a kind (`"method"`): the closest names, or if none is close, a hint."""
    names = sorted(possible)
    close = difflib.get_close_matches(str(given), names, n=3)
    hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else otherwise
    listed = ", ".join(repr(name) if "," in name else name for name in names)
    return PosencError(f"Unknown {kind} {given!r}.{hint} Available: {listed}.")


def one_line(error: BaseException) -> str:
    """Return the first line of an error's message with the list below it, or its type if the message is empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    items = itertools.takewhile(lambda line: line.startswith("- "), lines[1:])
    below = ", ".join(item[2:] for item in items)
    return f"{lines[0]} {below}".rstrip() if lines else type(error).__name__


_EXTRAS = {
    **dict.fromkeys(("filelock", "rich", "typer"), "cli"),
    **dict.fromkeys(("jinja2", "markupsafe"), "report"),
    "pandas": "data",
}
"""The extra that installs a library, of those that patching a model does not need."""


@contextlib.contextmanager
def naming_extras() -> Iterator[None]:
    """Name the extra to install where an import fails for a library of one."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (extra := _EXTRAS.get((error.name or "").partition(".")[0])) is None:
            raise
        raise PosencError(
            f"This needs the library {error.name}: pip install 'hf-posenc[{extra}]'."
        ) from error


FREQUENCY_METHODS_WORK = (
    "Frequency methods (yarn, ntk_by_parts, ...; dynamic ones with "
    'update="sequence") work on this model.'
)
"""The way out where a method that computes attention itself cannot be used."""
LOAD_FIRST = "Load the model first: no --dry-run in a command, and --weights for `recommend`."
"""The way out where a model on the meta device lacks the values that a patch reads."""
