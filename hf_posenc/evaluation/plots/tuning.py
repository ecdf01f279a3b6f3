"""The figures of a sweep and of a search. They need matplotlib."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

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

    from hf_posenc.evaluation.tuning.board import Row
    from hf_posenc.evaluation.tuning.search import SearchResult
    from hf_posenc.evaluation.tuning.sweep import SweepResult


def sweep_figure(result: SweepResult) -> Figure:
    """Every method that gave a number, the best on top; filled where it was measured on all documents."""
    require()
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    rows = [row for row in result.rows if row.failed is None and math.isfinite(row.perplexity)]
    methods = [row for row in rows if not row.control]
    with mpl.rc_context(STYLE):
        drawn = Figure(figsize=(6.4, 1.3 + 0.22 * len(methods)), layout="constrained")
        panel = drawn.subplots()
        panel.set_xscale("log")
        last = result.rungs[-1].documents
        for place, row in enumerate(methods):
            _dot(panel, place, row, best=row.label == result.winner, filled=row.documents == last)
        panel.set_yticks(range(len(methods)), [_name(row, last) for row in methods])
        panel.set_ylim(len(methods) - 0.4, -0.6)
        for above, row in enumerate(row for row in rows if row.control):
            _control(panel, row, above)  # one name above the other, however near they are
        ticks = value_ticks(*panel.get_xlim())
        panel.set_xticks(ticks, [f"{value:g}" for value in ticks])
        panel.xaxis.set_minor_locator(NullLocator())
        panel.set_xlabel(f"tail perplexity at {result.settings.target:,} tokens")
    return drawn


def _dot(panel: Axes, place: int, row: Row, *, best: bool, filled: bool) -> None:
    colour = COLOURS[1] if best else COLOURS[0]
    if row.interval is not None:
        panel.plot(row.interval, (place, place), color=colour, linewidth=1.1, alpha=0.6, zorder=2)
    face = colour if filled else "white"
    panel.plot(
        row.perplexity, place, "o", color=colour, markerfacecolor=face, markersize=5, zorder=3
    )


def _name(row: Row, last: int) -> str:
    return row.label if row.documents == last else f"{row.label}, {row.documents} documents"


def _control(panel: Axes, row: Row, above: int) -> None:
    colour = BASELINE if row.label == "none" else CONTROL_COLOUR
    panel.axvline(row.perplexity, color=colour, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    look: dict[str, Any] = {"color": colour, "fontsize": 7, "ha": "center", "va": "bottom"}
    panel.annotate(
        row.label,
        (row.perplexity, 1),
        xycoords=("data", "axes fraction"),
        xytext=(0, 2 + 9 * above),
        textcoords="offset points",
        **look,
    )


def search_figure(result: SearchResult) -> Figure:
    """Left the path: every evaluation, and the best so far. Right the factors, of the best and of the starts."""
    require()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        drawn = Figure(figsize=(8.2, 3.3), layout="constrained")
        path, factors = drawn.subplots(1, 2)
        _path(path, result)
        _factors(factors, result)
    return drawn


def _path(panel: Axes, result: SearchResult) -> None:
    scores = [math.exp(step.score) if step.score < 700 else math.nan for step in result.steps]
    best: list[float] = []
    for score in scores:
        best.append(min(score, best[-1]) if best and not math.isnan(best[-1]) else score)
    count = range(1, len(scores) + 1)
    panel.plot(count, scores, ".", color=COLOURS[0], markersize=3, alpha=0.5)
    panel.plot(count, best, color=COLOURS[1], linewidth=1.3)
    panel.set_ylim(*_limits(best))
    panel.set_xlabel("evaluations")
    panel.set_ylabel(f"tail perplexity at {result.settings.target:,} tokens")
    panel.set_title("search documents", loc="left")


def _limits(best: list[float]) -> tuple[float, float]:
    """From the best found to about as far above the best start: mutations that fail by far are cut off."""
    low = min((value for value in best if not math.isnan(value)), default=1.0)
    starts = [value for value in best[:3] if not math.isnan(value)]
    high = min(starts, default=low)
    room = max(high - low, 0.02 * low)
    return low - 0.3 * room, high + room


def _factors(panel: Axes, result: SearchResult) -> None:
    lines = [step for step in result.steps if step.kind not in ("mutation", "crossover")]
    for place, step in enumerate(lines):
        colour = (COLOURS[0], COLOURS[2], COLOURS[3], *COLOURS[4:])[place % len(COLOURS)]
        panel.plot(step.genome.factors, color=colour, linewidth=1.1, label=step.kind)
    if result.best is not None:
        look: dict[str, Any] = {"marker": "o", "markersize": 3, "linewidth": 1.4}
        panel.plot(result.best.genome.factors, color=COLOURS[1], label="search", **look)
    panel.set_xlabel("pair of features, from the fastest")
    panel.set_ylabel("divisor of its frequency")
    panel.legend(frameon=False, fontsize=7.5)
