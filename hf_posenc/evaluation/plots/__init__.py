"""Figures of measurements, for papers, notebooks and the report. Needs matplotlib (`pip install hf-posenc[plot]`).

Every function takes a result object and gives a matplotlib `Figure`, so the same picture stands in a file, in a
notebook and in the HTML page.
"""

from hf_posenc.evaluation.plots.perplexity import (
    difference_figure,
    figure,
    position_figure,
    ratio_figure,
    save,
    write_figure,
    write_plot,
)
from hf_posenc.evaluation.plots.style import COLOURS, CONTROL, STYLE, available, require, spread

__all__ = [
    "COLOURS",
    "CONTROL",
    "STYLE",
    "available",
    "difference_figure",
    "figure",
    "position_figure",
    "ratio_figure",
    "require",
    "save",
    "spread",
    "write_figure",
    "write_plot",
]
