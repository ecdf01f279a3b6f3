"""Fills the template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from markupsafe import Markup

from hf_posenc.evaluation.page import appendix, bench, retrieval, tuning
from hf_posenc.evaluation.page.collect import Collection, Source
from hf_posenc.evaluation.page.perplexity import Table, sections
from hf_posenc.evaluation.plots import available
from hf_posenc.evaluation.report import FEW_DOCUMENTS

TITLE = "Measurements of hf-posenc"


def render(found: Collection, *, title: str = TITLE, figures: bool = True) -> str:
    """The report as one HTML document.

    Args:
        found: What `collect` gave.
        title: Its heading.
        figures: Whether it has figures, where matplotlib is installed.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from hf_posenc.evaluation.identity import version_of

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
    failures = appendix.failures(found.sources)
    values: dict[str, Any] = {
        "title": title,
        "version": version_of("hf-posenc"),
        "style": Markup(style),
        "few": FEW_DOCUMENTS,
        "legend": _legend,
        "count": _count,
        "shortened": appendix.shortened,
        "runs": [_run(source) for source in found.files],
        "columns": _columns(found),
        "sources": found.sources,
        "unfinished": found.unfinished,
        "remarks": found.remarks,
        "perplexity": perplexity,
        "retrieval": retrieval.sections(found.sources),
        "bench": bench.sections(found.sources),
        "tuning": tuning.sections(found.sources),
        "failures": failures,
        "settings": appendix.settings(found.sources),
        "documents": appendix.listed(found.sources, "documents"),
        "skipped": appendix.listed(found.sources, "skipped"),
        "methods": appendix.methods(found.sources),
        "commands": appendix.commands(found.sources),
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
