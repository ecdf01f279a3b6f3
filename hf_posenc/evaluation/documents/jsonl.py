"""JSON lines: a document per line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_posenc.evaluation.documents.document import Entry, Skipped
from hf_posenc.evaluation.documents.fields import Field
from hf_posenc.evaluation.documents.names import printable
from hf_posenc.evaluation.documents.streams import byte_pieces

LONGEST = 1 << 28
"""Bytes of a line that is still read; it is in memory as a whole."""


def read_jsonl(path: Path, field: Field) -> Iterator[Entry]:
    """The lines of a file, compressed or not; blank ones are none.

    Raises:
        UnreadableError: The file cannot be read, or not to its end.
    """
    empty = True
    for number, line, ended in _lines(path):
        label = f"{printable(path)}:{number}"
        if line is None:
            yield Skipped(label, f"a line of more than {LONGEST:,} bytes")
        elif line.strip():
            yield _entry(label, line, ended, field)
        empty &= line is not None and not line.strip()
    if empty:
        yield Skipped(printable(path), "empty")


def _entry(label: str, line: bytes, ended: bool, field: Field) -> Entry:
    try:
        row: Any = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return Skipped(label, f"not UTF-8 (byte 0x{error.object[error.start]:02x})")
    except json.JSONDecodeError as error:
        torn = "" if ended else "; the file ends within this line"
        return Skipped(label, f"not JSON ({error.msg}, character {error.pos + 1:,}){torn}")
    except (ValueError, RecursionError):  # a number of 5,000 digits, 5,000 brackets
        return Skipped(label, "JSON beyond what Python reads")
    if not isinstance(row, dict):
        return Skipped(label, f"a JSON {type(row).__name__}, not an object with columns")
    return field.entry(label, row)


def _lines(path: Path) -> Iterator[tuple[int, bytes | None, bool]]:
    """Number, content (`None`: too long) and whether a line break follows, of every line."""
    number, held, size = 1, [b""], 0
    for piece in byte_pieces(path):
        first, *others = piece.split(b"\n")
        for part in (first, *others):
            if part is not first:
                yield number, b"".join(held) if size <= LONGEST else None, True
                number, held, size = number + 1, [], 0
            size += len(part)
            held = [*held, part] if size <= LONGEST else []
    if size:
        yield number, b"".join(held) if size <= LONGEST else None, False
