"""The look, the files and the command line of the pictures that the scripts draw.

Needs matplotlib (`pip install 'hf-posenc[plot]'`).
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from PIL import Image

from hf_posenc.evaluation.plots import STYLE

Draw = Callable[[Figure], None]
Pictures = Mapping[str, Draw]
Sizes = Mapping[str, tuple[float, float]]
SIZE, DPI = (6.0, 3.5), 120
"""The usual size of a picture in inches, and its pixels per inch: 720 wide, and readable at 600 and less."""
LOOK: Any = {
    **STYLE,
    "font.size": 10.5,
    "axes.titlesize": 10.5,
    "legend.fontsize": 10,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}
SMALL = 9.5
"""The size of remarks in points; nothing is smaller."""
SHADES = 128
"""Colours of a file, which is then a third as large."""


def draw(names: list[str], folder: Path, pictures: Pictures, sizes: Sizes) -> list[Path]:
    """Write `NAME.png` for every name, in the size given for it or in the usual one."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with rc_context(LOOK):
        for name in names:
            figure = Figure(figsize=sizes.get(name, SIZE), layout="constrained")
            pictures[name](figure)
            written.append(folder / f"{name}.png")
            figure.savefig(drawn := io.BytesIO(), dpi=DPI)
            small = Image.open(drawn).convert("RGB").quantize(SHADES)
            small.save(written[-1], "PNG", optimize=True)
    return written


def main(doc: str | None, pictures: Pictures, sizes: Sizes, folder: Path) -> None:
    """Draw the pictures that the command line names, by default all."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(pictures)}")
    parser.add_argument("--folder", type=Path, default=folder)
    given = parser.parse_args()
    wrong = [name for name in given.names if name not in pictures]
    if wrong:
        sys.exit(f"No picture {wrong[0]!r}. There are: {', '.join(pictures)}.")
    for path in draw(given.names or list(pictures), given.folder, pictures, sizes):
        print(path)
