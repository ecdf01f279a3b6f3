"""Figure of `benchmark.py attention`: time and memory as ratios to plain causal attention."""

from __future__ import annotations

from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from hf_posenc.evaluation.plots import COLOURS, STYLE
from scripts.benchmark_attention import AGAIN, OTHERS, PLAIN

Results = dict[str, dict[str, dict[str, float]]]


def write(results: Results, *paths: Path) -> None:
    """Draw one row per situation and one mark per case, in a panel for time and one for peak memory.

    Args:
        results: By situation and case: "ratio", and "peak_ratio" where memory was measured.
        *paths: Files to write, each in the format of its suffix.
    """
    cases = list(dict.fromkeys(case for group in results.values() for case in group))
    cases = [case for case in cases if case not in (PLAIN, AGAIN)]
    # One colour per kind of encoding; hollow marks for its usual implementation.
    kinds = {case: COLOURS[i % len(COLOURS)] for i, case in enumerate(cases)}
    with rc_context(STYLE):
        figure = Figure(figsize=(9.5, 0.36 * len(results) + 1.6), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for panel, field in zip(panels, ("ratio", "peak_ratio"), strict=True):
            for case in cases:
                lower = 0.4 * (
                    cases.index(case) / max(1, len(cases) - 1) - 0.5
                )  # marks may coincide
                points = [
                    (group[case][field], row + lower)
                    for row, group in enumerate(results.values())
                    if field in group.get(case, {})
                ]
                face = "none" if case in OTHERS else kinds[case]
                marker = "D" if case in OTHERS else "o"
                x, y = zip(*points, strict=True) if points else ((), ())
                panel.scatter(
                    x,
                    y,
                    s=34,
                    marker=marker,
                    facecolors=face,
                    edgecolors=kinds[case],
                    label=case,
                    zorder=3,
                )
            panel.axvline(1, color="0.25", linewidth=1)
            panel.set_xscale("log")
        panels[0].set_xlabel("CPU time / plain causal attention")
        panels[1].set_xlabel("peak memory / plain causal attention")
        for panel, ticks in zip(
            panels,
            ((0.3, 0.5, 0.7, 1, 1.5, 3, 5, 10, 20), (1, 2, 4, 10, 30, 100, 300)),
            strict=True,
        ):
            panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            panel.minorticks_off()
        panels[0].set_yticks(range(len(results)), list(results))
        panels[0].invert_yaxis()
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        for path in paths:
            metadata = {"Date": None} if path.suffix == ".svg" else None
            figure.savefig(path, dpi=200, bbox_inches="tight", metadata=metadata)
