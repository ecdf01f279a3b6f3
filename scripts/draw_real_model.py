"""Draw the picture of docs/real_model.md and README.md from docs/data/real_model/: `python -m scripts.draw_real_model`.

Needs matplotlib (`pip install 'hf-posenc[plot]'`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hf_posenc.evaluation.measuring.candidates import TRUNCATION
from hf_posenc.evaluation.measuring.statistics import Cell
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.evaluation.plots import COLOURS, STYLE
from hf_posenc.evaluation.retrieval.result import Record
from scripts.results import REAL_MODEL, losses, perplexity, retrieval
from scripts.results import tails as ratios_of

WIDE, NARROW = REAL_MODEL / "headline.png", REAL_MODEL / "headline-narrow.png"
"""The picture with panels side by side, and for a phone one below the other."""
WIDEST = 2.0
"""The largest ratio on the axis; greater ones are written at its end."""
FOUND, FIRST, MISSED = COLOURS[2], "#a6d8c3", "#e3e3e3"
"""Colours of a passkey that is answered, of one that is only the most probable, and of one that is missed."""


def main() -> None:
    """Draw perplexity by that of truncation, and passkeys by depth, one row for each method."""
    tails = perplexity(REAL_MODEL / "tail-16k.json")
    passkeys = retrieval(REAL_MODEL / "passkey.json")
    length = tails.settings.lengths[-1]
    ratios = {m: c for (m, n), c in ratios_of(REAL_MODEL / "tail-16k.json").items() if n == length}
    order = sorted(ratios, key=lambda label: ratios[label].perplexity)
    measured = {record.method for record in passkeys.records}
    few = [label for label in order if label in measured]
    with rc_context({**STYLE, "font.size": 9}):
        for file, found in ((WIDE, order), (NARROW, few)):
            size = (9.6, 1.5 + 0.34 * len(order))
            grid: dict[str, Any] = {"ncols": 2, "sharey": True}
            if file is NARROW:
                size = (4.8, 2.4 + 0.34 * len(order + few))
                grid = {"nrows": 2, "height_ratios": (len(order), len(few))}
            figure = Figure(figsize=size, layout="constrained")
            upper, lower = figure.subplots(**grid)
            _ratios(upper, tails, ratios, _rows(upper, order))
            _passkeys(lower, passkeys.records, max(passkeys.settings.lengths), _rows(lower, found))
            figure.suptitle(f"SmolLM2-135M: {tails.original:,} tokens by its config")
            figure.savefig(file, dpi=150, facecolor="white")


def _rows(axes: Axes, labels: Sequence[str]) -> dict[str, int]:
    """Return the height of each label, the first at the top, and write them at the axis."""
    rows = {label: -row for row, label in enumerate(labels)}
    axes.set_yticks(list(rows.values()), list(rows))
    axes.set_ylim(-len(rows) + 0.4, 0.6)
    return rows


def _ratios(
    axes: Axes, tails: PerplexityResult, ratios: Mapping[str, Cell], rows: Mapping[str, int]
) -> None:
    """Draw the ratio of every document as a dot, and the mean with its interval."""
    length = tails.settings.lengths[-1]
    loss = losses(tails.records, length)
    axes.axvline(1, color="black", linewidth=0.8)
    for label, row in rows.items():
        ratio = ratios[label].ratio or 1.0
        interval = ratios[label].ratio_interval
        if ratio > WIDEST:
            axes.annotate(f"{ratio:,.3g} →", (WIDEST, row), ha="right", va="center")
            continue
        each = np.exp(loss[label] - loss[TRUNCATION])
        axes.plot(each, [row] * len(each), "o", color=COLOURS[0], alpha=0.35, markersize=4)
        if interval is not None and label != TRUNCATION:
            axes.plot(interval, [row, row], color=COLOURS[0], linewidth=1.4)
        axes.plot([ratio], [row], "D", color=COLOURS[0], markersize=5)
    axes.set_xscale("log")
    ticks = (0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(0.55, WIDEST * 1.03)
    axes.set_xlabel(f"tail perplexity at {length:,} tokens / truncation's\n(left is better)")


def _passkeys(axes: Axes, records: Sequence[Record], length: int, rows: Mapping[str, int]) -> None:
    """Draw a square for every depth."""
    for record in records:
        if record.length == length and record.method in rows and record.depth is not None:
            colour = FOUND if record.correct else FIRST if record.rank == 1 else MISSED
            axes.plot([record.depth], [rows[record.method]], "s", color=colour, markersize=9)
    for method in {record.method for record in records} & set(rows):
        own = [r for r in records if r.method == method and r.length == length]
        found = sum(record.correct for record in own)
        axes.annotate(f"{found} of {len(own)}", (1.06, rows[method]), va="center")
    for label in set(rows) - {record.method for record in records}:
        axes.annotate("not measured", (0.0, rows[label]), va="center", color="grey")
    for colour, meaning in ((FOUND, "answered"), (FIRST, "first of 11"), (MISSED, "missed")):
        axes.plot([], [], "s", color=colour, label=meaning)
    place: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": 3}
    axes.legend(frameon=False, columnspacing=1, handletextpad=0.2, **place)
    axes.set_xlim(-0.06, 1.25)
    axes.set_xticks([0, 0.5, 1], ["at the front", "depth", "at the end"])
    axes.set_xlabel(f"passkeys in {length:,} tokens, by their place")
    axes.tick_params(left=False)


if __name__ == "__main__":
    main()
