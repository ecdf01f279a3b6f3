"""Figures of measurements, for papers, notebooks and the report. Needs matplotlib (`pip install hf-posenc[plot]`).

Every function takes a result, or plain data of one, and returns a matplotlib `Figure`. Files, notebooks and the HTML
page show the same figures.
"""

from hf_posenc.evaluation.plots.perplexity import (
    difference_figure,
    figure,
    position_figure,
    ratio_figure,
    write_plot,
)
from hf_posenc.evaluation.plots.style import (
    COLOURS,
    CONTROL,
    STYLE,
    available,
    require,
    save,
    spread,
    write_figure,
)

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
