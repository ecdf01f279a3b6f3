"""Figures of perplexity: against context length, as a ratio to the baseline, and by position in the text."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.measuring.statistics import Cell
from hf_posenc.evaluation.plots.style import (
    BASELINE,
    MAX_BANDS,
    Measured,
    length_axis,
    line_panels,
    looks,
    mark_trained,
    thinned,
    tick,
    value_axis,
    write_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLES = {"prefix": "prefix (first L tokens)", "tail": "tail (same last {tail} tokens)"}
MARKED = {"markersize": 4.5, "markeredgecolor": "white", "markeredgewidth": 0.5, "linewidth": 1.3}
MAX_MARKERS = 16
"""Longer lines have no markers, which would touch."""


def figure(result: Measured, protocols: Sequence[str] | None = None) -> Figure:
    """Draw one panel per protocol with a shared vertical axis; the last one has the names of the lines.

    Args:
        result: The perplexities.
        protocols: The protocols to draw; by default all.

    Raises:
        PosencError: matplotlib is not installed.
    """
    shown = result.settings.protocols if protocols is None else protocols
    with line_panels(result, 3.3 * len(shown) + 1.5, len(shown), sharey=True) as (drawn, panels):
        for panel, protocol in zip(panels, shown, strict=True):
            perplexity_panel(panel, result, protocol)
        panels[0].set_ylabel("perplexity")
        value_axis(panels[0])
    return drawn


def perplexity_panel(panel: Axes, result: Measured, protocol: str) -> None:
    """Draw perplexity against length under one protocol, with the trained length marked."""
    lengths = result.settings.lengths
    panel.set_yscale("log")
    title = TITLES.get(protocol, protocol)
    panel.set_title(title.format(tail=f"{result.settings.tail_tokens:,}"), loc="left")
    length_axis(panel, lengths)
    for candidate, look in zip(result.candidates, looks(result.candidates), strict=True):
        _line(panel, result, protocol, candidate.label, look)
    mark_trained(panel, result.original)


def marked(look: dict[str, Any], points: int) -> dict[str, Any]:
    """Add markers to a line's look if it has few points."""
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


STAGGER = 0.35
"""Largest share of the distance between two lengths over which the methods' intervals are spread."""
CLOSE = 0.012
"""Largest distance of two intervals, as a share of the axis."""


def difference_figure(result: Measured, protocol: str = "tail") -> Figure:
    """Draw perplexity on the left; on the right its ratio to the first method's, with paired 95 % intervals.

    An interval that excludes 1 shows a difference. Overlap of two intervals of perplexity is no evidence about it.

    Args:
        result: The perplexities.
        protocol: One of its protocols.

    Raises:
        PosencError: matplotlib is not installed.
    """
    with line_panels(result, 8.1, 2) as (drawn, (left, right)):
        perplexity_panel(left, result, protocol)
        left.set_ylabel("perplexity")
        value_axis(left)
        ratio_panel(right, result, protocol)
    return drawn


def ratio_figure(result: Measured, protocol: str = "tail") -> Figure:
    """Draw the right half of `difference_figure`.

    Args:
        result: The perplexities.
        protocol: One of its protocols.

    Raises:
        PosencError: matplotlib is not installed.
    """
    with line_panels(result, 4.8) as (drawn, (panel,)):
        ratio_panel(panel, result, protocol)
    return drawn


def ratio_panel(panel: Axes, result: Measured, protocol: str) -> None:
    """Draw the ratio to the baseline against length, with an interval at every point and a line at 1."""
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


def _intervals(panel: Axes, cells: list[Cell], shift: float, look: dict[str, Any]) -> None:
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


SPAN = 2**0.125
"""Least ratio of two positions: an eighth of an octave."""
_LARGEST = 700.0  # nats; the exponential of more is no float


def position_figure(result: Measured) -> Figure:
    """Draw the perplexity of tokens by their position in the text, over all documents, with the trained length marked.

    Every token is read with all tokens before it, in windows of the longest length.

    Args:
        result: The perplexities; its `curve` has the sums.

    Raises:
        PosencError: There is no curve (it comes from `prefix` windows), or matplotlib is not installed.
    """
    if not result.curve or not result.curve["methods"]:
        raise PosencError(
            "This result has no curve by position: it is measured with --protocol prefix."
        )
    with line_panels(result, 4.8) as (drawn, (panel,)):
        position_panel(panel, result, result.curve)
    return drawn


def position_panel(panel: Axes, result: Measured, curve: Mapping[str, Any]) -> None:
    """Draw the lines of `position_figure`."""
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
    """Return positions and the perplexity of the tokens around them.

    Neighbouring buckets are pooled until they span a factor of `SPAN`, which gives equal steps on the log axis. Buckets
    of equal size would crowd to the right and show the noise of few tokens. Values that are not finite leave a gap.

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


def write_plot(result: Measured, *paths: Path) -> None:
    """Draw `figure` once and write it to every path, in the format of its suffix.

    Raises:
        PosencError: matplotlib is not installed, or a file cannot be written.
    """
    write_figure(figure(result), *paths)
