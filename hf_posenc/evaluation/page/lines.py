"""The rows of a table that several results share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hf_posenc.evaluation.page.collect import Source
from hf_posenc.evaluation.page.numbers import Interval


@dataclass(frozen=True)
class Number:
    """One number of a table, as `hf_posenc.evaluation.statistics.Cell`, with a ratio to the table's baseline."""

    length: int
    perplexity: float
    interval: Interval | None
    ratio: float | None
    ratio_interval: Interval | None
    bits_per_byte: float | None
    tokens: int
    documents: int


@dataclass(frozen=True)
class Axes:
    """What the axes of a figure are made from."""

    lengths: tuple[int, ...]
    protocols: tuple[str, ...]
    tail_tokens: int


@dataclass
class Line:
    """One method of one result: a row of the table.

    Attributes:
        source: Where it was measured.
        also: Where else, with the very same numbers.
        name: The method's label in that result.
        label: Its label here, which no other row has: with the number of its result where several have it.
        method: The method's name; `None` for the model as it was loaded.
        numbers: By length.
        failures: Why there is no number, by length.
        baseline: The label of the row that its ratios are relative to; its own, if it is that row.
    """

    source: Source
    name: str
    label: str
    method: str | None
    also: list[Source] = field(default_factory=list)
    numbers: dict[int, Number] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    baseline: str = ""


@dataclass
class Merged:
    """The results of one protocol that are comparable; can be drawn like a `PerplexityResult`.

    Attributes:
        protocol: Its name.
        definition: Its sentence.
        sources: Where the numbers come from.
        lines: The rows.
        settings: Lengths and such, of all of them together.
        original: The context length that the model was trained on; `None` if unknown, or not the same.
        curve: Sums by position, where every result has them with the same edges.
    """

    protocol: str
    definition: str
    sources: list[Source]
    lines: list[Line]
    settings: Axes
    original: int | None
    curve: dict[str, Any] | None = None

    @property
    def candidates(self) -> list[Line]:
        """The rows, under the name that figures know."""
        return self.lines

    def cell(self, method: str, protocol: str, length: int, /) -> Number | None:
        """The number of a row at a length."""
        line = next(line for line in self.lines if line.label == method)
        return line.numbers.get(length)
