"""Text files, folders and glob patterns: each file once, by the reader that its name asks for."""

from __future__ import annotations

import functools
import glob
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hf_posenc.errors import unknown
from hf_posenc.evaluation.documents.document import (
    Document,
    Entry,
    LongDocument,
    Skipped,
    UnreadableError,
    printable,
    reason_of,
)
from hf_posenc.evaluation.documents.formats import (
    COMPRESSED,
    TOKEN_DTYPES,
    Field,
    check_regular,
    inner_suffix,
    is_saved,
    read_bin,
    read_jsonl,
    read_npy,
    read_parquet,
    read_saved,
    text_pieces,
)

# The files below a folder.


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


SMALL = 1 << 20
"""Characters, or bytes, from which on a text stays in its file."""


def read_paths(
    paths: Iterable[str],
    *,
    column: str = "text",
    tokenized: str | None = None,
    split: str = "test",
    token_dtype: str = "uint16",
) -> Iterator[Entry]:
    """Files, folders (every file below them, hidden ones left out) and glob patterns, each file once.

    What a file is, its name says, without `.gz` or `.zst`: `.jsonl`, `.ndjson` and `.parquet` are rows; `.npy` and,
    where it is named and not just found in a folder, `.bin` are token ids; everything else is one text. A folder that
    `save_to_disk` of the datasets library wrote is that dataset.

    Args:
        paths: Files, folders, patterns.
        column: The column of rows that holds their text.
        tokenized: The column of rows that holds token ids, read instead of a text.
        split: Which part of a saved `DatasetDict`.
        token_dtype: What a `.bin` file consists of: `uint16`, as LongLoRA's, or another of `TOKEN_DTYPES`.

    Raises:
        PosencError: There is no such `token_dtype`, or a saved dataset cannot be read.
    """
    if token_dtype not in TOKEN_DTYPES:
        raise unknown("token type", token_dtype, TOKEN_DTYPES)
    reader = _Reader(Field(column, tokenized), split, token_dtype)
    for given in paths:
        yield from reader.read(given)


@dataclass
class _Reader:
    column: Field
    split: str
    token_dtype: str
    seen: dict[tuple[int, int], Path] = field(default_factory=dict)

    def read(self, given: str) -> Iterator[Entry]:
        """What one argument names."""
        path = Path(os.path.expanduser(given))  # noqa: PTH111 (pathlib's raises for an unknown user)
        if not given:  # an empty variable of a shell, and not the folder that pathlib takes it for
            yield Skipped("(an empty name)", "no such file")
        elif os.path.isdir(path):  # noqa: PTH112 (pathlib's raises for a name that is too long)
            if is_saved(path):
                yield from read_saved(path, self.split, self.column)
            else:
                yield from self._folder(path)
        elif os.path.lexists(path):
            yield from self._file(path, named=True)
        else:
            files = [Path(file) for file in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207
            files = [file for file in files if not os.path.isdir(file)]  # noqa: PTH112
            if not files:
                yield Skipped(printable(given), "no such file")
            for file in files:
                yield from self._file(file, named=True)

    def _folder(self, folder: Path) -> Iterator[Entry]:
        empty = True
        for found in below(folder):
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
            if first is None:
                yield from self._content(path, named)
            elif os.path.abspath(first) != os.path.abspath(path):  # noqa: PTH100 (links stay)
                yield Skipped(name, f"the same file as {printable(first)}")
        except UnreadableError as error:
            yield Skipped(name, str(error))

    def _first(self, path: Path) -> Path | None:
        """The path under which this file was read before."""
        try:
            found = path.stat()
        except OSError:
            return None  # its reader says why
        before = self.seen.setdefault((found.st_dev, found.st_ino), path)
        return None if before is path else before

    def _content(self, path: Path, named: bool) -> Iterator[Entry]:
        suffix, packed = inner_suffix(path), path.suffix.lower() in COMPRESSED
        if suffix in (".jsonl", ".ndjson"):
            yield from read_jsonl(path, self.column)
        elif suffix in (".parquet", ".npy", ".bin") and packed:
            raise UnreadableError(f"{suffix} files are read from any place: decompress it first")
        elif suffix == ".parquet":
            yield from read_parquet(path, self.column)
        elif suffix == ".npy":
            yield from read_npy(path)
        elif suffix == ".bin" and not named:
            raise UnreadableError("may be token ids or anything else: name the file to read it")
        elif suffix == ".bin":
            yield from read_bin(path, self.token_dtype)
        else:
            yield _text(path, packed)


def _text(path: Path, packed: bool) -> Document | LongDocument:
    name, pieces = printable(path), functools.partial(text_pieces, path)
    size = check_regular(path)
    if not packed and size > SMALL:
        return LongDocument(name, pieces)
    held: list[str] = []
    for piece in pieces():
        held.append(piece)
        if sum(map(len, held)) > SMALL:
            return LongDocument(name, pieces)
    return Document(name, "".join(held))
