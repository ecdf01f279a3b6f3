"""Figures of a sweep and of a search. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_posenc.evaluation.plots import (
    BASELINE,
    COLOURS,
    CONTROL_COLOUR,
    set_ticks,
    styled_panels,
    value_ticks,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hf_posenc.evaluation.tuning.objective import Row


def sweep_figure(rows: Sequence[Row], winner: str | None, documents: int, target: int) -> Figure:
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
            _control(panel, row.label, row.perplexity, 2 + 9 * index)  # names above each other
        set_ticks(panel.xaxis, value_ticks(*panel.get_xlim()), "{:g}".format)
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

    The path has the perplexity of every evaluation, NaN where there is none; the starts are named by their method.
    """
    with styled_panels(8.2, 3.3, 2) as (drawn, (path, factors)):
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
