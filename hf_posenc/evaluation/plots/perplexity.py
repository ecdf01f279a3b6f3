"""Perplexity against context length, as a figure for a paper."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.plots.style import (
    BASELINE,
    LABEL_SIZE,
    LINE,
    MAX_BANDS,
    STYLE,
    Measured,
    Point,
    length_axis,
    looks,
    mark_trained,
    name_lines,
    require,
    thinned,
    tick,
    value_axis,
)
from hf_posenc.files import replace_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLES = {"prefix": "prefix (first L tokens)", "tail": "tail (same last {tail} tokens)"}
MARKED = {"markersize": 4.5, "markeredgecolor": "white", "markeredgewidth": 0.5, "linewidth": 1.3}
MAX_MARKERS = 16
"""Longer lines have no markers: they would touch."""


def figure(result: Measured, protocols: Sequence[str] | None = None) -> Figure:
    """One panel per protocol with a shared vertical axis; each line's name stands at its end in the last one.

    Args:
        result: What was measured.
        protocols: Some of its protocols only.

    Raises:
        PosencError: matplotlib is not installed.
    """
    require()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    shown = result.settings.protocols if protocols is None else protocols
    height = 2.0 + LABEL_SIZE * LINE * len(result.candidates) / 72
    size = (3.3 * len(shown) + 1.5, max(3.1, height))
    with mpl.rc_context(STYLE):
        drawn = Figure(figsize=size, layout="constrained")
        panels = drawn.subplots(1, len(shown), sharey=True, squeeze=False)[0]
        for panel, protocol in zip(panels, shown, strict=True):
            perplexity_panel(panel, result, protocol)
        panels[0].set_ylabel("perplexity")
        value_axis(panels[0])
        labels = {candidate.label for candidate in result.candidates}
        name_lines(panels[-1], labels, (size[1] - 1.0) * 72)
    return drawn


def perplexity_panel(panel: Axes, result: Measured, protocol: str) -> None:
    """Perplexity against length under one protocol, with the trained length marked."""
    lengths = result.settings.lengths
    panel.set_yscale("log")
    title = TITLES.get(protocol, protocol)
    panel.set_title(title.format(tail=f"{result.settings.tail_tokens:,}"), loc="left")
    length_axis(panel, lengths)
    for candidate, look in zip(result.candidates, looks(result.candidates), strict=True):
        _line(panel, result, protocol, candidate.label, look)
    mark_trained(panel, result.original)


def marked(look: dict[str, Any], points: int) -> dict[str, Any]:
    """A line's look, with markers where it has few points."""
    shown = {**look, **MARKED, "zorder": 3}
    return shown if points <= MAX_MARKERS else {**shown, "marker": ""}


def _line(panel: Axes, result: Measured, protocol: str, label: str, look: dict[str, Any]) -> None:
    cells = [result.cell(label, protocol, length) for length in result.settings.lengths]
    finite = [cell for cell in cells if cell is not None and math.isfinite(cell.perplexity)]
    panel.plot(
        [cell.length for cell in finite],
        [cell.perplexity for cell in finite],
        label=label,
        **marked(look, len(finite)),
    )
    if len(result.candidates) > MAX_BANDS:  # the numbers are in the table
        return
    ranges = [(cell.length, *cell.interval) for cell in finite if cell.interval is not None]
    if len(ranges) > 1:
        lengths, low, high = zip(*ranges, strict=True)
        panel.fill_between(
            lengths, low, high, color=look["color"], alpha=0.12, linewidth=0, zorder=2
        )


# What a method changes: its perplexity, and its ratio to the baseline on the same documents, with paired intervals.


STAGGER = 0.35
"""Over which share of the way between two lengths the methods' intervals stand side by side, at most."""
CLOSE = 0.012
"""How far apart they stand, at most, as a share of the axis."""


def difference_figure(result: Measured, protocol: str = "tail") -> Figure:
    """Perplexity on the left; on the right its ratio to the first method's, with paired 95 % intervals.

    An interval that leaves out 1 shows a difference; two overlapping intervals of perplexity show nothing about it.

    Args:
        result: What was measured.
        protocol: Which of its protocols.

    Raises:
        PosencError: matplotlib is not installed.
    """
    require()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    height = max(3.1, 2.0 + LABEL_SIZE * LINE * len(result.candidates) / 72)
    with mpl.rc_context(STYLE):
        drawn = Figure(figsize=(8.1, height), layout="constrained")
        left, right = drawn.subplots(1, 2)
        perplexity_panel(left, result, protocol)
        left.set_ylabel("perplexity")
        value_axis(left)
        ratio_panel(right, result, protocol)
        labels = {candidate.label for candidate in result.candidates}
        name_lines(right, labels, (height - 1.0) * 72)
    return drawn


def ratio_figure(result: Measured, protocol: str = "tail") -> Figure:
    """The right half of `difference_figure` by itself.

    Args:
        result: What was measured.
        protocol: Which of its protocols.

    Raises:
        PosencError: matplotlib is not installed.
    """
    require()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    height = max(3.1, 2.0 + LABEL_SIZE * LINE * len(result.candidates) / 72)
    with mpl.rc_context(STYLE):
        drawn = Figure(figsize=(4.8, height), layout="constrained")
        panel = drawn.subplots()
        ratio_panel(panel, result, protocol)
        labels = {candidate.label for candidate in result.candidates}
        name_lines(panel, labels, (height - 1.0) * 72)
    return drawn


def ratio_panel(panel: Axes, result: Measured, protocol: str) -> None:
    """The ratio to the baseline against length, an interval at every point, and a line at 1."""
    lengths = result.settings.lengths
    panel.set_title(f"{protocol}, as a multiple of the baseline", loc="left")
    panel.set_yscale("log")
    panel.axhline(1.0, color=BASELINE, linewidth=1.0, zorder=2)
    drawn = list(zip(result.candidates, looks(result.candidates), strict=True))
    gap = min((math.log2(b / a) for a, b in itertools.pairwise(lengths)), default=1.0)
    span = math.log2(lengths[-1] / lengths[0]) or 1.0
    step = min(STAGGER * gap / len(drawn), CLOSE * span)
    for index, (candidate, look) in enumerate(drawn):
        cells = [result.cell(candidate.label, protocol, length) for length in lengths]
        shift = 2 ** (step * (index - (len(drawn) - 1) / 2))
        _intervals(panel, [cell for cell in cells if cell is not None], shift, look)
        ratios = [(c.length, c.ratio or 0.0) for c in cells if c is not None and _drawable(c.ratio)]
        if candidate.method is None and all(ratio == 1.0 for _, ratio in ratios):
            continue  # the baseline is the line at 1
        panel.plot(
            [length * shift for length, _ in ratios],
            [ratio for _, ratio in ratios],
            label=candidate.label,
            **marked(look, len(ratios)),
        )
    length_axis(panel, lengths)
    mark_trained(panel, result.original, below=True)
    panel.set_ylabel("ratio, paired 95 % interval")
    value_axis(panel)


def _intervals(panel: Axes, cells: list[Point], shift: float, look: dict[str, Any]) -> None:
    ranges = [
        (cell.length * shift, *cell.ratio_interval)
        for cell in cells
        if cell.ratio_interval is not None
        and all(map(_drawable, cell.ratio_interval))
        and cell.ratio_interval[0] != cell.ratio_interval[1]
    ]
    if ranges:
        where, low, high = zip(*ranges, strict=True)
        panel.vlines(where, low, high, color=look["color"], linewidth=0.9, alpha=0.7, zorder=2)


def _drawable(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0


# Perplexity against the position in the text: where exactly a method gives out.


SPAN = 2**0.125
"""From one point to the next at least an eighth of an octave."""
_LARGEST = 700.0  # nats; the exponential of more is no float


def position_figure(result: Measured) -> Figure:
    """Perplexity of the tokens between two positions of the text, over all documents; a line at the trained length.

    Every token is read with all that is in front of it, in windows of the longest length.

    Args:
        result: What was measured; its `curve` has the sums.

    Raises:
        PosencError: There is no curve (it comes from `prefix` windows), or matplotlib is not installed.
    """
    require()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    if not result.curve or not result.curve["methods"]:
        raise PosencError(
            "This result has no curve by position: it is measured with --protocol prefix."
        )
    height = max(3.1, 2.0 + LABEL_SIZE * LINE * len(result.candidates) / 72)
    with mpl.rc_context(STYLE):
        drawn = Figure(figsize=(4.8, height), layout="constrained")
        panel = drawn.subplots()
        position_panel(panel, result, result.curve)
        labels = {candidate.label for candidate in result.candidates}
        name_lines(panel, labels, (height - 1.0) * 72)
    return drawn


def position_panel(panel: Axes, result: Measured, curve: Mapping[str, Any]) -> None:
    """The lines of `position_figure`."""
    from matplotlib.ticker import NullLocator

    edges: Sequence[int] = curve["edges"]
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    for candidate, look in zip(result.candidates, looks(result.candidates), strict=True):
        points = position_points(curve, candidate.label)
        panel.plot(
            [place for place, _ in points],
            [perplexity for _, perplexity in points],
            label=candidate.label,
            **marked(look, len(points)),
        )
    first, last = math.log2(max(edges[1], 2)), math.log2(edges[-1])
    ticks = thinned([2**power for power in range(math.floor(first), math.floor(last) + 1)])
    panel.set_xticks(ticks, [tick(edge) for edge in ticks])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_title(f"by position in windows of {edges[-1]:,} tokens", loc="left")
    panel.set_xlabel("position in the text (tokens)")
    panel.set_ylabel("perplexity at this position")
    mark_trained(panel, result.original)
    value_axis(panel)


def position_points(curve: Mapping[str, Any], label: str) -> list[tuple[float, float]]:
    """Where a line goes: positions and the perplexity of the tokens around them.

    Neighbouring buckets are pooled until they span a factor of `SPAN`: equal steps on the log axis, where buckets of
    equal size would crowd to the right and show the noise of few tokens. What is not finite leaves a gap.

    Args:
        curve: Edges, and sums per method and bucket.
        label: The method.

    Returns:
        The middle of each pool, in tokens, and the perplexity.
    """
    sums = curve["methods"].get(label)
    if sums is None:
        return []
    points: list[tuple[float, float]] = []
    begin, nats, tokens = 0, 0.0, 0
    buckets = zip(
        curve["edges"][:-1], curve["edges"][1:], sums["nats"], sums["tokens"], strict=True
    )
    for first, stop, more, count in buckets:
        begin = first if not tokens else begin
        nats += math.nan if more is None else more
        tokens += count
        if stop < SPAN * max(begin, 1) and stop < curve["edges"][-1]:
            continue
        if tokens and nats / tokens < _LARGEST:
            points.append(((begin + stop) / 2, math.exp(nats / tokens)))
        nats, tokens = 0.0, 0
    return points


# Figures as files.


def write_plot(result: Measured, *paths: Path) -> None:
    """Draws the result once and writes it to every path, in the format of its suffix.

    Raises:
        PosencError: matplotlib is not installed, or a file cannot be written.
    """
    require()
    write_figure(figure(result), *paths)


def write_figure(drawn: Figure, *paths: Path) -> None:
    """Writes a figure to every path, in the format of its suffix; each file is whole or as it was before.

    Raises:
        PosencError: A file cannot be written.
    """
    for path in paths:
        replace_atomically(path, lambda temporary: save(drawn, temporary))


def save(drawn: Figure, path: Path | Any, format: str | None = None) -> None:
    """Writes a figure so that the same figure gives the same file: no date, no random names.

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
