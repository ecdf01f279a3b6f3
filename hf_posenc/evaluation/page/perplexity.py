"""The perplexity sections of the page: a table per protocol, the price on short texts, and the figures."""

from __future__ import annotations

import hashlib
import io
import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from hf_posenc.evaluation import plots
from hf_posenc.evaluation.grid import Field, Grid, Span, failure_field, number
from hf_posenc.evaluation.measuring.statistics import ROUNDING, side_of_one
from hf_posenc.evaluation.page.collect import (
    Interval,
    Line,
    Merged,
    Source,
    against,
    grouped,
    merge,
    protocol_differs,
    texts,
    texts_differ,
    variant,
)
from hf_posenc.evaluation.perplexity.result import FEW_DOCUMENTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Fields of the page: numbers with their exact values, ranges, and the conclusions that intervals allow.


def number_span(value: float, digits: int = 3, mark: str = "aside") -> Span:
    """Return a number with so many significant digits."""
    return Span(number(value, digits), mark, value)


def ratio_span(value: float, mark: str = "aside") -> Span:
    """Return a ratio with enough digits to distinguish it from 1, unless the difference is rounding."""
    if not 0.9 < value < 1.1 or abs(value - 1) < ROUNDING:
        return number_span(value, 3, mark)
    texts = [f"{value:.{digits}f}" for digits in (3, 4)]
    return Span(next((text for text in texts if float(text) != 1), texts[-1]), mark, value)


def range_spans(
    before: str, interval: Sequence[float] | None, span: Callable[[float], Span], after: str = ""
) -> list[Span]:
    """Return both ends of an interval between two texts; nothing without one."""
    if interval is None:
        return []
    low, high = map(span, interval)
    return [Span(before, "aside"), low, Span("–", "aside"), high, Span(after, "aside")]


def number_field(value: float, interval: Interval | None, mark: str = "value") -> Field:
    """Return a number, and its range in the line below."""
    return Field().add(number_span(value, 4, mark), *range_spans("\n", interval, number_span))


def ratio_field(ratio: float | None, interval: Interval | None, documents: int) -> Field:
    """Return a ratio of perplexities, its range and its verdict."""
    if ratio is None or not math.isfinite(ratio):
        return Field("-", "none", hint="one of the two was not measured")
    return Field("×", "value").add(
        ratio_span(ratio, "value"), *_range_and_verdict(interval, documents)
    )


def missing_field(reason: str | None) -> Field:
    """Return the field of a number that is missing, with the reason if its measurement failed."""
    return Field("-", "none", hint="not measured") if reason is None else failure_field(reason)


def _range_and_verdict(interval: Interval | None, documents: int) -> list[Span]:
    """The range of a ratio; `better` or `worse` if all of it is below or above 1, given enough documents."""
    spans = range_spans(" (", interval, ratio_span, ")")
    if interval is None or documents < FEW_DOCUMENTS or not all(map(math.isfinite, interval)):
        return spans
    verdict = {-1: "better", 0: "", 1: "worse"}[side_of_one(interval)]
    return [*spans, Span(" "), Span(verdict, verdict)] if verdict else spans


def row_name(name: str, about: str) -> Field:
    """Return the heading of a row, with an explanation in the line below."""
    field = Field(name)
    return field.append("\n").append(about, "aside") if about else field


# Sections.

WIDE = 12
"""With more lengths than this, lengths are rows and methods are columns."""
_BASELINE = Field("baseline", "none", hint="the others are relative to it")


def sections(sources: Sequence[Source], *, figures: bool) -> list[dict[str, Any]]:
    """Return the values of `sections.html`: all perplexity results, comparable ones together."""
    groups = grouped(sources, "perplexity", texts)
    return [
        {
            "sources": group,
            "apart": texts_differ(groups[0][0].data, group[0].data),
            "documents": len(group[0].data["documents"]),
            "parts": _parts(group, figures),
        }
        for group in groups
    ]


def _parts(group: Sequence[Source], figures: bool) -> list[dict[str, Any]]:
    """One part per protocol and settings of it."""
    parts: list[dict[str, Any]] = []
    firsts: dict[str, Merged] = {}
    for merged in merge(group):
        name, apart = merged.protocol, ""
        first = firsts.setdefault(name, merged)
        if first is not merged:
            reason = protocol_differs(first.sources[0].data, merged.sources[0].data, name)
            apart = f"Not comparable with the {name} above: {reason}."
        parts.append(
            {
                "merged": merged,
                "apart": apart,
                "summary": _summary(merged),
                "pictures": pictures(merged) if figures else [],
                "table": _table(merged),
            }
        )
    return parts


def _about(line: Line, merged: Merged) -> str:
    """The results of a row, if the table has several."""
    if len(merged.sources) == 1:
        return ""
    runs = ", ".join(str(source.number) for source in (line.source, *line.also))
    about = f"run {runs}" if not line.also else f"runs {runs}, the same numbers"
    if len({variant(source) for source in merged.sources}) > 1:
        model = line.source.data["model"]
        about += f": {model.get('name', '')}, {model.get('dtype', '')}"
    return about


def _summary(merged: Merged) -> Grid | None:
    """Each method at the longest length within the original one, and at the longest of all."""
    original, lengths = merged.original, merged.settings.lengths
    short = max((n for n in lengths if original and n <= original), default=None)
    long = lengths[-1]
    if short is None or long == short:
        return None
    protocol, base = merged.protocol, merged.candidates[0]
    title = f"Short and long texts, {protocol}"
    caption = (
        f"{title}: perplexity as a multiple of another, with the paired 95 % interval over documents. The price on "
        "texts of the trained length is shown beside the effect on long ones."
    )
    grid = Grid.of(title, "method", caption=caption, kind="numbers summary")
    grid.column(f"{short:,} tokens, to the baseline")
    grid.column(f"{long:,} tokens, to the baseline")
    others = [(line, long) for line in merged.candidates if line.method == plots.CONTROL][:1]
    for control, _ in others:
        grid.column(f"{long:,} tokens, to {control.label}")
    if protocol == "tail":
        grid.column(f"{long:,} tokens, to {base.label} at {short:,}")
        others.append((base, short))
    for line in merged.candidates:
        fields = [_to_baseline(line, short), _to_baseline(line, long)]
        fields += [_to_other(line, long, *other, protocol) for other in others]
        grid.row(row_name(line.label, _about(line, merged)), *fields)
    return grid


def _to_baseline(line: Line, length: int) -> Field:
    cell = line.cells.get(length)
    if cell is None or not math.isfinite(cell.perplexity):
        return _no_number(line, length)
    if line.baseline == line.label:
        return _BASELINE
    return ratio_field(cell.ratio, cell.ratio_interval, cell.documents)


def _to_other(line: Line, length: int, other: Line, other_length: int, protocol: str) -> Field:
    if line is other and length == other_length:
        return _BASELINE
    ratio, interval = against(line, other, protocol, length, other_length)
    return ratio_field(ratio, interval, len(line.source.data["documents"]))


def _no_number(line: Line, length: int) -> Field:
    if length in line.cells:
        return Field("nan", "failed", hint="the loss is not a finite number")
    return missing_field(line.failures.get(length))


def _table(merged: Merged) -> Grid:
    lengths, original = merged.settings.lengths, merged.original
    baselines = ", ".join(dict.fromkeys(line.baseline for line in merged.candidates))
    title = f"Perplexity, {merged.protocol}"
    caption = (
        f"{title}. In each field: the perplexity, the lowest of its length underlined; its 95 % bootstrap interval "
        f"over documents; × its ratio to {baselines} with the paired interval, and better or worse where that interval "
        "excludes 1."
    )
    grid = Grid.of(title, "method", caption=caption)
    short = [length for length in lengths if original and length <= original]
    within = "trained length" if len(short) == 1 else "up to the trained length"
    for length in lengths:
        group = within if length in short else "longer than trained"
        grid.column(
            f"{length:,}\n×{length / original:.3g}" if original else f"{length:,}",
            group=group if 0 < len(short) < len(lengths) else "",
        )
    lowest = [_lowest(merged, length) for length in lengths]
    for line in merged.candidates:
        fields = [_field(line, *pair) for pair in zip(lengths, lowest, strict=True)]
        grid.row(row_name(line.label, _about(line, merged)), *fields)
    return grid if len(lengths) <= WIDE else _transposed(grid, "context length L (tokens)")


def _transposed(grid: Grid, corner: str) -> Grid:
    names = [row.fields[0].text for row in grid.rows]
    turned = Grid.of(grid.title, corner, *names, caption=grid.caption, kind=grid.kind)
    for index, column in enumerate(grid.columns[1:], 1):
        name = row_name(*column.head.partition("\n")[::2])
        turned.row(name, *(row.fields[index] for row in grid.rows))
    return turned


def _lowest(merged: Merged, length: int) -> float:
    cells = [line.cells[length] for line in merged.candidates if length in line.cells]
    values = {cell.perplexity for cell in cells if math.isfinite(cell.perplexity)}
    return min(values) if len(values) > 1 else math.nan


def _field(line: Line, length: int, lowest: float) -> Field:
    cell = line.cells.get(length)
    if cell is None or not math.isfinite(cell.perplexity):
        return _no_number(line, length)
    mark = "best" if cell.perplexity == lowest else "value"
    field = number_field(cell.perplexity, cell.interval, mark)
    if cell.ratio is not None and math.isfinite(cell.ratio) and line.baseline != line.label:
        field.append("\n×", "aside").add(
            ratio_span(cell.ratio), *_range_and_verdict(cell.ratio_interval, cell.documents)
        )
    return field


# Figures: SVG whose text stays text and whose colours follow the reader's light or dark mode.

VARIABLES = {
    **{colour.lower(): f"line-{index}" for index, colour in enumerate(plots.COLOURS)},
    "#000000": "ink",
    plots.BASELINE: "ink",
    "#ffffff": "paper",
    plots.GRID: "grid",
    plots.CONTROL_COLOUR: "muted",
    plots.REMARK: "muted",
}
"""The custom property of the page's style sheet for each colour of a figure."""
_TRANSPARENT: Any = dict.fromkeys(
    ("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"
)


def pictures(merged: Merged) -> list[tuple[Markup, str, str]]:
    """Draw the figures of one protocol, each with its caption and its description in words; none without a number."""
    lines, name, curve = merged.candidates, merged.protocol, merged.curve
    if not any(line.cells for line in lines):
        return []
    import matplotlib as mpl

    key = f"f{hashlib.sha256(name.encode()).hexdigest()[:6]}-{merged.sources[0].number}"
    with mpl.rc_context({**plots.STYLE, **_TRANSPARENT}):
        svg = themed(plots.figure(merged, [name]), f"{key}-length")
        caption = f"Perplexity against context length, {name}: {merged.definition}."
        ends = [[(n, line.cells[n].perplexity) for n in sorted(line.cells)] for line in lines]
        description = _ends(ends, lines, "{} at {:,} tokens to {} at {:,}")
        drawn = [(svg, caption, description)]
        if any(cell.ratio_interval for line in lines for cell in line.cells.values()):
            svg = themed(plots.ratio_figure(merged, name), f"{key}-ratio")
            caption = (
                "The same as a multiple of the baseline, with paired 95 % intervals: below 1 is better, and only an "
                "interval that excludes 1 shows a difference."
            )
            drawn.append((svg, caption, "The ratios are in the table."))
        points = [plots.position_points(curve, line.label) for line in lines] if curve else []
        if curve and any(points):
            svg = themed(plots.position_figure(merged), f"{key}-position")
            caption = (
                "Perplexity of the tokens at each position of the text, each read with all tokens before it, in "
                f"windows of {curve['edges'][-1]:,} tokens. Past the dashed line texts are longer than those of the "
                "training."
            )
            description = _ends(points, lines, "{} near token {:,.0f} to {} near {:,.0f}")
            drawn.append((svg, caption, description))
    return drawn


def _ends(points: Sequence[Sequence[tuple[float, float]]], lines: Sequence[Line], text: str) -> str:
    """Describe the first and the last point of every line."""
    descriptions = []
    for line, ends in zip(lines, points, strict=True):
        if ends:
            (first, low), (last, high) = ends[0], ends[-1]
            change = text.format(number(low), first, number(high), last)
            descriptions.append(f"{line.label} goes from {change}")
    return "; ".join(descriptions) + "."


def themed(figure: Figure, key: str) -> Markup:
    """Return a figure with a transparent background as an `<svg>` element, whose ids begin with a unique key."""
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
    text = re.sub(r'(<text)? style="([^"]*)"', _style, text)
    return Markup(text.replace("<svg", '<svg aria-hidden="true" focusable="false"', 1).strip())


def _style(match: re.Match[str]) -> str:
    """Use the page's colours; for text those with enough contrast, and the page's own typeface."""
    text, style = match[1] or "", match[2]
    if text:
        style = re.sub(r"font-family:[^;]*;?\s*", "", style)
        style = re.sub(r"font: (\S+) [^;]*", r"font-size: \1", style)  # older matplotlib

    def variable(colour: re.Match[str]) -> str:
        name = VARIABLES.get(colour[0].lower(), "ink" if text else "")
        return f"var(--{'text-' if text else ''}{name})" if name else colour[0]

    return f'{text} style="{re.sub(r"#[0-9a-fA-F]{6}", variable, style)}"'
