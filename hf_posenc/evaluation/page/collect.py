"""Results in run folders: which are there, which have not finished, and which may share a table."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.measuring.result import nan_if_none
from hf_posenc.evaluation.measuring.statistics import Cell, Record, summarize
from hf_posenc.evaluation.perplexity.result import record_of
from hf_posenc.evaluation.plots import Scope

_TUNING = ("model", "settings", "methods", "records", "documents")
KINDS = {
    "perplexity": (*_TUNING, "curve", "failures"),
    "retrieval": ("model", "settings", "methods", "records", "failures", "haystack"),
    "bench": ("perplexity",),
    "sweep": _TUNING,
    "search": _TUNING,
}
"""Each kind of result, with the objects and lists that every result of the kind has."""
RECORDS = "records"
PARTS = ("perplexity", "retrieval")
"""Results inside a benchmark's."""


@dataclass(frozen=True)
class Source:
    """One result: a file, or a part of a benchmark's file; the parts have the file's number, which begins at 1."""

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
    """Read the results in folders, including their subfolders, or in files.

    Args:
        paths: Run folders, folders of run folders, or result files.

    Returns:
        The results in the order of the paths; a result that occurs twice is taken once.

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
    except (OSError, ValueError) as error:
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
    parts = [part for part in PARTS if kind == "bench" and data.get(part)]
    collection.sources.append(whole)
    collection.sources += [replace(whole, kind=p, data=data[p], part=True) for p in parts]
    return ""


def _lacking(kind: str, data: dict[str, Any]) -> str:
    """List the necessary parts that a result lacks; empty for a whole one."""
    lacking = [name for name in KINDS[kind] if not isinstance(data.get(name), dict | list)]
    for part in PARTS if kind == "bench" else ():
        inside = data.get(part)
        if inside is not None:
            more = _lacking(part, inside) if isinstance(inside, dict) else "everything"
            lacking += [f"{part}: {more}"] if more else []
    return ", ".join(lacking)


def _unfinished_in(folder: Path, finished: set[Path]) -> list[Unfinished]:
    runs = []
    folders = {path.parents[2] for path in folder.rglob(f"{RECORDS}/*/*.jsonl")}
    for run in sorted(folders - finished):
        counts: dict[Path, list[int]] = {}
        for file in sorted((run / RECORDS).glob("*/*.jsonl")):
            counts.setdefault(file.parent, []).append(file.read_bytes().count(b"\n"))
        store = max(counts, key=lambda store: sum(counts[store]))
        values, processes = sum(counts[store]), len(counts[store])
        try:
            settings = json.loads((store / "settings.json").read_bytes())
        except (OSError, ValueError):
            settings = None
        known = settings if isinstance(settings, dict) else {}
        runs.append(Unfinished(run.as_posix(), values, processes, known))
    return runs


# Comparable perplexity results. Results with equal texts and equal settings of a protocol share a table.

Interval = tuple[float, float]

# Settings that change the computation of a number but not its tokens, or only which numbers there are.
_FREE = frozenset(
    {
        *("lengths", "protocols", "seed", "resamples", "buckets", "min_tokens"),
        *("chunk", "prefill", "batch", "preset"),
    }
)
# Settings that matter to some protocols only.
_OF_PROTOCOL = {
    "tail_tokens": ("tail",),
    "read_last": ("tail",),
    "windows_per_document": ("tail", "sliding"),
    "bos_windows": ("sliding",),
    "stride": ("sliding", "stream"),
    "evaluator": ("longppl",),
}


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


def texts(data: Mapping[str, Any]) -> tuple[tuple[str, ...], str, str]:
    """Return each document's hash of tokens, the tokenizer's hash, and the special tokens before a window as JSON."""
    model = data["model"]
    documents = tuple(document["tokens_sha256"] for document in data["documents"])
    return documents, model["tokenizer"]["sha256"], json.dumps(model["bos"]["token_ids"])


def texts_differ(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the reasons why two results did not read the same tokens."""
    documents, tokenizer, special = texts(first)
    documents_2, tokenizer_2, special_2 = texts(other)
    reasons = []
    if tokenizer != tokenizer_2:
        reasons.append("another tokenizer, so a token is not the same piece of text")
    elif documents != documents_2:
        reasons.append(f"other documents ({_documents_differ(first, other)})")
    if special != special_2:
        reasons.append(f"other special tokens in front ({special_2} instead of {special})")
    return reasons


def _documents_differ(first: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    hashes = [[document["text_sha256"] for document in d["documents"]] for d in (first, other)]
    if hashes[0] == hashes[1] and None not in hashes[0]:
        return "the same texts, cut at other lengths"
    one, two = (set(texts(data)[0]) for data in (first, other))
    if one == two:
        return "the same ones in another order"
    common = len(one & two)
    cut = len(set(hashes[0]) & set(hashes[1]) - {None}) - common
    also = f", {cut} more cut at other lengths" if cut > 0 else ""
    return f"{len(hashes[1])} instead of {len(hashes[0])}, {common} in common{also}"


def settings_differ(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[str]:
    """Return the values that differ between two sets of settings."""
    return [
        f"{name} {_plain(two.get(name))} instead of {_plain(one.get(name))}"
        for name in dict.fromkeys([*one, *two])
        if one.get(name) != two.get(name)
    ]


def _plain(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)


def protocol_differs(first: Mapping[str, Any], other: Mapping[str, Any], protocol: str) -> str:
    """Return the reason why two results of one protocol, on the same texts, do not share a table."""
    if first["protocols"][protocol] != other["protocols"][protocol]:
        return f"the other one is: {first['protocols'][protocol]}"
    return ", ".join(settings_differ(_decisive(first, protocol), _decisive(other, protocol)))


def _decisive(data: Mapping[str, Any], protocol: str) -> dict[str, Any]:
    """The settings that give a protocol's numbers their meaning."""
    kept = {
        name: value
        for name, value in data["settings"].items()
        if name not in _FREE and protocol in _OF_PROTOCOL.get(name, (protocol,))
    }
    if kept.get("windows_per_document") not in (None, 1):  # spread over the rest of the longest
        kept["longest length"] = max(data["settings"]["lengths"])
    return kept


@dataclass
class Line:
    """One method of one result: a row of the table.

    Attributes:
        name: The method's label in the result.
        label: Its unique label here: with the number of its result if several results have it.
        method: The method's name; `None` for the model as it was loaded.
        also: Other results with the very same numbers.
        cells: The numbers by length, with ratios to the row with the label `baseline`, which may be this one.
        failures: The reason why there is no number, by length.
    """

    source: Source
    name: str
    label: str
    method: str | None
    also: list[Source] = field(default_factory=list)
    cells: dict[int, Cell] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    baseline: str = ""


@dataclass
class Merged:
    """Comparable results of one protocol; can be drawn like a `PerplexityResult`.

    `original` is the trained length, if all results have the same; `curve` has the sums by position, if all have the
    same buckets.
    """

    protocol: str
    definition: str
    sources: list[Source]
    candidates: list[Line]
    settings: Scope
    original: int | None
    curve: dict[str, Any] | None

    def cell(self, method: str, protocol: str, length: int, /) -> Cell | None:
        """Return the number of a row at a length."""
        line = next(line for line in self.candidates if line.label == method)
        return line.cells.get(length)


def merge(sources: Sequence[Source]) -> list[Merged]:
    """Make one table per protocol and settings of it, from perplexity results that read the same tokens."""
    groups: dict[Any, list[Source]] = {}
    for source in sources:
        for protocol, definition in source.data["protocols"].items():
            decisive = json.dumps(_decisive(source.data, protocol), sort_keys=True)
            groups.setdefault((protocol, definition, decisive), []).append(source)
    return [_merged(protocol, group) for (protocol, *_), group in groups.items()]


def _merged(protocol: str, sources: list[Source]) -> Merged:
    lines: list[Line] = []
    for source in sources:
        for method in source.data["methods"]:
            line = _line(source, method, protocol)
            twin = next((other for other in lines if _same(other, line)), None)
            if twin is None:
                lines.append(line)
            else:
                twin.also.append(source)
    names = [line.name for line in lines]
    for line in lines:
        if names.count(line.name) > 1:
            line.label = f"{line.name} [{line.source.number}]"
    for line in lines:
        baseline = _baseline(line, lines)
        line.baseline = baseline.label
        for length, cell in line.cells.items() if baseline.source is not line.source else ():
            ratio, interval = against(line, baseline, protocol, length, length)
            line.cells[length] = replace(cell, ratio=ratio, ratio_interval=interval)
    settings = [source.data["settings"] for source in sources]
    lengths = sorted({length for values in settings for length in values["lengths"]})
    originals = {source.data.get("original_max_position_embeddings") for source in sources}
    return Merged(
        protocol,
        sources[0].data["protocols"][protocol],
        sources,
        lines,
        Scope(tuple(lengths), (protocol,), settings[0].get("tail_tokens", 0)),
        originals.pop() if len(originals) == 1 else None,
        _curve(lines) if protocol == "prefix" else None,
    )


def variant(source: Source) -> str:
    """Identify the model of a result. A ratio between two models would not be a method's."""
    model = source.data["model"]
    names = ("weights_sha256", "config_sha256", "patch", "class", "parameters", "dtype")
    values = [model.get(name) for name in names]
    return json.dumps([*values, None if model.get("weights_sha256") else model.get("name")])


def _line(source: Source, method: Mapping[str, Any], protocol: str) -> Line:
    line = Line(source, method["label"], method["label"], method["method"])
    for entry in _entries(line, protocol, "summary"):
        values = {each.name: entry[each.name] for each in fields(Cell)}
        values["perplexity"] = nan_if_none(entry["perplexity"])
        for name in ("interval", "ratio_interval"):
            values[name] = interval_of(entry[name])
        line.cells[entry["length"]] = Cell(**values)
    line.failures = {e["length"]: e["reason"] for e in _entries(line, protocol, "failures")}
    return line


def _same(one: Line, two: Line) -> bool:
    """Return whether the second line repeats the first: the same model, method and numbers, to the last bit."""
    first, second = (
        {n: (c.nats, c.tokens, c.perplexity, c.interval) for n, c in line.cells.items()}
        | {length: (reason,) for length, reason in line.failures.items()}
        for line in (one, two)
    )
    named = one.name == two.name and variant(one.source) == variant(two.source)
    return named and bool(second) and second.items() <= first.items()


def _entries(line: Line, protocol: str, name: str) -> list[Any]:
    """The entries of one of a result's lists that belong to a line."""
    key = (line.name, protocol)
    return [e for e in line.source.data[name] if (e["method"], e["protocol"]) == key]


def _baseline(line: Line, lines: Sequence[Line]) -> Line:
    """The first method of a result of the same model, preferably the model as it was loaded."""
    own = [other for other in lines if variant(other.source) == variant(line.source)]
    firsts = {
        other.source.number: other for other in reversed(own)
    }  # each result's, the last first
    loaded = (other for other in reversed(firsts.values()) if other.method is None)
    return next(loaded, own[0])


def _curve(lines: Sequence[Line]) -> dict[str, Any] | None:
    """The sums by position of all rows, if their buckets are the same."""
    curves = [line.source.data["curve"] for line in lines]
    edges = curves[0]["edges"]
    if any(curve["edges"] != edges for curve in curves):
        return None
    methods = {
        line.label: curve["methods"][line.name]
        for line, curve in zip(lines, curves, strict=True)
        if line.name in curve["methods"]
    }
    return {"edges": edges, "methods": methods}


def interval_of(values: Sequence[float | None] | None) -> Interval | None:
    """Return an interval of a JSON file; `None` if an end is missing."""
    if values is None or values[0] is None or values[1] is None:
        return None
    return values[0], values[1]


def against(
    line: Line, other: Line, protocol: str, length: int, other_length: int
) -> tuple[float | None, Interval | None]:
    """Divide a row's perplexity by another's, with the paired 95 % interval over documents; `None` if one is missing.

    Both have read the same documents, and under `tail` the same targets at any length.
    """
    base = _records(other, protocol, other_length, "base")
    rows = _records(line, protocol, length, "row")
    if not rows or len(rows) != len(base):
        return None, None
    settings = line.source.data["settings"]
    how = {name: settings.get(name) for name in ("seed", "resamples", "aggregate", "base")}
    cells = summarize([*base, *rows], **how)
    cell = next((cell for cell in cells if cell.method == "row"), None)
    return (None, None) if cell is None else (cell.ratio, cell.ratio_interval)


def _records(line: Line, protocol: str, length: int, name: str) -> list[Record]:
    """A row's sums under names that do not depend on the machine: the document's index, and length 0."""
    documents = enumerate(line.source.data["documents"])
    indices = {document["name"]: str(index) for index, document in documents}
    records = []
    for entry in _entries(line, protocol, "records"):
        if entry["length"] == length:
            document = indices.get(entry["document"], entry["document"])
            values = {**entry, "method": name, "length": 0, "document": document}
            records.append(record_of({each.name: values[each.name] for each in fields(Record)}))
    return records
