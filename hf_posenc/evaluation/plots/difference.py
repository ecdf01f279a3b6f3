"""What a method changes: its perplexity, and its ratio to the baseline on the same documents, with paired intervals."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

from hf_posenc.evaluation.plots.axes import LINE, length_axis, mark_trained, name_lines, value_axis
from hf_posenc.evaluation.plots.lengths import marked, perplexity_panel
from hf_posenc.evaluation.plots.style import (
    BASELINE,
    LABEL_SIZE,
    STYLE,
    Measured,
    Point,
    looks,
    require,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
