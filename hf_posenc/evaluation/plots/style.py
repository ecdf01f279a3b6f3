"""Common parts of the figures: colours by method, axes of lengths and values, names of lines, files."""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.measuring.statistics import Cell
from hf_posenc.files import replace_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, distinct under every common kind of colour blindness; a violet and an olive replace their
# pale yellow.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F3C8D", "#999933")
BASELINE = "#222222"
CONTROL_COLOUR = "#888888"
REMARK = "#666666"
GRID = "#e6e6e6"
CONTROL = "sliding_window"
MARKERS = "osD^vP*X<>"
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.5)))
LABEL_SIZE = 7.5
LINE = 1.25  # distance of two labels, as a multiple of their size
MAX_LABEL = 36  # characters
MIN_TICKS, MAX_TICKS = 3, 8
_STEPS = ((1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8), (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,))
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


class Named(Protocol):
    """A method of a result: its `label` in reports, and its name `method`; `None` for the model as loaded."""

    @property
    def label(self) -> str: ...
    @property
    def method(self) -> str | None: ...


class Axis(Protocol):
    """Settings behind the axes, such as `hf_posenc.evaluation.perplexity.protocols.Settings`."""

    @property
    def lengths(self) -> tuple[int, ...]: ...
    @property
    def protocols(self) -> tuple[str, ...]: ...
    @property
    def tail_tokens(self) -> int: ...


class Measured(Protocol):
    """Perplexities that can be drawn: a `PerplexityResult`, or several of them merged."""

    @property
    def settings(self) -> Axis: ...
    @property
    def original(self) -> int | None: ...
    @property
    def candidates(self) -> Sequence[Named]: ...
    @property
    def curve(self) -> Mapping[str, Any] | None: ...
    def cell(self, method: str, protocol: str, length: int, /) -> Cell | None: ...


def available() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def require() -> None:
    """Check that matplotlib is installed.

    Raises:
        PosencError: It is not installed.
    """
    if not available():
        raise PosencError("The plot needs matplotlib: pip install 'hf-posenc[plot]'.")


def looks(candidates: Sequence[Named]) -> list[dict[str, Any]]:
    """Return the look of each line: a colour per method, dashes for its further and dynamic forms, the control grey."""
    seen: dict[str, int] = {}
    styles = []
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
        styles.append({**look, "marker": MARKERS[index % len(MARKERS)]})
    return styles


@contextlib.contextmanager
def line_panels(
    result: Measured, width: float, columns: int = 1, **options: Any
) -> Iterator[tuple[Figure, list[Axes]]]:
    """Make a figure of panels side by side; when they are drawn, name the lines at the last one.

    Args:
        result: The source of the lines.
        width: Width of the figure, in inches.
        columns: Number of panels.
        **options: Further arguments of `Figure.subplots`.

    Raises:
        PosencError: matplotlib is not installed.
    """
    require()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    height = max(3.1, 2.0 + LABEL_SIZE * LINE * len(result.candidates) / 72)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        panels = list(figure.subplots(1, columns, squeeze=False, **options)[0])
        yield figure, panels
        labels = {candidate.label for candidate in result.candidates}
        name_lines(panels[-1], labels, (height - 1.0) * 72)


def length_axis(panel: Axes, lengths: Sequence[int]) -> None:
    """Make the x axis a base-2 axis of tokens, with ticks at the lengths, or at some of many."""
    from matplotlib.ticker import NullLocator

    panel.set_xscale("log", base=2)
    panel.set_xlabel("context length L (tokens)")
    ticks = thinned(lengths)
    panel.set_xticks(ticks, [tick(length) for length in ticks])
    panel.xaxis.set_minor_locator(NullLocator())


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
    """Make the y axis a log axis with round numbers."""
    from matplotlib.ticker import NullLocator

    panel.set_yscale("log")
    ticks = value_ticks(*panel.get_ylim())
    panel.set_yticks(ticks, [f"{value:g}" for value in ticks])
    panel.yaxis.set_minor_locator(NullLocator())


def value_ticks(low: float, high: float) -> list[float]:
    """Return round numbers on a log axis: the finest set of steps that gives at most `MAX_TICKS` of them.

    If even the finest gives fewer than `MIN_TICKS`, the ends are close, and the numbers are equally far apart.
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
    """Multiples of 1, 2 or 5 times a power of ten: of the smallest that gives at most `MAX_TICKS`."""
    power = 10.0 ** (math.floor(math.log10(high - low)) - 1)
    step = next(n * power for n in (1, 2, 5, 10, 20, 50) if (high - low) / (n * power) < MAX_TICKS)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [round(index * step, 12) for index in range(first, last + 1)]


def tick(length: int) -> str:
    """Format a length for an axis: 4k for 4,096."""
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)


def name_lines(panel: Axes, labels: Collection[str], height: float) -> None:
    """Write the name of each line beside its end, moved apart where ends are close.

    Args:
        panel: The last panel, its lines drawn on a log axis.
        labels: The lines to name.
        height: Approximate height of the panel, in points.
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
                "relpos": (0, 0.5),  # begins at the left edge of the name
                "color": line.get_color(),
                "linewidth": 0.5,
                "shrinkA": 1,
                "shrinkB": 3,
            },
            annotation_clip=False,
        )


def shortened(label: str) -> str:
    """Shorten a name to `MAX_LABEL` characters."""
    return label if len(label) <= MAX_LABEL else f"{label[: MAX_LABEL - 1]}…"


def spread(places: list[float], gap: float) -> list[float]:
    """Move places apart as little as possible so that neighbours are at least `gap` apart, in the same order.

    Places that are too close become a block around their mean; blocks that touch are merged.
    """
    order = sorted(range(len(places)), key=lambda index: places[index])
    blocks: list[tuple[float, list[int]]] = []  # middle and members of each
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


# Files.


def write_figure(drawn: Figure, *paths: Path) -> None:
    """Write a figure to every path, in the format of its suffix; each file is whole or as it was before.

    Raises:
        PosencError: A file cannot be written.
    """
    for path in paths:
        replace_atomically(path, lambda temporary: save(drawn, temporary))


def save(drawn: Figure, path: Path | Any, format: str | None = None) -> None:
    """Write a figure deterministically: without a date or random names.

    Args:
        drawn: The figure.
        path: A path, or an open file.
        format: `"svg"`, `"png"`, ...; by default the path's suffix.
    """
    import matplotlib as mpl

    kind = format or Path(path).suffix.removeprefix(".")
    metadata = {"Date": None} if kind == "svg" else None
    with mpl.rc_context(STYLE):
        drawn.savefig(path, format=kind, dpi=200, bbox_inches="tight", metadata=metadata)
