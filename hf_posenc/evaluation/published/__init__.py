"""Published tables of perplexities and retrieval scores, their protocols, and their evidence for a method."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from hf_posenc.errors import PosencError, unknown
from hf_posenc.evaluation.grid import Grid, number

if TYPE_CHECKING:
    from hf_posenc.evaluation.perplexity.protocols import Settings
    from hf_posenc.evaluation.perplexity.result import PerplexityResult

Value = float | str | None
"""A number as printed; `">1e3"` is a bound, `"OOM"` means out of memory, `None` was not reported."""

LENGTHS = "context length"
"""The `column_kind` of a table with one column for each context length, in tokens."""

TOLERANCE = 1.25
"""A method holds while its perplexity is at most this multiple of the unpatched model's at the trained length.

Our choice: the published numbers are either a few per cent above or many times as large.
"""

_DECISIVE = {
    "stride": ("sliding", "stream"),
    "aggregate": ("sliding", "disjoint"),  # windows score different numbers of tokens
    "tail_tokens": ("tail",),
}
"""Settings that change the meaning of some protocols' numbers."""


@dataclass(frozen=True)
class Source:
    """Origin of a table: a paper, by its arXiv number; a file of a repository at a commit; or a page.

    `kind` is that in words; `transcription` is a second copy that the numbers were checked against.
    """

    kind: str
    arxiv: str | None = None
    repo: str | None = None
    commit: str | None = None
    path: str | None = None
    url: str | None = None
    transcription: str | None = None

    def __str__(self) -> str:
        """Return the shortest reference to the source."""
        if self.arxiv is not None:
            return f"arXiv {self.arxiv}"
        return self.url or f"github.com/{self.repo}, {self.path}"


@dataclass(frozen=True)
class Protocol:
    """Protocol of a table, as far as the paper states it; `None`: not stated.

    `name` is one of `hf_posenc.evaluation.perplexity.protocols`, and so are the numbers; `note` is a remark on it.
    """

    name: str | None
    stride: int | None = None
    aggregate: str | None = None
    tail_tokens: int | None = None
    note: str | None = None


@dataclass(frozen=True)
class Row:
    """Row of a table, as printed: a value for each column, `None` where the print has none.

    Where it is stated: the tokens that this model was trained or fine-tuned at, if it was fine-tuned for longer texts,
    and the `window` in tokens that it was evaluated at, where the columns are something else.
    """

    model: str
    method: str
    values: tuple[Value, ...]
    trained_context: int | None = None
    fine_tuned: bool | None = None
    window: int | None = None


@dataclass(frozen=True)
class PublishedTable:
    """Published table, as printed.

    Attributes:
        paper: The paper or report, with its authors and year.
        table: The table's number or place in it.
        metric: `"perplexity"`, `"loss"` (nats), `"accuracy"` or `"tokens"`; `metric_note` has the paper's words.
        columns: Context lengths in tokens, or names where `column_kind` is not `LENGTHS`.
        caveat: Parts of the transcription that could not be checked.
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
        """Read an entry of `published.json`."""
        read = {
            "source": Source(**values["source"]),
            "protocol": Protocol(**values["protocol"]),
            "columns": tuple(values["columns"]),
            "rows": tuple(Row(**{**row, "values": tuple(row["values"])}) for row in values["rows"]),
        }
        return cls(**{**values, **read})

    def value(self, row: Row, column: int | str) -> Value:
        """Return the value of a row in a column; `None` also if there is no such column."""
        return row.values[self.columns.index(column)] if column in self.columns else None

    def printed(self, lengths: Sequence[int]) -> Iterator[tuple[Row, list[str]]]:
        """Yield the rows with a value at one of the lengths, with the values: perplexities; bounds as printed."""

        def shown(value: Value) -> str:
            if value is None or isinstance(value, str):
                return value or "-"
            return f"{math.exp(value):.4g}" if self.metric == "loss" else f"{value:g}"

        for row in self.rows:
            values = [self.value(row, length) for length in lengths]
            if values != [None] * len(values):
                yield row, list(map(shown, values))


def available() -> tuple[str, ...]:
    """Return the names of the tables in the package, in the order of the papers.

    Examples:
        >>> from hf_posenc.evaluation import published
        >>> "dca-t1-pg19" in published.available()
        True
    """
    return tuple(_tables())


def get(id: str) -> PublishedTable:
    """Return the table of a name; raise an error that lists them if there is none.

    Examples:
        >>> from hf_posenc.evaluation import published
        >>> published.get("dca-t1-pg19").columns
        (4096, 8192, 16384, 32768, 65536)
    """
    if id not in _tables():
        raise unknown("published table", id, available())
    return _tables()[id]


@functools.cache
def _data() -> dict[str, Any]:
    file = resources.files(__name__).joinpath("published.json")
    data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return data


@functools.cache
def _tables() -> dict[str, PublishedTable]:
    return {entry["id"]: PublishedTable.from_dict(entry) for entry in _data()["tables"]}


def untrained() -> Mapping[str, Sequence[tuple[str, str, str]]]:
    """Return table, model and row that show each method on a model that was not trained for it, by method."""
    return {
        method: [(table, model, row) for table, model, row, *_ in rows]
        for method, rows in _data()["untrained"].items()
    }


def differences(table: PublishedTable, settings: Settings) -> list[str]:
    """Return the differences that make a table and a run incomparable, one phrase each.

    Models, texts and tokenizers are not compared: a table beside another model's numbers is the purpose.
    """
    if table.metric not in ("perplexity", "loss"):
        return [f"metric: {table.metric} ({table.metric_note}), not perplexity"]
    if table.column_kind != LENGTHS:
        return [f"columns: {table.column_kind}, not context lengths"]
    reasons, theirs = [], table.protocol
    if theirs.name is None:
        reasons.append("protocol: unstated")
    elif theirs.name not in settings.protocols:
        reasons.append(f"protocol: {theirs.name}, here {', '.join(settings.protocols)}")
    for name, protocols in _DECISIVE.items():
        given, here = getattr(theirs, name), getattr(settings, name)
        if theirs.name in protocols and given != here:
            reasons.append(f"{name.replace('_', ' ')}: {_number(given)}, here {_number(here)}")
    windows = settings.windows_per_document
    usual = {"sliding": "all", "tail": "1"}.get(theirs.name or "")
    if windows is not None and usual not in (None, str(windows)):
        reasons.append(f"windows per document: {usual}, here {windows:,}")
    if not set(table.columns) & set(settings.lengths):
        listed = (", ".join(map(_number, each)) for each in (table.columns, settings.lengths))
        reasons.append(f"lengths: {', here '.join(listed)}")
    return reasons


def comparable(table: PublishedTable, settings: Settings) -> None:
    """Refuse a table whose numbers have another meaning; the error has the options that measure as it does."""
    if not (reasons := differences(table, settings)):
        return
    theirs = table.protocol
    own = {n: getattr(theirs, n) for n, protocols in _DECISIVE.items() if theirs.name in protocols}
    measurable = table.column_kind == LENGTHS and table.metric in ("perplexity", "loss")
    way = ""
    if measurable and theirs.name is not None and None not in own.values():
        options = (f"--{name.replace('_', '-')} {value}" for name, value in own.items())
        lengths = ", ".join(map(_number, table.columns))
        given = " ".join((f"--protocol {theirs.name}", *options))
        way = f" To measure as it does: {given}, at lengths {lengths}."
    raise PosencError(
        f"{table.id} ({table.paper}, {table.table}) is not comparable with this run: {'; '.join(reasons)}.{way}"
    )


def beside(table: PublishedTable, result: PerplexityResult) -> Grid:
    """Return the run's methods and the published rows in one table, with the lengths of the run.

    Losses are shown as perplexities, `exp(loss)`. What is not comparable is refused.
    """
    comparable(table, result.settings)
    protocol, lengths = str(table.protocol.name), result.settings.lengths
    title = f"Perplexity, {protocol}, beside {table.paper}, {table.table}"
    grid = Grid.of(title, "model", "method")
    for length in lengths:
        grid.column(f"{length:,}", numeric=True)
    for candidate in result.candidates:
        cells = [result.cell(candidate.label, protocol, length) for length in lengths]
        shown = [number(cell.perplexity if cell else None) for cell in cells]
        grid.row("this run", candidate.label, *shown, mark="best")
    for index, (row, values) in enumerate(table.printed(lengths)):
        grid.row(row.model, row.method, *values, rule=index == 0)
    return grid


def remarks(table: PublishedTable) -> Iterator[str]:
    """Yield the notes that belong to a table."""
    yield f"{table.paper}, {table.table}: {table.dataset}. Read in {table.source}."
    yield from filter(None, (table.protocol.note, table.caveat))
    yield (
        "Only the protocol is the same. Models, texts and tokenizers are each table's own: compare how the numbers "
        "change with the length, not the numbers."
    )


def _number(value: int | str | None) -> str:
    if value is None:
        return "unstated"
    return value if isinstance(value, str) else f"{value:,}"


@dataclass(frozen=True)
class Evidence:
    """Evidence of one published row for a method: a table's `id`, and the model as printed.

    Attributes:
        held: The largest multiple of the trained length at which it held; 0: none.
        broke: The first multiple at which it did not; `None`: none in the table.
    """

    table: str
    model: str
    held: float
    broke: float | None


def evidence_of(method: str) -> tuple[Evidence, ...]:
    """Return the published evidence for a method without training, by its canonical name; empty if there is none.

    Examples:
        >>> from hf_posenc.evaluation.published import evidence_of
        >>> evidence_of("dual_chunk")[0]
        Evidence(table='dca-t1-pg19', model='Llama-2-7b', held=8.0, broke=16.0)
    """
    rows = _data()["untrained"].get(method, ())
    return tuple(Evidence(table, model, *reach) for table, model, _, *reach in rows)


def verdict(evidence: Sequence[Evidence], factor: float) -> int:
    """Return 1 if the method held at this multiple and never broke below it, -1 if it broke, else 0."""
    if any(one.broke is not None and one.broke <= factor for one in evidence):
        return -1
    return int(any(one.held >= factor for one in evidence))


def summary(evidence: Sequence[Evidence], factor: float) -> str:
    """Return the evidence in a few words, with the factor and the model of each measurement, and how far it reaches."""
    parts = []
    best = max(evidence, key=lambda one: one.held, default=None)
    if best is not None and best.held:
        parts.append(f"held at x{best.held:g} ({best.model}, {best.table})")
    worst = min(evidence, key=lambda one: one.broke or math.inf, default=None)
    if worst is not None and worst.broke is not None:
        parts.append(f"not at x{worst.broke:g} ({worst.model}, {worst.table})")
    elif best is not None and factor > best.held:
        parts.append(f"x{factor:.3g} is beyond what was measured")
    return f"published, untrained: {', '.join(parts) or 'nothing'}"
