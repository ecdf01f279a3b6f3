"""Text files, folders and glob patterns: each file once, read in the format that its name implies."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from hf_posenc.errors import unknown
from hf_posenc.evaluation.documents.document import Entry, Skipped, UnreadableError, printable
from hf_posenc.evaluation.documents.formats import (
    TOKEN_DTYPES,
    Column,
    is_saved,
    read_file,
    read_saved,
    system_reason,
)


def read_paths(
    paths: Iterable[str],
    *,
    column: str = "text",
    tokenized: str | None = None,
    split: str = "test",
    token_dtype: str = "uint16",
) -> Iterator[Entry]:
    """Yield the documents of files, folders (all files below them except hidden ones) and glob patterns.

    Each file is read once. Its suffix, without `.gz` or `.zst`, selects the format: `.jsonl`, `.ndjson` and `.parquet`
    contain rows; `.npy` contains token ids, as does a `.bin` file that is named and not just found in a folder;
    everything else is one text. A folder that `save_to_disk` of the datasets library wrote is that dataset.

    Args:
        paths: Files, folders, patterns.
        column: The column of rows that contains their text.
        tokenized: The column of rows that contains token ids, read instead of a text.
        split: The split of a saved `DatasetDict`.
        token_dtype: Type of the ids in a `.bin` file: `uint16`, as LongLoRA's, or another of `TOKEN_DTYPES`.

    Raises:
        PosencError: There is no such `token_dtype`, or a saved dataset cannot be read.
    """
    if token_dtype not in TOKEN_DTYPES:
        raise unknown("token type", token_dtype, TOKEN_DTYPES)
    reader = _Reader(Column(column, tokenized), split, token_dtype)
    for argument in paths:
        yield from reader.read(argument)


class _Reader:
    def __init__(self, column: Column, split: str, token_dtype: str) -> None:
        self.column, self.split, self.token_dtype = column, split, token_dtype
        self.seen: dict[tuple[int, int], Path] = {}

    def read(self, argument: str) -> Iterator[Entry]:
        """Yield the documents of one argument."""
        path = Path(os.path.expanduser(argument))  # noqa: PTH111 (pathlib's raises for an unknown user)
        if not argument:  # an empty shell variable, which pathlib takes for the current folder
            yield Skipped("(an empty name)", "no such file")
        elif os.path.isdir(path):  # noqa: PTH112 (pathlib's raises for a name that is too long)
            if is_saved(path):
                yield from read_saved(path, self.split, self.column)
            else:
                yield from self._folder(path)
        elif os.path.lexists(path):
            yield from self._file(path, named=True)
        else:
            matches = [Path(file) for file in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207
            files = [file for file in matches if not os.path.isdir(file)]  # noqa: PTH112
            if not files:
                yield Skipped(printable(argument), "no such file")
            for file in files:
                yield from self._file(file, named=True)

    def _folder(self, folder: Path) -> Iterator[Entry]:
        empty = True
        for found in _below(folder):
            empty = False
            if isinstance(found, Skipped):
                yield found
            else:
                yield from self._file(found, named=False)
        if empty:
            yield Skipped(printable(folder), "a folder without files")

    def _file(self, path: Path, *, named: bool) -> Iterator[Entry]:
        name = printable(path)
        try:
            first = self._first(path)
            if first is path:
                yield from read_file(path, self.column, self.token_dtype if named else None)
            elif os.path.abspath(first) != os.path.abspath(path):  # noqa: PTH100 (links stay)
                yield Skipped(name, f"the same file as {printable(first)}")
        except UnreadableError as error:
            yield Skipped(name, str(error))

    def _first(self, path: Path) -> Path:
        """Return the path under which this file was first read; a file without a status is its own."""
        try:
            status = path.stat()
        except OSError:
            return path  # its reader raises the reason
        return self.seen.setdefault((status.st_dev, status.st_ino), path)


def _below(folder: Path) -> Iterator[Path | Skipped]:
    """Yield every file below a folder, by name and through links; hidden entries are left out."""
    seen: set[tuple[int, int]] = set()
    pending = [folder]
    while pending:
        path = pending.pop()
        if not os.path.isdir(path):  # noqa: PTH112 (pathlib's raises for some names)
            yield path
            continue
        try:
            status = path.stat()
            if (status.st_dev, status.st_ino) in seen:
                yield Skipped(printable(path), "a link to a folder that is read already")
                continue
            seen.add((status.st_dev, status.st_ino))
            entries = sorted(path.iterdir(), key=lambda entry: entry.name, reverse=True)
        except OSError as error:
            yield Skipped(printable(path), system_reason(error))
            continue
        pending += [entry for entry in entries if not entry.name.startswith(".")]
