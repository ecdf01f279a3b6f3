"""Published tables of perplexities and retrieval scores: what they printed, under which protocol, and where."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from hf_posenc.errors import unknown

Value = float | str | None
"""A number as printed; `">1e3"` is a bound, `"OOM"` says what it says, `None` was not reported."""

LENGTHS = "context length"
"""The `column_kind` of a table with one column for each context length, in tokens."""


@dataclass(frozen=True)
class Source:
    """Where a table was read.

    Attributes:
        kind: What was read: the paper, a README, data of a repository.
        arxiv: The paper's number.
        repo: The GitHub repository that holds what was read.
        commit: The commit of it.
        path: The file in it.
        url: The page, where it is not a file.
        transcription: A second copy that it was checked against.
    """

    kind: str
    arxiv: str | None = None
    repo: str | None = None
    commit: str | None = None
    path: str | None = None
    url: str | None = None
    transcription: str | None = None

    def __str__(self) -> str:
        """The shortest that leads there."""
        if self.arxiv is not None:
            return f"arXiv {self.arxiv}"
        return self.url or f"github.com/{self.repo}, {self.path}"


@dataclass(frozen=True)
class Protocol:
    """How the numbers of a table came about, in the words of `hf_posenc.evaluation.protocols`.

    Attributes:
        name: The protocol; `None`: not stated.
        stride: Tokens between windows, of `sliding` and `stream`.
        aggregate: How losses became one number; `None`: not stated, or no losses.
        tail_tokens: The K of `tail`.
        note: What else is known of it.
    """

    name: str | None
    stride: int | None = None
    aggregate: str | None = None
    tail_tokens: int | None = None
    note: str | None = None


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        model: The model, in the table's words.
        method: The method, in the table's words.
        values: One for each column.
        trained_context: Tokens that this model was trained or fine-tuned at, where the table says so.
        fine_tuned: Whether it was fine-tuned for longer texts, where the table says so.
        window: Tokens that it was evaluated at, where the columns are something else.
    """

    model: str
    method: str
    values: tuple[Value, ...]
    trained_context: int | None = None
    fine_tuned: bool | None = None
    window: int | None = None


@dataclass(frozen=True)
class PublishedTable:
    """A table as it was printed.

    Attributes:
        id: Its name here.
        paper: Authors and title, short.
        table: Its number, or the file.
        source: Where it was read.
        metric: `"perplexity"`, `"loss"` (nats), `"accuracy"` or `"tokens"`.
        dataset: The texts, in the table's words.
        protocol: How the numbers came about.
        column_kind: What the columns are; `LENGTHS` in most tables.
        columns: Context lengths in tokens, or names.
        rows: The lines.
        metric_note: The metric in the paper's words, where it needs any.
        caveat: What could not be checked in the transcription.
    """

    id: str
    paper: str
    table: str
    source: Source
    metric: str
    dataset: str
    protocol: Protocol
    column_kind: str
    columns: tuple[int | str, ...]
    rows: tuple[Row, ...]
    metric_note: str | None = None
    caveat: str | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PublishedTable:
        """Reads an entry of `published.json`."""
        rows = tuple(Row(**{**row, "values": tuple(row["values"])}) for row in values["rows"])
        return cls(
            **{
                **values,
                "source": Source(**values["source"]),
                "protocol": Protocol(**values["protocol"]),
                "columns": tuple(values["columns"]),
                "rows": rows,
            }
        )

    def value(self, row: Row, column: int | str) -> Value:
        """What stands in a row under a column; `None` also where there is no such column."""
        return row.values[self.columns.index(column)] if column in self.columns else None


def available() -> tuple[str, ...]:
    """The names of the tables that come with the package, in the order of the papers."""
    return tuple(_tables())


def get(id: str) -> PublishedTable:
    """The table of this name.

    Raises:
        PosencError: There is none.
    """
    if id not in _tables():
        raise unknown("published table", id, available())
    return _tables()[id]


@functools.cache
def _tables() -> Mapping[str, PublishedTable]:
    text = resources.files(__name__).joinpath("published.json").read_text(encoding="utf-8")
    tables = [PublishedTable.from_dict(entry) for entry in json.loads(text)["tables"]]
    return {table.id: table for table in tables}
