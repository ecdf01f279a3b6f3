"""Heat maps as tables: the numbers stand in the fields, so that colour is not the only thing that says them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_posenc.evaluation.page.collect import Source
from hf_posenc.evaluation.page.numbers import Shown

ACCURACY = "share of answers that are right"
BEATEN = "share of distractors that are less probable than the answer (one half by chance)"


@dataclass(frozen=True)
class Field:
    """One field: its number, `None` where there is none, and how much of the colour it has, in percent."""

    value: Shown | None
    colour: int


@dataclass(frozen=True)
class Heat:
    """One method's map.

    Attributes:
        name: The method.
        value: What its numbers are.
        lengths: The columns.
        rows: Depth in percent, and the fields.
    """

    name: str
    value: str
    lengths: Sequence[int]
    rows: Sequence[tuple[str, Sequence[Field]]]


def heats(sources: Sequence[Source], task: str, several: bool) -> list[Heat]:
    """A map for every method of a task that has depths.

    Args:
        sources: Comparable retrieval results.
        task: The task.
        several: Whether names say which result they are from.

    Returns:
        The maps, all of the same quantity: accuracy, or ranks where no answer of the task is right.
    """
    cells = [
        (source, cell)
        for source in sources
        for cell in source.data.get("by_depth", ())
        if cell["task"] == task and cell["depth"] is not None
    ]
    if not cells:
        return []
    ranked = all(cell["beaten"] is not None for _, cell in cells)
    beaten = ranked and not any(cell["accuracy"] for _, cell in cells)
    key = "beaten" if beaten else "accuracy"
    lengths = sorted({cell["length"] for _, cell in cells})
    depths = sorted({cell["depth"] for _, cell in cells})
    made = []
    for source in sources:
        for method in source.data["methods"]:
            label = method["label"]
            own = {
                (cell["depth"], cell["length"]): cell[key]
                for origin, cell in cells
                if origin is source and cell["method"] == label
            }
            rows = [(f"{depth:.0%}", [_field(own, depth, n) for n in lengths]) for depth in depths]
            name = f"{label} [{source.number}]" if several else label
            made.append(Heat(name, BEATEN if beaten else ACCURACY, lengths, rows))
    return made


def _field(own: Mapping[tuple[float, int], Any], depth: float, length: int) -> Field:
    share = own.get((depth, length))
    if share is None:
        return Field(None, 0)
    return Field(Shown(f"{100 * share:.0f}", repr(share)), round(100 * share))
