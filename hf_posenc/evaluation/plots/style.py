"""How figures look: colours, markers and dashes by method, and what a result must have to be drawn."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from hf_posenc.errors import PosencError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, told apart by every common kind of colour blindness; a violet and an olive instead of
# their pale yellow.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F3C8D", "#999933")
BASELINE = "#222222"
CONTROL_COLOUR = "#888888"
REMARK = "#666666"
GRID = "#e6e6e6"
CONTROL = "sliding_window"
MARKERS = "osD^vP*X<>"
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.5)))
LABEL_SIZE = 7.5
MAX_BANDS = 4
"""Up to so many lines are drawn with their intervals; more hide each other."""

STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "hf_posenc",  # the same result gives the same file
    "text.parse_math": False,  # a name is no formula, whatever it contains
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
}


class Named(Protocol):
    """A method of a result: `label`, as reports show it, and `method`, its name; `None` for the model as loaded."""

    @property
    def label(self) -> str: ...
    @property
    def method(self) -> str | None: ...


class Point(Protocol):
    """One number of a table, as `hf_posenc.evaluation.measuring.statistics.Cell`."""

    @property
    def length(self) -> int: ...
    @property
    def perplexity(self) -> float: ...
    @property
    def interval(self) -> tuple[float, float] | None: ...
    @property
    def ratio(self) -> float | None: ...
    @property
    def ratio_interval(self) -> tuple[float, float] | None: ...


class Axis(Protocol):
    """What the axes of a figure are made from, as `hf_posenc.evaluation.perplexity.protocols.Settings`."""

    @property
    def lengths(self) -> tuple[int, ...]: ...
    @property
    def protocols(self) -> tuple[str, ...]: ...
    @property
    def tail_tokens(self) -> int: ...


class Measured(Protocol):
    """What can be drawn: a `PerplexityResult`, or several of them put together."""

    @property
    def settings(self) -> Axis: ...
    @property
    def original(self) -> int | None: ...
    @property
    def candidates(self) -> Sequence[Named]: ...
    @property
    def curve(self) -> Mapping[str, Any] | None: ...
    def cell(self, method: str, protocol: str, length: int, /) -> Point | None: ...


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def require() -> None:
    """Makes sure of matplotlib.

    Raises:
        PosencError: It is not installed.
    """
    if not available():
        raise PosencError("The plot needs matplotlib: pip install 'hf-posenc[plot]'.")


def looks(candidates: Sequence[Named]) -> list[dict[str, Any]]:
    """How each line is drawn: a colour per method, dashes where it comes again or is dynamic, the control grey."""
    seen: dict[str, int] = {}
    drawn = []
    for index, candidate in enumerate(candidates):
        look: dict[str, Any] = {"color": BASELINE, "linestyle": "-"}
        if candidate.method == CONTROL:
            look["color"] = CONTROL_COLOUR
        elif candidate.method is not None:
            name = candidate.method.removeprefix("dynamic_")
            again = seen[name] = seen.get(name, -1) + 1
            place = list(seen).index(name)
            look["color"] = COLOURS[place % len(COLOURS)]
            look["linestyle"] = DASHES[(place // len(COLOURS) + again) % len(DASHES)]
        drawn.append({**look, "marker": MARKERS[index % len(MARKERS)]})
    return drawn


# What the figures share: the axis of lengths, the mark at the trained length, ticks, names at the ends of lines.


LINE = 1.25  # from one label to the next, as a multiple of their size
MAX_TICKS = 8
MIN_TICKS = 3
MAX_LABEL = 36  # characters
_STEPS = ((1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8), (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,))


def length_axis(panel: Axes, lengths: Sequence[int]) -> None:
    """A base-2 axis of tokens with a tick at each length; where there are many, at those far enough apart."""
    from matplotlib.ticker import NullLocator

    panel.set_xscale("log", base=2)
    panel.set_xlabel("context length L (tokens)")
    ticks = thinned(lengths)
    panel.set_xticks(ticks, [tick(length) for length in ticks])
    panel.xaxis.set_minor_locator(NullLocator())


def thinned(lengths: Sequence[int]) -> list[int]:
    """At most `MAX_TICKS` or so of the lengths, from the longest down, evenly on a log axis."""
    if len(lengths) <= MAX_TICKS:
        return list(lengths)
    gap = math.log2(lengths[-1] / lengths[0]) / MAX_TICKS
    kept = [lengths[-1]]
    for length in reversed(lengths[:-1]):
        if math.log2(kept[-1] / length) >= gap:
            kept.append(length)
    return kept[::-1]


def mark_trained(panel: Axes, original: int | None, *, below: bool = False) -> None:
    """A dashed line at the length that the model was trained on, where the axis has it; its name on top, or below."""
    low, high = panel.get_xlim()
    if not original or not low <= original <= high:
        return
    panel.axvline(original, color=CONTROL_COLOUR, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
    panel.annotate(
        "trained length",
        (original, 0 if below else 1),
        xycoords=("data", "axes fraction"),
        xytext=(3, 3 if below else -2),
        textcoords="offset points",
        va="bottom" if below else "top",
        color=REMARK,
        fontsize=7,
    )


def value_axis(panel: Axes) -> None:
    """A log axis with round numbers."""
    from matplotlib.ticker import NullLocator

    panel.set_yscale("log")
    ticks = value_ticks(*panel.get_ylim())
    panel.set_yticks(ticks, [f"{value:g}" for value in ticks])
    panel.yaxis.set_minor_locator(NullLocator())


def value_ticks(low: float, high: float) -> list[float]:
    """Round numbers on a log axis: the finest set of steps that gives at most `MAX_TICKS` of them.

    Where even the finest gives fewer than `MIN_TICKS`, the ends are close, and the numbers are equally far apart.
    """
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: list[float] = []
    for steps in _STEPS:
        ticks = [step * 10.0**decade for decade in decades for step in steps]
        ticks = [value for value in ticks if low <= value <= high]
        if len(ticks) <= MAX_TICKS:
            break
    return ticks if len(ticks) >= MIN_TICKS else _even_ticks(low, high)


def _even_ticks(low: float, high: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten: the smallest that gives at most `MAX_TICKS`."""
    power = 10.0 ** (math.floor(math.log10(high - low)) - 1)
    step = next(n * power for n in (1, 2, 5, 10, 20, 50) if (high - low) / (n * power) < MAX_TICKS)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [round(index * step, 12) for index in range(first, last + 1)]


def tick(length: int) -> str:
    """A length as its axis shows it: 4k for 4,096."""
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)


def name_lines(panel: Axes, labels: Collection[str], height: float) -> None:
    """Writes the name of each line beside its end, moved apart where ends are close.

    Args:
        panel: The last panel, its lines drawn on a log axis.
        labels: The lines to name.
        height: About how high the panel is, in points.
    """
    low, high = (math.log(limit) for limit in panel.get_ylim())
    lines: list[Any] = [line for line in panel.get_lines() if line.get_label() in labels]
    ends = {
        line: (math.log(line.get_ydata()[-1]) - low) / (high - low)
        for line in lines
        if len(line.get_ydata())
    }
    gap = LABEL_SIZE * LINE / height
    for (line, end), place in zip(ends.items(), spread(list(ends.values()), gap), strict=True):
        panel.annotate(
            shortened(str(line.get_label())),
            (line.get_xdata()[-1], math.exp(low + end * (high - low))),
            xytext=(1.07, place),
            textcoords="axes fraction",
            va="center",
            fontsize=LABEL_SIZE,
            color=line.get_color(),
            arrowprops={
                "arrowstyle": "-",
                "relpos": (0, 0.5),  # from where the name begins, not across it
                "color": line.get_color(),
                "linewidth": 0.5,
                "shrinkA": 1,
                "shrinkB": 3,
            },
            annotation_clip=False,
        )


def shortened(label: str) -> str:
    """A name that leaves room for the drawing."""
    return label if len(label) <= MAX_LABEL else f"{label[: MAX_LABEL - 1]}…"


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
