"""Tokens in memory, in temporary files and in a cache that several processes and later runs share.

The tokens of a document are one array of int64, with a row per token: its id, and the end of its text in bytes and in
words if the text is known.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents.tokens import Numbers
from hf_posenc.files import disk_errors

IN_MEMORY = 1 << 20  # most tokens of a document that is kept in memory, 24 bytes each
FORMAT = 3  # of the cache


def stored(parts: Iterable[Numbers]) -> Numbers:
    """Return all rows of a document: in memory, or mapped from a nameless temporary file if they are many."""
    room = "Let TMPDIR name a folder on a larger disk, or cut the documents (--max-doc-tokens)."
    columns, limit = 1, IN_MEMORY * 24
    with tempfile.SpooledTemporaryFile(max(1, limit)) as file:
        for part in parts:
            columns = part.shape[1]
            with disk_errors(f"The tokens cannot be written to {tempfile.gettempdir()}", room):
                file.write(np.ascontiguousarray(part, "<i8").tobytes())
        if file.tell() > limit:
            return np.memmap(file, "<i8", "r+").reshape(-1, columns)
        file.seek(0)
        return np.frombuffer(bytearray(file.read()), "<i8").reshape(-1, columns)


class TokenCache:
    """A folder with one file per text and tokenizer, each written under a temporary name and then renamed.

    Any number of processes may read and write at once: an entry exists whole or not at all, and that of a process that
    comes second replaces the same content. In front of its rows are their number of columns and a checksum.
    """

    def __init__(self, folder: Path, tokenizer_sha256: str) -> None:
        import tokenizers

        self.folder = folder
        self._prefix = f"{FORMAT}/{tokenizers.__version__}/{tokenizer_sha256}"

    def rows(self, text_sha256: str, max_tokens: int | None, parts: Iterable[Numbers]) -> Numbers:
        """Return the rows of a text, as `stored` does; those of `parts` are written to the cache if it has none."""
        key = f"{self._prefix}/{text_sha256}/{max_tokens}"
        entry = self.folder / hashlib.sha256(key.encode()).hexdigest()
        if not entry.exists():
            with disk_errors(f"The token cache {self.folder} cannot be written to"):
                self._write(entry, parts)
        try:
            numbers = np.memmap(entry, "<i8", "c")
            columns, checksum = map(int, numbers[:2])
            if checksum != zlib.crc32(bytes([columns]), zlib.crc32(numbers[2:].data)):
                raise ValueError("its checksum does not match")
            rows = numbers[2:].reshape(-1, columns)
        except (OSError, ValueError) as error:
            raise PosencError(
                f"The token cache {entry} is damaged: remove that file ({error})"
            ) from error
        return rows if len(rows) > IN_MEMORY else np.array(rows)

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
