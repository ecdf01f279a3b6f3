"""Perplexity against the position in the text: where exactly a method gives out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.plots.axes import (
    LINE,
    mark_trained,
    name_lines,
    thinned,
    tick,
    value_axis,
)
from hf_posenc.evaluation.plots.lengths import marked
from hf_posenc.evaluation.plots.style import LABEL_SIZE, STYLE, Measured, looks, require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
