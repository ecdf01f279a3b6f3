"""Sections of the page: every kind of result in one form, filled by its own tables, notes and figures."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from hf_posenc.evaluation import plots
from hf_posenc.evaluation.grid import Field, Grid, number
from hf_posenc.evaluation.measuring.statistics import TOO_FEW, VERDICTS, Cell
from hf_posenc.evaluation.page import compare
from hf_posenc.evaluation.page.collect import Source
from hf_posenc.evaluation.page.compare import ratio_text
from hf_posenc.evaluation.perplexity.result import PerplexityResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ORDER = ("extend", "perplexity", "retrieval")
"""Kinds that come first on the page."""
_MAP = "by depth of the needle in the prompt, from its front to its end, and by the tokens of the prompt."
CAPTIONS = {
    "retrieval": f"Answers right, {_MAP}",
    "retrieval_ranks": f"Distractors less probable than the answer (by chance 50 %), {_MAP}",
    "sweep": "Every method with its interval over documents; vertical lines: the controls.",
    "search": "Left: the path of the search. Right: the factors found, beside those it began with.",
}
Drawing = tuple[Markup, str, str]
"""A figure as an `<svg>` element, its caption, and its lines in words."""


@dataclass
class Part:
    """A part of a section: tables, and figures below them."""

    grids: Sequence[Grid]
    figures: Sequence[Drawing] = ()
    heading: str = ""


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
    """Return a section for each result: extensions first, then perplexity and retrieval, then the others."""
    place = {kind: index for index, kind in enumerate(ORDER)}
    ordered = sorted(sources, key=lambda source: place.get(source.kind, len(ORDER)))
    return [_section(source, figures) for source in ordered]


def _section(source: Source, figures: bool) -> Section:
    result, kind, key = source.result, source.kind, f"{source.kind}-{source.number}"
    title, verdicts, notes = kind.capitalize(), list[str](), list(result.notes())
    parts = [] if kind == "perplexity" else [_own(result, key, figures)]
    if kind == "extend":
        title = f"Extending {source.data['model']['name']} to {result.lengths[1]:,} tokens"
        verdicts = result.lines()
        demands = [
            f"{'Met' if demand.met else 'Not met'}: {demand.name}. {demand.numbers}."
            for demand in result.demands
        ]
        notes = [*demands, *(note for note in notes if note not in verdicts)]
    elif kind == "perplexity":
        verdicts = [compare.perplexity_verdict(result, name) for name in result.conditions]
        for name, grid in zip(result.conditions, result.tables(), strict=True):
            drawn = list(_figures(result, name, f"{key}-{name}")) if figures else []
            parts.append(Part([grid, *_ratios(result, name)], drawn, name))
        notes += result.guide()
    elif kind == "retrieval":
        verdicts = [compare.retrieval_verdict(result)]
        notes += result.guide()
    elif kind == "bench":
        title = f"Benchmark, suite {result.suite}"
    elif kind == "gpu":
        title = result.machine["device"]
        verdicts = ["times and memory, which do not measure quality."]
    else:  # a sweep or a search: what follows the note on its course is about the best method
        notes, verdicts = notes[:1], [" ".join(notes[1:])]
    recipe = getattr(result, "recipe", None)
    return Section(
        key,
        f"{title} (run {source.number})",
        verdicts,
        notes,
        parts,
        recipe=json.dumps(recipe, indent=2) if recipe else "",
    )


def _own(result: Any, key: str, figures: bool) -> Part:
    """Return a result's own tables, and those of its figures that have a caption."""
    drawn = result.figures() if figures and CAPTIONS.keys() & {result.kind} else {}
    return Part(
        result.tables(),
        [_drawn(figure, f"{key}-{name}", CAPTIONS[name]) for name, figure in drawn.items()],
    )


# Perplexity.


def _ratios(result: PerplexityResult, protocol: str) -> Iterator[Grid]:
    """Yield the table of ratios to the baseline, at the longest length to the control too; none of a single method.

    Under `tail`, the gain too: the same tokens with the longest context, by those with the longest trained one.
    """
    lengths, labels = result.settings.lengths, [entry.label for entry in result.candidates]
    if len(labels) < 2:
        return
    base, control, last = labels[0], compare.control_of(result)[0], lengths[-1]
    short = [length for length in lengths if result.original and length <= result.original]
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
    grid.column(f"{last:,}\nto the control", numeric=True)
    others = [(control, last)]
    if protocol == "tail" and 0 < len(short) < len(lengths):
        grid.column(f"{last:,}, to the\nbaseline at {short[-1]:,}", numeric=True)
        others.append((base, short[-1]))
    for label in labels:
        cells = (result.cell(label, protocol, length) for length in lengths)
        fields = [_ratio(cell, "baseline" * (label == base)) for cell in cells]
        for other in others:
            itself = "control" * (other == (label, last))
            fields.append(_ratio(compare.against(result, protocol, (label, last), other), itself))
        grid.row(label, *fields)
    yield grid


def _ratio(cell: Cell | None, itself: str) -> Field:
    """Return a ratio, its range and its verdict; the name of the method that is compared with itself."""
    if cell is None or cell.ratio is None or not plots.positive(cell.ratio):
        return Field("-", "none", hint="one of the two was not measured")
    if itself:
        return Field(itself, "none")
    shown = Field(f"×{ratio_text(cell.ratio)}", "value", cell.ratio)
    ends = cell.ratio_interval
    shown.append(f"\n{'-'.join(map(ratio_text, ends)) if ends else TOO_FEW}", "aside")
    if cell.differs:
        shown.append("\n").append(VERDICTS[cell.differs], VERDICTS[cell.differs])
    return shown


def _figures(result: PerplexityResult, protocol: str, key: str) -> Iterator[Drawing]:
    """Draw perplexity against length, as ratios, and by position; nothing without a number."""
    cells, curve = [cell for cell in result.cells if cell.protocol == protocol], result.curve
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
    if protocol == "prefix" and any(
        plots.position_points(curve, label) for label in curve["methods"]
    ):
        caption = (
            "Perplexity of the tokens at each position of the text, each read with all tokens before it, in windows of "
            f"{curve['edges'][-1]:,} tokens. Past the dashed line texts are longer than those of the training."
        )
        yield _drawn(plots.position_figure(result), f"{key}-position", caption)


# Figures: SVG whose text stays text. The page's style sheet replaces the colours, except those of a heat map.


def _drawn(figure: Figure, key: str, caption: str) -> Drawing:
    """Return a figure with ids of its own."""
    import matplotlib as mpl

    file, metadata = io.StringIO(), dict.fromkeys(("Creator", "Date", "Format", "Type"))
    how: dict[str, Any] = {"format": "svg", "bbox_inches": "tight", "metadata": metadata}
    maps = any(axes.get_images() for axes in figure.axes)
    with mpl.rc_context({**plots.STYLE, "svg.hashsalt": key}):
        figure.savefig(file, transparent=not maps, **how)
    svg = file.getvalue()
    svg = re.sub(r' id="[\w.]+_\d{1,4}"', "", svg[svg.index("<svg") :])  # groups', which repeat
    lines: list[Any] = [line for axes in figure.axes for line in axes.get_lines()]
    described = [
        f"{label} goes from {number(y[0])} at {x[0]:,.0f} to {number(y[-1])} at {x[-1]:,.0f}"
        for label, x, y in ((str(n.get_label()), n.get_xdata(), n.get_ydata()) for n in lines)
        if len(x) and not label.startswith("_")
    ]
    return Markup(svg), caption, "; ".join(described)
