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
from scripts import results
from scripts.results import at, losses, perplexity, retrieval, summary

WIDEST, TICKS = 2.0, (0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2)
"""The largest ratio on the axis, greater ones are written at its end; and the ratios at the ticks."""
FOUND = {"answered": COLOURS[2], "first of 11": "#a6d8c3", "missed": "#e3e3e3"}
"""Colours of a passkey that is answered, of one that is only the most probable, and of one that is missed."""


def main() -> None:
    """Draw perplexity by that of truncation, and passkeys by depth, one row for each method."""
    folder = results.REAL_MODEL
    tails, found = perplexity(folder / "tail-16k.json"), retrieval(folder / "passkey.json")
    length, longest = tails.settings.lengths[-1], max(found.settings.lengths)
    cells = summary(r for r in tails.records if r.protocol == "tail")
    ratios = pandas.concat(
        [at(cells, "tail", length, c) for c in ("ratio", "ratio_interval")], axis=1
    )
    ratios = ratios.sort_values("ratio")
    keys = pandas.DataFrame(map(vars, found.records)).query("length == @longest")
    few = [label for label in ratios.index if label in set(keys.method)]
    each = np.exp(losses(tails.records, length).apply(lambda loss: loss - loss[TRUNCATION], axis=1))
    wide: dict[str, Any] = {"ncols": 2, "sharey": True}
    narrow: dict[str, Any] = {"nrows": 2, "height_ratios": (len(ratios), len(few))}
    with rc_context({**STYLE, "font.size": 9}):
        for name, labels, size, grid in (
            ("headline", list(ratios.index), (9.6, 1.5 + 0.34 * len(ratios)), wide),
            ("headline-narrow", few, (4.8, 2.4 + 0.34 * (len(ratios) + len(few))), narrow),
        ):
            figure = Figure(figsize=size, layout="constrained")
            upper, lower = figure.subplots(**grid)
            draw_ratios(upper, ratios, each, length)
            draw_passkeys(lower, keys, labels, longest)
            figure.suptitle(f"SmolLM2-135M: {tails.original:,} tokens by its config")
            figure.savefig(folder / f"{name}.png", dpi=150, facecolor="white")


def draw_ratios(axes: Axes, ratios: Any, each: Any, length: int) -> None:
    """Draw the ratio of every document as a dot, and the mean with its interval."""
    axes.axvline(1, color="black", linewidth=0.8)
    for row, (label, ratio, interval) in enumerate(ratios.itertuples()):
        if ratio > WIDEST:
            axes.annotate(f"{ratio:,.3g} →", (WIDEST, row), ha="right", va="center")
            continue
        axes.plot(each[label], [row] * len(each), "o", color=COLOURS[0], alpha=0.35, markersize=4)
        axes.plot(interval, [row, row], color=COLOURS[0], linewidth=1.4)
        axes.plot([ratio], [row], "D", color=COLOURS[0], markersize=5)
    name_rows(axes, list(ratios.index))
    axes.set_xscale("log")
    axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.minorticks_off()
    axes.set_xlim(0.55, WIDEST * 1.03)
    axes.set_xlabel(f"tail perplexity at {length:,} tokens / truncation's\n(left is better)")


def draw_passkeys(axes: Axes, keys: Any, labels: list[str], length: int) -> None:
    """Draw a square for every depth."""
    for row, label in enumerate(labels):
        own = keys[keys.method == label]
        colours = [
            *map(FOUND.get, np.select([own.correct, own["rank"] == 1], list(FOUND)[:2], "missed"))
        ]
        axes.scatter(own.depth, [row] * len(own), s=81, marker="s", c=colours)
        count = f"{own.correct.sum()} of {len(own)}"
        place, text = ((1.06, row), count) if len(own) else ((0.0, row), "not measured")
        axes.annotate(text, place, va="center", color="black" if len(own) else "grey")
    for meaning, colour in FOUND.items():
        axes.plot([], [], "s", color=colour, label=meaning)
    place: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": 3}
    axes.legend(frameon=False, columnspacing=1, handletextpad=0.2, **place)
    name_rows(axes, labels)
    axes.set_xlim(-0.06, 1.25)
    axes.set_xticks([0, 0.5, 1], ["at the front", "depth", "at the end"])
    axes.set_xlabel(f"passkeys in {length:,} tokens, by their place")
    axes.tick_params(left=False)


def name_rows(axes: Axes, labels: list[str]) -> None:
    """Write the labels at the axis, the first at the top."""
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)


if __name__ == "__main__":
    main()
