"""Heat maps of needle depth and prompt length, small multiples over tasks and methods. Needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.plots.style import REMARK, STYLE, require, tick
from hf_posenc.evaluation.retrieval.result import RetrievalResult, percent
from hf_posenc.evaluation.retrieval.statistics import Cell
from hf_posenc.evaluation.retrieval.tasks import get_task
from hf_posenc.evaluation.scoring.memory import OUT_OF_MEMORY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

VALUES = {
    "accuracy": "answers right",
    "beaten": "distractors less probable\nthan the answer (chance: 50 %)",
}
COLOURS = ("#F0496E", "#EBB839", "#0CD79F")  # those of EasyContext's needle plots
NO_NUMBER = "#e6e6e6"
MAX_COLUMNS = 4
MAX_TICKS = 8
WRITTEN = 8  # up to so many lengths, a cell's number is written into it
_LINE = 0.17  # height of a line of text, in inches


def figure(result: RetrievalResult, value: str | None = None) -> Figure:
    """Every task in rows of panels of its own, one panel per method, all with one colour scale from 0 to 1.

    Rows of a panel are depths, the needle at the front on top; tasks without a depth have a single one. Columns are
    lengths; a dashed line stands behind the last one of at most the trained length. Grey is what could not be measured.

    Args:
        result: What to draw.
        value: A key of `VALUES`; by default accuracy, unless it is 0 everywhere and answers are ranked.

    Raises:
        PosencError: matplotlib is not installed, or there is no such value in this result.
    """
    require()
    import matplotlib as mpl
    from matplotlib.colors import LinearSegmentedColormap

    shown = value or _default(result)
    if shown not in VALUES or (shown == "beaten" and not result.settings.ranks):
        raise PosencError(
            f"This result has no {shown!r} to draw: accuracy, or beaten where answers are ranked."
        )
    colours = LinearSegmentedColormap.from_list("retrieval", COLOURS).with_extremes(bad=NO_NUMBER)
    with mpl.rc_context({**STYLE, "axes.grid": False}):
        return _drawn(result, shown, colours)


def _default(result: RetrievalResult) -> str:
    silent = not any(cell.accuracy for cell in result.cells)
    return "beaten" if silent and result.settings.ranks else "accuracy"


def _drawn(result: RetrievalResult, value: str, colours: Colormap) -> Figure:
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

    methods = [entry.label for entry in result.candidates]
    columns = min(MAX_COLUMNS, len(methods))
    rows = -(-len(methods) // columns)
    heights = [rows * _panel_height(result, task) + 0.45 for task in result.settings.tasks]
    width = max(0.42 * len(result.settings.lengths), 1.5) * columns + 1.6
    drawn = Figure(figsize=(width, sum(heights) + 0.3), layout="constrained")
    sides: Any = drawn.subfigures(1, 2, width_ratios=[width - 0.9, 0.9])
    left, right = sides
    parts = left.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for task, part in zip(result.settings.tasks, parts, strict=True):
        part.suptitle(task, x=0.01, ha="left", fontsize=9, fontweight="bold")
        if result.original:
            trained = f"dashed: trained length, {result.original:,} tokens"
            part.text(0.99, 0.985, trained, ha="right", va="top", fontsize=7, color=REMARK)
        panels = part.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
        for place, panel in enumerate(panels.flat):
            if place >= len(methods):
                panel.set_visible(False)
                continue
            _panel(panel, result, task, methods[place], value, colours)
            below = place + columns < len(methods)
            panel.tick_params(labelbottom=not below, labelleft=place % columns == 0, length=0)
            if not below:
                panel.set_xlabel("context (tokens)", fontsize=8)
        if get_task(task).has_depth:
            for panel in panels[:, 0]:
                panel.set_ylabel("needle depth", fontsize=8)
    scale = ScalarMappable(cmap=colours)
    scale.set_clim(0, 1)
    bar = right.colorbar(scale, cax=right.add_axes((0.05, 0.1, 0.17, 0.8)))
    bar.set_label(VALUES[value], fontsize=8)
    bar.set_ticks([0, 0.25, 0.5, 0.75, 1], labels=["0", "25 %", "50 %", "75 %", "100 %"])
    return drawn


def _panel_height(result: RetrievalResult, task: str) -> float:
    rows = len(result.settings.depths) if get_task(task).has_depth else 1
    return max(0.2, min(0.24, 2.6 / rows)) * rows + 0.75


def _panel(
    panel: Axes, result: RetrievalResult, task: str, method: str, value: str, colours: Colormap
) -> None:
    import numpy as np

    lengths = result.settings.lengths
    depths = result.settings.depths if get_task(task).has_depth else (None,)
    grid = np.full((len(depths), len(lengths)), np.nan)
    for column, length in enumerate(lengths):
        for cell in result.by_depth(method, task, length):
            grid[depths.index(cell.depth), column] = _value(cell, value)
    panel.imshow(np.ma.masked_invalid(grid), cmap=colours, vmin=0, vmax=1, aspect="auto")
    panel.set_title(method, loc="left", fontsize=8)
    for side in ("top", "right", "bottom", "left"):
        panel.spines[side].set_visible(False)
    step = -(-len(lengths) // MAX_TICKS)
    ticks = list(range(len(lengths)))[::step]
    panel.set_xticks(ticks, [tick(lengths[place]) for place in ticks], fontsize=7)
    _depth_ticks(panel, depths)
    for column, length in enumerate(lengths):
        why = _why_empty(result, method, task, length)
        if why:
            panel.text(column, (len(depths) - 1) / 2, why, ha="center", va="center", fontsize=6,
                       color=REMARK, rotation=90 if len(depths) > 2 else 0)  # fmt: skip
        elif len(lengths) <= WRITTEN:
            for row in range(len(depths)):
                panel.text(column, row, percent(float(grid[row, column])).removesuffix("%"),
                           ha="center", va="center", fontsize=5.5, color="#222222")  # fmt: skip
    _mark_trained(panel, result)


def _depth_ticks(panel: Axes, depths: tuple[Any, ...]) -> None:
    if depths == (None,):
        panel.set_yticks([])
        return
    step = -(-len(depths) // MAX_TICKS)
    rows = list(range(len(depths)))[::step]
    panel.set_yticks(rows, [f"{depths[row]:.0%}" for row in rows], fontsize=7)


def _value(cell: Cell, value: str) -> float:
    number = cell.accuracy if value == "accuracy" else cell.beaten
    return float("nan") if number is None else number


def _why_empty(result: RetrievalResult, method: str, task: str, length: int) -> str | None:
    if result.cell(method, task, length) is not None:
        return None
    if result.is_left_out(task, length):
        return "too short"
    return "OOM" if result.failure(method, task, length) == OUT_OF_MEMORY else "failed"


def _mark_trained(panel: Axes, result: RetrievalResult) -> None:
    """A line between the last length that the model was trained for and the first that it was not."""
    if not result.original:
        return
    within = sum(length <= result.original for length in result.settings.lengths)
    panel.axvline(within - 0.5, color="#222222", linewidth=1.0, linestyle=(0, (4, 3)))
