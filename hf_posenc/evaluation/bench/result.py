"""The result of a benchmark."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posenc.evaluation.bench.pooled import pooled
from hf_posenc.evaluation.bench.speed_result import SpeedResult
from hf_posenc.evaluation.files import finite, to_csv, to_json, write_atomically
from hf_posenc.evaluation.result import PerplexityResult
from hf_posenc.evaluation.retrieval import RetrievalResult
from hf_posenc.evaluation.statistics import Cell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT = 1
_OF_PROTOCOL = (
    *("perplexity", "perplexity_low", "perplexity_high"),
    *("difference", "difference_low", "difference_high", "status"),
)
_OF_RETRIEVAL = (
    *("samples", "accuracy", "accuracy_low", "accuracy_high", "first", "first_low", "first_high"),
    *("chance", "status"),
)
_OF_SPEED = ("tokens_per_second", "lowest", "highest", "ratio", "peak_bytes", "status")


@dataclass(repr=False)
class BenchResult:
    """What `hf-posenc bench` measured.

    Attributes:
        perplexity: Perplexities by method, protocol and length, and what they were measured on.
        retrieval: What was found in prompts of the same lengths; `None` where that was not measured.
        speed: The timed prefill at the longest length; `None` where that was not measured.
        suite: The suite's name.
        compare: Published tables to show beside it, by their names.
        remarks: What a reader must know of what was left out.
    """

    perplexity: PerplexityResult
    retrieval: RetrievalResult | None
    speed: SpeedResult | None
    suite: str
    compare: Sequence[str] = ()
    remarks: Sequence[str] = ()

    def __repr__(self) -> str:
        return f"BenchResult({self.suite}, {self.perplexity!r})"

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON-ready values. All but `speed` is the same whenever the same is measured again."""
        values = {
            "format": FORMAT,
            "kind": "bench",
            "suite": self.suite,
            "compare": list(self.compare),
            "remarks": list(self.remarks),
            "perplexity": self.perplexity.to_dict(),
            "retrieval": None if self.retrieval is None else self.retrieval.to_dict(),
            "speed": None if self.speed is None else self.speed.to_dict(),
        }
        made: dict[str, Any] = finite(values)
        return made

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BenchResult:
        """Reads what `to_dict` wrote."""
        retrieval, speed = values["retrieval"], values["speed"]
        return cls(
            perplexity=PerplexityResult.from_dict(values["perplexity"]),
            retrieval=None if retrieval is None else RetrievalResult.from_dict(retrieval),
            speed=None if speed is None else SpeedResult.from_dict(speed),
            suite=values["suite"],
            compare=tuple(values["compare"]),
            remarks=tuple(values["remarks"]),
        )

    def plot(self) -> Figure:
        """Perplexity by position in the text, where `prefix` was measured, else by length; needs matplotlib."""
        from hf_posenc.evaluation.plots import position_figure

        return (
            position_figure(self.perplexity) if self.perplexity.curves else self.perplexity.plot()
        )

    def heatmap(self) -> Figure | None:
        """Retrieval by length and depth of the needle, where it was measured; needs matplotlib."""
        return None if self.retrieval is None else self.retrieval.plot()

    def _repr_html_(self) -> str:
        from hf_posenc.evaluation.bench.report import to_html

        return to_html(self)

    def _repr_markdown_(self) -> str:
        from hf_posenc.evaluation.bench.markdown import to_markdown

        return to_markdown(self)

    def write(self, folder: Path, *, plots: bool = True) -> list[str]:
        """Writes bench.json, bench.csv, table.md and the figures, each whole or not at all.

        Args:
            folder: Where to.
            plots: Whether to draw curve.png and heatmap.png, which needs matplotlib.

        Returns:
            The names of the files.

        Raises:
            PosencError: A file cannot be written, or matplotlib is not installed.
        """
        from hf_posenc.evaluation.plots import write_figure

        write_atomically(folder / "bench.json", to_json(self.to_dict()))
        write_atomically(folder / "bench.csv", self._csv())
        write_atomically(folder / "table.md", self._repr_markdown_())
        written = ["bench.json", "bench.csv", "table.md"]
        for name, figure in (("curve.png", self.plot), ("heatmap.png", self.heatmap)):
            drawn = figure() if plots else None
            if drawn is not None:
                write_figure(drawn, folder / name)
                written.append(name)
        return written

    def _csv(self) -> str:
        """A row for each method and length: perplexities of all protocols, retrieval, and speed at the longest."""
        protocols = self.perplexity.settings.protocols
        columns = ["method", "length", "scale"]
        for prefix, names in (
            *((protocol, _OF_PROTOCOL) for protocol in protocols),
            ("retrieval", _OF_RETRIEVAL),
            ("speed", _OF_SPEED),
        ):
            columns += [f"{prefix}_{name}" for name in names]
        rows = []
        for entry in self.perplexity.candidates:
            for length in self.perplexity.settings.lengths:
                row: dict[str, Any] = {
                    "method": entry.label,
                    "length": length,
                    "scale": entry.scale_at(length),
                }
                for protocol in protocols:
                    row |= _prefixed(protocol, self._of_protocol(entry.label, protocol, length))
                row |= _prefixed("retrieval", self._of_retrieval(entry.label, length))
                row |= _prefixed("speed", self._of_speed(entry.label, length))
                rows.append(row)
        return to_csv(columns, rows)

    def _of_protocol(self, method: str, protocol: str, length: int) -> dict[str, Any]:
        cell = self.perplexity.cell(method, protocol, length)
        if cell is None:
            return {"status": self.perplexity.failure(method, protocol, length)}
        low, high = cell.interval or (None, None)
        values = (cell.perplexity, low, high, *difference(cell))
        status = "ok" if math.isfinite(cell.nats) else "not finite"
        return dict(zip(_OF_PROTOCOL, (*values, status), strict=True))

    def _of_retrieval(self, method: str, length: int) -> dict[str, Any]:
        if self.retrieval is None:
            return {}
        found = pooled(self.retrieval, method, lengths=[length])
        if found.cell is None:
            return {"status": found.failure}
        cell = found.cell
        first = cell.first_interval or (None, None)
        values = (cell.samples, cell.accuracy, *cell.interval, cell.first, *first, cell.chance)
        return dict(zip(_OF_RETRIEVAL, (*values, "ok"), strict=True))

    def _of_speed(self, method: str, length: int) -> dict[str, Any]:
        if self.speed is None or length != self.speed.length:
            return {}
        cell = self.speed.cell(method)
        values = {name: getattr(cell, name) for name in _OF_SPEED[:-1]}
        return {**values, "status": cell.failed or "ok"}


def difference(cell: Cell) -> tuple[float | None, float | None, float | None]:
    """A cell's mean loss less the baseline's, in nats per token, and the ends of its paired interval."""
    low, high = cell.ratio_interval or (None, None)
    return _log(cell.ratio), _log(low), _log(high)


def _log(ratio: float | None) -> float | None:
    if ratio is None:
        return None
    return math.log(ratio) if ratio > 0 else -math.inf


def _prefixed(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}_{name}": value for name, value in values.items()}
