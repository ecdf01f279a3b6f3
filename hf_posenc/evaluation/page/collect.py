"""Results in run folders: which are there, and which have not finished."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_posenc import evaluation
from hf_posenc.errors import PosencError, one_line
from hf_posenc.evaluation.grid import Result

PARTS = ("perplexity", "retrieval")
"""Attributes of a benchmark or an extension that are results themselves."""
_NAMES = ("Perplexity", "Retrieval", "Bench", "Extend", "Gpu", "Sweep", "Search")
KINDS: Mapping[str, type[Result]] = {
    name.lower(): getattr(evaluation, f"{name}Result") for name in _NAMES
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


@dataclass
class Collection:
    """Results, each once, with their parts behind them; runs that have not finished, and why files are left out."""

    sources: list[Source] = field(default_factory=list)
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
    collection, seen, order = Collection(), dict[str, Path](), list(KINDS)
    for path in paths:
        if not path.exists():
            raise PosencError(f"There is no folder {path}. Give the --output folder of a run.")
        files, unfinished = [path], list[str]()
        if path.is_dir():
            inside = (file for file in path.rglob("*.json") if file.stem in KINDS)
            found = (file for file in inside if RECORDS not in file.relative_to(path).parts)
            files = sorted(found, key=lambda file: (file.parent, order.index(file.stem)))
            unfinished = _unfinished_in(path, {file.parent for file in files})
        for file in files:
            try:
                _add(collection, file, file.parent if path.is_dir() else file, seen)
            except PosencError as reason:
                collection.remarks.append(f"{file}: {reason}.")
        collection.remarks += unfinished
        if not files and not unfinished:
            collection.remarks.append(f"{path}: no result in it.")
    if not collection.sources:
        names = ", ".join(f"{kind}.json" for kind in KINDS)
        reasons = " ".join(collection.remarks)
        raise PosencError(f"There is nothing to report. {reasons} A run's folder has {names}.")
    return collection


def _add(collection: Collection, file: Path, name: Path, seen: dict[str, Path]) -> None:
    """Add the result of a file and its parts; raise the reason if it is left out."""
    try:
        text = file.read_bytes()
        data = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise PosencError(f"cannot be read ({' '.join(str(error).split())})") from error
    kind = str(data.get("kind")) if isinstance(data, dict) else ""
    if kind not in KINDS:
        raise PosencError("not a result of hf-posenc")
    try:
        result = KINDS[kind].from_dict(data)
        for shown in (result.tables, result.notes, result.guide, result.problems):
            list(shown())
    except Exception as error:  # a value of another kind may fail anywhere
        lacks = f"it lacks {error.args[0]}" if isinstance(error, KeyError) else one_line(error)
        raise PosencError(f"damaged, or written by another version: {lacks}") from error
    if (first := seen.setdefault(hashlib.sha256(text).hexdigest(), file)) is not file:
        raise PosencError(f"the same result as {first}")
    about = len(collection.files) + 1, name.as_posix()
    collection.sources.append(Source(*about, kind, data, result))
    for part in PARTS:
        if (inside := getattr(result, part, None)) is not None:
            collection.sources.append(Source(*about, part, data[part], inside, part=True))


def _unfinished_in(folder: Path, finished: set[Path]) -> list[str]:
    """Return a line for each run with records and no result, with the command of the one that stored most."""
    lines = []
    folders = {path.parents[2] for path in folder.rglob(f"{RECORDS}/*/*.jsonl")}
    for run in sorted(folders - finished):
        counts: dict[Path, list[int]] = {}
        for file in sorted((run / RECORDS).glob("*/*.jsonl")):
            counts.setdefault(file.parent, []).append(file.read_bytes().count(b"\n"))
        store = max(counts, key=lambda store: sum(counts[store]))
        command = ""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            command = json.loads((store / "settings.json").read_bytes()).get("command") or ""
        lines.append(
            f"{run.as_posix()}: unfinished, with {sum(counts[store]):,} values; the same command resumes it. {command}"
        )
    return lines
