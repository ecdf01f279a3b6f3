"""Figures of a sweep and of a search. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_posenc.evaluation.plots.style import (
    BASELINE,
    COLOURS,
    CONTROL_COLOUR,
    STYLE,
    require,
    value_ticks,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Point:
    """Perplexity of one method.

    Attributes:
        name: The name on the axis.
        value: The perplexity.
        interval: Its 95 % interval; `None`: none.
        best: Whether it is the winner.
        complete: Whether it was measured on all documents; otherwise the point is open.
    """

    name: str
    value: float
    interval: tuple[float, float] | None
    best: bool
    complete: bool


def sweep_figure(points: Sequence[Point], controls: Mapping[str, float], target: int) -> Figure:
    """Draw a point for every method, the best on top, and a vertical line for every control.

    Args:
        points: The methods.
        controls: The perplexities of the controls, by label.
        target: The target length, in tokens.
    """
    require()
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    with mpl.rc_context(STYLE):
        drawn = Figure(figsize=(6.4, 1.3 + 0.22 * len(points)), layout="constrained")
        panel = drawn.subplots()
        panel.set_xscale("log")
        for height, point in enumerate(points):
            colour = COLOURS[1] if point.best else COLOURS[0]
            if point.interval is not None:
                heights = (height, height)
                panel.plot(
                    point.interval, heights, color=colour, linewidth=1.1, alpha=0.6, zorder=2
                )
            face = colour if point.complete else "white"
            marker = panel.plot(point.value, height, "o", color=colour, markersize=5, zorder=3)
            marker[0].set_markerfacecolor(face)
        panel.set_yticks(range(len(points)), [point.name for point in points])
        panel.set_ylim(len(points) - 0.4, -0.6)
        for index, (label, value) in enumerate(controls.items()):
            _control(panel, label, value, 2 + 9 * index)  # names above each other, however near
        ticks = value_ticks(*panel.get_xlim())
        panel.set_xticks(ticks, [f"{value:g}" for value in ticks])
        panel.xaxis.set_minor_locator(NullLocator())
        panel.set_xlabel(f"tail perplexity at {target:,} tokens")
    return drawn


def _control(panel: Axes, label: str, value: float, above: int) -> None:
    colour = BASELINE if label == "none" else CONTROL_COLOUR
    panel.axvline(value, color=colour, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    panel.annotate(
        label,
        (value, 1),
        xycoords=("data", "axes fraction"),
        xytext=(0, above),
        textcoords="offset points",
        color=colour,
        fontsize=7,
        ha="center",
        va="bottom",
    )


def search_figure(
    perplexities: Sequence[float],
    starts: Mapping[str, Sequence[float]],
    best: Sequence[float] | None,
    target: int,
) -> Figure:
    """Draw the path of a search on the left, and the factors of the starts and of the best on the right.

    Args:
        perplexities: Perplexity of every evaluation, in order; NaN where there is none.
        starts: The factors that the search began with, by method.
        best: The factors found; `None`: none.
        target: The target length, in tokens.
    """
    require()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        drawn = Figure(figsize=(8.2, 3.3), layout="constrained")
        path, factors = drawn.subplots(1, 2)
        _path(path, perplexities, target)
        colours = (COLOURS[0], COLOURS[2], COLOURS[3], *COLOURS[4:])
        for index, (name, values) in enumerate(starts.items()):
            colour = colours[index % len(COLOURS)]
            factors.plot(values, color=colour, linewidth=1.1, label=name)
        if best is not None:
            factors.plot(
                best, color=COLOURS[1], label="search", marker="o", markersize=3, linewidth=1.4
            )
        factors.set_xlabel("pair of features, from the fastest")
        factors.set_ylabel("divisor of its frequency")
        factors.legend(frameon=False, fontsize=7.5)
    return drawn


def _path(panel: Axes, perplexities: Sequence[float], target: int) -> None:
    best: list[float] = []
    for value in perplexities:
        best.append(min(value, best[-1]) if best and not math.isnan(best[-1]) else value)
    count = range(1, len(perplexities) + 1)
    panel.plot(count, perplexities, ".", color=COLOURS[0], markersize=3, alpha=0.5)
    panel.plot(count, best, color=COLOURS[1], linewidth=1.3)
    panel.set_ylim(*_limits(best))
    panel.set_xlabel("evaluations")
    panel.set_ylabel(f"tail perplexity at {target:,} tokens")
    panel.set_title("search documents", loc="left")


def _limits(best: Sequence[float]) -> tuple[float, float]:
    """Return limits from the best found to somewhat above the best start; far worse mutations are cut off."""
    low = min((value for value in best if not math.isnan(value)), default=1.0)
    starts = [value for value in best[:3] if not math.isnan(value)]
    high = min(starts, default=low)
    room = max(high - low, 0.02 * low)
    return low - 0.3 * room, high + room
