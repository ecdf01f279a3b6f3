"""The sections of `sweep.json` and `search.json`: every method at the target length, and the recipe that came out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_posenc.evaluation.page.collect import Source
from hf_posenc.evaluation.page.numbers import (
    Entry,
    ends,
    failure_entry,
    interval_of,
    ratio_entry,
    shown,
)

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
class Section:
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


def sections(sources: Sequence[Source]) -> list[Section]:
    """Each result by itself: a sweep compares its methods on its own documents."""
    return [_section(source) for source in sources if source.kind in TITLES]


def _section(source: Source) -> Section:
    data = source.data
    settings, rows = data["settings"], data["summary"]
    recipe = data.get("recipe")
    winner = data.get("winner")
    return Section(
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
