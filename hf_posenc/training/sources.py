"""Where training text comes from when nothing is named, and what tells two states of a source apart."""

from __future__ import annotations

import itertools
import os
import platform
from collections.abc import Iterator, Mapping
from glob import glob
from pathlib import Path
from typing import Any

from hf_posenc.evaluation.documents import Document

STANDARD_LIBRARY: dict[str, Any] = {
    "kind": "modules of the standard library that are not held out",
    "python": platform.python_version(),
}
"""What a result says of `read_standard_library`."""


def read_standard_library() -> Iterator[Document]:
    """The part of the embedded model's training corpus that every Python has: its standard library.

    Chosen by the rules of `hf_posenc.embedded.corpus`: no tests, no tables, nothing twice, and none of the held-out
    modules that `read_embedded` gives for evaluation, nor what quotes them.
    """
    from hf_posenc.embedded.corpus import environment, select

    first = itertools.islice(environment(), 1)  # the standard library, which is taken whole
    for _, path, text in select(first, bytes_per_source=0).files:
        yield Document(path, text)


def stamped(source: Mapping[str, Any]) -> dict[str, Any]:
    """A source's description with the sizes and times of the files that it names.

    So a file that was changed is another source. What a hub dataset holds is taken to stay what it was.

    Args:
        source: As `source_of` of the command line gives it: `paths` of texts, or the `name` of a dataset.
    """
    named = [*source.get("paths", ()), *([source["name"]] if "name" in source else ())]
    files = sorted({file for name in named for file in _files(str(name))})
    return {**source, "files": [(str(file), *_stamp(file)) for file in files]}


def _files(name: str) -> Iterator[Path]:
    for found in [name] if os.path.lexists(name) else glob(name, recursive=True):  # noqa: PTH207
        path = Path(found)
        yield from (path.rglob("*") if path.is_dir() else [path])


def _stamp(file: Path) -> tuple[int, int]:
    found = file.lstat() if not file.exists() else file.stat()
    return found.st_size, found.st_mtime_ns
