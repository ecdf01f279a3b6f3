"""Figures inside the page: SVG whose text stays text and whose colours follow the reader's light or dark mode."""

from __future__ import annotations

import hashlib
import io
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from hf_posenc.evaluation import plots
from hf_posenc.evaluation.page.collect import Merged
from hf_posenc.evaluation.perplexity.result import number
from hf_posenc.evaluation.plots.perplexity import position_points
from hf_posenc.evaluation.plots.style import BASELINE, COLOURS, CONTROL_COLOUR, GRID, REMARK, STYLE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, PAPER = "#000000", "#ffffff"
VARIABLES = {
    **{colour.lower(): f"line-{index}" for index, colour in enumerate(COLOURS)},
    INK: "ink",
    BASELINE: "ink",
    PAPER: "paper",
    GRID: "grid",
    CONTROL_COLOUR: "muted",
    REMARK: "muted",
}
"""Which custom property of the page's style sheet stands for each colour of a figure."""

_TRANSPARENT: Any = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


@dataclass(frozen=True)
class Picture:
    """A figure of the page.

    Attributes:
        svg: The drawing.
        caption: What it shows.
        description: The same in words, for those who do not see it.
    """

    svg: Markup
    caption: str
    description: str


def pictures(merged: Merged) -> list[Picture]:
    """The figures of one protocol; none without a number.

    Raises:
        PosencError: matplotlib is not installed.
    """
    plots.require()
    if not any(line.numbers for line in merged.lines):
        return []
    import matplotlib as mpl

    made = []
    name = merged.protocol
    key = f"f{hashlib.sha256(name.encode()).hexdigest()[:6]}-{merged.sources[0].number}"
    with mpl.rc_context({**STYLE, **_TRANSPARENT}):
        made.append(
            Picture(
                themed(plots.figure(merged, [name]), f"{key}-length"),
                f"Perplexity against context length, {name}: {merged.definition}.",
                _by_length(merged),
            )
        )
        if any(number.ratio_interval for line in merged.lines for number in line.numbers.values()):
            made.append(
                Picture(
                    themed(plots.ratio_figure(merged, name), f"{key}-ratio"),
                    "The same as a multiple of the baseline, with paired 95 % intervals: below 1 is better, and "
                    "only an interval that leaves out 1 shows a difference.",
                    "The ratios are in the table.",
                )
            )
        if merged.curve and any(position_points(merged.curve, n.label) for n in merged.lines):
            made.append(
                Picture(
                    themed(plots.position_figure(merged), f"{key}-position"),
                    "Perplexity of the tokens at each position of the text, each read with all that is in front "
                    f"of it, in windows of {merged.curve['edges'][-1]:,} tokens. Past the dashed line the model "
                    "is longer than it was trained.",
                    _by_position(merged),
                )
            )
    return made


def themed(figure: Figure, key: str) -> Markup:
    """A figure as an `<svg>` element for the page.

    Args:
        figure: The figure, drawn on nothing.
        key: A name that no other figure of the page has; its ids begin with it.
    """
    file = io.StringIO()
    plots.save(figure, file, "svg")
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"\s*<style[^>]*>.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r' (xmlns(:xlink)?|version)="[^"]*"', "", text)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'\bid="', f'id="{key}-', text)
    text = re.sub(r"url\(#", f"url(#{key}-", text)
    text = re.sub(r'xlink:href="#', f'href="#{key}-', text)
    text = re.sub(r"<text style=\"([^\"]*)\"", _text_style, text)
    text = re.sub(r' style="[^"]*"', _colours, text)
    return Markup(text.replace("<svg", '<svg aria-hidden="true" focusable="false"', 1).strip())


def _text_style(found: re.Match[str]) -> str:
    """The page's own typeface; and colours that are dark or light enough for text."""
    style = re.sub(r"font-family:[^;]*;?\s*", "", found[1])
    style = re.sub(r"font: (\S+) [^;]*", r"font-size: \1", style)  # older matplotlib
    style = re.sub(
        r"fill: (#[0-9a-fA-F]{6})",
        lambda colour: f"fill: var(--text-{VARIABLES.get(colour[1].lower(), 'ink')})",
        style,
    )
    return f'<text style="{style}"'


def _colours(style: re.Match[str]) -> str:
    return re.sub(r"#[0-9a-fA-F]{6}", _variable, style[0])


def _variable(found: re.Match[str]) -> str:
    name = VARIABLES.get(found[0].lower())
    return found[0] if name is None else f"var(--{name})"


def _by_length(merged: Merged) -> str:
    said = []
    for line in merged.lines:
        cells = [line.numbers[n] for n in sorted(line.numbers)]
        if cells:
            first, last = cells[0], cells[-1]
            said.append(
                f"{line.label} goes from {number(first.perplexity)} at {first.length:,} tokens "
                f"to {number(last.perplexity)} at {last.length:,}"
            )
    return "; ".join(said) + "."


def _by_position(merged: Merged) -> str:
    curve: dict[str, Any] = merged.curve or {}
    said = []
    for line in merged.lines:
        points = position_points(curve, line.label)
        if points:
            (first, low), (last, high) = points[0], points[-1]
            said.append(
                f"{line.label} goes from {number(low)} near token {first:,.0f} to {number(high)} near {last:,.0f}"
            )
    return "; ".join(said) + "."
