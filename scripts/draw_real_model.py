"""Draw the picture of docs/real_model.md and README.md from docs/data/real_model/: `python -m scripts.draw_real_model`.

Needs matplotlib (`pip install 'hf-posenc[plot]'`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hf_posenc.evaluation.measuring.candidates import TRUNCATION
from hf_posenc.evaluation.measuring.statistics import Cell, summarize
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.evaluation.plots import COLOURS, STYLE
from hf_posenc.evaluation.retrieval.result import Record
from scripts.results import REAL_MODEL, perplexity, retrieval

PICTURE = REAL_MODEL / "headline.png"
WIDEST = 2.0
"""The largest ratio on the axis; greater ones are written at its end."""
FOUND, FIRST, MISSED = COLOURS[2], "#a6d8c3", "#e3e3e3"
"""Colours of a passkey that is answered, of one that is only the most probable, and of one that is missed."""


def main() -> None:
    """Draw perplexity by that of truncation, and passkeys by depth, one row for each method."""
    tails = perplexity(REAL_MODEL / "tail-16k.json")
    passkeys = retrieval(REAL_MODEL / "passkey.json")
    length = tails.settings.lengths[-1]
    cells = summarize(tails.records, baseline=TRUNCATION)
    ratios = {cell.method: cell for cell in cells if cell.length == length}
    order = sorted(ratios, key=lambda label: ratios[label].perplexity)
    rows = {label: -row for row, label in enumerate(order)}
    with rc_context({**STYLE, "font.size": 9}):
        figure = Figure(figsize=(9.6, 1.5 + 0.34 * len(order)), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        _ratios(left, tails, ratios, rows)
        _passkeys(right, passkeys.records, max(passkeys.settings.lengths), rows)
        left.set_yticks(list(rows.values()), list(rows))
        left.set_ylim(-len(order) + 0.4, 0.6)
        name, trained = tails.model["name"], tails.original
        figure.suptitle(f"{name}: {trained:,} tokens by its config")
        figure.savefig(PICTURE, dpi=150, facecolor="white")


def _ratios(
    axes: Axes, tails: PerplexityResult, ratios: Mapping[str, Cell], rows: Mapping[str, int]
) -> None:
    """Draw the ratio of every document as a dot, and the mean with its interval."""
    length = tails.settings.lengths[-1]
    loss = {(r.method, r.document): r.nats / r.tokens for r in tails.records if r.length == length}
    documents = [document["name"] for document in tails.documents]
    axes.axvline(1, color="black", linewidth=0.8)
    for label, row in rows.items():
        ratio = ratios[label].ratio or 1.0
        interval = ratios[label].ratio_interval
        if ratio > WIDEST:
            axes.annotate(f"{ratio:,.3g} →", (WIDEST, row), ha="right", va="center")
            continue
        each = [math.exp(loss[label, name] - loss[TRUNCATION, name]) for name in documents]
        axes.plot(each, [row] * len(each), "o", color=COLOURS[0], alpha=0.35, markersize=4)
        if interval is not None and label != TRUNCATION:
            axes.plot(interval, [row, row], color=COLOURS[0], linewidth=1.4)
        axes.plot([ratio], [row], "D", color=COLOURS[0], markersize=5)
    axes.set_xscale("log")
    ticks = (0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(0.55, WIDEST * 1.03)
    axes.set_xlabel(f"perplexity at {length:,} tokens / truncation's\n(left is better)")


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
    for colour, meaning in ((FOUND, "answered"), (FIRST, "ranked first of 11"), (MISSED, "missed")):
        axes.plot([], [], "s", color=colour, label=meaning)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
    axes.set_xlim(-0.06, 1.25)
    axes.set_xticks([0, 0.5, 1], ["at the front", "depth", "at the end"])
    axes.set_xlabel(f"passkeys in {length:,} tokens, by their place")
    axes.tick_params(left=False)


if __name__ == "__main__":
    main()
