"""Figures of measurements, for papers, notebooks and the report. Needs matplotlib (`pip install hf-posenc[plot]`).

Every function takes a result (`Any`, since results import this file), or plain data of one, and returns a matplotlib
`Figure`: perplexity against context length, as a ratio to the baseline and by position in the text; heat maps of
retrieval; the points of a sweep; the path of a search. The common look, axes and files come first.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.measuring.candidates import TRUNCATION
from hf_posenc.evaluation.measuring.statistics import Cell
from hf_posenc.files import replace_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure


# Okabe and Ito's colours, distinct under every common kind of colour blindness; a violet and an olive replace their
# pale yellow.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F3C8D", "#999933")
BASELINE = "#222222"
CONTROL_COLOUR = "#888888"
REMARK = "#666666"
GRID = "#e6e6e6"
MARKERS = "osD^vP*X<>"
MARKED = {"markersize": 4.5, "markeredgecolor": "white", "markeredgewidth": 0.5, "linewidth": 1.3}
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.5)))
LABEL_SIZE = 7.5
MAX_LABEL = 36  # characters
MAX_TICKS = 8
MAX_BANDS = 4
"""Lines up to this number are drawn with their intervals; more would hide each other."""

STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "hf_posenc",  # the same result gives the same file
    "text.parse_math": False,  # names are not formulas
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
}


def available() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def require() -> None:
    """Raise an error if matplotlib is not installed."""
    if not available():
        raise PosencError("The plot needs matplotlib: pip install 'hf-posenc[plot]'.")


def looks(candidates: Sequence[Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield each method and the look of its line: a colour of its own, dashes for further and dynamic forms of it."""
    seen: dict[str, int] = {}
    for index, candidate in enumerate(candidates):
        look: dict[str, Any] = {"color": BASELINE, "linestyle": "-"}
        if candidate.method == TRUNCATION:
            look["color"] = CONTROL_COLOUR
        elif candidate.method is not None:
            name = candidate.method.removeprefix("dynamic_")
            again = seen[name] = seen.get(name, -1) + 1
            place = list(seen).index(name)
            look["color"] = COLOURS[place % len(COLOURS)]
            look["linestyle"] = DASHES[(place // len(COLOURS) + again) % len(DASHES)]
        yield candidate, {**look, "marker": MARKERS[index % len(MARKERS)]}


@contextlib.contextmanager
def styled_panels(
    width: float, height: float, columns: int = 1, **options: Any
) -> Iterator[tuple[Figure, list[Axes]]]:
    """Make a figure of panels side by side, in inches; what is drawn within the context has the common style."""
    require()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, list(figure.subplots(1, columns, squeeze=False, **options)[0])


@contextlib.contextmanager
def line_panels(
    result: Any, width: float, columns: int = 1, **options: Any
) -> Iterator[tuple[Figure, list[Axes]]]:
    """Make `styled_panels` as high as the names of the lines need.

    When they are drawn, they are named beside the last one, in their colours and in the order of their ends.
    """
    height = max(3.1, 1.5 + 0.14 * len(result.candidates))
    with styled_panels(width, height, columns, **options) as (figure, panels):
        yield figure, panels
        labels = {candidate.label for candidate in result.candidates}
        found: list[Any] = [n for n in panels[-1].get_lines() if n.get_label() in labels]
        lines = sorted((n for n in found if len(n.get_ydata())), key=lambda n: -n.get_ydata()[-1])
        names = [str(line.get_label()) for line in lines]
        panels[-1].legend(
            lines,
            [name if len(name) <= MAX_LABEL else f"{name[: MAX_LABEL - 1]}…" for name in names],
            loc="center left",
            bbox_to_anchor=(1.02, 0.5),
            frameon=False,
            fontsize=LABEL_SIZE,
            labelcolor="linecolor",
        )


def length_axis(panel: Axes, lengths: Sequence[int]) -> None:
    """Make the x axis a base-2 axis of tokens, with ticks at the lengths, or at some of many."""
    panel.set_xscale("log", base=2)
    panel.set_xlabel("context length L (tokens)")
    set_ticks(panel.xaxis, thinned(lengths))


def thinned(lengths: Sequence[int]) -> list[int]:
    """Return about `MAX_TICKS` of the lengths at most, from the longest down, evenly on a log axis."""
    if len(lengths) <= MAX_TICKS:
        return list(lengths)
    gap = math.log2(lengths[-1] / lengths[0]) / MAX_TICKS
    kept = [lengths[-1]]
    for length in reversed(lengths[:-1]):
        if math.log2(kept[-1] / length) >= gap:
            kept.append(length)
    return kept[::-1]


def mark_trained(panel: Axes, original: int | None, *, below: bool = False) -> None:
    """Draw a dashed line at the trained length, if it is on the axis, with its name at the top or bottom."""
    low, high = panel.get_xlim()
    if original and low <= original <= high:
        look: dict[str, Any] = {"color": CONTROL_COLOUR, "linewidth": 0.9, "zorder": 1}
        panel.axvline(original, linestyle=(0, (4, 3)), **look)
        at, side = ((3, 3), "bottom") if below else ((3, -2), "top")
        name_mark(panel, "trained length", (original, not below), at, color=REMARK, va=side)


def name_mark(
    panel: Axes, text: str, end: tuple[float, float], points: tuple[float, float], **look: Any
) -> None:
    """Write the name of a vertical line so many points from an end: its x, and 1 for the upper, 0 for the lower one."""
    place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "xytext": points}
    panel.annotate(text, end, **place, textcoords="offset points", fontsize=7, **look)


def value_axis(panel: Axes) -> None:
    """Make the y axis a log axis with round numbers."""
    panel.set_yscale("log")
    round_ticks(panel.yaxis)


def round_ticks(axis: Axis) -> None:
    """Set round numbers as the ticks of a log axis; where its ends are close, they are equally far apart."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    low, high = axis.get_view_interval()
    if high < 10 * low:
        axis.set_major_locator(MaxNLocator(MAX_TICKS, steps=[1, 2, 5, 10]))
    elif high < 1000 * low:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    else:
        axis.set_major_locator(LogLocator(numticks=MAX_TICKS))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


def tick(length: int) -> str:
    """Format a length for an axis: 4k for 4,096."""
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)


def set_ticks(axis: Axis, lengths: Sequence[int]) -> None:
    """Set the ticks of an axis of tokens, and no minor ones."""
    from matplotlib.ticker import NullLocator

    axis.set_ticks(lengths, [tick(length) for length in lengths])
    axis.set_minor_locator(NullLocator())


# Files.


def add_footer(drawn: Figure, text: str) -> None:
    """Write a line below a figure, if there is one."""
    if text:
        drawn.text(0.01, -0.01, text, ha="left", va="top", fontsize=LABEL_SIZE, color=REMARK)


def write_figure(drawn: Figure, *paths: Path) -> None:
    """Write a figure to every path, in the format of its suffix, without a date or random names.

    Each file is whole or as it was before.
    """
    import matplotlib as mpl

    for path in paths:
        kind = path.suffix.removeprefix(".")
        how: dict[str, Any] = {"metadata": {"Date": None} if kind == "svg" else None, "dpi": 200}
        with mpl.rc_context(STYLE):
            save = partial(drawn.savefig, format=kind, bbox_inches="tight", **how)
            replace_atomically(path, save)


# Figures of perplexity.

TITLES = {"prefix": "prefix (first L tokens)", "tail": "tail (same last {tail} tokens)"}
MAX_MARKERS = 16
"""Longer lines have no markers, which would touch."""


def figure(result: Any, protocols: Sequence[str] | None = None) -> Figure:
    """Draw one panel for each of the protocols (all by default); the last one has the names of the lines."""
    settings = result.settings
    shown = settings.protocols if protocols is None else protocols
    with line_panels(result, 3.3 * len(shown) + 1.5, len(shown), sharey=True) as (drawn, panels):
        for panel, protocol in zip(panels, shown, strict=True):
            panel.set_yscale("log")
            title = TITLES.get(protocol, protocol).format(tail=f"{settings.tail_tokens:,}")
            panel.set_title(title, loc="left")
            length_axis(panel, settings.lengths)
            for candidate, look in looks(result.candidates):
                cells = _cells(result, candidate.label, protocol)
                cells = [cell for cell in cells if math.isfinite(cell.perplexity)]
                _line(panel, candidate.label, [(c.length, c.perplexity) for c in cells], look)
                ranges = [(c.length, *c.interval) for c in cells if c.interval is not None]
                if len(ranges) > 1 and len(result.candidates) <= MAX_BANDS:
                    band: dict[str, Any] = {"alpha": 0.12, "linewidth": 0, "zorder": 2}
                    x, low, high = zip(*ranges, strict=True)
                    panel.fill_between(x, low, high, color=look["color"], **band)
            mark_trained(panel, result.original)
        panels[0].set_ylabel("perplexity")
        value_axis(panels[0])
    return drawn


def _cells(result: Any, label: str, protocol: str) -> list[Cell]:
    cells = (result.cell(label, protocol, length) for length in result.settings.lengths)
    return [cell for cell in cells if cell is not None]


def _line(
    panel: Axes, label: str, points: Sequence[tuple[float, float]], look: Mapping[str, Any]
) -> None:
    """Draw a line, with markers if it has few points."""
    marker = "" if len(points) > MAX_MARKERS else look["marker"]
    x, y = [x for x, _ in points], [y for _, y in points]
    panel.plot(x, y, **{**look, **MARKED, "marker": marker}, zorder=3, label=label)


STAGGER = 0.1
"""Share of the distance between two lengths over which the methods' intervals are spread."""


def ratio_figure(result: Any, protocol: str = "tail") -> Figure:
    """Draw the ratio to the first method's perplexity, with its paired interval at every point and a line at 1.

    An interval that excludes 1 shows a difference. Overlap of two intervals of perplexity is no evidence about it.
    """
    lengths = result.settings.lengths
    with line_panels(result, 4.8) as (drawn, (panel,)):
        panel.set_title(f"{protocol}, as a multiple of the baseline", loc="left")
        panel.set_yscale("log")
        panel.axhline(1.0, color=BASELINE, linewidth=1.0, zorder=2)
        gap = min((math.log2(b / a) for a, b in itertools.pairwise(lengths)), default=1.0)
        count = len(result.candidates)
        for index, (candidate, look) in enumerate(looks(result.candidates)):
            cells = [c for c in _cells(result, candidate.label, protocol) if positive(c.ratio)]
            if candidate.method is None and all(cell.ratio == 1.0 for cell in cells):
                continue  # the baseline is the line at 1
            shift = 2 ** (STAGGER * gap / count * (index - (count - 1) / 2))
            for cell in cells:
                if cell.ratio_interval and all(map(positive, cell.ratio_interval)):
                    thin: dict[str, Any] = {"linewidth": 0.9, "alpha": 0.7, "zorder": 2}
                    x, ends = cell.length * shift, cell.ratio_interval
                    panel.vlines(x, *ends, color=look["color"], **thin)
            ratios = [(cell.length * shift, cell.ratio or 0.0) for cell in cells]
            _line(panel, candidate.label, ratios, look)
        length_axis(panel, lengths)
        mark_trained(panel, result.original, below=True)
        panel.set_ylabel("ratio, paired interval")
        value_axis(panel)
    return drawn


def positive(value: float | None) -> bool:
    """Return whether a value is on a log axis."""
    return value is not None and math.isfinite(value) and value > 0


SPAN = 2**0.125
"""Least ratio of two positions: an eighth of an octave."""
_LARGEST = 700.0  # nats; the exponential of more is no float


def position_figure(result: Any) -> Figure:
    """Draw the perplexity of tokens by their position in the text, over all documents, with the trained length marked.

    Every token is read with all tokens before it, in windows of the longest length.

    Raises:
        PosencError: There is no curve (it comes from `prefix` windows), or matplotlib is not installed.
    """
    curve = result.curve
    if not curve or not curve["methods"]:
        raise PosencError("This result has no curve by position: it needs --protocol prefix.")
    with line_panels(result, 4.8) as (drawn, (panel,)):
        edges: Sequence[int] = curve["edges"]
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        for candidate, look in looks(result.candidates):
            _line(panel, candidate.label, position_points(curve, candidate.label), look)
        first, last = math.log2(max(edges[1], 2)), math.log2(edges[-1])
        powers = range(math.floor(first), math.floor(last) + 1)
        set_ticks(panel.xaxis, thinned([2**power for power in powers]))
        panel.set_title(f"by position in windows of {edges[-1]:,} tokens", loc="left")
        panel.set_xlabel("position in the text (tokens)")
        panel.set_ylabel("perplexity at this position")
        mark_trained(panel, result.original)
        value_axis(panel)
    return drawn


def position_points(curve: Mapping[str, Any], label: str) -> list[tuple[float, float]]:
    """Return positions in tokens and the perplexity of the tokens around them, from a method's sums by bucket.

    Neighbouring buckets are pooled until they span a factor of `SPAN`, which gives equal steps on the log axis. Buckets
    of equal size would crowd to the right and show the noise of few tokens. Values that are not finite leave a gap.
    """
    points: list[tuple[float, float]] = []
    begin, nats, tokens, edges = 0, 0.0, 0, curve["edges"]
    sums = curve["methods"].get(label, {"nats": (), "tokens": ()})
    buckets = zip(itertools.pairwise(edges), sums["nats"], sums["tokens"], strict=False)
    for (first, stop), more, count in buckets:
        begin = first if not tokens else begin
        nats += math.nan if more is None else more
        tokens += count
        if stop < SPAN * max(begin, 1) and stop < edges[-1]:
            continue
        if tokens and nats / tokens < _LARGEST:
            points.append(((begin + stop) / 2, math.exp(nats / tokens)))
        nats, tokens = 0.0, 0
    return points


HEAT = "cividis"  # the same with and without colour blindness, and ordered by lightness
MAX_COLUMNS = 4
MAX_DEPTHS = 10  # more of them make no panel higher
WRITTEN = 8  # with at most so many lengths, each cell contains its number


def heat_figure(result: Any, value: str, label: str) -> Figure:
    """Draw every task in rows of panels of its own, one panel per method, with one colour scale from 0 to 1.

    The front of the prompt is on top. A dashed line follows the last length of at most the trained length. Panels are
    grey where a number is missing. `value` is the attribute of a cell that is shown, and `label` its name.
    """
    require()
    import matplotlib as mpl
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

    lengths, labels = result.settings.lengths, [entry.label for entry in result.candidates]
    columns = min(MAX_COLUMNS, len(labels))
    starts = range(0, len(labels), columns)
    rows = [(task, labels[n : n + columns]) for task in result.settings.tasks for n in starts]
    depths = [len(result.shares(task, labels[0], value)) for task, _ in rows]
    heights = [0.24 * min(count, MAX_DEPTHS) + 0.85 for count in depths]
    size = max(0.42 * len(lengths), 1.5) * columns + 1.6, sum(heights) + 0.4
    colours = mpl.colormaps[HEAT].with_extremes(bad=GRID)
    with mpl.rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(len(rows), columns, squeeze=False, height_ratios=heights)
        for (task, methods), panels in zip(rows, axes, strict=True):
            for panel, method in itertools.zip_longest(panels, methods):
                if method is None:
                    panel.set_visible(False)
                else:
                    _panel(panel, result, task, method, value, colours)
            panels[0].set_ylabel(task, fontsize=8)
        if result.original:
            about = f"rows: needle depth; dashed: trained length, {result.original:,} tokens"
            figure.suptitle(about, fontsize=7)
        bar = figure.colorbar(ScalarMappable(cmap=colours), ax=axes)  # from 0 to 1
        bar.set_label(label, fontsize="x-small")
        bar.set_ticks([0, 0.5, 1], labels=["0", "50 %", "100 %"], fontsize="x-small")
    return figure


def _panel(panel: Axes, result: Any, task: str, method: str, value: str, colours: Colormap) -> None:
    import numpy as np

    lengths, shares = result.settings.lengths, result.shares(task, method, value)
    rows = len(shares)
    shown = np.ma.masked_invalid(np.array(shares, dtype=float))
    panel.imshow(shown, cmap=colours, vmin=0, vmax=1, aspect="auto")
    panel.set_title(method, loc="left", fontsize=8)
    panel.spines[:].set_visible(False)
    panel.tick_params(labelsize=7, length=0)
    ticks = range(0, len(lengths), -(-len(lengths) // MAX_TICKS))
    panel.set_xticks(ticks, [tick(lengths[place]) for place in ticks])
    panel.set_xlabel("context (tokens)", fontsize=8)
    depths = [f"{depth:.0%}" for depth in result.settings.depths] if rows > 1 else [""]
    ticks = range(0, rows, -(-rows // MAX_TICKS))
    panel.set_yticks(ticks, [depths[row] for row in ticks])
    look: dict[str, Any] = {"ha": "center", "va": "center"}
    remark = {**look, "fontsize": 6, "color": REMARK, "rotation": 90 if rows > 2 else 0}
    for column, length in enumerate(lengths):
        if missing := result.missing(task, method, length):
            panel.text(column, (rows - 1) / 2, missing, **remark)
            continue
        for row, values in enumerate(shares if len(lengths) <= WRITTEN else ()):
            share = values[column]
            digits = int(0 < share < 0.005 or 0.995 <= share < 1)  # neither 0 nor 100
            text, colour = f"{100 * share:.{digits}f}", "white" if share < 0.5 else BASELINE
            panel.text(column, row, text, fontsize=5.5, color=colour, **look)
    if result.original:
        within = sum(length <= result.original for length in lengths)
        panel.axvline(within - 0.5, color=BASELINE, linewidth=1.0, linestyle=(0, (4, 3)))


# Sweep and search.


def sweep_figure(rows: Sequence[Any], winner: str | None, documents: int, target: int) -> Figure:
    """Draw a point for every method, the best on top, and a vertical line for every control.

    Points of methods that were measured on fewer documents than all are open. The target is a length in tokens.
    """
    shown = [row for row in rows if row.failed is None and math.isfinite(row.perplexity)]
    methods = [row for row in shown if not row.control]
    with styled_panels(6.4, 1.3 + 0.22 * len(methods)) as (drawn, (panel,)):
        panel.set_xscale("log")
        names = []
        for height, row in enumerate(methods):
            colour = COLOURS[1] if row.label == winner else COLOURS[0]
            complete = row.documents == documents
            names.append(row.label if complete else f"{row.label}, {row.documents} documents")
            if row.interval is not None:
                thin: dict[str, Any] = {"linewidth": 1.1, "alpha": 0.6, "zorder": 2}
                panel.plot(row.interval, (height, height), color=colour, **thin)
            face = colour if complete else "white"
            look: dict[str, Any] = {"color": colour, "markerfacecolor": face, "markersize": 5}
            panel.plot(row.perplexity, height, "o", **look, zorder=3)
        panel.set_yticks(range(len(methods)), names)
        panel.set_ylim(len(methods) - 0.4, -0.6)
        for index, row in enumerate(row for row in shown if row.control):
            colour = BASELINE if row.label == "none" else CONTROL_COLOUR
            x, dashes = row.perplexity, (0, (4, 3))
            panel.axvline(x, color=colour, linewidth=1, linestyle=dashes, zorder=1)
            above = (0, 2 + 9 * index)  # names above each other, however near
            name_mark(panel, row.label, (x, 1), above, color=colour, ha="center", va="bottom")
        round_ticks(panel.xaxis)
        panel.set_xlabel(f"tail perplexity at {target:,} tokens")
    return drawn


def search_figure(
    perplexities: Sequence[float],
    starts: Mapping[str, Sequence[float]],
    best: Sequence[float] | None,
    target: int,
) -> Figure:
    """Draw the path of a search on the left; on the right the factors of the starts, by method, and of the best."""
    lowest: list[float] = []
    for value in perplexities:
        lowest.append(min(value, lowest[-1]) if lowest and not math.isnan(lowest[-1]) else value)
    count = range(1, len(perplexities) + 1)
    with styled_panels(8.2, 3.3, 2) as (drawn, (path, factors)):
        path.plot(count, perplexities, ".", color=COLOURS[0], markersize=3, alpha=0.5)
        path.plot(count, lowest, color=COLOURS[1], linewidth=1.3)
        # from the best found to somewhat above the best start; far worse mutations are cut off
        low = min((value for value in lowest if not math.isnan(value)), default=1.0)
        high = min((value for value in lowest[:3] if not math.isnan(value)), default=low)
        room = max(high - low, 0.02 * low)
        path.set_ylim(low - 0.3 * room, high + room)
        path.set_xlabel("evaluations")
        path.set_ylabel(f"tail perplexity at {target:,} tokens")
        path.set_title("search documents", loc="left")
        colours = itertools.cycle((COLOURS[0], *COLOURS[2:]))
        for colour, (name, values) in zip(colours, starts.items(), strict=False):
            factors.plot(values, color=colour, linewidth=1.1, label=name)
        if best is not None:
            factors.plot(best, "o-", color=COLOURS[1], label="search", markersize=3, linewidth=1.4)
        factors.set_xlabel("pair of features, from the fastest")
        factors.set_ylabel("divisor of its frequency")
        factors.legend(frameon=False, fontsize=7.5)
    return drawn
