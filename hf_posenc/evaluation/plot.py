"""Perplexity against context length, as a figure for a paper. Needs matplotlib (`pip install hf-posenc[plot]`)."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.result import PerplexityResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by every common kind of colour blindness; a violet instead of their pale yellow.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F3C8D")
MARKERS = "osD^vP*X<>"
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.5)))
MAX_BANDS = 4
TITLES = {"prefix": "prefix (first L tokens)", "tail": "tail (same last {tail} tokens)"}
STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "hf_posenc",  # the same result gives the same file
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
}


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def write_plot(result: PerplexityResult, *paths: Path) -> None:
    """Draws the result once and writes it to every path, in the format of its suffix.

    Raises:
        PosencError: matplotlib is not installed.
    """
    if not available():
        raise PosencError("The plot needs matplotlib: pip install 'hf-posenc[plot]'.")
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        drawn = figure(result)
        for path in paths:
            metadata = {"Date": None} if path.suffix == ".svg" else None
            drawn.savefig(path, dpi=200, bbox_inches="tight", metadata=metadata)


def figure(result: PerplexityResult) -> Figure:
    """One panel per protocol with a shared vertical axis, and the legend below."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    protocols = result.settings.protocols
    drawn = Figure(figsize=(3.5 * len(protocols) + 0.2, 3.1), layout="constrained")
    panels = drawn.subplots(1, len(protocols), sharey=True, squeeze=False)[0]
    for panel, protocol in zip(panels, protocols, strict=True):
        _panel(panel, result, protocol)
    panels[0].set_ylabel("perplexity")
    ticks = _value_ticks(*panels[0].get_ylim())
    panels[0].set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    panels[0].yaxis.set_minor_locator(NullLocator())
    handles, labels = panels[0].get_legend_handles_labels()
    columns = min(len(labels), 4 if len(protocols) > 1 else 2)
    drawn.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    return drawn


def _panel(panel: Axes, result: PerplexityResult, protocol: str) -> None:
    from matplotlib.ticker import NullLocator

    lengths = result.settings.lengths
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_title(TITLES[protocol].format(tail=f"{result.settings.tail_tokens:,}"), loc="left")
    panel.set_xlabel("context length L (tokens)")
    panel.set_xticks(lengths, [_tick(length) for length in lengths])
    panel.xaxis.set_minor_locator(NullLocator())
    if result.original and lengths[0] <= result.original <= lengths[-1]:
        panel.axvline(
            result.original, color="#888888", linewidth=0.9, linestyle=(0, (4, 3)), zorder=1
        )
        panel.annotate(
            "trained length",
            (result.original, 1),
            xycoords=("data", "axes fraction"),
            xytext=(3, -2),
            textcoords="offset points",
            va="top",
            color="#666666",
            fontsize=7,
        )
    for candidate, look in zip(result.candidates, _looks(result), strict=True):
        _line(panel, result, protocol, candidate.label, look)


def _looks(result: PerplexityResult) -> list[dict[str, Any]]:
    """How each line is drawn: a colour per method, dashes for the same method with other options."""
    methods = list(dict.fromkeys(c.method for c in result.candidates if c.method is not None))
    looks, seen = [], dict.fromkeys(methods, 0)
    for index, candidate in enumerate(result.candidates):
        look: dict[str, Any] = {"color": "#222222", "linestyle": "-"}
        if candidate.method is not None:
            place, again = methods.index(candidate.method), seen[candidate.method]
            look["color"] = COLOURS[place % len(COLOURS)]
            look["linestyle"] = DASHES[(place // len(COLOURS) + again) % len(DASHES)]
            seen[candidate.method] += 1
        looks.append({**look, "marker": MARKERS[index % len(MARKERS)]})
    return looks


def _line(
    panel: Axes, result: PerplexityResult, protocol: str, label: str, look: dict[str, Any]
) -> None:
    cells = [result.cell(label, protocol, length) for length in result.settings.lengths]
    finite = [cell for cell in cells if cell is not None and math.isfinite(cell.perplexity)]
    panel.plot(
        [cell.length for cell in finite],
        [cell.perplexity for cell in finite],
        label=label,
        **look,
        markersize=4.5,
        markeredgecolor="white",
        markeredgewidth=0.5,
        linewidth=1.3,
        zorder=3,
    )
    if (
        len(result.candidates) > MAX_BANDS
    ):  # more of them hide each other; the numbers are in the table
        return
    ranges = [(cell.length, *cell.interval) for cell in finite if cell.interval is not None]
    if len(ranges) > 1:
        lengths, low, high = zip(*ranges, strict=True)
        panel.fill_between(
            lengths, low, high, color=look["color"], alpha=0.12, linewidth=0, zorder=2
        )


def _value_ticks(low: float, high: float) -> list[float]:
    """Round numbers on a log axis: the finest set of steps that gives at most 8 of them."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for steps in (
        (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8),
        (1, 1.5, 2, 3, 5, 7),
        (1, 2, 5),
        (1, 3),
        (1,),
    ):
        ticks = [step * 10.0**decade for decade in decades for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= 8:
            break
    return ticks


def _tick(length: int) -> str:
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)
