"""One HTML page from the results of many runs. It loads nothing, so it can be mailed, archived or printed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_posenc.evaluation.grid import Field, Grid, listed
from hf_posenc.evaluation.measuring.statistics import FEW_DOCUMENTS
from hf_posenc.evaluation.page import kinds, perplexity
from hf_posenc.evaluation.page.collect import Collection, Source, Unfinished, collect
from hf_posenc.evaluation.plots import available

__all__ = ["TITLE", "Collection", "Source", "Unfinished", "collect", "render"]

TITLE = "Measurements of hf-posenc"
HASH = 12
"""Digits of a hash that are shown; the tooltip and the JSON have all of them."""
_HASH = re.compile(r"[0-9a-f]{40,}")
# Parts of a result that the page shows elsewhere than under its settings.
_ELSEWHERE = frozenset(
    {
        *("kind", "format", "command", "summary", "records", "curve", "documents", "skipped"),
        *("failures", "methods", "protocols", "perplexity", "retrieval", "speed", "by_depth"),
        *("scores", "tasks", "recipe", "rungs", "steps", "remarks"),
    }
)


def render(collection: Collection, *, title: str = TITLE, figures: bool = True) -> str:
    """Render the results as one HTML document, with figures if matplotlib is installed."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from hf_posenc.evaluation.measuring.identity import version_of

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    sources = collection.sources
    commands = {s.number: s.data["command"] for s in reversed(sources) if s.data.get("command")}
    return environment.get_template("page.html").render(
        title=title,
        version=version_of("hf-posenc"),
        few=FEW_DOCUMENTS,
        collection=collection,
        runs=_runs(collection.files),
        failures=_failures(sources),
        settings=_settings(sources),
        methods=[_methods(source) for source in sources if source.data.get("methods")],
        documents=[(s, _documents(s)) for s in sources if s.data.get("documents")],
        skipped=[(s, s.data["skipped"]) for s in sources if s.data.get("skipped")],
        commands=sorted(commands.items()),
        perplexity=perplexity.sections(sources, figures=figures and available()),
        retrieval=kinds.retrieval(sources),
        bench=kinds.bench(sources),
        gpu=kinds.gpu(sources),
        tuning=kinds.tuning(sources),
    )


def _runs(files: Sequence[Source]) -> Grid:
    heads = ("run", "folder", "kind", "model", "dtype, attention, device")
    grid = Grid.of("Runs", *heads, caption="Results in this report.", kind="words")
    for source in files:
        model = (source.data.get("perplexity") or source.data).get("model", {})
        values = (model.get("dtype"), model.get("attention"), model.get("device"))
        how = ", ".join(str(value) for value in values if value is not None)
        name = model.get("name", "-")
        grid.row(str(source.number), source.name, source.kind, name, how or "-")
    return grid


def _failures(sources: Sequence[Source]) -> Grid:
    """Missing numbers and their reasons; each reason once with all its lengths."""
    reasons: dict[tuple[str, ...], list[int]] = {}
    for source in sources:
        for *key, length in _missing(source):
            reasons.setdefault((str(source.number), *key), []).append(length)
    caption = "OOM: out of memory. nan: the loss was not a finite number. Nothing is averaged over the rest."
    heads = ("run", "method", "where", "why")
    grid = Grid.of("Missing numbers", *heads, caption=caption, kind="words")
    for (run, method, where, reason), lengths in reasons.items():
        grid.row(run, method, f"{where} at {listed(sorted(lengths))}", reason)
    return grid


def _missing(source: Source) -> Iterator[tuple[Any, ...]]:
    """Yield method, protocol or task, reason and length of every missing number."""
    data = source.data
    for entry in data.get("failures", ()):
        where = entry.get("protocol") or entry["task"]
        yield entry["method"], where, entry["reason"], entry["length"]
    for row in data["summary"] if source.kind == "perplexity" else ():
        if row["nats"] is None:
            yield row["method"], row["protocol"], "the loss is not finite", row["length"]
    for row in data["summary"] if source.kind in kinds.TITLES else ():
        if row["failed"] is not None:
            yield row["label"], "tail", row["failed"], data["settings"]["target"]


def _settings(sources: Sequence[Source]) -> Grid:
    """Everything that determines the numbers, one row per setting and one column per result."""
    numbers = [source.number for source in sources]
    several = {number for number in numbers if numbers.count(number) > 1}
    heads = [f"run {s.number}" + (f", {s.kind}" if s.number in several else "") for s in sources]
    caption = "One column per result; a single field where all that have the setting agree."
    grid = Grid.of("Settings", "setting", *heads, caption=caption, kind="words settings")
    tables = [_flat(source.data) for source in sources]
    for name in dict.fromkeys(name for table in tables for name in table):
        values = [table.get(name, "") for table in tables]
        given = [value for value in values if value]
        if len(given) > 1 and len(set(given)) == 1:
            grid.row(name, _shortened(given[0], columns=len(values)))
        else:
            differs = "differs" if len(set(given)) > 1 else ""
            grid.row(name, *map(_shortened, values), mark=differs)
    return grid


def _flat(data: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """Nested values under dotted names; lists of plain values joined, lists of anything else left out."""
    flat: dict[str, str] = {}
    for key, value in data.items():
        name, values = f"{above}{key}", value if isinstance(value, list) else [value]
        if not above and key in _ELSEWHERE:
            continue
        if isinstance(value, dict):
            flat |= _flat(value, f"{name}.")
        elif not any(isinstance(entry, dict | list) for entry in values):
            flat[name] = ", ".join(map(_plain, values)) if values else "none"
    return flat


def _plain(value: Any) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)


def _shortened(value: str, mark: str = "", columns: int = 1) -> Field:
    """A hash by its first digits, anything else whole."""
    text = f"{value[:HASH]}…" if _HASH.fullmatch(value) else value
    return Field(text, mark, hint=value, columns=columns)


def _methods(source: Source) -> Grid:
    heads = ("method", "--patch", "scale", "forwards for prefix")
    caption = "As they were requested, and the scale in force."
    grid = Grid.of(f"Methods of run {source.number}", *heads, caption=caption, kind="words")
    forwards = {None: "-", True: "one for all lengths", False: "one for each length"}
    for method in source.data["methods"]:
        scale, original = method.get("scale"), method.get("original")
        shown = "-" if scale is None else f"{scale:g}"
        if scale is None and method.get("auto_scale"):
            shown = f"length / {original:,}, at least 1" if original else "auto"
        spec = Field(str(method.get("spec", "")), "mono")
        shared = forwards[method.get("prefix_from_one_forward")]
        grid.row(str(method["label"]), spec, shown, shared)
    return grid


def _documents(source: Source) -> Grid:
    heads = ("document", "tokens", "bytes", "text", "tokens read")
    caption = "Hashes: SHA-256 of the text and of the tokens that were read, first digits; the JSON has all of them."
    grid = Grid.of(f"Documents of run {source.number}", *heads, caption=caption, kind="words")
    for document in source.data["documents"]:
        counts = (document[name] for name in ("tokens", "bytes"))
        shown = ("-" if count is None else f"{count:,}" for count in counts)
        hashes = (document[name] or "-" for name in ("text_sha256", "tokens_sha256"))
        grid.row(document["name"], *shown, *(_shortened(text, "mono") for text in hashes))
    return grid
