"""The column of a row that holds a document: its text, or its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hf_posenc.evaluation.documents.document import Document, Entry, Skipped
from hf_posenc.evaluation.documents.names import printable
from hf_posenc.evaluation.documents.token_ids import document_of_ids


@dataclass(frozen=True)
class Field:
    """Which column to read.

    Attributes:
        text: The column of texts.
        tokens: The column of token ids; read instead where it is given.
    """

    text: str = "text"
    tokens: str | None = None

    @property
    def name(self) -> str:
        """The column that is read."""
        return self.text if self.tokens is None else self.tokens

    @property
    def option(self) -> str:
        """The command's option that names it."""
        return "--column" if self.tokens is None else "--tokenized"

    def entry(self, label: str, row: Mapping[str, Any]) -> Entry:
        """The document of a row."""
        if self.name not in row:
            return Skipped(label, self.missing(row))
        value = row[self.name]
        if self.tokens is not None:
            return document_of_ids(label, value)
        if isinstance(value, str):
            return Document(label, value)
        kind = "null" if value is None else type(value).__name__
        return Skipped(label, f"column {self.name!r} holds {kind}, not text")

    def missing(self, columns: Iterable[str]) -> str:
        """Says that there is no such column."""
        names = printable(", ".join(columns))[:200] or "none"
        return f"no column {self.name!r}; its columns are {names}. Pass {self.option}"
