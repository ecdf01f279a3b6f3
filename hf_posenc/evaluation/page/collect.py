"""Results in run folders: which are there, which have not finished, and which belong together."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.measuring.statistics import Interval

_TUNING = ("model", "settings", "methods", "records", "documents")
KINDS = {
    "perplexity": (*_TUNING, "curve", "failures", "summary"),
    "retrieval": ("model", "settings", "methods", "records", "failures", "haystack"),
    "bench": ("perplexity",),
    "extend": ("choosing", "model", "settings", "plan"),
    "gpu": ("model", "sizes", "machine", "environment", "records"),
    "sweep": _TUNING,
    "search": _TUNING,
}
"""Each kind of result, with the objects and lists that every result of the kind has."""
RECORDS = "records"
PARTS = ("perplexity", "retrieval")
WHOLES = ("bench", "extend")
"""The parts of the results of these kinds are results themselves."""


@dataclass(frozen=True)
class Source:
    """One result: a file, or a part of one (`WHOLES`); the parts have the file's number, which begins at 1."""

    number: int
    name: str
    kind: str
    data: dict[str, Any]
    part: bool = False


@dataclass(frozen=True)
class Unfinished:
    """A run folder with records and no result: counts, and the settings, of the run that stored most."""

    name: str
    values: int
    processes: int
    settings: dict[str, Any]


@dataclass
class Collection:
    """Results, each once, with the parts of a benchmark behind it; unfinished runs; reasons why files are left out."""

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
        files = [path] if path.is_file() else _results_in(path)
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


def _results_in(folder: Path) -> list[Path]:
    files = (path for path in folder.rglob("*.json") if path.stem in KINDS)
    inside = (path for path in files if RECORDS not in path.relative_to(folder).parts)
    return sorted(inside, key=lambda path: (path.parent.as_posix(), list(KINDS).index(path.stem)))


def _add(collection: Collection, file: Path, name: Path, seen: dict[str, Path]) -> str:
    """Add the result of a file and its parts; return the reason if it is left out."""
    try:
        text = file.read_bytes()
        data = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        return f"cannot be read ({' '.join(str(error).split())})"
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind not in KINDS:
        return "not a result of hf-posenc"
    if lacking := _lacking(kind, data):
        return f"damaged, or written by another version: it lacks {lacking}"
    first = seen.setdefault(hashlib.sha256(text).hexdigest(), file)
    if first is not file:
        return f"the same result as {first}"
    whole = Source(len(collection.files) + 1, name.as_posix(), kind, data)
    parts = [part for part in PARTS if kind in WHOLES and data.get(part)]
    collection.sources.append(whole)
    collection.sources += [replace(whole, kind=p, data=data[p], part=True) for p in parts]
    return ""


def _lacking(kind: str, data: dict[str, Any]) -> str:
    """List the necessary parts that a result lacks; empty for a whole one."""
    lacking = [name for name in KINDS[kind] if not isinstance(data.get(name), dict | list)]
    parts = [part for part in PARTS if kind in WHOLES and data.get(part) is not None]
    for part in parts:
        whole = isinstance(data[part], dict)
        if more := _lacking(part, data[part]) if whole else "everything":
            lacking.append(f"{part}: {more}")
    return ", ".join(lacking)


def _unfinished_in(folder: Path, finished: set[Path]) -> list[Unfinished]:
    runs = []
    folders = {path.parents[2] for path in folder.rglob(f"{RECORDS}/*/*.jsonl")}
    for run in sorted(folders - finished):
        counts: dict[Path, list[int]] = {}
        for file in sorted((run / RECORDS).glob("*/*.jsonl")):
            counts.setdefault(file.parent, []).append(file.read_bytes().count(b"\n"))
        store = max(counts, key=lambda store: sum(counts[store]))
        settings: Any = {}
        with contextlib.suppress(OSError, ValueError):
            settings = json.loads((store / "settings.json").read_bytes())
        known = settings if isinstance(settings, dict) else {}
        runs.append(Unfinished(run.as_posix(), sum(counts[store]), len(counts[store]), known))
    return runs


# Grouping and comparing results.


def grouped(
    sources: Sequence[Source], kind: str, key: Callable[[dict[str, Any]], Any]
) -> list[list[Source]]:
    """Group results of a kind that have the same key, in the order of their first appearance."""
    groups: dict[str, list[Source]] = {}
    for source in sources:
        if source.kind == kind:
            same = json.dumps(key(source.data), sort_keys=True)
            groups.setdefault(same, []).append(source)
    return list(groups.values())


def settings_differ(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[str]:
    """Return the values that differ between two sets of settings."""
    return [
        f"{name} {_plain(two.get(name))} instead of {_plain(one.get(name))}"
        for name in dict.fromkeys([*one, *two])
        if one.get(name) != two.get(name)
    ]


def _plain(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)


def interval_of(values: Sequence[float | None] | None) -> Interval | None:
    """Return an interval of a JSON file; `None` if an end is missing."""
    low, high = values or (None, None)
    return None if low is None or high is None else (low, high)


def model_of(data: Mapping[str, Any]) -> str:
    """Return what identifies the model of a result."""
    model = data["model"]
    names = ("weights_sha256", "config_sha256", "patch", "class", "parameters", "dtype")
    values = [model.get(name) for name in names]
    return json.dumps([*values, None if model.get("weights_sha256") else model.get("name")])
