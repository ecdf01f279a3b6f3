"""Results in run folders: which are there, and which have not finished."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_posenc.errors import PosencError, one_line
from hf_posenc.evaluation import (
    BenchResult,
    ExtendResult,
    GpuResult,
    PerplexityResult,
    RetrievalResult,
    SearchResult,
    SweepResult,
)
from hf_posenc.evaluation.grid import Result

PARTS = ("perplexity", "retrieval")
"""Attributes of a benchmark or an extension that are results themselves."""
KINDS: Mapping[str, type[Result]] = {
    kind.kind: kind
    for kind in (
        *(PerplexityResult, RetrievalResult, BenchResult, ExtendResult),
        *(GpuResult, SweepResult, SearchResult),
    )
}
RECORDS = "records"


@dataclass(frozen=True)
class Source:
    """One result: a file, or a part of one; the parts have the file's number, which begins at 1.

    `data` is the JSON that the result was read from.
    """

    number: int
    name: str
    kind: str
    data: dict[str, Any]
    result: Any
    part: bool = False


@dataclass(frozen=True)
class Unfinished:
    """A run folder with records and no result: counts, and the command, of the run that stored most."""

    name: str
    values: int
    processes: int
    command: str | None


@dataclass
class Collection:
    """Results, each once, with their parts behind them; unfinished runs; reasons why files are left out."""

    sources: list[Source] = field(default_factory=list)
    unfinished: list[Unfinished] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def files(self) -> list[Source]:
        """The results that are whole files."""
        return [source for source in self.sources if not source.part]


def collect(paths: Sequence[Path]) -> Collection:
    """Read the results in files or below folders, in the order of the paths; one that occurs twice is taken once.

    Raises:
        PosencError: A path does not exist, or there is nothing to report in any of them.
    """
    collection = Collection()
    seen: dict[str, Path] = {}
    for path in paths:
        if not path.exists():
            raise PosencError(f"There is no folder {path}. Give the --output folder of a run.")
        inside = (file for file in path.rglob("*.json") if file.stem in KINDS)
        found = (file for file in inside if RECORDS not in file.relative_to(path).parts)
        order = list(KINDS)
        files = (
            [path]
            if path.is_file()
            else sorted(found, key=lambda file: (file.parent.as_posix(), order.index(file.stem)))
        )
        for file in files:
            if reason := _add(collection, file, file.parent if path.is_dir() else file, seen):
                collection.remarks.append(f"{file}: {reason}.")
        if path.is_dir():
            collection.unfinished += _unfinished_in(path, {file.parent for file in files})
        unfinished = (Path(run.name) for run in collection.unfinished)
        if not files and not any(run.is_relative_to(path) for run in unfinished):
            collection.remarks.append(f"{path}: no result in it.")
    if not collection.sources and not collection.unfinished:
        names = ", ".join(f"{kind}.json" for kind in KINDS)
        reasons = " ".join(collection.remarks)
        raise PosencError(f"There is nothing to report. {reasons} A run's folder has {names}.")
    return collection


def _add(collection: Collection, file: Path, name: Path, seen: dict[str, Path]) -> str:
    """Add the result of a file and its parts; return the reason if it is left out."""
    try:
        text = file.read_bytes()
        data = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        return f"cannot be read ({' '.join(str(error).split())})"
    kind = str(data.get("kind")) if isinstance(data, dict) else ""
    if kind not in KINDS:
        return "not a result of hf-posenc"
    try:
        result = KINDS[kind].from_dict(data)
        for shown in (result.tables, result.notes, result.guide, result.problems):
            list(shown())
    except Exception as error:  # a value of another kind may fail anywhere
        lacks = f"it lacks {error.args[0]}" if isinstance(error, KeyError) else one_line(error)
        return f"damaged, or written by another version: {lacks}"
    first = seen.setdefault(hashlib.sha256(text).hexdigest(), file)
    if first is not file:
        return f"the same result as {first}"
    number, where = len(collection.files) + 1, name.as_posix()
    collection.sources.append(Source(number, where, kind, data, result))
    for part in PARTS:
        if getattr(result, part, None) is not None:
            inside = Source(number, where, part, data[part], getattr(result, part), part=True)
            collection.sources.append(inside)
    return ""


def _unfinished_in(folder: Path, finished: set[Path]) -> list[Unfinished]:
    runs = []
    folders = {path.parents[2] for path in folder.rglob(f"{RECORDS}/*/*.jsonl")}
    for run in sorted(folders - finished):
        counts: dict[Path, list[int]] = {}
        for file in sorted((run / RECORDS).glob("*/*.jsonl")):
            counts.setdefault(file.parent, []).append(file.read_bytes().count(b"\n"))
        store = max(counts, key=lambda store: sum(counts[store]))
        command = None
        with contextlib.suppress(OSError, ValueError, AttributeError):
            command = json.loads((store / "settings.json").read_bytes()).get("command")
        runs.append(Unfinished(run.as_posix(), sum(counts[store]), len(counts[store]), command))
    return runs
