"""What the timed prefills say of every method."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class SpeedCell:
    """The speed and the memory of a method.

    Attributes:
        method: Its label.
        tokens_per_second: Tokens of the window by the median of the seconds of all rounds; `None` where it failed.
        lowest: Of the slowest round.
        highest: Of the fastest round.
        ratio: Times as fast as the first method: the median over the rounds, both of the same round.
        peak_bytes: The largest peak of memory; `None` where it cannot be told.
        prefill: Tokens that were run at a time; `None`: all.
        failed: Why there is no number.
    """

    method: str
    tokens_per_second: float | None = None
    lowest: float | None = None
    highest: float | None = None
    ratio: float | None = None
    peak_bytes: int | None = None
    prefill: int | None = None
    failed: str | None = None


@dataclass
class SpeedResult:
    """The prefill of one window, timed under every method in turn, several times over.

    Attributes:
        length: Tokens of the window.
        device: What ran it.
        threads: Threads of a CPU.
        memory: What `peak_bytes` is.
        methods: Labels, the baseline first.
        rounds: For each round and method seconds, peak and tokens at a time, or why it failed.
        cells: What follows from it, in the order of the methods.
    """

    length: int
    device: str
    threads: int | None
    memory: str | None
    methods: Sequence[str]
    rounds: Sequence[Mapping[str, Mapping[str, Any]]]
    cells: list[SpeedCell] = field(init=False)

    def __post_init__(self) -> None:
        self.cells = [self._cell(label) for label in self.methods]

    def cell(self, method: str) -> SpeedCell:
        """That of a method."""
        return self.cells[list(self.methods).index(method)]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {
            "length": self.length,
            "device": self.device,
            "threads": self.threads,
            "memory": self.memory,
            "methods": list(self.methods),
            "rounds": [
                {label: dict(values) for label, values in made.items()} for made in self.rounds
            ],
            "summary": [asdict(cell) for cell in self.cells],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SpeedResult:
        """Reads what `to_dict` wrote; the summary is made anew from the rounds."""
        return cls(**{name: value for name, value in values.items() if name != "summary"})

    def _cell(self, label: str) -> SpeedCell:
        mine = [made[label] for made in self.rounds]
        failed = next((values["failed"] for values in mine if "failed" in values), None)
        if failed is not None or not mine:
            return SpeedCell(label, failed=failed or "not measured")
        seconds = [values["seconds"] for values in mine]
        first = [made[self.methods[0]] for made in self.rounds]
        ratio = None
        if not any("failed" in values for values in first):
            pairs = zip(first, mine, strict=True)
            ratio = statistics.median(theirs["seconds"] / own["seconds"] for theirs, own in pairs)
        peaks = [values["peak_bytes"] for values in mine]
        pieces = [values["prefill"] for values in mine if values["prefill"] is not None]
        return SpeedCell(
            label,
            tokens_per_second=self.length / statistics.median(seconds),
            lowest=self.length / max(seconds),
            highest=self.length / min(seconds),
            ratio=ratio,
            peak_bytes=None if None in peaks else max(peaks),
            prefill=min(pieces, default=None),
        )
