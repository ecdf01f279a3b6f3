"""The figures under their first name; `hf_posenc.evaluation.plots` has them all."""

from hf_posenc.evaluation.plots import (
    COLOURS,
    CONTROL,
    STYLE,
    available,
    difference_figure,
    figure,
    position_figure,
    ratio_figure,
    save,
    spread,
    write_plot,
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
    "save",
    "spread",
    "write_plot",
]
