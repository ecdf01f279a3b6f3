"""Names that can be printed anywhere."""

from __future__ import annotations

from pathlib import Path


def printable(name: str | Path) -> str:
    """A name on one line: bytes that are no UTF-8 and characters that would not show as escapes."""
    text = str(name).encode("utf-8", "backslashreplace").decode("utf-8")
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return "".join(shown)
