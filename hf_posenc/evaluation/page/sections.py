"""Sections of the page: every kind of result in one form, filled by its own tables, notes and figures."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from hf_posenc.evaluation import plots
from hf_posenc.evaluation.grid import Field, Grid, number
from hf_posenc.evaluation.measuring.statistics import VERDICTS, Cell
from hf_posenc.evaluation.page.collect import Source
from hf_posenc.evaluation.page.compare import (
    Group,
    against,
    control_of,
    groups,
    perplexity_verdict,
    ratio_text,
    retrieval_verdict,
)
from hf_posenc.evaluation.retrieval.result import VALUES, RetrievalResult
from hf_posenc.evaluation.retrieval.tasks import get_task

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CAPTIONS = {
    "sweep": "Every method with its interval over documents; vertical lines: the controls.",
    "search": "Left: the path of the search. Right: the factors found, beside those it began with.",
}


@dataclass
class Part:
    """A part of a section: figures with captions and descriptions in words, tables, and heat maps below a text."""

    heading: str = ""
    figures: list[tuple[Markup, str, str]] = field(default_factory=list)
    grids: list[Grid] = field(default_factory=list)
    about_maps: str = ""
    maps: list[Grid] = field(default_factory=list)


@dataclass
class Section:
    """A section of the page; its verdicts are at the top of the page."""

    id: str
    title: str
    verdicts: list[str]
    notes: list[str]
    parts: list[Part]
    recipe: str = ""


def sections(sources: Sequence[Source], *, figures: bool) -> list[Section]:
    """Return the sections: extensions first, then runs that read the same texts, then the other runs."""
    single = [source for source in sources if source.kind not in ("perplexity", "retrieval")]
    return [
        *(_single(source, figures) for source in single if source.kind == "extend"),
        *_compared(sources, "perplexity", figures),
        *_compared(sources, "retrieval", figures),
        *(_single(source, figures) for source in single if source.kind != "extend"),
    ]


def _single(source: Source, figures: bool) -> Section:
    """Return the section of a run that is compared with no other."""
    result, kind = source.result, source.kind
    title, verdicts, notes = kind.capitalize(), list[str](), list(result.notes())
    if kind == "extend":
        title = f"Extending {source.data['model']['name']} to {result.lengths[1]:,} tokens"
        verdicts = result.lines()
        demands = [
            f"{'Met' if demand.met else 'Not met'}: {demand.name}. {demand.numbers}."
            for demand in result.demands
        ]
        notes = [*demands, *(note for note in notes if note not in verdicts)]
    elif kind == "bench":
        title = f"Benchmark, suite {result.suite}"
    elif kind == "gpu":
        title, verdicts = (
            result.machine["device"],
            ["times and memory, which do not measure quality."],
        )
    else:  # a sweep or a search: what follows the note on its course is about the best method
        notes, verdicts = notes[:1], [" ".join(notes[1:])]
    recipe, drawn = getattr(result, "recipe", None), []
    if figures and kind in CAPTIONS:
        drawn = [
            _drawn(figure, f"{name}-{source.number}", CAPTIONS[kind])
            for name, figure in result.figures().items()
        ]
    return Section(
        f"{kind}-{source.number}",
        f"{title} (run {source.number})",
        verdicts,
        notes,
        [Part(figures=drawn, grids=result.tables())],
        recipe=json.dumps(recipe, indent=2) if recipe else "",
    )


def _compared(sources: Sequence[Source], kind: str, figures: bool) -> Iterator[Section]:
    """Yield a section for each group of runs that read the same texts."""
    found = groups(sources, kind)
    for index, group in enumerate(found, 1):
        result, id, title = group.result, f"{kind}-{index}", kind.capitalize()
        if kind == "perplexity":
            verdicts = [
                perplexity_verdict(group, model, protocol)
                for protocol in result.conditions
                for model in group.models
            ]
            parts = [
                Part(
                    protocol,
                    list(_perplexity_figures(group, protocol, id)) if figures else [],
                    [result.table(protocol), *_ratios(group, protocol)],
                )
                for protocol in result.conditions
            ]
        else:
            verdicts = [retrieval_verdict(group, model) for model in group.models]
            tables = zip(result.conditions, result.tables(), strict=True)
            parts = [Part(task, [], [grid], *_heat_maps(result, task)) for task, grid in tables]
        notes = [f"Run {group.runs[0].number}.", *result.notes(), *result.guide()]
        if len(group.runs) > 1:
            numbers = ", ".join(str(run.number) for run in group.runs)
            notes[0] = f"Runs {numbers}; the numbers of its runs follow the name of a method."
        if len(group.models) > 1:
            baselines = (labels[0] for labels in group.models.values())
            notes.append(f"Each model has a baseline of its own: {', '.join(baselines)}.")
        if len(found) > 1:
            title += f" {index}"
            notes.append(
                "Other texts or settings than in the other sections of its kind, with which its numbers are not "
                "comparable."
            )
        yield Section(id, title, verdicts, notes, parts)


# Perplexity.


def _ratios(group: Group, protocol: str) -> Iterator[Grid]:
    """Yield the table of ratios to the baseline, at the longest length to the control too; none of a single method.

    Under `tail`, the gain too: the same tokens with the longest context, by those with the longest trained one.
    """
    result, lengths = group.result, group.result.settings.lengths
    if len(result.candidates) < 2:
        return
    short = [length for length in lengths if result.original and length <= result.original]
    gain = protocol == "tail" and 0 < len(short) < len(lengths)
    grid = Grid(
        f"Ratios, {protocol}",
        caption=(
            f"Ratios, {protocol}: perplexity as a multiple of another, with the paired interval over documents; better "
            "or worse where it excludes 1 (all of a column hold together in 95 % of samples)."
        ),
    )
    grid.column("method")
    for length in lengths:
        grid.column(f"{length:,}\nto the baseline", numeric=True)
    grid.column(f"{lengths[-1]:,}\nto the control", numeric=True)
    if gain:
        grid.column(f"{lengths[-1]:,}, to the\nbaseline at {short[-1]:,}", numeric=True)
    for labels in group.models.values():
        base, control, last = labels[0], control_of(result, labels)[0], lengths[-1]
        for label in labels:
            cells = [result.cell(label, protocol, length) for length in lengths]
            fields = [_ratio(cell, "baseline" * (label == base)) for cell in cells]
            others = [(control, last), *([(base, short[-1])] if gain else [])]
            for other in others:
                itself = "control" * (other == (label, last))
                cell = against(result, protocol, (label, last), other, len(labels) - 1)
                fields.append(_ratio(cell, itself))
            grid.row(label, *fields)
    yield grid


def _ratio(cell: Cell | None, itself: str) -> Field:
    """Return a ratio, its range and its verdict; the name of the method that is compared with itself."""
    if cell is None or cell.ratio is None or not plots.positive(cell.ratio):
        return Field("-", "none", hint="one of the two was not measured")
    if itself:
        return Field(itself, "none")
    shown = Field(f"×{ratio_text(cell.ratio)}", "value", cell.ratio)
    if cell.ratio_interval is not None:
        shown.append(f"\n{'-'.join(map(ratio_text, cell.ratio_interval))}", "aside")
    if cell.differs:
        shown.append("\n").append(VERDICTS[cell.differs], VERDICTS[cell.differs])
    return shown


def _perplexity_figures(group: Group, protocol: str, id: str) -> Iterator[tuple[Markup, str, str]]:
    """Draw perplexity against length, as ratios, and by position; nothing without a number."""
    result, key = group.result, f"{id}-{protocol}"
    cells = [cell for cell in result.cells if cell.protocol == protocol]
    if not cells:
        return
    definition = result.settings.definition(protocol)
    caption = f"Perplexity against context length, {protocol}: {definition}."
    yield _drawn(plots.figure(result, [protocol]), key, caption)
    if any(cell.ratio_interval for cell in cells):
        caption = (
            "The same as a multiple of the baseline, with paired intervals (all at one length hold together in 95 % of "
            "samples): below 1 is better, and only an interval that excludes 1 shows a difference."
        )
        yield _drawn(plots.ratio_figure(result, protocol), f"{key}-ratio", caption)
    curve = result.curve
    if protocol == "prefix" and any(
        plots.position_points(curve, each) for each in curve["methods"]
    ):
        caption = (
            "Perplexity of the tokens at each position of the text, each read with all tokens before it, in windows of "
            f"{curve['edges'][-1]:,} tokens. Past the dashed line texts are longer than those of the training."
        )
        yield _drawn(plots.position_figure(result), f"{key}-position", caption)


# Heat maps are tables with shaded fields, so that colour alone carries no information.


def _heat_maps(result: RetrievalResult, task: str) -> tuple[str, list[Grid]]:
    """Return a text about the heat maps, and one map for each method of a task with depths.

    They show the ranks of the answers if no answer is right.
    """
    settings, right = result.settings, [cell.accuracy for cell in result.cells if cell.task == task]
    value = "beaten" if settings.ranks and not any(right) else "accuracy"
    maps = []
    for label in (entry.label for entry in result.candidates if get_task(task).has_depth):
        title = f"{label} in {task}, by depth and length"
        heads = (f"{length:,}" for length in settings.lengths)
        grid = Grid.of(title, "depth", *heads, caption=label, kind="heat")
        for depth, row in zip(settings.depths, result.shares(task, label, value), strict=True):
            shares = (
                Field("-")
                if math.isnan(share)
                else Field(f"{100 * share:.0f}", "", share, shade=round(100 * share))
                for share in row
            )
            grid.row(f"{depth:.0%}", *shares)
        maps.append(grid)
    quantity = " ".join(VALUES[value].split())
    about = (
        f"In percent: {quantity}. Rows: depth of the needle, from the front (0 %) to the end (100 %); columns: tokens "
        "of the prompt."
    )
    return about, maps


# Figures: SVG whose text stays text. The page's style sheet replaces the colours.


def _drawn(figure: Figure, key: str, caption: str) -> tuple[Markup, str, str]:
    """Return a figure as an `<svg>` element with ids of its own, its caption, and its lines in words."""
    import matplotlib as mpl

    file = io.StringIO()
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with mpl.rc_context({**plots.STYLE, "svg.hashsalt": key}):
        figure.savefig(
            file, format="svg", bbox_inches="tight", transparent=True, metadata=no_metadata
        )
    svg = file.getvalue()
    svg = re.sub(r' id="[\w.]+_\d{1,4}"', "", svg[svg.index("<svg") :])  # groups', which repeat
    lines: list[Any] = [line for axes in figure.axes for line in axes.get_lines()]
    named = [line for line in lines if not str(line.get_label()).startswith("_")]
    ends = ((line.get_label(), line.get_xdata(), line.get_ydata()) for line in named)
    described = "; ".join(
        f"{label} goes from {number(y[0])} at {x[0]:,.0f} to {number(y[-1])} at {x[-1]:,.0f}"
        for label, x, y in ends
        if len(x)
    )
    return Markup(svg), caption, f"{described}."
