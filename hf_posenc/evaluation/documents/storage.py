"""Tokens in memory, in a temporary file and in a cache that several processes and later runs share.

The tokens of a document are one array of int64, with a row per token: its id, and the end of its text in bytes and in
words if the text is known.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import weakref
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents.tokens import Numbers
from hf_posenc.files import disk_errors

if TYPE_CHECKING:
    from torch import Tensor

BUDGET = 1 << 24  # tokens that all documents of a run together keep in memory, 24 bytes each
FORMAT = 3  # of the cache


@dataclass(frozen=True)
class Stored:
    """The place of a document in the spool, in bytes, with its numbers of tokens and columns."""

    start: int
    count: int = 0
    columns: int = 1


class Spool:
    """The tokens of all documents of a run: in memory up to a budget, then in a nameless temporary file."""

    def __init__(self) -> None:
        self._budget = max(1, BUDGET * 24)
        self._file = tempfile.SpooledTemporaryFile(self._budget)  # noqa: SIM115 (mappings outlive any block)
        self._map: Tensor | None = None
        weakref.finalize(self, self._file.close)

    def store(self, parts: Iterable[Numbers]) -> Stored:
        """Store one document; nothing of it is kept if reading it fails."""
        start, count, columns = self._file.tell(), 0, 1
        room = "Let TMPDIR name a folder on a larger disk, or cut the documents (--max-doc-tokens)."
        try:
            for part in parts:
                count, columns = count + len(part), part.shape[1]
                with disk_errors(f"The tokens cannot be written to {tempfile.gettempdir()}", room):
                    self._file.write(np.ascontiguousarray(part, "<i8").tobytes())
        except BaseException:
            self.forget(Stored(start))
            raise
        return Stored(start, count, columns)

    def forget(self, stored: Stored) -> None:
        """Free the memory or the rows of the document that was stored last."""
        self._file.seek(stored.start)
        self._file.truncate()

    def columns(self, stored: Stored) -> list[Tensor]:
        """Return the columns of a document, each of shape (count,); nothing may be stored afterwards."""
        import torch

        size = stored.count * stored.columns
        if self._file.tell() <= self._budget:
            self._file.seek(stored.start)
            numbers = np.frombuffer(bytearray(self._file.read(size * 8)), "<i8")
            columns = np.ascontiguousarray(numbers.reshape(-1, stored.columns).T)
            return list(torch.from_numpy(columns))
        if self._map is None:
            self._map = torch.from_numpy(np.memmap(self._file, "<i8", "r+"))
        first = stored.start // 8
        return list(self._map[first : first + size].view(-1, stored.columns).T)


class TokenCache:
    """A folder with one file per text and tokenizer, each written under a temporary name and then renamed.

    Any number of processes may read and write at once: an entry exists whole or not at all, and that of a process that
    comes second replaces the same content. In front of its rows are their number of columns and a checksum.
    """

    def __init__(self, folder: Path, tokenizer_sha256: str) -> None:
        import tokenizers

        self.folder = folder
        self._prefix = f"{FORMAT}/{tokenizers.__version__}/{tokenizer_sha256}"

    def through(
        self, text_sha256: str, max_tokens: int | None, parts: Iterable[Numbers]
    ) -> Iterator[Numbers]:
        """Yield the tokens of a text from the cache, once those of `parts` are written to it if it has none."""
        key = f"{self._prefix}/{text_sha256}/{max_tokens}"
        entry = self.folder / hashlib.sha256(key.encode()).hexdigest()
        if not entry.exists():
            with disk_errors(f"The token cache {self.folder} cannot be written to"):
                self._write(entry, parts)
        try:
            numbers = np.memmap(entry, "<i8", "r")
            columns, checksum = map(int, numbers[:2])
            if checksum != zlib.crc32(bytes([columns]), zlib.crc32(numbers[2:].data)):
                raise ValueError("its checksum does not match")
            rows = numbers[2:].reshape(-1, columns)
        except (OSError, ValueError) as error:
            raise PosencError(
                f"The token cache {entry} is damaged: remove that file ({error})"
            ) from error
        yield rows

    def _write(self, entry: Path, parts: Iterable[Numbers]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix="unfinished-", dir=self.folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(bytes(16))  # replaced at the end
                checksum, columns = 0, 1
                for part in parts:
                    rows = np.ascontiguousarray(part, "<i8")
                    checksum, columns = zlib.crc32(rows.data, checksum), rows.shape[1]
                    file.write(rows.data)
                file.seek(0)
                checksum = zlib.crc32(bytes([columns]), checksum)
                file.write(np.array([columns, checksum], "<i8").data)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(entry)
        finally:
            Path(name).unlink(missing_ok=True)  # of an interrupted run
