"""Figures of the other results: heat maps of retrieval, the points of a sweep, the path of a search."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_posenc.evaluation import plots
from hf_posenc.evaluation.grid import percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

    from hf_posenc.evaluation.tuning import Row

# Retrieval: heat maps of needle depth and prompt length, small multiples over tasks and methods.

HEAT = "cividis"  # the same with and without colour blindness, and ordered by lightness
MAX_COLUMNS = 4
MAX_DEPTHS = 10  # more of them make no panel higher
WRITTEN = 8  # with at most so many lengths, each cell contains its number


def heat_figure(result: Any, value: str, label: str) -> Figure:
    """Draw every task in rows of panels of its own, one panel per method, with one colour scale from 0 to 1.

    The front of the prompt is on top. A dashed line follows the last length of at most the trained length. Panels are
    grey where a number is missing. `value` is the attribute of a cell that is shown, and `label` its name.
    """
    plots.require()
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
    colours = mpl.colormaps[HEAT].with_extremes(bad=plots.GRID)
    with mpl.rc_context({**plots.STYLE, "axes.grid": False}):
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
        bar = figure.colorbar(ScalarMappable(cmap=colours), ax=axes, label=label)  # from 0 to 1
        bar.set_ticks([0, 0.25, 0.5, 0.75, 1], labels=["0", "25 %", "50 %", "75 %", "100 %"])
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
    ticks = range(0, len(lengths), -(-len(lengths) // plots.MAX_TICKS))
    panel.set_xticks(ticks, [plots.tick(lengths[place]) for place in ticks])
    panel.set_xlabel("context (tokens)", fontsize=8)
    depths = [f"{depth:.0%}" for depth in result.settings.depths] if rows > 1 else [""]
    ticks = range(0, rows, -(-rows // plots.MAX_TICKS))
    panel.set_yticks(ticks, [depths[row] for row in ticks])
    look: dict[str, Any] = {"ha": "center", "va": "center"}
    remark = {**look, "fontsize": 6, "color": plots.REMARK, "rotation": 90 if rows > 2 else 0}
    for column, length in enumerate(lengths):
        if missing := result.missing(task, method, length):
            panel.text(column, (rows - 1) / 2, missing, **remark)
            continue
        for row, values in enumerate(shares if len(lengths) <= WRITTEN else ()):
            text = percent(values[column]).removesuffix("%")
            colour = "white" if values[column] < 0.5 else plots.BASELINE
            panel.text(column, row, text, fontsize=5.5, color=colour, **look)
    if result.original:
        within = sum(length <= result.original for length in lengths)
        panel.axvline(within - 0.5, color=plots.BASELINE, linewidth=1.0, linestyle=(0, (4, 3)))


# Sweep and search.


def sweep_figure(rows: Sequence[Row], winner: str | None, documents: int, target: int) -> Figure:
    """Draw a point for every method, the best on top, and a vertical line for every control.

    Points of methods that were measured on fewer documents than all are open. The target is a length in tokens.
    """
    shown = [row for row in rows if row.failed is None and math.isfinite(row.perplexity)]
    methods = [row for row in shown if not row.control]
    with plots.styled_panels(6.4, 1.3 + 0.22 * len(methods)) as (drawn, (panel,)):
        panel.set_xscale("log")
        names = []
        for height, row in enumerate(methods):
            colour = plots.COLOURS[1] if row.label == winner else plots.COLOURS[0]
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
            colour = plots.BASELINE if row.label == "none" else plots.CONTROL_COLOUR
            x, dashes = row.perplexity, (0, (4, 3))
            panel.axvline(x, color=colour, linewidth=1, linestyle=dashes, zorder=1)
            above = (0, 2 + 9 * index)  # names above each other, however near
            plots.name_mark(panel, row.label, (x, 1), above, color=colour, ha="center", va="bottom")
        plots.round_ticks(panel.xaxis)
        panel.set_xlabel(f"tail perplexity at {target:,} tokens")
    return drawn


def search_figure(
    perplexities: Sequence[float],
    starts: Mapping[str, Sequence[float]],
    best: Sequence[float] | None,
    target: int,
    scored: str = "tail",
) -> Figure:
    """Draw the path of a search on the left; on the right the factors of the starts, by method, and of the best.

    `scored` names the tokens that the perplexities are of.
    """
    lowest: list[float] = []
    for value in perplexities:
        lowest.append(min(value, lowest[-1]) if lowest and not math.isnan(lowest[-1]) else value)
    count = range(1, len(perplexities) + 1)
    with plots.styled_panels(8.2, 3.3, 2) as (drawn, (path, factors)):
        path.plot(count, perplexities, ".", color=plots.COLOURS[0], markersize=3, alpha=0.5)
        path.plot(count, lowest, color=plots.COLOURS[1], linewidth=1.3)
        # from the best found to somewhat above the best start; far worse mutations are cut off
        low = min((value for value in lowest if not math.isnan(value)), default=1.0)
        high = min((value for value in lowest[:3] if not math.isnan(value)), default=low)
        room = max(high - low, 0.02 * low)
        path.set_ylim(low - 0.3 * room, high + room)
        path.set_xlabel("evaluations")
        path.set_ylabel(f"{scored} perplexity at {target:,} tokens")
        path.set_title("search documents", loc="left")
        colours = itertools.cycle((plots.COLOURS[0], *plots.COLOURS[2:]))
        for colour, (name, values) in zip(colours, starts.items(), strict=False):
            factors.plot(values, color=colour, linewidth=1.1, label=name)
        if best is not None:
            look: dict[str, Any] = {"marker": "o", "markersize": 3, "linewidth": 1.4}
            factors.plot(best, color=plots.COLOURS[1], label="search", **look)
        factors.set_xlabel("pair of features, from the fastest")
        factors.set_ylabel("divisor of its frequency")
        factors.legend(frameon=False, fontsize=7.5)
    return drawn
