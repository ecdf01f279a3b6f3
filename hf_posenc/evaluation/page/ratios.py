"""Ratios that no single result has: between rows of different results, or between lengths."""

from __future__ import annotations

import dataclasses
import math

from hf_posenc.evaluation.page.lines import Line
from hf_posenc.evaluation.page.numbers import Interval
from hf_posenc.evaluation.statistics import RESAMPLES, Record, summarize

NAN = math.nan


def against(
    line: Line, other: Line, protocol: str, length: int, other_length: int
) -> tuple[float | None, Interval | None]:
    """A row's perplexity divided by another's, with the paired 95 % interval over documents.

    Args:
        line: The row.
        other: What it is divided by; it has read the same documents, and under `tail` the same targets at any length.
        protocol: The protocol of both.
        length: The row's length.
        other_length: The other's.

    Returns:
        Ratio and interval; `None` where one of the two was not measured.
    """
    base = _records(other, protocol, other_length, "base")
    rows = _records(line, protocol, length, "row")
    if not rows or len(rows) != len(base):
        return None, None
    settings = line.source.data["settings"]
    cells = summarize(
        [*base, *rows],
        seed=settings.get("seed", 0),
        resamples=settings.get("resamples", RESAMPLES),
        aggregate=settings.get("aggregate", "tokens"),
        base=settings.get("base"),
    )
    cell = next((cell for cell in cells if cell.method == "row"), None)
    return (None, None) if cell is None else (cell.ratio, cell.ratio_interval)


def _records(line: Line, protocol: str, length: int, name: str) -> list[Record]:
    """A row's sums, under names that do not depend on the machine: the document's place, and length 0."""
    data = line.source.data
    places = {document["name"]: str(place) for place, document in enumerate(data["documents"])}
    known = {field.name for field in dataclasses.fields(Record)}
    records = []
    for entry in data["records"]:
        if (entry["method"], entry["protocol"], entry["length"]) != (line.name, protocol, length):
            continue
        document = places.get(entry["document"], entry["document"])
        values = {**entry, "method": name, "length": 0, "document": document}
        for sums in ("nats", "weighted"):  # JSON has no NaN
            values[sums] = NAN if values[sums] is None else values[sums]
        records.append(Record(**{key: values[key] for key in known}))
    return records
