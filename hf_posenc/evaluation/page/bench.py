"""The section of `bench.json`: speed and memory, and the published tables that were asked for.

Its perplexities and its retrieval stand in their own sections, together with those of other results.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_posenc.errors import PosencError
from hf_posenc.evaluation import published
from hf_posenc.evaluation.page.collect import Source
from hf_posenc.evaluation.page.numbers import (
    Entry,
    Shown,
    ends,
    failure_entry,
    interval_of,
    ratio_entry,
    shown,
    shown_ratio,
)
from hf_posenc.evaluation.perplexity.protocols import Settings
from hf_posenc.evaluation.perplexity.result import number
from hf_posenc.evaluation.published import differences, printed, remarks


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


# The sections of `sweep.json` and `search.json`: every method at the target length, and the recipe that came out.


TITLES = {"sweep": "Sweep of methods and scales", "search": "Search of a factor for every pair"}


@dataclass(frozen=True)
class Line:
    """A method's row: how often it was measured, its number, its price on short texts, its ratio to the best."""

    name: str
    about: str
    documents: int
    tail: Entry
    short: Entry
    to_best: Entry


@dataclass(frozen=True)
class TuningSection:
    """One sweep or search.

    Attributes:
        source: The result.
        title: What it is.
        protocol: The objective, in one sentence.
        original: The trained length.
        target: The length of the objective.
        winner: The label of the best method; `None` where there is none.
        undecided: The methods that these documents do not tell apart from it.
        lines: The rows.
        recipe: The winner as `load_patch` reads it, as JSON text; `""` where there is none.
    """

    source: Source
    title: str
    protocol: str
    original: int
    target: int
    winner: str | None
    undecided: Sequence[str]
    lines: Sequence[Line]
    recipe: str


def tuning_sections(sources: Sequence[Source]) -> list[TuningSection]:
    """Each result by itself: a sweep compares its methods on its own documents."""
    return [_tuning_section(source) for source in sources if source.kind in TITLES]


def _tuning_section(source: Source) -> TuningSection:
    data = source.data
    settings, rows = data["settings"], data["summary"]
    recipe = data.get("recipe")
    winner = data.get("winner")
    return TuningSection(
        source,
        TITLES[source.kind],
        data["protocol"],
        settings["original"],
        settings["target"],
        winner,
        data.get("undecided") or [],
        [_line(row, winner) for row in rows],
        json.dumps(recipe, indent=2) if recipe else "",
    )


def _line(row: Mapping[str, Any], winner: str | None) -> Line:
    documents = row["documents"]
    tail = failure_entry(row["failed"])
    if row["failed"] is None and row["perplexity"] is not None:
        low, high = ends(interval_of(row["interval"]))
        tail = Entry(shown(row["perplexity"]), low, high)
    best = row["label"] == winner
    return Line(
        row["label"],
        "control" if row["control"] else "best" if best else "",
        documents,
        tail,
        _ratio(row["short"], documents),
        _ratio(row["to_best"], documents),
    )


def _ratio(value: Mapping[str, Any] | None, documents: int) -> Entry:
    if value is None:
        return Entry(state="-", reason="not compared")
    return ratio_entry(value["ratio"], interval_of(value["interval"]), documents)
