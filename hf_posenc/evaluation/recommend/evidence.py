"""Published evidence for methods without training: a digest of the tables in docs/data/published.json.

`python -m scripts.make_readme` writes evidence.json from these tables.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

TOLERANCE = 1.25
"""A method holds while its perplexity is at most this multiple of the unpatched model's at the trained length.

Our choice: the published numbers are either a few per cent above or many times as large.
"""


@dataclass(frozen=True)
class Evidence:
    """Evidence of one published row for a method: the table's name, and the model as printed.

    Attributes:
        held: The largest multiple of the trained length at which it held; 0: none.
        broke: The first multiple at which it did not; `None`: none in the table.
    """

    table: str
    model: str
    held: float
    broke: float | None


@functools.cache
def evidence_of(method: str) -> tuple[Evidence, ...]:
    """Return the published evidence for a method, by its canonical name; empty if there is none."""
    rows = json.loads(resources.files(__package__).joinpath("evidence.json").read_bytes())
    return tuple(Evidence(*row) for name, *row in rows if name == method)


def verdict(evidence: Sequence[Evidence], factor: float) -> int:
    """Return 1 if the method held at this multiple and never broke below it, -1 if it broke, else 0."""
    if any(one.broke is not None and one.broke <= factor for one in evidence):
        return -1
    return int(any(one.held >= factor for one in evidence))


def summary(evidence: Sequence[Evidence], factor: float) -> str:
    """Return the evidence in a few words, with the factor and the model of each measurement, and how far it reaches."""
    parts = []
    best = max(evidence, key=lambda one: one.held, default=None)
    if best is not None and best.held:
        parts.append(f"held at x{best.held:g} ({best.model}, {best.table})")
    worst = min(evidence, key=lambda one: one.broke or math.inf, default=None)
    if worst is not None and worst.broke is not None:
        parts.append(f"not at x{worst.broke:g} ({worst.model}, {worst.table})")
    elif best is not None and factor > best.held:
        parts.append(f"x{factor:.3g} is beyond what was measured")
    return f"published, untrained: {', '.join(parts) or 'nothing'}"
