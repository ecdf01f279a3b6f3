"""Tokens in memory, in temporary files and in a cache that several processes and later runs share."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents.tokens import Numbers, Tokens
from hf_posenc.files import disk_errors

if TYPE_CHECKING:
    from torch import Tensor


BUDGET = 1 << 24  # tokens that all documents of a run together keep in memory, 24 bytes each
COLUMNS = {"ids": "<i4", "byte_ends": "<i8", "word_ends": "<i8"}  # of `Tokens`, in a file
FORMAT = 2  # of the cache
CHECKSUMS = "crc32"  # the file of a cache entry with the checksum of every column
_NOTHING = np.zeros(0, np.int64)


@dataclass
class Stored:
    """The tokens of one document: arrays held in memory, or its first row in the spool's file of each column."""

    count: int = 0
    held: list[Tokens] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)


class Spool:
    """The tokens of all documents of a run: in memory up to a budget, then in nameless temporary files."""

    def __init__(self, budget: int | None = None) -> None:
        self._left = BUDGET if budget is None else budget
        self._files: dict[str, _File] = {}

    def store(self, parts: Iterable[Tokens]) -> Stored:
        """Store one document; nothing of it is kept if reading it fails."""
        stored = Stored()
        try:
            for part in parts:
                stored.count += len(part)
                stored.held.append(part)
                if stored.rows or stored.count > self._left:
                    self._write(stored)
        except BaseException:
            stored.count = 0
            self.forget(stored)
            raise
        if not stored.rows:
            self._left -= stored.count
        return stored

    def forget(self, stored: Stored) -> None:
        """Free the memory or the rows of the document that was stored last."""
        if not stored.rows:
            self._left += stored.count
        for name, first in stored.rows.items():
            self._files[name].truncate(first)

    def column(self, stored: Stored, name: str) -> Tensor | None:
        """Return one of `COLUMNS` of a document, shape (count,); `None` if its text is unknown."""
        import torch

        if stored.rows:
            first = stored.rows.get(name)
            return None if first is None else self._files[name].read(first, stored.count)
        values = [values for part in stored.held if (values := getattr(part, name)) is not None]
        if len(values) < len(stored.held):
            return None
        return torch.from_numpy(np.concatenate([_NOTHING, *values]))

    def _write(self, stored: Stored) -> None:
        room = "Let TMPDIR name a folder on a larger disk, or cut the documents (--max-doc-tokens)."
        with disk_errors(f"The tokens cannot be written to {tempfile.gettempdir()}", room):
            for part in stored.held:
                for name, values in _columns(part):
                    if name not in self._files:
                        self._files[name] = _File(COLUMNS[name])
                    stored.rows.setdefault(name, self._files[name].rows)
                    self._files[name].append(values)
        stored.held.clear()


def _columns(tokens: Tokens) -> Iterator[tuple[str, Numbers]]:
    """Yield the columns that these tokens have, in the types of a file."""
    for name, dtype in COLUMNS.items():
        if (values := getattr(tokens, name)) is not None:
            yield name, np.ascontiguousarray(values, dtype=dtype)


class _File:
    """One number per token, appended to a nameless temporary file and mapped for reading."""

    def __init__(self, dtype: str) -> None:
        self.dtype, self.rows = np.dtype(dtype), 0
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (mappings outlive any block)
        self._map: Tensor | None = None

    def append(self, values: Numbers) -> None:
        self._file.write(values.data)
        self.rows += len(values)

    def truncate(self, rows: int) -> None:
        self._file.seek(rows * self.dtype.itemsize)
        self._file.truncate()
        self.rows = rows

    def read(self, first: int, count: int) -> Tensor:
        import torch

        if self._map is None or len(self._map) < first + count:
            self._file.flush()
            self._map = torch.from_numpy(np.memmap(self._file, self.dtype, "r+"))
        return self._map[first : first + count]


class TokenCache:
    """A folder with one folder per text and tokenizer, each written under a temporary name and then renamed.

    Any number of processes may read and write at once: an entry exists whole or not at all, and a process that comes
    second discards its own.
    """

    def __init__(self, folder: Path, tokenizer_sha256: str) -> None:
        import tokenizers

        self.folder = folder
        self._prefix = f"{FORMAT}/{tokenizers.__version__}/{tokenizer_sha256}"

    def through(
        self, text_sha256: str, max_tokens: int | None, parts: Iterable[Tokens]
    ) -> Iterator[Tokens]:
        """Yield the tokens of a text: from the cache, else from `parts`, which are then written to it."""
        key = f"{self._prefix}/{text_sha256}/{max_tokens}"
        entry = self.folder / hashlib.sha256(key.encode()).hexdigest()
        return _entry_tokens(entry) if entry.is_dir() else self._written(entry, parts)

    def _written(self, entry: Path, parts: Iterable[Tokens]) -> Iterator[Tokens]:
        with contextlib.ExitStack() as stack:
            with self._writing():
                self.folder.mkdir(parents=True, exist_ok=True)
                unfinished = tempfile.TemporaryDirectory(
                    prefix="unfinished-", dir=self.folder, ignore_cleanup_errors=True
                )
                folder = Path(stack.enter_context(unfinished))
            checksums: dict[str, int] = {}
            for part in parts:
                with self._writing():
                    for name, values in _columns(part):
                        checksums[name] = zlib.crc32(values.data, checksums.get(name, 0))
                        with (folder / name).open("ab") as file:
                            file.write(values.data)
                            file.flush()
                            os.fsync(file.fileno())
                yield part
            with self._writing():
                (folder / CHECKSUMS).write_text(str(sorted(checksums.items())))
            with contextlib.suppress(OSError):  # another process was first
                folder.rename(entry)

    def _writing(self) -> contextlib.AbstractContextManager[None]:
        return disk_errors(f"The token cache {self.folder} cannot be written to")


def _entry_tokens(entry: Path) -> Iterator[Tokens]:
    try:
        columns = {
            name: np.memmap(entry / name, dtype, "r") if (entry / name).stat().st_size else _NOTHING
            for name, dtype in COLUMNS.items()
            if (entry / name).exists()
        }
        if len({len(values) for values in columns.values()}) != 1:
            raise ValueError("its columns have different lengths")
        sums = {name: zlib.crc32(np.ascontiguousarray(v).data) for name, v in columns.items()}
        if (entry / CHECKSUMS).read_text() != str(sorted(sums.items())):
            raise ValueError("its checksums do not match")
        yield Tokens(columns["ids"], columns.get("byte_ends"), columns.get("word_ends"))
    except (OSError, ValueError, KeyError) as error:
        raise PosencError(
            f"The token cache {entry} is damaged: remove that folder ({error})"
        ) from error
