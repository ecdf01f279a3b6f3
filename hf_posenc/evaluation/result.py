"""The result of a perplexity run, with everything that is needed to tell whether two results may be compared."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posenc.evaluation.candidates import Candidate
from hf_posenc.evaluation.documents import Skipped
from hf_posenc.evaluation.files import finite, to_csv, to_json, write_atomically
from hf_posenc.evaluation.items import edges
from hf_posenc.evaluation.perplexity import Failure, Measurement
from hf_posenc.evaluation.protocols import Settings
from hf_posenc.evaluation.statistics import Cell, Record, summarize

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT = 2
COLUMNS = (
    *("method", "protocol", "length", "scale"),
    *("perplexity", "perplexity_low", "perplexity_high", "ratio", "ratio_low", "ratio_high"),
    *(
        "bits_per_byte",
        "word_perplexity",
        "nats",
        "tokens",
        "bytes",
        "words",
        "documents",
        "status",
    ),
)
"""The columns of the CSV."""


@dataclass(frozen=True)
class MethodEntry:
    """A candidate as a result knows it.

    Attributes:
        label: As reports show it.
        spec: As it was given to `--patch`.
        method: Its method's name, several joined by `+`; `None` for the model as loaded.
        parts: Each method with its options.
        beside: What `patch_model` got beside them.
        scale: As given; `None` for none.
        auto_scale: Whether the scale is length / original length, anew at every length.
        original: The original length in tokens that a scale refers to.
        prefix_from_one_forward: Whether one forward at the longest length gave the prefix of every length.
    """

    label: str
    spec: str
    method: str | None
    parts: Sequence[Mapping[str, Any]]
    beside: Mapping[str, Any]
    scale: float | None
    auto_scale: bool
    original: int | None
    prefix_from_one_forward: bool

    @classmethod
    def of(cls, candidate: Candidate, shared: bool) -> MethodEntry:
        """What a result keeps of a candidate."""
        parts = () if candidate.request is None else candidate.request.parts
        return cls(
            candidate.label,
            candidate.spec,
            candidate.method,
            [{"method": part.method, "options": dict(part.options)} for part in parts],
            {} if candidate.request is None else dict(candidate.request.beside),
            candidate.scale,
            candidate.auto_scale,
            candidate.original,
            shared,
        )

    def scale_at(self, length: int) -> float | None:
        """The scale in force at a length."""
        if self.auto_scale and self.original:
            return max(1.0, length / self.original)
        return self.scale


@dataclass(repr=False)
class PerplexityResult:
    """What `hf-posenc perplexity` measured.

    Attributes:
        model: What was measured: name, class, dtype, attention backend, tokenizer hash, ... (`describe_model`).
        source: Where the documents came from, as it was asked for.
        settings: Protocols, lengths and the other numbers.
        original: The context length that the model was trained on, in tokens, where it is known.
        candidates: The methods, in the order of the table.
        documents: The documents that were used, each with its hashes and its number of tokens, bytes and words.
        skipped: Those that were not, and why.
        records: Sums per method, protocol, length and document.
        failures: Cells without a number.
        curves: For each method's label, nats and tokens of every bucket of the longest prefix.
        head_replay: How the scorer's probe compared with full logits.
        environment: Versions of the packages that computed.
        command: What gives this result again.
        fingerprint: Of everything that determines a number; the records lie under it.
        cells: The numbers of the table, made from the records.
    """

    model: dict[str, Any]
    source: dict[str, Any]
    settings: Settings
    original: int | None
    candidates: Sequence[MethodEntry]
    documents: Sequence[Mapping[str, Any]]
    skipped: Sequence[Skipped]
    records: Sequence[Record]
    failures: Sequence[Failure]
    curves: dict[str, tuple[list[float], list[int]]] = field(default_factory=dict)
    head_replay: str = "off"
    environment: dict[str, Any] = field(default_factory=dict)
    command: str | None = None
    fingerprint: str | None = None
    cells: list[Cell] = field(init=False)

    def __post_init__(self) -> None:
        settings = self.settings
        self.cells = summarize(
            self.records,
            seed=settings.seed,
            resamples=settings.resamples,
            aggregate=settings.aggregate,
            base=settings.base,
            baseline=self.candidates[0].label if self.candidates else None,
        )
        self._by_key = {(c.method, c.protocol, c.length): c for c in self.cells}

    @classmethod
    def of(
        cls, measured: Measurement, candidates: Sequence[Candidate], **known: Any
    ) -> PerplexityResult:
        """Puts a measurement together with what is known about it.

        Args:
            measured: The numbers.
            candidates: The methods.
            **known: The other fields.
        """
        return cls(
            candidates=[MethodEntry.of(c, measured.shared_prefix[c.label]) for c in candidates],
            records=measured.records,
            failures=measured.failures,
            curves=measured.curves,
            head_replay=measured.head_replay,
            **known,
        )

    def cell(self, method: str, protocol: str, length: int) -> Cell | None:
        """The number of a method under a protocol at a length; `None` where it could not be measured."""
        return self._by_key.get((method, protocol, length))

    def failure(self, method: str, protocol: str, length: int) -> str | None:
        """Why there is no number."""
        key = (method, protocol, length)
        found = (f.reason for f in self.failures if (f.method, f.protocol, f.length) == key)
        return next(found, None)

    def not_finite(self) -> list[Cell]:
        """The cells whose loss was not a finite number."""
        return [cell for cell in self.cells if not math.isfinite(cell.nats)]

    def __repr__(self) -> str:
        methods = ", ".join(entry.label for entry in self.candidates)
        return f"PerplexityResult({methods}; {len(self.documents)} documents, lengths {list(self.settings.lengths)})"

    @property
    def curve(self) -> dict[str, Any]:
        """Losses by position in the longest prefix: where the buckets begin and end, and each method's sums."""
        methods = {
            label: {"nats": nats, "tokens": tokens} for label, (nats, tokens) in self.curves.items()
        }
        return {
            "edges": edges(self.settings.lengths[-1], self.settings.buckets),
            "methods": methods,
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON-ready values; a number that is not finite becomes `None`."""
        settings = self.settings
        values = {
            "format": FORMAT,
            "kind": "perplexity",
            "command": self.command,
            "fingerprint": self.fingerprint,
            "model": self.model,
            "original_max_position_embeddings": self.original,
            "protocols": {name: settings.definition(name) for name in settings.protocols},
            "settings": settings.to_dict(),
            "environment": self.environment,
            "head_replay": self.head_replay,
            "methods": [dataclasses.asdict(entry) for entry in self.candidates],
            "source": self.source,
            "documents": list(self.documents),
            "skipped": [dataclasses.asdict(skipped) for skipped in self.skipped],
            "summary": [dataclasses.asdict(cell) for cell in self.cells],
            "failures": [dataclasses.asdict(failure) for failure in self.failures],
            "curve": self.curve,
            "records": [dataclasses.asdict(record) for record in self.records],
        }
        made: dict[str, Any] = finite(values)
        return made

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PerplexityResult:
        """Reads what `to_dict` wrote; the summary is made anew from the records."""
        curves = {
            label: ([_number(loss) for loss in curve["nats"]], list(curve["tokens"]))
            for label, curve in values["curve"]["methods"].items()
        }
        return cls(
            model=dict(values["model"]),
            source=dict(values["source"]),
            settings=Settings.from_dict(values["settings"]),
            original=values["original_max_position_embeddings"],
            candidates=[MethodEntry(**entry) for entry in values["methods"]],
            documents=list(values["documents"]),
            skipped=[Skipped(**entry) for entry in values["skipped"]],
            records=[
                Record(
                    **{
                        **entry,
                        "nats": _number(entry["nats"]),
                        "weighted": _number(entry["weighted"]),
                    }
                )
                for entry in values["records"]
            ],
            failures=[Failure(**entry) for entry in values["failures"]],
            curves=curves,
            head_replay=values["head_replay"],
            environment=dict(values["environment"]),
            command=values["command"],
            fingerprint=values["fingerprint"],
        )

    def plot(self) -> Figure:
        """Perplexity against context length, one panel per protocol; needs matplotlib."""
        from hf_posenc.evaluation.plots import figure

        return figure(self)

    def _repr_html_(self) -> str:
        from hf_posenc.evaluation.report import to_html

        return to_html(self)

    def write_json(self, path: Path) -> None:
        """Writes everything."""
        write_atomically(path, to_json(self.to_dict()))

    def write_csv(self, path: Path) -> None:
        """Writes one row per cell of the table; a cell that could not be measured has a `status` and no numbers."""
        rows = (
            self._row(entry, protocol, length)
            for entry in self.candidates
            for protocol in self.settings.protocols
            for length in self.settings.lengths
        )
        write_atomically(path, to_csv(COLUMNS, rows))

    def _row(self, entry: MethodEntry, protocol: str, length: int) -> dict[str, Any]:
        row = {
            "method": entry.label,
            "protocol": protocol,
            "length": length,
            "scale": entry.scale_at(length),
        }
        cell = self.cell(entry.label, protocol, length)
        if cell is None:
            reason = self.failure(entry.label, protocol, length)
            return {**row, "status": reason or "nothing to score"}
        values = dataclasses.asdict(cell)
        for name, interval in (("perplexity", cell.interval), ("ratio", cell.ratio_interval)):
            values[f"{name}_low"], values[f"{name}_high"] = interval or (None, None)
        del values["interval"], values["ratio_interval"]
        status = "ok" if math.isfinite(cell.nats) else "not finite"
        return {**values, **row, "status": status}


def _number(value: float | None) -> float:
    return math.nan if value is None else value
