"""What the figures share: the axis of lengths, the mark at the trained length, ticks, names at the ends of lines."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from hf_posenc.evaluation.plots.style import CONTROL_COLOUR, LABEL_SIZE, REMARK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
