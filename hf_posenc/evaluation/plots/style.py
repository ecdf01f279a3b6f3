"""How figures look: colours, markers and dashes by method, and what a result must have to be drawn."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hf_posenc.errors import PosencError

# Okabe and Ito's colours, told apart by every common kind of colour blindness; a violet and an olive instead of
# their pale yellow.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F3C8D", "#999933")
BASELINE = "#222222"
CONTROL_COLOUR = "#888888"
REMARK = "#666666"
GRID = "#e6e6e6"
CONTROL = "sliding_window"
MARKERS = "osD^vP*X<>"
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.5)))
LABEL_SIZE = 7.5
MAX_BANDS = 4
"""Up to so many lines are drawn with their intervals; more hide each other."""

STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "hf_posenc",  # the same result gives the same file
    "text.parse_math": False,  # a name is no formula, whatever it contains
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
}


class Named(Protocol):
    """A method of a result: `label`, as reports show it, and `method`, its name; `None` for the model as loaded."""

    @property
    def label(self) -> str: ...
    @property
    def method(self) -> str | None: ...


class Point(Protocol):
    """One number of a table, as `hf_posenc.evaluation.statistics.Cell`."""

    @property
    def length(self) -> int: ...
    @property
    def perplexity(self) -> float: ...
    @property
    def interval(self) -> tuple[float, float] | None: ...
    @property
    def ratio(self) -> float | None: ...
    @property
    def ratio_interval(self) -> tuple[float, float] | None: ...


class Axis(Protocol):
    """What the axes of a figure are made from, as `hf_posenc.evaluation.protocols.Settings`."""

    @property
    def lengths(self) -> tuple[int, ...]: ...
    @property
    def protocols(self) -> tuple[str, ...]: ...
    @property
    def tail_tokens(self) -> int: ...


class Measured(Protocol):
    """What can be drawn: a `PerplexityResult`, or several of them put together."""

    @property
    def settings(self) -> Axis: ...
    @property
    def original(self) -> int | None: ...
    @property
    def candidates(self) -> Sequence[Named]: ...
    @property
    def curve(self) -> Mapping[str, Any] | None: ...
    def cell(self, method: str, protocol: str, length: int, /) -> Point | None: ...


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def require() -> None:
    """Makes sure of matplotlib.

    Raises:
        PosencError: It is not installed.
    """
    if not available():
        raise PosencError("The plot needs matplotlib: pip install 'hf-posenc[plot]'.")


def looks(candidates: Sequence[Named]) -> list[dict[str, Any]]:
    """How each line is drawn: a colour per method, dashes where it comes again or is dynamic, the control grey."""
    seen: dict[str, int] = {}
    drawn = []
    for index, candidate in enumerate(candidates):
        look: dict[str, Any] = {"color": BASELINE, "linestyle": "-"}
        if candidate.method == CONTROL:
            look["color"] = CONTROL_COLOUR
        elif candidate.method is not None:
            name = candidate.method.removeprefix("dynamic_")
            again = seen[name] = seen.get(name, -1) + 1
            place = list(seen).index(name)
            look["color"] = COLOURS[place % len(COLOURS)]
            look["linestyle"] = DASHES[(place // len(COLOURS) + again) % len(DASHES)]
        drawn.append({**look, "marker": MARKERS[index % len(MARKERS)]})
    return drawn
