"""Result of methods that are compared under conditions, such as protocols or tasks, at several lengths."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from hf_posenc.evaluation.grid import Result, listed
from hf_posenc.evaluation.measuring.candidates import Candidate
from hf_posenc.files import finite

CellT = TypeVar("CellT")


@dataclass(frozen=True)
class MethodEntry:
    """A method of a result: what describes its `Candidate`, JSON-ready.

    `prefix_from_one_forward` is true if one forward at the longest length gave the prefix of every length.
    """

    label: str
    spec: str
    method: str | None
    parts: Sequence[Mapping[str, Any]]
    beside: Mapping[str, Any]
    scale: float | None
    auto_scale: bool
    original: int | None
    prefix_from_one_forward: bool = False

    @classmethod
    def of(cls, candidate: Candidate, shared: bool = False) -> MethodEntry:
        """Return the entry of a candidate; `shared` is `prefix_from_one_forward`."""
        names = ("label", "spec", "method", "scale", "auto_scale", "original")
        same: dict[str, Any] = {name: getattr(candidate, name) for name in names}
        parts = [{"method": part.method, "options": dict(part.options)} for part in candidate.parts]
        beside = dict(candidate.beside)
        return cls(**same, parts=parts, beside=beside, prefix_from_one_forward=shared)

    def scale_at(self, length: int) -> float | None:
        """Return the scale in force at a length."""
        if self.auto_scale and self.original:
            return max(1.0, length / self.original)
        return self.scale


@dataclass(repr=False, kw_only=True)
class MethodsResult(Result, Generic[CellT]):
    """Result of methods under conditions; `condition` names their field in records and their list in the settings.

    Attributes:
        settings: Conditions, lengths and the other numbers.
        candidates: The methods, in the order of the table.
        records: What was measured, a method, condition and length at a time.
        failures: Cells without a number.
        model: The measured model: name, class, dtype, attention backend, tokenizer hash, ... (`describe_model`).
        original: The context length that the model was trained on, in tokens, where it is known.
        head_replay: Outcome of the scorer's probe, which compares it with full logits.
        environment: Versions of the packages that computed.
        command: The command that reproduces this result.
        fingerprint: Hash of everything that determines a number; the records are stored under it.
        cells: The numbers of the table, computed from the records.
    """

    condition: ClassVar[str]
    version: ClassVar[int]
    intervals: ClassVar[Sequence[tuple[str, str]]]
    """Columns of the CSV file with a `_low` and a `_high`, and the attribute of a cell that holds both."""
    nothing: ClassVar[str]
    """The status of a row without a number that did not fail."""

    settings: Any
    candidates: Sequence[MethodEntry]
    records: Sequence[Any]
    failures: Sequence[Any]
    model: dict[str, Any] = field(default_factory=dict)
    original: int | None = None
    head_replay: str = "off"
    environment: dict[str, Any] = field(default_factory=dict)
    command: str | None = None
    fingerprint: str | None = None
    cells: list[CellT] = field(init=False)

    def cell(self, method: str, condition: str, length: int) -> CellT | None:
        """Return the number of a method under a condition at a length; `None` where it could not be measured."""
        return self._by_key.get((method, condition, length))

    @functools.cached_property
    def _by_key(self) -> dict[tuple[str, str, int], CellT]:
        return {self._key(cell): cell for cell in self.cells}

    def _key(self, entry: Any) -> tuple[str, str, int]:
        return entry.method, getattr(entry, self.condition), entry.length

    def failure(self, method: str, condition: str, length: int) -> str | None:
        """Return the reason why there is no number."""
        key = (method, condition, length)
        return next((each.reason for each in self.failures if self._key(each) == key), None)

    @property
    def conditions(self) -> Sequence[str]:
        """The conditions, in the order of the tables."""
        names: Sequence[str] = getattr(self.settings, f"{self.condition}s")
        return names

    def __repr__(self) -> str:
        methods = ", ".join(entry.label for entry in self.candidates)
        return f"{type(self).__name__}({methods}; {', '.join(self.conditions)}, lengths {list(self.settings.lengths)})"

    def described(self, definitions: Mapping[str, Any], **details: Any) -> dict[str, Any]:
        """Return everything as JSON-ready values; `definitions` of the conditions come before the settings."""
        values: dict[str, Any] = {
            "format": self.version,
            "kind": self.kind,
            "command": self.command,
            "fingerprint": self.fingerprint,
            "model": self.model,
            "original_max_position_embeddings": self.original,
            **definitions,
            "settings": dataclasses.asdict(self.settings),
            "environment": self.environment,
            "head_replay": self.head_replay,
            "methods": self.candidates,
            **details,
        }
        ready: dict[str, Any] = finite(
            {
                name: listed_fields(value) if isinstance(value, list | tuple) else value
                for name, value in values.items()
            }
        )
        return ready

    @staticmethod
    def description(values: Mapping[str, Any], lists: Mapping[str, type]) -> dict[str, Any]:
        """Return the fields that `described` wrote, except the settings; `lists` are sequences of dataclasses."""
        names = ("model", "head_replay", "environment", "command", "fingerprint")
        return {
            **{name: values[name] for name in names},
            "original": values["original_max_position_embeddings"],
            "candidates": [MethodEntry(**entry) for entry in values["methods"]],
            **{name: [kind(**entry) for entry in values[name]] for name, kind in lists.items()},
        }

    def csv_rows(self) -> Iterator[Mapping[str, Any]]:
        """Yield the rows of every method, condition and length: one per cell, or one with the reason of its absence."""
        lengths = self.settings.lengths
        for entry, name, length in itertools.product(self.candidates, self.conditions, lengths):
            key = {"method": entry.label, self.condition: name, "length": length}
            key["scale"] = entry.scale_at(length)
            cells = self.cells_of(entry.label, name, length)
            if not cells:
                reason = self.failure(entry.label, name, length)
                yield {**key, "status": reason or self.nothing}
            for cell in cells:
                values = dataclasses.asdict(cell)
                for column, interval in self.intervals:
                    ends = values.pop(interval) or (None, None)
                    values[f"{column}_low"], values[f"{column}_high"] = ends
                finite = math.isfinite(values["nats"] or 0)
                yield {**values, **key, "status": "ok" if finite else "not finite"}

    def cells_of(self, method: str, condition: str, length: int) -> list[Any]:
        """Return the cells with a row of their own in `frame`."""
        cell = self.cell(method, condition, length)
        return [] if cell is None else [cell]

    def lengths_of_failures(self, *names: str) -> dict[tuple[str, ...], str]:
        """Return the lengths at which methods failed, by these attributes of the failures."""
        lengths: dict[tuple[str, ...], set[int]] = {}
        for failure in self.failures:
            key = tuple(getattr(failure, name) for name in names)
            lengths.setdefault(key, set()).add(failure.length)
        return {key: listed(sorted(found)) for key, found in lengths.items()}


def listed_fields(entries: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the fields of dataclasses as dictionaries; dictionaries stay as they are."""
    return [dict(e) if isinstance(e, Mapping) else dataclasses.asdict(e) for e in entries]


def nan_if_none(value: float | None) -> float:
    """Return a number of a JSON file, which has no NaN."""
    return math.nan if value is None else value
