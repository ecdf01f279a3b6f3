"""Heat maps as tables: the numbers stand in the fields, so that colour is not the only thing that says them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_posenc.evaluation.page.collect import Source
from hf_posenc.evaluation.page.numbers import Shown, percent

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


def heats(methods: Sequence[tuple[Source, str]], names: Sequence[str], task: str) -> list[Heat]:
    """A map for every method of a task that has depths.

    Args:
        methods: Methods by their result and label.
        names: What they are called.
        task: The task.

    Returns:
        The maps, all of the same quantity: accuracy, or ranks where no answer of the task is right.
    """
    found = [
        [
            cell
            for cell in source.data.get("by_depth", ())
            if (cell["method"], cell["task"]) == (label, task) and cell["depth"] is not None
        ]
        for source, label in methods
    ]
    cells = [cell for own in found for cell in own]
    if not cells:
        return []
    ranked = all(cell["beaten"] is not None for cell in cells)
    beaten = ranked and not any(cell["accuracy"] for cell in cells)
    key = "beaten" if beaten else "accuracy"
    lengths = sorted({cell["length"] for cell in cells})
    depths = sorted({cell["depth"] for cell in cells})
    made = []
    for name, own in zip(names, found, strict=True):
        values = {(cell["depth"], cell["length"]): cell[key] for cell in own}
        rows = [
            (percent(depth).text, [_field(values, depth, length) for length in lengths])
            for depth in depths
        ]
        made.append(Heat(name, BEATEN if beaten else ACCURACY, lengths, rows))
    return made


def _field(own: Mapping[tuple[float, int], Any], depth: float, length: int) -> Field:
    share = own.get((depth, length))
    if share is None:
        return Field(None, 0)
    return Field(Shown(f"{100 * share:.0f}", repr(share)), round(100 * share))
