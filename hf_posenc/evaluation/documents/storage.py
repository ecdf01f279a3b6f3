"""Tokens on disk, so that several processes, and the next run, need not tokenize the same books again."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents.document import BLOCK
from hf_posenc.evaluation.documents.tokens import Numbers, Tokens

# Where tokens are kept: in memory up to a budget, behind it in files without a name that vanish with their reader.


BUDGET = 1 << 24
"""Tokens that all documents of a run together keep in memory, 24 bytes each."""

COLUMNS = {"ids": "<i4", "byte_ends": "<i8", "word_ends": "<i8"}
"""What is kept of a token, and the type that it has in a file."""


@dataclass
class Stored:
    """The tokens of one document: arrays in memory, or rows of the spool's files.

    Attributes:
        count: Number of tokens.
        held: The arrays.
        rows: The document's first row in the file of each column, where it is in files.
    """

    count: int = 0
    held: list[Tokens] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)


class Spool:
    """The tokens of all documents of a run.

    Args:
        budget: Tokens that are kept in memory, by default `BUDGET`; the documents behind them go to the folder for
            temporary files.
    """

    def __init__(self, budget: int | None = None) -> None:
        self._left = BUDGET if budget is None else budget
        self._files: dict[str, _File] = {}

    def store(self, parts: Iterable[Tokens]) -> Stored:
        """Keeps one document; nothing of it where reading it fails.

        Raises:
            PosencError: The disk is full.
        """
        stored = Stored()
        before = {name: file.rows for name, file in self._files.items()}
        try:
            for part in parts:
                stored.count += len(part)
                stored.held.append(part)
                if stored.rows or stored.count > self._left:
                    self._write(stored)
        except BaseException:
            for name, file in self._files.items():
                file.shorten(before.get(name, 0))
            raise
        if not stored.rows:
            self._left -= stored.count
        return stored

    def forget(self, stored: Stored) -> None:
        """Gives back what a document took, if it is the last one or in memory."""
        if not stored.rows:
            self._left += stored.count
        for name, first in stored.rows.items():
            if self._files[name].rows == first + stored.count:
                self._files[name].shorten(first)

    def column(self, stored: Stored, name: str) -> Tensor | None:
        """One of `COLUMNS` of a document, shape (count,); `None` where its tokens know nothing of their text."""
        if stored.rows:
            return self._files[name].mapped(stored, name) if name in stored.rows else None
        values = [values for part in stored.held if (values := getattr(part, name)) is not None]
        if len(values) < len(stored.held):
            return None
        return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *values]))

    def _write(self, stored: Stored) -> None:
        try:
            for name in COLUMNS:
                if getattr(stored.held[0], name) is not None:
                    if name not in self._files:
                        self._files[name] = _File(name)
                    stored.rows.setdefault(name, self._files[name].rows)
                    for part in stored.held:
                        self._files[name].append(getattr(part, name))
        except OSError as error:
            raise PosencError(
                f"The tokens cannot be written to {tempfile.gettempdir()}: {error.strerror or error}. Let TMPDIR "
                "name a folder on a larger disk, or cut the documents (--max-doc-tokens)."
            ) from error
        stored.held.clear()


class _File:
    """One number per token, appended to a file without a name."""

    def __init__(self, column: str) -> None:
        self.dtype, self.rows = np.dtype(COLUMNS[column]), 0
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (mappings outlive any block)
        self._map: Tensor | None = None

    def append(self, values: Numbers) -> None:
        self._file.write(np.ascontiguousarray(values, dtype=self.dtype).data)
        self.rows += len(values)

    def shorten(self, rows: int) -> None:
        self._file.seek(rows * self.dtype.itemsize)
        self._file.truncate()
        self.rows = rows

    def mapped(self, stored: Stored, name: str) -> Tensor:
        first = stored.rows[name]
        if self._map is None or len(self._map) < first + stored.count:
            self._file.flush()
            self._map = torch.from_numpy(np.memmap(self._file, self.dtype, "r+"))
        return self._map[first : first + stored.count]


FORMAT = 1


class TokenCache:
    """A folder with one folder per document and tokenizer, each written beside its place and renamed into it.

    So any number of processes may read and write at once: an entry is there whole or not at all, and whoever comes
    second to write it throws his own away.

    Args:
        folder: Made where it is missing.
        tokenizer_sha256: What decides how a text becomes tokens (`identity.tokenizer_hash`).
    """

    def __init__(self, folder: Path, tokenizer_sha256: str) -> None:
        import tokenizers

        self.folder = folder
        self._prefix = f"{FORMAT}/{tokenizers.__version__}/{tokenizer_sha256}"

    def through(
        self, text_sha256: str, max_tokens: int | None, parts: Iterable[Tokens]
    ) -> Iterator[Tokens]:
        """The tokens of a text: from the cache, else from `parts`, which is then written to it.

        Raises:
            PosencError: The folder cannot be written to.
        """
        key = f"{self._prefix}/{text_sha256}/{max_tokens}"
        entry = self.folder / hashlib.sha256(key.encode()).hexdigest()
        if entry.is_dir():
            yield from _read(entry)
        else:
            yield from self._written(entry, parts)

    def _written(self, entry: Path, parts: Iterable[Tokens]) -> Iterator[Tokens]:
        unfinished: Path | None = None
        try:
            with _as_posenc_error(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                unfinished = Path(tempfile.mkdtemp(prefix="unfinished-", dir=self.folder))
            for part in parts:
                with _as_posenc_error(self.folder):
                    _append(unfinished, part)
                yield part
            with contextlib.suppress(OSError):  # somebody else was first
                unfinished.rename(entry)
        finally:
            if unfinished is not None:
                shutil.rmtree(unfinished, ignore_errors=True)


@contextlib.contextmanager
def _as_posenc_error(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PosencError(
            f"The token cache {folder} cannot be written to: {error.strerror or error}"
        ) from error


def _append(folder: Path, part: Tokens) -> None:
    for name, kind in COLUMNS.items():
        values = getattr(part, name)
        if values is not None:
            with (folder / name).open("ab") as file:
                file.write(np.ascontiguousarray(values, dtype=kind).data)
                file.flush()
                os.fsync(file.fileno())


def _read(entry: Path) -> Iterator[Tokens]:
    try:
        with contextlib.ExitStack() as stack:
            files = {
                name: stack.enter_context((entry / name).open("rb"))
                for name in COLUMNS
                if (entry / name).exists()
            }
            while True:
                block = {n: np.fromfile(file, COLUMNS[n], BLOCK) for n, file in files.items()}
                if len({len(values) for values in block.values()}) != 1:
                    raise EOFError("not as many ends as tokens")
                tokens = Tokens(
                    block["ids"].astype(np.int64), block.get("byte_ends"), block.get("word_ends")
                )
                yield tokens
                if len(tokens) < BLOCK:
                    return
    except (OSError, EOFError, KeyError) as error:
        raise PosencError(
            f"The token cache {entry} is damaged: remove that folder ({error})"
        ) from error
