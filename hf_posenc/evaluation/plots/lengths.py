"""Perplexity against context length, as a figure for a paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_posenc.evaluation.plots.axes import (
    LINE,
    length_axis,
    mark_trained,
    name_lines,
    value_axis,
)
from hf_posenc.evaluation.plots.style import LABEL_SIZE, MAX_BANDS, STYLE, Measured, looks, require

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
