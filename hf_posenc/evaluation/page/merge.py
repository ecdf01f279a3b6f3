"""Puts comparable perplexity results into one table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from hf_posenc.evaluation.page.collect import Source
from hf_posenc.evaluation.page.comparable import protocol_key
from hf_posenc.evaluation.page.lines import Axes, Line, Merged, Number
from hf_posenc.evaluation.page.numbers import interval_of
from hf_posenc.evaluation.page.ratios import against


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
    names = ("weights_sha256", "config_sha256", "patch", "class", "parameters", "dtype")
    known = [model.get(name) for name in names]
    return json.dumps([*known, None if model.get("weights_sha256") else model.get("name")])


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
            math.nan if cell["perplexity"] is None else cell["perplexity"],
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
