"""Finds the results in run folders."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.measuring.statistics import RESAMPLES, Record, summarize
from hf_posenc.evaluation.page.numbers import Interval, interval_of

# The rows of a table that several results share.


@dataclass(frozen=True)
class Number:
    """One number of a table, as `measuring.statistics.Cell`, with a ratio to the baseline of the table."""

    length: int
    perplexity: float
    interval: Interval | None
    ratio: float | None
    ratio_interval: Interval | None
    bits_per_byte: float | None
    tokens: int
    documents: int


@dataclass(frozen=True)
class Axes:
    """What the axes of a figure are made from."""

    lengths: tuple[int, ...]
    protocols: tuple[str, ...]
    tail_tokens: int


@dataclass
class Line:
    """One method of one result: a row of the table.

    Attributes:
        source: Where it was measured.
        also: Where else, with the very same numbers.
        name: The method's label in that result.
        label: Its label here, which no other row has: with the number of its result where several have it.
        method: The method's name; `None` for the model as it was loaded.
        numbers: By length.
        failures: Why there is no number, by length.
        baseline: The label of the row that its ratios are relative to; its own, if it is that row.
    """

    source: Source
    name: str
    label: str
    method: str | None
    also: list[Source] = field(default_factory=list)
    numbers: dict[int, Number] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    baseline: str = ""


@dataclass
class Merged:
    """The results of one protocol that are comparable; can be drawn like a `PerplexityResult`.

    Attributes:
        protocol: Its name.
        definition: Its sentence.
        sources: Where the numbers come from.
        lines: The rows.
        settings: Lengths and such, of all of them together.
        original: The context length that the model was trained on; `None` if unknown, or not the same.
        curve: Sums by position, where every result has them with the same edges.
    """

    protocol: str
    definition: str
    sources: list[Source]
    lines: list[Line]
    settings: Axes
    original: int | None
    curve: dict[str, Any] | None = None

    @property
    def candidates(self) -> list[Line]:
        """The rows, under the name that figures know."""
        return self.lines

    def cell(self, method: str, protocol: str, length: int, /) -> Number | None:
        """The number of a row at a length."""
        line = next(line for line in self.lines if line.label == method)
        return line.numbers.get(length)


# Ratios that no single result has: between rows of different results, or between lengths.


NAN = math.nan


def against(
    line: Line, other: Line, protocol: str, length: int, other_length: int
) -> tuple[float | None, Interval | None]:
    """A row's perplexity divided by another's, with the paired 95 % interval over documents.

    Args:
        line: The row.
        other: What it is divided by; it has read the same documents, and under `tail` the same targets at any length.
        protocol: The protocol of both.
        length: The row's length.
        other_length: The other's.

    Returns:
        Ratio and interval; `None` where one of the two was not measured.
    """
    base = _records(other, protocol, other_length, "base")
    rows = _records(line, protocol, length, "row")
    if not rows or len(rows) != len(base):
        return None, None
    settings = line.source.data["settings"]
    cells = summarize(
        [*base, *rows],
        seed=settings.get("seed", 0),
        resamples=settings.get("resamples", RESAMPLES),
        aggregate=settings.get("aggregate", "tokens"),
        base=settings.get("base"),
    )
    cell = next((cell for cell in cells if cell.method == "row"), None)
    return (None, None) if cell is None else (cell.ratio, cell.ratio_interval)


def _records(line: Line, protocol: str, length: int, name: str) -> list[Record]:
    """A row's sums, under names that do not depend on the machine: the document's place, and length 0."""
    data = line.source.data
    places = {document["name"]: str(place) for place, document in enumerate(data["documents"])}
    known = {field.name for field in dataclasses.fields(Record)}
    records = []
    for entry in data["records"]:
        if (entry["method"], entry["protocol"], entry["length"]) != (line.name, protocol, length):
            continue
        document = places.get(entry["document"], entry["document"])
        values = {**entry, "method": name, "length": 0, "document": document}
        for sums in ("nats", "weighted"):  # JSON has no NaN
            values[sums] = NAN if values[sums] is None else values[sums]
        records.append(Record(**{key: values[key] for key in known}))
    return records


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


# Which results may stand in one table.


# What changes how a number is made but not which tokens are scored, or only which numbers there are.
_FREE = frozenset(
    {
        *("lengths", "protocols", "seed", "resamples", "buckets", "min_tokens"),
        *("chunk", "prefill", "batch", "preset"),
    }
)
# What says something about one protocol only.
_OF_PROTOCOL = {
    "tail_tokens": ("tail",),
    "read_last": ("tail",),
    "windows_per_document": ("tail", "sliding"),
    "bos_windows": ("sliding",),
    "stride": ("sliding", "stream"),
    "evaluator": ("longppl",),
}


@dataclass(frozen=True)
class Texts:
    """What was read: results with equal `Texts` read the same tokens.

    Attributes:
        documents: Hash of each document's tokens, in order.
        tokenizer: Hash of the tokenizer.
        special: What stands in front of a window, as JSON.
    """

    documents: tuple[str, ...]
    tokenizer: str
    special: str

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Texts:
        """Reads it from a result."""
        model = data.get("model", {})
        documents = tuple(_document_id(document) for document in data.get("documents", ()))
        tokenizer = model.get("tokenizer") or data.get("tokenizer") or {}
        special = model.get("bos") or data.get("bos") or {}
        tokens = special.get("token_ids", special) if isinstance(special, dict) else special
        return cls(documents, str(tokenizer.get("sha256", "unknown")), json.dumps(tokens))


def _document_id(document: Mapping[str, Any]) -> str:
    return str(document.get("tokens_sha256") or json.dumps(document, sort_keys=True))


def protocol_key(data: Mapping[str, Any], protocol: str) -> Hashable:
    """Everything that a protocol's numbers mean, the documents aside: its sentence and its settings."""
    return str(data["protocols"][protocol]), json.dumps(_decisive(data, protocol), sort_keys=True)


def _decisive(data: Mapping[str, Any], protocol: str) -> dict[str, Any]:
    settings: dict[str, Any] = data.get("settings", {})
    kept = {
        name: value
        for name, value in settings.items()
        if name not in _FREE and protocol in _OF_PROTOCOL.get(name, (protocol,))
    }
    if kept.get("windows_per_document") not in (
        None,
        1,
    ):  # they are spread over what the longest leaves
        kept["longest length"] = max(settings["lengths"])
    return kept


def why_another(first: Mapping[str, Any], other: Mapping[str, Any], protocol: str) -> str:
    """In words, why two results of one protocol, on the same texts, are not in one table."""
    if first["protocols"][protocol] != other["protocols"][protocol]:
        return f"the other one is: {first['protocols'][protocol]}"
    one, two = _decisive(first, protocol), _decisive(other, protocol)
    return ", ".join(
        f"{name} {two.get(name)} instead of {one.get(name)}"
        for name in dict.fromkeys([*one, *two])
        if one.get(name) != two.get(name)
    )


def by_texts(sources: Sequence[Source]) -> list[list[Source]]:
    """Groups results that read the same tokens, in the order of their first appearance."""
    groups: dict[Texts, list[Source]] = {}
    for source in sources:
        groups.setdefault(Texts.of(source.data), []).append(source)
    return list(groups.values())


def why_apart(first: Sequence[Source], other: Sequence[Source]) -> list[str]:
    """In words, why two groups are no one group."""
    one, two = Texts.of(first[0].data), Texts.of(other[0].data)
    reasons = []
    if one.tokenizer != two.tokenizer:
        reasons.append("another tokenizer, so a token is not the same piece of text")
    elif one.documents != two.documents:
        reasons.append(f"other documents ({_documents_differ(first[0].data, other[0].data)})")
    if one.special != two.special:
        reasons.append(f"other special tokens in front ({two.special} instead of {one.special})")
    return reasons


def _documents_differ(one: Mapping[str, Any], two: Mapping[str, Any]) -> str:
    a, b = (list(data.get("documents", ())) for data in (one, two))
    texts = [[document.get("text_sha256") for document in documents] for documents in (a, b)]
    if texts[0] == texts[1] and None not in texts[0]:
        return "the same texts, cut at other lengths"
    ids = [{_document_id(document) for document in documents} for documents in (a, b)]
    if ids[0] == ids[1]:
        return "the same ones in another order"
    common = len(ids[0] & ids[1])
    cut = len(set(texts[0]) & set(texts[1]) - {None}) - common
    also = f", {cut} more cut at other lengths" if cut > 0 else ""
    return f"{len(b)} instead of {len(a)}, {common} in common{also}"


# Puts comparable perplexity results into one table.


def merge(sources: Sequence[Source]) -> list[Merged]:
    """One table per protocol and way of measuring it, in the order of their first appearance.

    Args:
        sources: Perplexity results that read the same tokens.
    """
    groups: dict[Any, list[Source]] = {}
    for source in sources:
        for protocol in source.data["protocols"]:
            groups.setdefault((protocol, protocol_key(source.data, protocol)), []).append(source)
    return [_merged(protocol, group) for (protocol, _), group in groups.items()]


def _merged(protocol: str, sources: list[Source]) -> Merged:
    lines: list[Line] = []
    for source in sources:
        for method in source.data["methods"]:
            line = Line(source, method["label"], method["label"], method.get("method"))
            twin = next((other for other in lines if _same(other, line, protocol)), None)
            if twin is None:
                lines.append(line)
            else:
                twin.also.append(source)
    names = [line.name for line in lines]
    for line in lines:
        if names.count(line.name) > 1:
            line.label = f"{line.name} [{line.source.number}]"
    for line in lines:
        _fill(line, protocol, _baseline(line, lines))
    settings = [source.data["settings"] for source in sources]
    lengths = sorted({length for values in settings for length in values["lengths"]})
    originals = {source.data.get("original_max_position_embeddings") for source in sources}
    return Merged(
        protocol,
        sources[0].data["protocols"][protocol],
        sources,
        lines,
        Axes(tuple(lengths), (protocol,), settings[0].get("tail_tokens", 0)),
        originals.pop() if len(originals) == 1 else None,
        _curve(lines) if protocol == "prefix" else None,
    )


def variant(source: Source) -> str:
    """What makes two models the same: a ratio between two others would not be a method's."""
    model = source.data["model"]
    names = ("weights_sha256", "config_sha256", "patch", "class", "parameters", "dtype")
    known = [model.get(name) for name in names]
    return json.dumps([*known, None if model.get("weights_sha256") else model.get("name")])


def _same(one: Line, two: Line, protocol: str) -> bool:
    """Whether the second has nothing that the first has not: the same model and method, to the last bit."""
    if one.name != two.name or variant(one.source) != variant(two.source):
        return False
    first, second = (_measured(line, protocol) for line in (one, two))
    return bool(second) and second.items() <= first.items()


def _measured(line: Line, protocol: str) -> dict[int, Any]:
    """What was measured at each length: the sums, or why there are none."""
    data = line.source.data
    key = (line.name, protocol)
    cells = {
        cell["length"]: (cell["nats"], cell["tokens"], cell["perplexity"], str(cell["interval"]))
        for cell in data["summary"]
        if (cell["method"], cell["protocol"]) == key
    }
    failed = {
        f["length"]: f["reason"] for f in data["failures"] if (f["method"], f["protocol"]) == key
    }
    return {**cells, **failed}


def _baseline(line: Line, lines: Sequence[Line]) -> Line:
    """The first method of a result of the same model, preferably the model as it was loaded."""
    firsts = {
        other.source.number: other
        for other in reversed(lines)
        if variant(other.source) == variant(line.source)
    }
    ordered = sorted(firsts.values(), key=lambda other: other.source.number)
    return next((other for other in ordered if other.method is None), ordered[0])


def _fill(line: Line, protocol: str, baseline: Line) -> None:
    data = line.source.data
    line.baseline = baseline.label
    own = baseline.source is line.source
    for cell in data["summary"]:
        if (cell["method"], cell["protocol"]) != (line.name, protocol):
            continue
        length = cell["length"]
        ratio, ratio_interval = cell["ratio"], interval_of(cell["ratio_interval"])
        if not own:
            ratio, ratio_interval = against(line, baseline, protocol, length, length)
        line.numbers[length] = Number(
            length,
            math.nan if cell["perplexity"] is None else cell["perplexity"],
            interval_of(cell["interval"]),
            ratio,
            ratio_interval,
            cell["bits_per_byte"],
            cell["tokens"],
            cell["documents"],
        )
    for failure in data["failures"]:
        if (failure["method"], failure["protocol"]) == (line.name, protocol):
            line.failures[failure["length"]] = failure["reason"]


def _curve(lines: Sequence[Line]) -> dict[str, Any] | None:
    """The sums by position of all rows, where their buckets are the same."""
    curves: list[Mapping[str, Any] | None] = [line.source.data.get("curve") for line in lines]
    edges = curves[0]["edges"] if curves and curves[0] else None
    if edges is None or any(curve is None or curve["edges"] != edges for curve in curves):
        return None
    methods = {
        line.label: curve["methods"][line.name]
        for line, curve in zip(lines, curves, strict=True)
        if curve is not None and line.name in curve["methods"]
    }
    return {"edges": edges, "methods": methods}
