"""The result of a run, with everything that is needed to tell whether two results may be compared."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import importlib.metadata
import json
import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_posenc.evaluation.candidates import Candidate
from hf_posenc.evaluation.documents import Skipped, TokenizedDocument
from hf_posenc.evaluation.head_replay import input_device
from hf_posenc.evaluation.perplexity import Failure, Measurement
from hf_posenc.evaluation.protocols import Settings
from hf_posenc.evaluation.statistics import Cell, Record, summarize

FORMAT = 1
COLUMNS = (
    *("method", "protocol", "length", "scale"),
    *("perplexity", "perplexity_low", "perplexity_high", "ratio", "ratio_low", "ratio_high"),
    *("bits_per_byte", "nats", "tokens", "bytes", "documents", "status"),
)
"""The columns of the CSV."""

_PACKAGES = ("hf-posenc", "torch", "transformers", "tokenizers", "accelerate", "numpy")


@dataclass
class PerplexityResult:
    """What `hf-posenc perplexity` measured.

    Attributes:
        model: What was measured: name, class, dtype, attention backend, tokenizer hash, ... (`describe_model`).
        source: Where the documents came from, as it was asked for.
        settings: Protocols, lengths and the other numbers.
        original: The context length that the model was trained on, in tokens, where it is known.
        candidates: The methods, in the order of the table.
        documents: The documents that were used.
        skipped: Those that were not, and why.
        records: Sums per method, protocol, length and document.
        failures: Cells without a number.
        shared_prefix: For each method's label, whether its prefix curve came from one forward per document.
        head_replay: How the scorer's probe compared with full logits.
        processes: How many processes shared the documents.
        cells: The numbers of the table, made from the records.
    """

    model: dict[str, Any]
    source: dict[str, Any]
    settings: Settings
    original: int | None
    candidates: Sequence[Candidate]
    documents: Sequence[TokenizedDocument]
    skipped: Sequence[Skipped]
    records: Sequence[Record]
    failures: Sequence[Failure]
    shared_prefix: dict[str, bool]
    head_replay: str
    processes: int = 1
    cells: list[Cell] = field(init=False)

    def __post_init__(self) -> None:
        settings = self.settings
        self.cells = summarize(self.records, seed=settings.seed, resamples=settings.resamples)

    @classmethod
    def merge(cls, shares: Sequence[Measurement], **known: Any) -> PerplexityResult:
        """Puts together what several processes measured on their shares of the documents.

        Args:
            shares: One measurement per process.
            **known: The other fields.
        """
        labels = [candidate.label for candidate in known["candidates"]]
        names = [document.name for document in known["documents"]]
        order = {name: index for index, name in enumerate(names)}
        protocols = known["settings"].protocols

        def place(record: Record) -> tuple[int, int, int, int]:
            where = labels.index(record.method), protocols.index(record.protocol)
            return (*where, record.length, order[record.document])

        working = [share for share in shares if share.shared_prefix]
        failures = {(f.method, f.protocol, f.length): f for share in shares for f in share.failures}
        return cls(
            records=sorted((record for share in shares for record in share.records), key=place),
            failures=list(failures.values()),
            shared_prefix={
                label: all(share.shared_prefix[label] for share in working) for label in labels
            },
            head_replay=working[0].head_replay,
            **known,
        )

    def cell(self, method: str, protocol: str, length: int) -> Cell | None:
        """The number of a method under a protocol at a length; `None` where it could not be measured."""
        key = (method, protocol, length)
        return next((c for c in self.cells if (c.method, c.protocol, c.length) == key), None)

    def failure(self, method: str, protocol: str, length: int) -> str | None:
        """Why there is no number."""
        key = (method, protocol, length)
        found = (f.reason for f in self.failures if (f.method, f.protocol, f.length) == key)
        return next(found, None)

    def not_finite(self) -> list[Cell]:
        """The cells whose loss was not a finite number."""
        return [cell for cell in self.cells if not math.isfinite(cell.nats)]

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON-ready values; a number that is not finite becomes `None`."""
        settings, lengths = self.settings, self.settings.lengths
        methods = []
        for candidate in self.candidates:
            shared = self.shared_prefix.get(candidate.label)
            methods.append({**candidate.to_dict(lengths), "prefix_from_one_forward": shared})
        values = {
            "format": FORMAT,
            "kind": "perplexity",
            "model": self.model,
            "original_max_position_embeddings": self.original,
            "protocols": {name: settings.definition(name) for name in settings.protocols},
            "settings": dataclasses.asdict(settings),
            "environment": environment(),
            "processes": self.processes,
            "head_replay": self.head_replay,
            "methods": methods,
            "source": self.source,
            "documents": [document.to_dict() for document in self.documents],
            "skipped": [dataclasses.asdict(skipped) for skipped in self.skipped],
            "summary": [dataclasses.asdict(cell) for cell in self.cells],
            "failures": [dataclasses.asdict(failure) for failure in self.failures],
            "records": [dataclasses.asdict(record) for record in self.records],
        }
        finite: dict[str, Any] = _finite(values)
        return finite

    def write_json(self, path: Path) -> None:
        """Writes everything."""
        text = json.dumps(self.to_dict(), indent=1, allow_nan=False)
        path.write_text(text + "\n", encoding="utf-8")

    def write_csv(self, path: Path) -> None:
        """Writes one row per cell of the table; a cell that could not be measured has a `status` and no numbers."""
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            for candidate in self.candidates:
                for protocol in self.settings.protocols:
                    for length in self.settings.lengths:
                        writer.writerow(self._row(candidate, protocol, length))

    def _row(self, candidate: Candidate, protocol: str, length: int) -> dict[str, Any]:
        scale = candidate.scale_at(length) or candidate.scale
        row = {"method": candidate.label, "protocol": protocol, "length": length, "scale": scale}
        cell = self.cell(candidate.label, protocol, length)
        if cell is None:
            return {**row, "status": self.failure(candidate.label, protocol, length)}
        values = dataclasses.asdict(cell)
        for name, interval in (("perplexity", cell.interval), ("ratio", cell.ratio_interval)):
            values[f"{name}_low"], values[f"{name}_high"] = interval or (None, None)
        del values["interval"], values["ratio_interval"]
        status = "ok" if math.isfinite(cell.nats) else "not finite"
        return {**values, **row, "status": status}


def describe_model(
    name: str, model: nn.Module, tokenizer: Any, special: Sequence[int], bos: str
) -> dict[str, Any]:
    """What a result stores of the model and its tokenizer."""
    config: Any = model.config
    parameters = list(model.parameters())
    return {
        "name": name,
        "class": type(model).__name__,
        "model_type": getattr(config, "model_type", None),
        "revision": getattr(config, "_commit_hash", None),
        "parameters": sum(parameter.numel() for parameter in parameters),
        "dtype": str(parameters[0].dtype).removeprefix("torch."),
        "device": _device_name(input_device(model)),
        "attention": getattr(config, "_attn_implementation", None),
        "tokenizer": {
            "class": type(tokenizer).__name__,
            "vocabulary": len(tokenizer),
            "sha256": tokenizer_hash(tokenizer),
        },
        "bos": {"policy": bos, "token_ids": list(special)},
    }


def tokenizer_hash(tokenizer: Any) -> str:
    """A hash of all that decides how a text becomes tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = (
        backend.to_str()
        if backend is not None
        else json.dumps(sorted(tokenizer.get_vocab().items()))
    )
    return hashlib.sha256(text.encode()).hexdigest()


def environment() -> dict[str, Any]:
    """The versions that a run used."""
    versions: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
            versions[package] = None
    system = f"{platform.system()} {platform.machine()}"
    return {"python": platform.python_version(), "system": system, **versions}


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
