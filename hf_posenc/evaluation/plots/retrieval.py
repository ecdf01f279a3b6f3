"""Heat maps of needle depth and prompt length, small multiples over tasks and methods. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_posenc.evaluation.grid import percent
from hf_posenc.evaluation.plots import MAX_TICKS, REMARK, STYLE, require, tick

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

COLOURS = ("#F0496E", "#EBB839", "#0CD79F")  # those of EasyContext's needle plots
NO_NUMBER = "#e6e6e6"
INK = "#222222"
MAX_COLUMNS = 4
WRITTEN = 8  # with at most so many lengths, each cell contains its number


@dataclass(frozen=True)
class HeatMap:
    """Shares of one method in one task, by needle depth and prompt length.

    Attributes:
        depths: The rows: depths from 0, the front of the prompt, to 1; `(None,)` for a task without depths.
        shares: A row of shares per depth, one per length; NaN where there is none.
        missing: For every length the reason why it has no number, in a word; `""` where it has one.
    """

    task: str
    method: str
    depths: Sequence[float | None]
    shares: Sequence[Sequence[float]]
    missing: Sequence[str]


def heat_figure(
    maps: Sequence[HeatMap], lengths: Sequence[int], original: int | None, label: str
) -> Figure:
    """Draw every task in rows of panels of its own, one panel per method, with one colour scale from 0 to 1.

    The front of the prompt is on top. A dashed line follows the last length of at most the trained length. Panels are
    grey where a number is missing. Every task has the same methods; `label` is the name of the shares.
    """
    require()
    import matplotlib as mpl
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    colours = LinearSegmentedColormap.from_list("retrieval", COLOURS).with_extremes(bad=NO_NUMBER)
    by_task = {
        task: [m for m in maps if m.task == task] for task in dict.fromkeys(m.task for m in maps)
    }
    panels = max(map(len, by_task.values()))
    columns = min(MAX_COLUMNS, panels)
    rows = -(-panels // columns)
    heights = [rows * _panel_height(group[0]) + 0.45 for group in by_task.values()]
    width = max(0.42 * len(lengths), 1.5) * columns + 1.6
    with mpl.rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(width, sum(heights) + 0.3), layout="constrained")
        sides: Any = figure.subfigures(1, 2, width_ratios=[width - 0.9, 0.9])
        parts = sides[0].subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
        for part, (task, group) in zip(parts, by_task.items(), strict=True):
            part.suptitle(task, x=0.01, ha="left", fontsize=9, fontweight="bold")
            if original:
                trained = f"dashed: trained length, {original:,} tokens"
                part.text(0.99, 0.985, trained, ha="right", va="top", fontsize=7, color=REMARK)
            axes = part.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
            for place, panel in enumerate(axes.flat):
                if place >= len(group):
                    panel.set_visible(False)
                    continue
                _panel(panel, group[place], lengths, original, colours)
                below = place + columns < len(group)
                panel.tick_params(labelbottom=not below, labelleft=place % columns == 0, length=0)
                if not below:
                    panel.set_xlabel("context (tokens)", fontsize=8)
            if group[0].depths[0] is not None:
                for panel in axes[:, 0]:
                    panel.set_ylabel("needle depth", fontsize=8)
        scale = ScalarMappable(cmap=colours)
        scale.set_clim(0, 1)
        bar = sides[1].colorbar(scale, cax=sides[1].add_axes((0.05, 0.1, 0.17, 0.8)))
        bar.set_label(label, fontsize=8)
        bar.set_ticks([0, 0.25, 0.5, 0.75, 1], labels=["0", "25 %", "50 %", "75 %", "100 %"])
    return figure


def _panel_height(heat: HeatMap) -> float:
    rows = len(heat.depths)
    return max(0.2, min(0.24, 2.6 / rows)) * rows + 0.75


def _panel(
    panel: Axes, heat: HeatMap, lengths: Sequence[int], original: int | None, colours: Colormap
) -> None:
    import numpy as np

    rows = len(heat.depths)
    shares = np.ma.masked_invalid(np.array(heat.shares, dtype=float))
    panel.imshow(shares, cmap=colours, vmin=0, vmax=1, aspect="auto")
    panel.set_title(heat.method, loc="left", fontsize=8)
    for side in ("top", "right", "bottom", "left"):
        panel.spines[side].set_visible(False)
    ticks = _thinned(len(lengths))
    panel.set_xticks(ticks, [tick(lengths[place]) for place in ticks], fontsize=7)
    ticks = _thinned(rows) if heat.depths[0] is not None else []
    panel.set_yticks(ticks, [f"{heat.depths[row]:.0%}" for row in ticks], fontsize=7)
    look: dict[str, Any] = {"ha": "center", "va": "center"}
    for column, missing in enumerate(heat.missing):
        if missing:
            turned = 90 if rows > 2 else 0
            look_missing = {**look, "fontsize": 6, "color": REMARK, "rotation": turned}
            panel.text(column, (rows - 1) / 2, missing, **look_missing)
        elif len(lengths) <= WRITTEN:
            for row in range(rows):
                text = percent(heat.shares[row][column]).removesuffix("%")
                panel.text(column, row, text, fontsize=5.5, color=INK, **look)
    if original:
        within = sum(length <= original for length in lengths)
        panel.axvline(within - 0.5, color=INK, linewidth=1.0, linestyle=(0, (4, 3)))


def _thinned(count: int) -> list[int]:
    return list(range(0, count, -(-count // MAX_TICKS)))
