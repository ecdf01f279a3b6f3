"""Published tables of perplexities and retrieval scores: what they printed, under which protocol, and where."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from hf_posenc.errors import PosencError, unknown

if TYPE_CHECKING:
    from rich.table import Table

    from hf_posenc.evaluation.perplexity.protocols import Settings
    from hf_posenc.evaluation.perplexity.result import PerplexityResult

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
    """How the numbers of a table came about, in the words of `hf_posenc.evaluation.perplexity.protocols`.

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


# A published table beside a run, where the two were measured in the same way.


_SPACED = ("sliding", "stream")
# Elsewhere every window, and every document, scores the same number of tokens, so that all aggregates agree.
_UNEVEN = ("sliding", "disjoint")


def differences(table: PublishedTable, settings: Settings) -> list[str]:
    """What keeps a table and a run from being comparable, one phrase each; empty where nothing does.

    Models, texts and tokenizers are not looked at: a table beside another model's numbers is what one asks for.
    """
    if table.metric not in ("perplexity", "loss"):
        return [f"metric: {table.metric} ({table.metric_note}), not perplexity"]
    if table.column_kind != LENGTHS:
        return [f"columns: {table.column_kind}, not context lengths"]
    found = []
    theirs = table.protocol
    if theirs.name is None:
        found.append("protocol: unstated")
    elif theirs.name not in settings.protocols:
        found.append(f"protocol: {theirs.name}, here {', '.join(settings.protocols)}")
    if theirs.name in _SPACED and theirs.stride != settings.stride:
        found.append(f"stride: {_number(theirs.stride)}, here {settings.stride:,}")
    if theirs.name in _UNEVEN and theirs.aggregate != settings.aggregate:
        found.append(f"aggregate: {theirs.aggregate or 'unstated'}, here {settings.aggregate}")
    if theirs.name == "tail" and theirs.tail_tokens != settings.tail_tokens:
        found.append(f"tail tokens: {_number(theirs.tail_tokens)}, here {settings.tail_tokens:,}")
    windows = settings.windows_per_document
    if windows is not None and (
        theirs.name == "sliding" or (theirs.name == "tail" and windows > 1)
    ):
        found.append(f"windows per document: {_all(theirs.name)}, here {windows:,}")
    if not set(table.columns) & set(settings.lengths):
        found.append(
            f"lengths: {', '.join(map(_number, table.columns))}, here "
            f"{', '.join(map(_number, settings.lengths))}"
        )
    return found


def comparable(table: PublishedTable, settings: Settings) -> None:
    """Refuses a table whose numbers mean something else than the run's.

    Raises:
        PosencError: With what differs, and the options that would measure as the table does.
    """
    found = differences(table, settings)
    if found:
        raise PosencError(
            f"{table.id} ({table.paper}, {table.table}) is not comparable with this run: {'; '.join(found)}."
            f"{_way_on(table)}"
        )


def beside(table: PublishedTable, result: PerplexityResult) -> Table:
    """The run's methods and the published rows in one table, with the lengths of the run.

    Args:
        table: The published table; one of losses is shown as perplexities, `exp(loss)`.
        result: The run.

    Raises:
        PosencError: They are not comparable.
    """
    comparable(table, result.settings)

    from rich import box
    from rich.table import Table

    from hf_posenc.evaluation.perplexity.result import number

    protocol = table.protocol.name
    assert protocol is not None  # or it would not be comparable
    made = Table(
        title=f"Perplexity, {protocol}, beside {table.paper}, {table.table}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    made.add_column("model", overflow="fold")
    made.add_column("method", overflow="fold")
    lengths = result.settings.lengths
    for length in lengths:
        made.add_column(f"{length:,}", justify="right", no_wrap=True)
    for candidate in result.candidates:
        cells = [result.cell(candidate.label, protocol, length) for length in lengths]
        shown = [number(cell.perplexity if cell else None) for cell in cells]
        made.add_row("this run", candidate.label, *shown, style="bold")
    made.add_section()
    for row in table.rows:
        values = [table.value(row, length) for length in lengths]
        if any(value is not None for value in values):
            made.add_row(row.model, row.method, *(printed(table, value) for value in values))
    return made


def remarks(table: PublishedTable) -> Iterator[str]:
    """What a reader must know beside the table."""
    yield f"{table.paper}, {table.table}: {table.dataset}. Read in {table.source}."
    for note in (table.protocol.note, table.caveat):
        if note is not None:
            yield note
    yield (
        "Only the protocol is the same. Models, texts and tokenizers are each table's own: compare how the numbers "
        "change with the length, not the numbers."
    )


def printed(table: PublishedTable, value: Value) -> str:
    """A published number as a perplexity; a bound, or why there is none, as it was printed."""
    if value is None or isinstance(value, str):
        return value or "-"
    return f"{math.exp(value):.4g}" if table.metric == "loss" else f"{value:g}"


def _way_on(table: PublishedTable) -> str:
    """The options that measure as the table does; nothing where it does not say enough."""
    theirs = table.protocol
    unknown = theirs.name is None or (theirs.name in _UNEVEN and theirs.aggregate is None)
    if unknown or table.column_kind != LENGTHS or table.metric not in ("perplexity", "loss"):
        return ""
    options = [f"--protocol {theirs.name}"]
    if theirs.name in _SPACED:
        options.append(f"--stride {theirs.stride}")
    if theirs.name in _UNEVEN:
        options.append(f"--aggregate {theirs.aggregate}")
    if theirs.name == "tail":
        options.append(f"--tail-tokens {theirs.tail_tokens}")
    return f" To measure as it does: {' '.join(options)}, at lengths {', '.join(map(_number, table.columns))}."


def _number(value: int | str | None) -> str:
    if value is None:
        return "unstated"
    return value if isinstance(value, str) else f"{value:,}"


def _all(protocol: str) -> str:
    return "all" if protocol == "sliding" else "1"
