"""Figures as files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posenc.evaluation.files import replace_atomically
from hf_posenc.evaluation.plots.lengths import figure
from hf_posenc.evaluation.plots.style import STYLE, Measured, require

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_plot(result: Measured, *paths: Path) -> None:
    """Draws the result once and writes it to every path, in the format of its suffix.

    Raises:
        PosencError: matplotlib is not installed, or a file cannot be written.
    """
    require()
    write_figure(figure(result), *paths)


def write_figure(drawn: Figure, *paths: Path) -> None:
    """Writes a figure to every path, in the format of its suffix; each file is whole or as it was before.

    Raises:
        PosencError: A file cannot be written.
    """
    for path in paths:
        replace_atomically(path, lambda temporary: save(drawn, temporary))


def save(drawn: Figure, path: Path | Any, format: str | None = None) -> None:
    """Writes a figure so that the same figure gives the same file: no date, no random names.

    Args:
        drawn: The figure.
        path: A path, or an open file.
        format: `"svg"`, `"png"`, ...; by default the path's suffix.
    """
    import matplotlib as mpl

    kind = format or Path(path).suffix.removeprefix(".")
    metadata = {"Date": None} if kind == "svg" else None
    with mpl.rc_context(STYLE):
        drawn.savefig(path, format=kind, dpi=200, bbox_inches="tight", metadata=metadata)
