"""The files below a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from hf_posenc.evaluation.documents.document import Skipped
from hf_posenc.evaluation.documents.errors import reason_of
from hf_posenc.evaluation.documents.names import printable


def below(folder: Path) -> Iterator[Path | Skipped]:
    """Everything below a folder that is no folder, by name, through links too; hidden entries are left out."""
    seen: set[tuple[int, int]] = set()
    waiting = [folder]
    while waiting:
        path = waiting.pop()
        if not os.path.isdir(path):  # noqa: PTH112 (pathlib's raises for some of what is no folder)
            yield path
            continue
        try:
            found = path.stat()
            if (found.st_dev, found.st_ino) in seen:
                yield Skipped(printable(path), "a link to a folder that is read already")
                continue
            seen.add((found.st_dev, found.st_ino))
            entries = sorted(path.iterdir(), key=lambda entry: entry.name, reverse=True)
        except OSError as error:
            yield Skipped(printable(path), reason_of(error))
            continue
        waiting += [entry for entry in entries if not entry.name.startswith(".")]
