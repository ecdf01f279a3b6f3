"""A published table beside a run, where the two were measured in the same way."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.published import LENGTHS, PublishedTable, Value

if TYPE_CHECKING:
    from rich.table import Table

    from hf_posenc.evaluation.protocols import Settings
    from hf_posenc.evaluation.result import PerplexityResult

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

    from hf_posenc.evaluation.report import number

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
