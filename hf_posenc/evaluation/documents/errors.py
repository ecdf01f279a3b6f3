"""What cannot be read, and what an error of another library says, in one line."""

from __future__ import annotations

from hf_posenc.errors import PosencError


class UnreadableError(PosencError):
    """A document that turns out to be unusable while it is read; the message is the reason of its `Skipped`."""


def one_line(error: BaseException) -> str:
    """The first line of an error's message, or its type where it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def reason_of(error: OSError) -> str:
    """What the operating system says, without the path."""
    return f"cannot be read ({error.strerror or one_line(error)})"
