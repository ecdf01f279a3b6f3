"""Where tokens are kept: in memory up to a budget, behind it in files without a name that vanish with their reader."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import IO

import numpy as np
import torch
from torch import Tensor

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents.places import Numbers
from hf_posenc.evaluation.documents.window import Tokens

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
