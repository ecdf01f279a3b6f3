"""Finds the results in run folders."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_posenc.errors import PosencError

KINDS = ("perplexity", "retrieval", "bench", "sweep", "search")
RECORDS = "records"
PARTS = ("perplexity", "retrieval")
"""Results inside a benchmark's."""
NEEDED = {
    "model": ("perplexity", "retrieval", "sweep", "search"),
    "settings": ("perplexity", "retrieval", "sweep", "search"),
    "methods": ("perplexity", "retrieval", "sweep", "search"),
    "records": ("perplexity", "retrieval", "sweep", "search"),
    "documents": ("perplexity", "sweep", "search"),
    "curve": ("perplexity",),
    "failures": ("perplexity", "retrieval"),
    "haystack": ("retrieval",),
    "perplexity": ("bench",),
}
"""Objects and lists that no result of a kind is without."""


@dataclass(frozen=True)
class Source:
    """One result: a file, or a part of a benchmark's file.

    Attributes:
        number: The file's place in the report, from 1; what tables call it.
        name: The folder, or the file where its name is not the usual one, as it was given.
        kind: One of `KINDS`.
        data: What the file holds, or the part of it.
        part: Whether it is a part.
    """

    number: int
    name: str
    kind: str
    data: dict[str, Any]
    part: bool = False


@dataclass(frozen=True)
class Unfinished:
    """A run folder with records and no result.

    Attributes:
        name: The folder.
        values: Number of stored values.
        processes: Number of files that they are in.
        settings: The settings of the run that stored most, where they can be read.
    """

    name: str
    values: int
    processes: int
    settings: dict[str, Any]


@dataclass
class Collection:
    """What was found, and what was not.

    Attributes:
        sources: The results, each once; those inside a benchmark's behind it.
        unfinished: Folders whose run has not ended.
        remarks: One line for every file or folder that is not in the report, and why.
    """

    sources: list[Source] = field(default_factory=list)
    unfinished: list[Unfinished] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def files(self) -> list[Source]:
        """The results that are files."""
        return [source for source in self.sources if not source.part]


def collect(paths: Sequence[Path]) -> Collection:
    """Reads the results in folders, their subfolders included, or in files.

    Args:
        paths: Run folders, folders of run folders, or result files.

    Returns:
        The results in the order of the paths; a result that is there twice is taken once.

    Raises:
        PosencError: A path does not exist, or there is nothing to report in any of them.
    """
    found = Collection()
    seen: dict[str, str] = {}
    for path in paths:
        if not path.exists():
            raise PosencError(f"There is no folder {path}. Give the --output folder of a run.")
        files = [path] if path.is_file() else _results_in(path)
        for file in files:
            _add(found, file, file.parent if path.is_dir() else file, seen)
        if path.is_dir():
            found.unfinished += _unfinished_in(path, {file.parent for file in files})
        if not files and not any(Path(run.name).is_relative_to(path) for run in found.unfinished):
            found.remarks.append(f"{path}: no result in it.")
    if not found.sources and not found.unfinished:
        names = ", ".join(f"{kind}.json" for kind in KINDS)
        reasons = " ".join(found.remarks)
        raise PosencError(f"There is nothing to report. {reasons} A run's folder has {names}.")
    return found


def _results_in(folder: Path) -> list[Path]:
    names = {f"{kind}.json" for kind in KINDS}
    files = (path for path in folder.rglob("*.json") if path.name in names)
    inside = (p for p in files if RECORDS not in p.relative_to(folder).parts)
    return sorted(inside, key=lambda p: (p.parent.as_posix(), KINDS.index(p.stem)))


def _add(found: Collection, file: Path, name: Path, seen: dict[str, str]) -> None:
    try:
        text = file.read_bytes()
        data = json.loads(text)
    except (OSError, ValueError) as error:
        found.remarks.append(f"{file}: cannot be read ({' '.join(str(error).split())}).")
        return
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind not in KINDS:
        found.remarks.append(f"{file}: not a result of hf-posenc.")
        return
    if lacking := _lacking(kind, data):
        found.remarks.append(f"{file}: damaged, or written by another version: it lacks {lacking}.")
        return
    digest = hashlib.sha256(text).hexdigest()
    if digest in seen:
        found.remarks.append(f"{file}: the same result as {seen[digest]}.")
        return
    seen[digest] = str(file)
    number = len(found.files) + 1
    found.sources.append(Source(number, name.as_posix(), kind, data))
    for part in PARTS if kind == "bench" else ():
        if data.get(part):
            found.sources.append(Source(number, name.as_posix(), part, data[part], part=True))


def _lacking(kind: str, data: dict[str, Any]) -> str:
    """What a table cannot be made without and a result does not have; empty for a whole one."""
    wanted = [name for name, of in NEEDED.items() if kind in of]
    lacking = [name for name in wanted if not isinstance(data.get(name), dict | list)]
    for part in PARTS if kind == "bench" else ():
        inside = data.get(part)
        if inside is not None:
            more = _lacking(part, inside) if isinstance(inside, dict) else "everything"
            lacking += [f"{part}: {more}"] if more else []
    return ", ".join(lacking)


def _unfinished_in(folder: Path, finished: set[Path]) -> list[Unfinished]:
    runs = []
    stores = sorted({path.parents[1] for path in folder.rglob(f"{RECORDS}/*/*.jsonl")})
    for run in (store.parent for store in stores):
        if run in finished:
            continue
        counts: dict[Path, list[int]] = {}
        for file in sorted((run / RECORDS).glob("*/*.jsonl")):
            counts.setdefault(file.parent, []).append(file.read_bytes().count(b"\n"))
        largest = max(counts, key=lambda place: sum(counts[place]))
        values, processes = sum(counts[largest]), len(counts[largest])
        runs.append(Unfinished(run.as_posix(), values, processes, _settings(largest)))
    return runs


def _settings(place: Path) -> dict[str, Any]:
    try:
        data = json.loads((place / "settings.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
