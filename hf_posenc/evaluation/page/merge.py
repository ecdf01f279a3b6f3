"""Puts comparable perplexity results into one table, and computes what only the whole of them can say."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_posenc.evaluation.page.collect import Source
from hf_posenc.evaluation.page.comparable import protocol_key
from hf_posenc.evaluation.page.numbers import Interval, interval_of
from hf_posenc.evaluation.statistics import RESAMPLES, Record, summarize

NAN = math.nan


@dataclass(frozen=True)
class Number:
    """One number of a table, as `hf_posenc.evaluation.statistics.Cell`, with a ratio to the table's baseline."""

    length: int
    perplexity: float
    interval: Interval | None
    ratio: float | None
    ratio_interval: Interval | None
    bits_per_byte: float | None
    tokens: int
    documents: int


@dataclass(frozen=True)
class Axes:
    """What the axes of a figure are made from."""

    lengths: tuple[int, ...]
    protocols: tuple[str, ...]
    tail_tokens: int


@dataclass
class Line:
    """One method of one result: a row of the table.

    Attributes:
        source: Where it was measured.
        also: Where else, with the very same numbers.
        name: The method's label in that result.
        label: Its label here, which no other row has: with the number of its result where several have it.
        method: The method's name; `None` for the model as it was loaded.
        numbers: By length.
        failures: Why there is no number, by length.
        baseline: The label of the row that its ratios are relative to; its own, if it is that row.
    """

    source: Source
    name: str
    label: str
    method: str | None
    also: list[Source] = field(default_factory=list)
    numbers: dict[int, Number] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    baseline: str = ""


@dataclass
class Merged:
    """The results of one protocol that are comparable; can be drawn like a `PerplexityResult`.

    Attributes:
        protocol: Its name.
        definition: Its sentence.
        sources: Where the numbers come from.
        lines: The rows.
        settings: Lengths and such, of all of them together.
        original: The context length that the model was trained on; `None` if unknown, or not the same.
        curve: Sums by position, where every result has them with the same edges.
    """

    protocol: str
    definition: str
    sources: list[Source]
    lines: list[Line]
    settings: Axes
    original: int | None
    curve: dict[str, Any] | None = None

    @property
    def candidates(self) -> list[Line]:
        """The rows, under the name that figures know."""
        return self.lines

    def cell(self, method: str, protocol: str, length: int, /) -> Number | None:
        """The number of a row at a length."""
        line = next(line for line in self.lines if line.label == method)
        return line.numbers.get(length)


def merge(sources: Sequence[Source]) -> list[Merged]:
    """One table per protocol and way of measuring it, in the order of their first appearance.

    Args:
        sources: Perplexity results that read the same tokens.
    """
    groups: dict[Any, list[Source]] = {}
    for source in sources:
        for protocol in source.data["protocols"]:
            groups.setdefault((protocol, protocol_key(source.data, protocol)), []).append(source)
    return [_merged(protocol, group) for (protocol, _), group in groups.items()]


def _merged(protocol: str, sources: list[Source]) -> Merged:
    lines: list[Line] = []
    for source in sources:
        for method in source.data["methods"]:
            line = Line(source, method["label"], method["label"], method.get("method"))
            twin = next((other for other in lines if _same(other, line, protocol)), None)
            if twin is None:
                lines.append(line)
            else:
                twin.also.append(source)
    names = [line.name for line in lines]
    for line in lines:
        if names.count(line.name) > 1:
            line.label = f"{line.name} [{line.source.number}]"
    for line in lines:
        _fill(line, protocol, _baseline(line, lines))
    settings = [source.data["settings"] for source in sources]
    lengths = sorted({length for values in settings for length in values["lengths"]})
    originals = {source.data.get("original_max_position_embeddings") for source in sources}
    return Merged(
        protocol,
        sources[0].data["protocols"][protocol],
        sources,
        lines,
        Axes(tuple(lengths), (protocol,), settings[0].get("tail_tokens", 0)),
        originals.pop() if len(originals) == 1 else None,
        _curve(lines) if protocol == "prefix" else None,
    )


def variant(source: Source) -> str:
    """What makes two models the same: a ratio between two others would not be a method's."""
    model = source.data["model"]
    names = ("weights", "config", "class", "parameters", "dtype")
    known = [model.get(name) for name in names]
    return json.dumps([*known, None if model.get("weights") else model.get("name")])


def _same(one: Line, two: Line, protocol: str) -> bool:
    """Whether the second has nothing that the first has not: the same model and method, to the last bit."""
    if one.name != two.name or variant(one.source) != variant(two.source):
        return False
    first, second = (_measured(line, protocol) for line in (one, two))
    return bool(second) and second.items() <= first.items()


def _measured(line: Line, protocol: str) -> dict[int, Any]:
    """What was measured at each length: the sums, or why there are none."""
    data = line.source.data
    key = (line.name, protocol)
    cells = {
        cell["length"]: (cell["nats"], cell["tokens"], cell["perplexity"], str(cell["interval"]))
        for cell in data["summary"]
        if (cell["method"], cell["protocol"]) == key
    }
    failed = {
        f["length"]: f["reason"] for f in data["failures"] if (f["method"], f["protocol"]) == key
    }
    return {**cells, **failed}


def _baseline(line: Line, lines: Sequence[Line]) -> Line:
    """The first method of a result of the same model, preferably the model as it was loaded."""
    firsts = {
        other.source.number: other
        for other in reversed(lines)
        if variant(other.source) == variant(line.source)
    }
    ordered = sorted(firsts.values(), key=lambda other: other.source.number)
    return next((other for other in ordered if other.method is None), ordered[0])


def _fill(line: Line, protocol: str, baseline: Line) -> None:
    data = line.source.data
    line.baseline = baseline.label
    own = baseline.source is line.source
    for cell in data["summary"]:
        if (cell["method"], cell["protocol"]) != (line.name, protocol):
            continue
        length = cell["length"]
        ratio, ratio_interval = cell["ratio"], interval_of(cell["ratio_interval"])
        if not own:
            ratio, ratio_interval = against(line, baseline, protocol, length, length)
        line.numbers[length] = Number(
            length,
            NAN if cell["perplexity"] is None else cell["perplexity"],
            interval_of(cell["interval"]),
            ratio,
            ratio_interval,
            cell["bits_per_byte"],
            cell["tokens"],
            cell["documents"],
        )
    for failure in data["failures"]:
        if (failure["method"], failure["protocol"]) == (line.name, protocol):
            line.failures[failure["length"]] = failure["reason"]


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
        older = {"words": None, "weighted": entry["nats"], "weight": entry["tokens"]}  # format 1
        here = {"method": name, "length": 0, "document": document}
        values = {**older, **entry, **here}
        for sums in ("nats", "weighted"):  # JSON has no NaN
            values[sums] = NAN if values[sums] is None else values[sums]
        records.append(Record(**{key: values[key] for key in known}))
    return records


def _curve(lines: Sequence[Line]) -> dict[str, Any] | None:
    """The sums by position of all rows, where their buckets are the same."""
    curves: list[Mapping[str, Any] | None] = [line.source.data.get("curve") for line in lines]
    edges = curves[0]["edges"] if curves and curves[0] else None
    if edges is None or any(curve is None or curve["edges"] != edges for curve in curves):
        return None
    methods = {
        line.label: curve["methods"][line.name]
        for line, curve in zip(lines, curves, strict=True)
        if curve is not None and line.name in curve["methods"]
    }
    return {"edges": edges, "methods": methods}
