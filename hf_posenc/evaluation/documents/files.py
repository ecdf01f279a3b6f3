"""Text files, folders and glob patterns."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator
from pathlib import Path

from hf_posenc.evaluation.documents.document import Document, Skipped


def read_paths(paths: Iterable[str]) -> Iterator[Document | Skipped]:
    """Text files, folders (every file below them, hidden ones left out) and glob patterns, each file once."""
    seen: set[Path] = set()
    for given in paths:
        files = _files(given)
        if not files:
            empty = Path(given).is_dir()
            yield Skipped(given, "a folder without files" if empty else "no such file")
        for path in files:
            if path.resolve() not in seen:
                seen.add(path.resolve())
                yield _read(path)


def _files(given: str) -> list[Path]:
    path = Path(given).expanduser()
    if path.is_dir():
        below = (file.relative_to(path) for file in path.rglob("*") if file.is_file())
        return [
            path / file
            for file in sorted(below)
            if not any(part.startswith(".") for part in file.parts)
        ]
    if path.exists():
        return [path]
    found = glob.glob(str(path), recursive=True)  # noqa: PTH207 (pathlib's takes no absolute pattern)
    return [Path(file) for file in sorted(found) if Path(file).is_file()]


def _read(path: Path) -> Document | Skipped:
    try:
        return Document(str(path), path.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        return Skipped(str(path), f"not UTF-8 (byte 0x{byte:02x} at offset {error.start})")
    except OSError as error:
        return Skipped(str(path), f"cannot be read ({error.strerror or error})")
