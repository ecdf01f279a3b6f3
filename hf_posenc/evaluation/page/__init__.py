"""One HTML page from the results of many runs. It loads nothing, so it can be mailed, archived or printed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_posenc.evaluation import plots
from hf_posenc.evaluation.grid import Field, Grid
from hf_posenc.evaluation.measuring.identity import version_of
from hf_posenc.evaluation.page.collect import Collection, Source, collect
from hf_posenc.evaluation.page.sections import sections
from hf_posenc.evaluation.plots import available

__all__ = ["TITLE", "Collection", "Source", "collect", "render"]

TITLE = "Measurements of hf-posenc"
HASH = 12
"""Digits of a hash that are shown; the tooltip and the JSON have all of them."""
_HASH = re.compile(r"[0-9a-f]{40,}")
# Parts of a result that the page shows elsewhere than under its settings, or that are results themselves.
_ELSEWHERE = (
    *("kind", "format", "command", "curve", "methods", "protocols", "perplexity", "retrieval"),
    *("speed", "tasks", "recipe", "remarks", "choosing", "choice", "demands", "lines", "kinds"),
    "saved",
)
_COLOURS = {
    **{colour.lower(): f"line-{index}" for index, colour in enumerate(plots.COLOURS)},
    **dict.fromkeys(("#000000", plots.BASELINE), "ink"),
    **dict.fromkeys((plots.CONTROL_COLOUR, plots.REMARK), "muted"),
    "#ffffff": "paper",
    plots.GRID: "grid",
}
"""The custom property of the page's style sheet for each colour of a figure."""


def render(collection: Collection, *, title: str = TITLE, figures: bool = True) -> str:
    """Render the results as one HTML document, with figures if matplotlib is installed."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    sources = collection.sources
    commands = {s.number: s.data["command"] for s in reversed(sources) if s.data.get("command")}
    problems = ((s.number, problem) for s in sources for problem in s.result.problems())
    return environment.get_template("page.html").render(
        title=title,
        version=version_of("hf-posenc"),
        colours=_COLOURS,
        collection=collection,
        sections=sections(sources, figures=figures and available()),
        runs=_runs(collection.files),
        problems=dict.fromkeys(problems),
        settings=_settings(sources),
        methods=[_methods(source) for source in sources if source.data.get("methods")],
        documents=[(s, _documents(s)) for s in sources if s.data.get("documents")],
        skipped=[(s, s.data["skipped"]) for s in sources if s.data.get("skipped")],
        commands=sorted(commands.items()),
    )


def _runs(files: Sequence[Source]) -> Grid:
    heads = ("run", "folder", "kind", "model", "dtype, attention, device")
    grid = Grid.of("Results in this report", *heads)
    for source in files:
        model = (source.data.get("perplexity") or source.data).get("model", {})
        how = [str(model[n]) for n in ("dtype", "attention", "device") if model.get(n) is not None]
        shown = model.get("name", "-"), ", ".join(how) or "-"
        grid.row(str(source.number), source.name, source.kind, *shown)
    return grid


def _settings(sources: Sequence[Source]) -> list[Grid]:
    """Everything that determines the numbers: what differs, with a column per result, then what all have in common."""
    numbers = [source.number for source in sources]
    heads = [f"run {s.number}" + f", {s.kind}" * (numbers.count(s.number) > 1) for s in sources]
    tables = [_flat(source.data) for source in sources]
    differ = Grid.of("Settings that differ", "setting", *heads)
    shared = Grid.of("Settings of all results that have them", "setting", "value")
    for name in dict.fromkeys(name for table in tables for name in table):
        values = [table.get(name, "") for table in tables]
        if len(given := {value for value in values if value}) > 1:
            differ.row(name, *map(_shortened, values))
        else:
            shared.row(name, _shortened("".join(given)))
    return [grid for grid in (differ, shared) if grid.rows]


def _flat(data: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """Nested values under dotted names; lists of plain values joined, lists of anything else left out."""
    flat: dict[str, str] = {}
    for key, value in data.items():
        name, values = f"{above}{key}", value if isinstance(value, list) else [value]
        if not above and (key in _ELSEWHERE or value == []):
            continue
        if isinstance(value, dict):
            flat |= _flat(value, f"{name}.")
        elif not any(isinstance(entry, dict | list) for entry in values):
            known = ("none" if entry is None else entry for entry in values or [None])
            flat[name] = ", ".join(e if isinstance(e, str) else json.dumps(e) for e in known)
    return flat


def _shortened(value: str, mark: str = "") -> Field:
    """A hash by its first digits, anything else whole."""
    text = f"{value[:HASH]}…" if _HASH.fullmatch(value) else value
    return Field(text, mark, hint=value)


def _methods(source: Source) -> Grid:
    grid = Grid.of(f"Methods of run {source.number}", "method", "--patch", "scale")
    for method in source.data["methods"]:
        scale, original = method.get("scale"), method.get("original")
        shown = "-" if scale is None else f"{scale:g}"
        if scale is None and method.get("auto_scale"):
            shown = f"length / {original:,}, at least 1" if original else "auto"
        grid.row(method["label"], Field(method["spec"], "mono"), shown)
    return grid


def _documents(source: Source) -> Grid:
    caption = "Hashes: SHA-256 of the text and of the tokens that were read, first digits; the JSON has all of them."
    grid = Grid.of(f"Documents of run {source.number}", "document", caption=caption)
    grid.column("tokens", numeric=True)
    grid.column("bytes", numeric=True)
    grid.column("text")
    grid.column("tokens read")
    for document in source.data["documents"]:
        counts = (document.get(name) for name in ("tokens", "bytes"))
        hashes = (document.get(name) or "-" for name in ("text_sha256", "tokens_sha256"))
        shown = ("-" if count is None else f"{count:,}" for count in counts)
        grid.row(document["name"], *shown, *(_shortened(text, "mono") for text in hashes))
    return grid
