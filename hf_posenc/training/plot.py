"""The loss of a training and the held-out perplexities on the way. Needs matplotlib (`pip install hf-posenc[plot]`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.plots.axes import name_lines, value_axis
from hf_posenc.evaluation.plots.lengths import MARKED
from hf_posenc.evaluation.plots.style import (
    COLOURS,
    CONTROL_COLOUR,
    MARKERS,
    STYLE,
    require,
)
from hf_posenc.evaluation.report import number
from hf_posenc.evaluation.result import PerplexityResult
from hf_posenc.training.stages import stages_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEIGHT = 3.1  # inches
DOTTED = (0, (1.5, 1.5))
SMOOTHED = 8
"""The thick line is a mean over an eighth of the log, so that the trend can be seen in the noise of the batches."""
LEAST_SMOOTHED = 3
"""Of fewer logs than that a mean shows nothing."""


def loss_figure(
    log_history: Sequence[Mapping[str, Any]],
    table: PerplexityResult | None = None,
    protocol: str = "tail",
) -> Figure:
    """The training loss by step; on the right the perplexity of held-out documents, a line for each length.

    The dotted line is what the model had, unpatched, at the length that it was trained at.

    Args:
        log_history: The Trainer's (`trainer.state.log_history`), or a list of `{"step": ..., "loss": ...}`.
        table: The rows of `Scores`; without, or with fewer than two of the training, there is no right half.
        protocol: Which of its protocols.

    Raises:
        PosencError: matplotlib is not installed, or no loss was logged.
    """
    require()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    losses = loss_points(log_history)
    if not losses:
        raise PosencError("No finite loss was logged, so there is none to draw.")
    lines = {} if table is None else score_points(table, protocol)
    with mpl.rc_context(STYLE):
        wide = any(len(points) > 1 for points in lines.values())
        drawn = Figure(figsize=(8.1 if wide else 4.4, HEIGHT), layout="constrained")
        panels = drawn.subplots(1, 2 if wide else 1, squeeze=False)[0]
        loss_panel(panels[0], losses, loss_points(log_history, "eval_loss"))
        panels[0].set_xlabel(_step_label(log_history))
        if wide:
            assert table is not None
            score_panel(panels[1], table, protocol, lines)
    return drawn


def loss_points(
    log_history: Sequence[Mapping[str, Any]], key: str = "loss"
) -> list[tuple[int, float]]:
    """Steps and losses of a log, where they are finite, in nats a token."""
    found = [(int(entry["step"]), float(entry[key])) for entry in log_history if key in entry]
    return [(step, loss) for step, loss in found if math.isfinite(loss)]


def score_points(table: PerplexityResult, protocol: str) -> dict[int, list[tuple[int, float]]]:
    """For each length, the steps of the training and the perplexity there."""
    lines: dict[int, list[tuple[int, float]]] = {}
    rows = list(zip(stages_of(table), table.candidates, strict=True))
    if len(rows) > 1 and rows[1][0].step == 0:
        rows = rows[1:]  # the first is of the model before it was patched
    for length in table.settings.lengths:
        cells = [(stage.step, table.cell(row.label, protocol, length)) for stage, row in rows]
        lines[length] = [
            (step, cell.perplexity)
            for step, cell in cells
            if cell is not None and math.isfinite(cell.perplexity)
        ]
    return lines


def smoothed(points: Sequence[tuple[int, float]]) -> tuple[list[tuple[float, float]], int]:
    """The running mean of a line, each in the middle of what it is the mean of, and of how many points it is."""
    width = len(points) // SMOOTHED
    if width < LEAST_SMOOTHED:
        return [], width
    parts = [points[begin : begin + width] for begin in range(len(points) - width + 1)]
    means = [
        (sum(step for step, _ in part) / width, math.fsum(loss for _, loss in part) / width)
        for part in parts
    ]
    return means, width


def loss_panel(
    panel: Axes, losses: Sequence[tuple[int, float]], held_out: Sequence[tuple[int, float]] = ()
) -> None:
    """The left half: every logged loss, their trend, and the Trainer's own evaluations, if any."""
    means, width = smoothed(losses)
    panel.plot(
        *zip(*losses, strict=True),
        color=COLOURS[0],
        linewidth=0.6 if means else 1.3,
        alpha=0.45 if means else 1.0,
        label="logged" if means else "training",
    )
    if means:
        panel.plot(
            *zip(*means, strict=True), color=COLOURS[0], linewidth=1.6, label=f"mean of {width}"
        )
    if held_out:
        look: dict[str, Any] = {**MARKED, "color": COLOURS[1], "marker": MARKERS[0]}
        panel.plot(*zip(*held_out, strict=True), label="evaluation", **look)
    if means or held_out:
        panel.legend(frameon=False)
    panel.set_title("training loss", loc="left")
    panel.set_ylabel("nats per token")


def score_panel(
    panel: Axes,
    table: PerplexityResult,
    protocol: str,
    lines: Mapping[int, Sequence[tuple[int, float]]],
) -> None:
    """The right half: held-out perplexity by step, a line for each length, and the unpatched model's own."""
    names = [f"{length:,} tokens" for length in lines]
    for index, points in enumerate(lines.values()):
        look: dict[str, Any] = {
            **MARKED,
            "color": COLOURS[index % len(COLOURS)],
            "marker": MARKERS[index % len(MARKERS)],
        }
        if points:
            panel.plot(*zip(*points, strict=True), label=names[index], **look)
    first = table.candidates[0]
    own = (
        None
        if first.method or table.original is None
        else table.cell(first.label, protocol, table.original)
    )
    if own is not None and math.isfinite(own.perplexity):
        # drawn as a line of the data, so that its name stands at its end as those of the others do
        names.append(f"{first.label} at {own.length:,}: {number(own.perplexity)}")
        steps = [step for points in lines.values() for step, _ in points]
        panel.plot(
            [min(steps), max(steps)],
            [own.perplexity] * 2,
            label=names[-1],
            color=CONTROL_COLOUR,
            linewidth=1.0,
            linestyle=DOTTED,
        )
    panel.set_title(f"held-out perplexity, {protocol}", loc="left")
    panel.set_xlabel("step")
    panel.set_ylabel("perplexity")
    value_axis(panel)
    name_lines(panel, names, (HEIGHT - 1.0) * 72)


def _step_label(log_history: Sequence[Mapping[str, Any]]) -> str:
    """`step`, and how many tokens one has, where the Trainer counts them."""
    seen = [
        (e["step"], e["num_input_tokens_seen"]) for e in log_history if "num_input_tokens_seen" in e
    ]
    if not seen or not seen[-1][0]:
        return "step"
    return f"step ({seen[-1][1] / seen[-1][0]:,.0f} tokens each)"
