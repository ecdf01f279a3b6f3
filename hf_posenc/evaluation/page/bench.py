"""The section of `bench.json`: speed and memory, and the published tables that were asked for.

Its perplexities and its retrieval stand in their own sections, together with those of other results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_posenc.errors import PosencError
from hf_posenc.evaluation import published
from hf_posenc.evaluation.page.collect import Source
from hf_posenc.evaluation.page.numbers import Entry, Shown, failure_entry, number, shown_ratio
from hf_posenc.evaluation.protocols import Settings
from hf_posenc.evaluation.published.compare import differences, printed, remarks


@dataclass(frozen=True)
class Speed:
    """A method's row: tokens per second, how many times as fast as the first, peak memory, tokens at a time."""

    name: str
    rate: Entry
    times: Shown | None
    memory: str
    prefill: str


@dataclass(frozen=True)
class Beside:
    """A published table.

    Attributes:
        title: Whose, and where.
        apart: Why it is not comparable with the run; empty where it is.
        lengths: The run's lengths.
        rows: Model, method and numbers as they were printed.
        remarks: What a reader must know.
    """

    title: str
    apart: Sequence[str]
    lengths: Sequence[int]
    rows: Sequence[tuple[str, str, Sequence[str]]]
    remarks: Sequence[str]


@dataclass(frozen=True)
class Section:
    """One benchmark.

    Attributes:
        source: The result.
        suite: Its suite.
        remarks: What it says of itself.
        measured: What was timed, in a sentence; `""` where nothing was.
        speed: The rows.
        beside: The published tables.
    """

    source: Source
    suite: str
    remarks: Sequence[str]
    measured: str
    speed: Sequence[Speed]
    beside: Sequence[Beside]


def sections(sources: Sequence[Source]) -> list[Section]:
    """One for each benchmark."""
    return [_section(source) for source in sources if source.kind == "bench"]


def _section(source: Source) -> Section:
    data = source.data
    speed = data.get("speed") or {}
    measured = ""
    if speed:
        count = speed.get("threads")
        threads = f", {count} thread{'s' * (count != 1)}" if count else ""
        measured = f"One prefill of {speed['length']:,} tokens on {speed['device']}{threads}"
        if speed.get("memory"):
            measured += f"; memory: {speed['memory']}"
    return Section(
        source,
        str(data.get("suite", "")),
        [str(remark) for remark in data.get("remarks", ())],
        measured,
        [_speed(row) for row in speed.get("summary", ())],
        [_beside(name, source) for name in data.get("compare", ())],
    )


def _speed(row: Mapping[str, Any]) -> Speed:
    rate = row.get("tokens_per_second")
    entry = failure_entry(row.get("failed"))
    if rate is not None:
        entry = Entry(_rate(rate), _rate(row["lowest"]), _rate(row["highest"]))
    times, peak, prefill = row.get("ratio"), row.get("peak_bytes"), row.get("prefill")
    return Speed(
        row["method"],
        entry,
        None if times is None else shown_ratio(times),
        "-" if peak is None else f"{number(peak / 2**30, 3)} GiB",
        "all" if prefill is None else f"{prefill:,}",
    )


def _rate(value: float) -> Shown:
    return Shown(f"{value:,.0f}" if value >= 100 else number(value, 3), repr(value))


def _beside(name: str, source: Source) -> Beside:
    values = source.data["perplexity"]["settings"]
    settings = Settings.from_dict(values)
    try:
        table = published.get(name)
    except PosencError:  # made by another version of the package
        return Beside(
            name, ["this version of hf-posenc does not have it"], settings.lengths, [], []
        )
    rows = [
        (row.model, row.method, [printed(table, table.value(row, n)) for n in settings.lengths])
        for row in table.rows
        if any(table.value(row, n) is not None for n in settings.lengths)
    ]
    title = f"{table.paper}, {table.table}"
    return Beside(title, differences(table, settings), settings.lengths, rows, list(remarks(table)))
