"""Draw the picture of docs/evidence.md and README.md from docs/data/real_model/: `python -m scripts.draw_real_model`.

Needs matplotlib (`pip install 'hf-posenc[plot]'`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hf_posenc.evaluation.measuring.candidates import TRUNCATION
from hf_posenc.evaluation.plots import COLOURS, STYLE
from scripts.headline import DYNAMIC, PASSKEY
from scripts.results import REAL_MODEL, losses, perplexity, retrieval, summary

WIDEST, TICKS = 2.0, (0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2)
"""The largest ratio on the axis, greater ones are written at its end; and the ratios at the ticks."""
FOUND = {"answered": COLOURS[2], "first of 11": "#a6d8c3", "missed": "#e3e3e3"}
"""Colours of a passkey that is answered, of one that is only the most probable, and of one that is missed."""
LEGEND: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": 3}


def main() -> None:
    """Draw perplexity by that of truncation, and passkeys by depth, one row for each method."""
    tails = perplexity(REAL_MODEL / "tail-16k.json")
    ratios = summary(tails.records).query("length == length.max()").sort_values("ratio")
    records = [vars(each) for file in (PASSKEY, DYNAMIC) for each in retrieval(file).records]
    keys = pandas.DataFrame(records).query("length == length.max()")
    labels, loss = [*ratios.method], losses(tails.records, max(tails.settings.lengths))
    each = np.exp(loss.sub(loss[TRUNCATION], axis=0))
    few = [label for label in labels if label in {*keys.method}]
    shapes: dict[str, Any] = {
        "headline": ((9.6, 1.5 + 0.34 * len(labels)), labels, {"ncols": 2, "sharey": True}),
    }
    stacked = {"nrows": 2, "height_ratios": (len(labels), len(few))}
    shapes["headline-narrow"] = ((4.8, 2.4 + 0.34 * len(labels + few)), few, stacked)
    with rc_context({**STYLE, "font.size": 9}):
        for name, (size, found_by, grid) in shapes.items():
            figure = Figure(figsize=size, layout="constrained")
            upper, lower = figure.subplots(**grid)
            draw_ratios(name_rows(upper, labels), ratios, each)
            draw_passkeys(name_rows(lower, found_by), keys, found_by)
            figure.suptitle(f"SmolLM2-135M: {tails.original:,} tokens by its config")
            figure.savefig(REAL_MODEL / f"{name}.png", dpi=150, facecolor="white")


def name_rows(axes: Axes, labels: list[str]) -> Axes:
    """Write the labels at the axis, the first at the top."""
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    return axes


def draw_ratios(axes: Axes, ratios: Any, each: Any) -> None:
    """Draw the ratio of every document as a dot, and the mean with its interval."""
    axes.axvline(1, color="black", linewidth=0.8)
    for row, cell in enumerate(ratios.itertuples()):
        if cell.ratio > WIDEST:
            axes.annotate(f"{cell.ratio:,.3g} →", (WIDEST, row), ha="right", va="center")
            continue
        axes.plot(
            each[cell.method], [row] * len(each), "o", color=COLOURS[0], alpha=0.35, markersize=4
        )
        axes.plot(cell.ratio_interval, [row, row], color=COLOURS[0], linewidth=1.4)
        axes.plot([cell.ratio], [row], "D", color=COLOURS[0], markersize=5)
    axes.set_xscale("log")
    axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.minorticks_off()
    axes.set_xlim(0.55, WIDEST * 1.03)
    length = ratios.length.max()
    axes.set_xlabel(f"tail perplexity at {length:,} tokens / truncation's\n(left is better)")


def draw_passkeys(axes: Axes, keys: Any, labels: list[str]) -> None:
    """Draw a square for every depth."""
    for row, label in enumerate(labels):
        own = keys[keys.method == label]
        kinds = np.select([own.correct, own["rank"] == 1], [*FOUND][:2], "missed")
        axes.scatter(
            own.depth, [row] * len(own), s=81, c=[FOUND[k] for k in kinds], marker="s", zorder=3
        )
        count = f"{own.correct.sum()} of {len(own)}" if len(own) else "not measured"
        colour = "black" if len(own) else "grey"
        axes.annotate(count, (1.06 if len(own) else 0.0, row), va="center", color=colour)
    for meaning, colour in FOUND.items():
        axes.plot([], [], "s", color=colour, label=meaning)
    axes.legend(frameon=False, columnspacing=1, handletextpad=0.2, **LEGEND)
    axes.set_xlim(-0.06, 1.25)
    axes.set_xticks([0, 0.5, 1], ["at the front", "depth", "at the end"])
    axes.set_xlabel(f"passkeys in {keys.length.max():,} tokens, by their place")
    axes.tick_params(left=False)


if __name__ == "__main__":
    main()
