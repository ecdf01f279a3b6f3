"""Fills the template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from hf_posenc.evaluation.page import bench, retrieval
from hf_posenc.evaluation.page.collect import Collection, Source
from hf_posenc.evaluation.page.perplexity import Table, sections
from hf_posenc.evaluation.perplexity.result import FEW_DOCUMENTS
from hf_posenc.evaluation.plots import available

# What stands behind the numbers: settings, methods, documents, what was left out, failures, commands.


# Each has a place of its own in the page.
_ELSEWHERE = frozenset(
    {
        *("kind", "format", "command", "summary", "records", "curve", "documents", "skipped"),
        *("failures", "methods", "protocols", "perplexity", "retrieval", "speed", "by_depth"),
        *("scores", "tasks", "recipe", "rungs", "steps", "remarks"),
    }
)
HASH = 12
"""Digits of a hash that are shown; all of them stand in its tooltip, and in the JSON."""
_HASH = re.compile(r"[0-9a-f]{40,}")
_FORWARDS = ("one for each length", "one for all lengths")


@dataclass(frozen=True)
class Setting:
    """One setting: its value in every result.

    Attributes:
        name: Where it stands in the results, e.g. `model.dtype`.
        values: As text, per result; `""` where a result does not have it.
        differs: Whether the results that have it disagree.
        same: The value that all have that have any, at least two of them; `""` otherwise.
    """

    name: str
    values: Sequence[str]
    differs: bool
    same: str


@dataclass(frozen=True)
class Failed:
    """Numbers that could not be measured, for one reason."""

    run: int
    method: str
    where: str
    reason: str


def settings(sources: Sequence[Source]) -> list[Setting]:
    """Everything that determines the numbers, one row per setting and one column per result."""
    tables = [_flat(source.data) for source in sources]
    names = dict.fromkeys(name for table in tables for name in table)
    rows = []
    for name in names:
        values = [table.get(name, "") for table in tables]
        known = set(filter(None, values))
        shared = len(known) == 1 and sum(map(bool, values)) > 1
        rows.append(Setting(name, values, len(known) > 1, next(iter(known)) if shared else ""))
    return rows


def _flat(data: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """Nested values under dotted names; lists of plain values joined, lists of anything else left out."""
    flat: dict[str, str] = {}
    for key, value in data.items():
        name = f"{above}{key}"
        if not above and key in _ELSEWHERE:
            continue
        if isinstance(value, dict):
            flat |= _flat(value, f"{name}.")
        elif isinstance(value, list):
            if not any(isinstance(entry, dict | list) for entry in value):
                flat[name] = ", ".join(map(_said, value)) or "none"
        else:
            flat[name] = _said(value)
    return flat


def _said(value: Any) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)


def shortened(value: str) -> str:
    """A hash by its first digits, anything else whole."""
    return f"{value[:HASH]}…" if _HASH.fullmatch(value) else value


def methods(sources: Sequence[Source]) -> list[tuple[Source, list[dict[str, str]]]]:
    """What each result compares: the entry of `--patch`, the scale in force, how the prefix was made."""
    tables = []
    for source in sources:
        rows = []
        for method in source.data.get("methods", ()):
            if not isinstance(method, dict):
                continue
            shared = method.get("prefix_from_one_forward")
            rows.append(
                {
                    "label": str(method.get("label", "")),
                    "spec": str(method.get("spec", "")),
                    "scale": _scale(method),
                    "prefix": "-" if shared is None else _FORWARDS[bool(shared)],
                }
            )
        if rows:
            tables.append((source, rows))
    return tables


def _scale(method: Mapping[str, Any]) -> str:
    scale = method.get("scale")
    if scale is None and method.get("auto_scale"):
        return f"length / {method['original']:,}, at least 1" if method.get("original") else "auto"
    return "-" if scale is None else f"{scale:g}"


def failures(sources: Sequence[Source]) -> list[Failed]:
    """What has no number and why, the same reason once with all its lengths."""
    reasons: dict[tuple[int, str, str, str], list[int]] = {}
    for source in sources:
        for failure in source.data.get("failures", ()):
            what = str(failure.get("protocol") or failure.get("task") or "")
            key = (source.number, str(failure.get("method", "")), what, str(failure.get("reason")))
            reasons.setdefault(key, []).append(failure.get("length"))
        for cell in source.data["summary"] if source.kind == "perplexity" else ():
            if cell["nats"] is None:
                key = (source.number, cell["method"], cell["protocol"], "the loss is not finite")
                reasons.setdefault(key, []).append(cell["length"])
        for row in source.data["summary"] if source.kind in ("sweep", "search") else ():
            if row["failed"] is not None:
                target = source.data["settings"]["target"]
                reasons.setdefault((source.number, row["label"], "tail", row["failed"]), []).append(
                    target
                )
    return [
        Failed(run, method, f"{what} at {_listed(lengths)}" if what else _listed(lengths), reason)
        for (run, method, what, reason), lengths in reasons.items()
    ]


def _listed(lengths: Sequence[int | None]) -> str:
    return ", ".join(f"{length:,}" for length in sorted(n for n in lengths if n is not None))


def listed(sources: Sequence[Source], name: str) -> list[tuple[Source, list[dict[str, Any]]]]:
    """The documents, or what was skipped, of each result that has any."""
    return [(source, source.data[name]) for source in sources if source.data.get(name)]


def commands(sources: Sequence[Source]) -> list[tuple[Source, str]]:
    """How each result was made, where it says so; the parts of a benchmark were made by its command."""
    made: dict[int, tuple[Source, str]] = {}
    for source in sources:
        if source.data.get("command"):
            made.setdefault(source.number, (source, str(source.data["command"])))
    return list(made.values())


TITLE = "Measurements of hf-posenc"


def render(found: Collection, *, title: str = TITLE, figures: bool = True) -> str:
    """The report as one HTML document.

    Args:
        found: What `collect` gave.
        title: Its heading.
        figures: Whether it has figures, where matplotlib is installed.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from hf_posenc.evaluation.measuring.identity import version_of

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    loader: Any = environment.loader
    style, _, _ = loader.get_source(environment, "style.css")
    perplexity = sections(found.sources, figures=figures and available())
    failed = failures(found.sources)
    values: dict[str, Any] = {
        "title": title,
        "version": version_of("hf-posenc"),
        "style": Markup(style),
        "few": FEW_DOCUMENTS,
        "legend": _legend,
        "count": _count,
        "shortened": shortened,
        "runs": [_run(source) for source in found.files],
        "columns": _columns(found),
        "sources": found.sources,
        "unfinished": found.unfinished,
        "remarks": found.remarks,
        "perplexity": perplexity,
        "retrieval": retrieval.sections(found.sources),
        "bench": bench.sections(found.sources),
        "tuning": bench.tuning_sections(found.sources),
        "failures": failed,
        "settings": settings(found.sources),
        "documents": listed(found.sources, "documents"),
        "skipped": listed(found.sources, "skipped"),
        "methods": methods(found.sources),
        "commands": commands(found.sources),
    }
    values["contents"] = _contents(values)
    return environment.get_template("page.html").render(values)


def _contents(values: dict[str, Any]) -> list[tuple[str, str]]:
    entries = [
        ("unfinished", "Unfinished runs") if values["unfinished"] else None,
        ("remarks", "Not in this report") if values["remarks"] else None,
        ("runs", "Runs"),
        *_numbered("perplexity", len(values["perplexity"])),
        *_numbered("retrieval", len(values["retrieval"])),
        *_numbered("bench", len(values["bench"])),
        *(
            (f"tuning-{index}", f"{section.title.split()[0]} of run {section.source.number}")
            for index, section in enumerate(values["tuning"], 1)
        ),
        ("failures", "What has no number") if values["failures"] else None,
        ("caveats", "Before you conclude"),
        ("settings", "Settings"),
        ("documents", "Documents"),
        ("reproduce", "To do it again"),
    ]
    return [entry for entry in entries if entry is not None]


def _numbered(name: str, count: int) -> list[tuple[str, str]]:
    title = name.capitalize()
    return [(f"{name}-{n}", f"{title} {n}" if count > 1 else title) for n in range(1, count + 1)]


def _run(source: Source) -> dict[str, Any]:
    model = (source.data.get("perplexity") or source.data).get("model", {})
    how = (model.get("dtype"), model.get("attention"), model.get("device"))
    return {
        "number": source.number,
        "name": source.name,
        "kind": source.kind,
        "model": model.get("name", "-"),
        "how": ", ".join(str(value) for value in how if value is not None) or "-",
    }


def _columns(found: Collection) -> list[str]:
    """What stands above each result's settings."""
    numbers = [source.number for source in found.sources]
    return [
        f"run {source.number}" + (f", {source.kind}" if numbers.count(source.number) > 1 else "")
        for source in found.sources
    ]


def _legend(table: Table) -> str:
    """What a field of the table says, top to bottom."""
    return (
        "In each field: the perplexity, the lowest of its length underlined; its 95 % bootstrap interval over "
        f"documents; × its ratio to {table.baseline} with the paired interval, and better or worse where that "
        "interval leaves out 1."
    )


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
