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

# Okabe and Ito's colours, told apart by every common kind of colour blindness; a violet and an olive instead of
# their pale yellow.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F3C8D", "#999933")
CONTROL = "sliding_window"
MARKERS = "osD^vP*X<>"
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.5)))
MAX_BANDS = 4
LABEL_SIZE = 7.5
LINE = 1.25  # from one label to the next, as a multiple of their size
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
    """One panel per protocol with a shared vertical axis; each line's name stands at its end in the last one."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    protocols = result.settings.protocols
    height = 2.0 + LABEL_SIZE * LINE * len(result.candidates) / 72
    size = (3.3 * len(protocols) + 1.5, max(3.1, height))
    drawn = Figure(figsize=size, layout="constrained")
    panels = drawn.subplots(1, len(protocols), sharey=True, squeeze=False)[0]
    for panel, protocol in zip(panels, protocols, strict=True):
        _panel(panel, result, protocol)
    panels[0].set_ylabel("perplexity")
    ticks = _value_ticks(*panels[0].get_ylim())
    panels[0].set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    panels[0].yaxis.set_minor_locator(NullLocator())
    _name_lines(panels[-1], result, (size[1] - 1.0) * 72)
    return drawn


def _name_lines(panel: Axes, result: PerplexityResult, height: float) -> None:
    """Writes the name of each line beside its end, moved apart where ends are close.

    Args:
        panel: The last panel, with its lines drawn.
        result: What they show.
        height: About how high the panel is, in points.
    """
    low, high = (math.log(limit) for limit in panel.get_ylim())
    wanted = {candidate.label for candidate in result.candidates}
    lines: list[Any] = [line for line in panel.get_lines() if line.get_label() in wanted]
    ends = {
        line: (math.log(line.get_ydata()[-1]) - low) / (high - low)
        for line in lines
        if len(line.get_ydata())
    }
    gap = LABEL_SIZE * LINE / height
    for (line, end), place in zip(ends.items(), spread(list(ends.values()), gap), strict=True):
        panel.annotate(
            str(line.get_label()),
            (line.get_xdata()[-1], math.exp(low + end * (high - low))),
            xytext=(1.07, place),
            textcoords="axes fraction",
            va="center",
            fontsize=LABEL_SIZE,
            color=line.get_color(),
            arrowprops={
                "arrowstyle": "-",
                "color": line.get_color(),
                "linewidth": 0.5,
                "shrinkA": 1,
                "shrinkB": 3,
            },
            annotation_clip=False,
        )


def spread(places: list[float], gap: float) -> list[float]:
    """Moves places apart as little as it takes for `gap` between neighbours, their order kept.

    Places that are too close become a block around their mean; blocks that then touch become one.
    """
    order = sorted(range(len(places)), key=lambda index: places[index])
    blocks: list[tuple[float, list[int]]] = []  # the middle of each, and who is in it
    for index in order:
        middle, members = places[index], [index]
        while blocks and middle - blocks[-1][0] < gap * (len(members) + len(blocks[-1][1])) / 2:
            members = blocks.pop()[1] + members
            middle = sum(places[member] for member in members) / len(members)
        blocks.append((middle, members))
    moved = list(places)
    for middle, members in blocks:
        for rank, member in enumerate(members):
            moved[member] = middle + (rank - (len(members) - 1) / 2) * gap
    return moved


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
    """How each line is drawn: a colour per method, dashes where it comes again or is dynamic, the control grey."""
    seen: dict[str, int] = {}
    looks = []
    for index, candidate in enumerate(result.candidates):
        look: dict[str, Any] = {"color": "#222222", "linestyle": "-"}
        if candidate.method == CONTROL:
            look["color"] = "#888888"
        elif candidate.method is not None:
            name = candidate.method.removeprefix("dynamic_")
            again = seen[name] = seen.get(name, -1) + 1
            place = list(seen).index(name)
            look["color"] = COLOURS[place % len(COLOURS)]
            look["linestyle"] = DASHES[(place // len(COLOURS) + again) % len(DASHES)]
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
