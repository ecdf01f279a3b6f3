"""Add a measurement of perplexity, of any machine, to docs/data/evidence/, and make the pages' tables of all of them.

    python -m scripts.add_result FOLDER NAME

FOLDER is the output of `hf-posenc perplexity`, or its records alone: of a run that did not end, methods are kept that
were measured on every document. Then run `python -m scripts.make_readme`.
"""

from __future__ import annotations

import itertools
import json
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_posenc.evaluation.grid import markdown_table, number
from hf_posenc.evaluation.measuring.candidates import TRUNCATION, Candidate
from hf_posenc.evaluation.measuring.result import MethodEntry
from hf_posenc.evaluation.measuring.statistics import Cell, Record, summarize
from hf_posenc.evaluation.measuring.store import record_line
from hf_posenc.evaluation.perplexity.protocols import Settings
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.files import to_json
from scripts.results import DOCS, made_with, perplexity, retrieval

EVIDENCE = DOCS / "data" / "evidence"
Value = dict[str, Any]


def result_of(folder: Path) -> PerplexityResult:
    """Return the result in a folder, or that of its records."""
    if (folder / "perplexity.json").is_file():
        return perplexity(folder / "perplexity.json")
    (records,) = (folder / "records").iterdir()
    about, values = json.loads((records / "settings.json").read_text()), dict(_values(records))
    measured = {key[0]: json.loads(key[0])[2] for key in values}
    given = [
        replace(Candidate.parse(s), original=o)
        for s in _specs(about["command"])
        for o in measured.values()
    ]
    candidates = {c.key: c for c in given if c.key in measured}
    documents = dict.fromkeys(key[3] for key in values)
    sums: dict[tuple[str, str, int], dict[str, list[Any]]] = defaultdict(dict)
    for key, value in values.items():
        for protocol, length, *numbers in value.get("sums", ()):  # none if it failed
            cell = sums[candidates[key[0]].label, protocol, length]
            before = cell.get(key[3], [0] * len(numbers))
            cell[key[3]] = [a + b for a, b in zip(before, numbers, strict=True)]
    whole = {cell: of for cell, of in sums.items() if of.keys() == documents.keys()}
    return PerplexityResult(
        settings=Settings(**about["settings"]),
        candidates=[MethodEntry.of(c) for c in candidates.values()],
        records=[
            Record(*cell, document.rsplit(" ", 2)[0], *numbers)
            for cell, of in whole.items()
            for document, numbers in of.items()
        ],
        failures=[],
        documents=[
            dict(zip(("name", "tokens_sha256", "text_sha256"), d.rsplit(" ", 2), strict=True))
            for d in documents
        ],
        model=about["model"],
        original=max(filter(None, measured.values())),
        environment=about["environment"],
        command=about["command"],
        fingerprint=records.name,
    )


def _values(records: Path) -> Iterator[tuple[tuple[Any, ...], Value]]:
    for file in sorted(records.glob("shard-*.jsonl")):
        for line in file.read_bytes().splitlines(keepends=True):
            entry = json.loads(line)
            if record_line(tuple(entry["key"]), entry["value"]) != line:
                sys.exit(f"{file} has a damaged record: {line[:80]!r}")
            yield tuple(entry["key"]), entry["value"]


def _specs(command: str) -> list[str]:
    words = shlex.split(command.replace("--patch=", "--patch "))
    return [spec for flag, spec in itertools.pairwise(words) if flag == "--patch"]


def added(name: str) -> str:
    """Return a table of an added result: ratios to truncation of the ends, of whole texts, and of short texts."""
    result, cells = added_cells(name)
    original, kinds = result.original or 0, (("tail", "end"), ("prefix", "whole"))
    columns = {
        f"{length:,} tokens: {words}": (protocol, length)
        for length in result.settings.lengths
        for protocol, words in kinds
        if length > original
    }
    columns[f"short: {original:,}"] = "prefix", original
    rows = [
        [f"`{label}`", *(bold_ratio(cells.get((label, *column))) for column in columns.values())]
        for label in dict.fromkeys(label for label, *_ in cells if label != TRUNCATION)
    ]
    missing = {*_specs(result.command or "")} - {entry.spec for entry in result.candidates}
    gone = f" Not measured to the end: {', '.join(sorted(missing))}." if missing else ""
    return (
        f"Perplexity divided by that of `{TRUNCATION}`, of the last {result.settings.tail_tokens:,} tokens (end), "
        f"of all tokens (whole), and of short texts. {len(result.documents)} documents, {result.model['name']}, one "
        f"{result.model['device']}, {made_with(result.environment)}. Bold: significantly different.{gone}\n\n"
        f"{markdown_table(['method', *columns], rows, numeric=True)}"
    )


def added_needles(name: str) -> str:
    """Return a table of an added retrieval result at its longest length: answers, and answers ranked first."""
    result = retrieval(EVIDENCE / f"{name}.json")
    longest, tasks = (
        max(c.length for c in result.cells),
        dict.fromkeys(c.task for c in result.cells),
    )
    answers: dict[str, list[str]] = defaultdict(list)
    for c in (c for c in result.cells if c.length == longest):
        right, first = (round((share or 0) * c.samples) for share in (c.accuracy, c.first))
        answers[f"`{c.method}`"].append(f"{right}, {first} of {c.samples}")
    rows = [[method, *numbers] for method, numbers in answers.items()]
    heads = [f"{longest:,} tokens: {task}" for task in tasks]
    table = markdown_table(["answered, ranked first", *heads], rows, numeric=True)
    return f"{result.model['name']}, one {result.model['device']}, {made_with(result.environment)}.\n\n{table}"


def whole_texts(name: str, kind: str, *methods: str) -> str:
    """Return the ratios of methods over whole texts, of a kind, at the least length beyond the trained one."""
    result, cells = added_cells(name)
    length = min(n for n in result.settings.lengths if n > (result.original or 0))
    found = (cells[method, "prefix", length] for method in methods)
    ratios = (
        f"`{c.method.partition(' ')[0]}` {bold_ratio(c, '')}{_WORDS[c.differs]}" for c in found
    )
    return f"{len(result.documents)} {kind} of {length:,} tokens: {', '.join(ratios)}"


_WORDS = {-1: ", significantly better", 0: "", 1: ", significantly worse"}


def added_cells(name: str) -> tuple[PerplexityResult, dict[tuple[str, str, int], Cell]]:
    """Return an added result, and its cells by method, protocol and length, with ratios to truncation."""
    result = perplexity(EVIDENCE / f"{name}.json")
    cells = summarize(result.records, baseline=TRUNCATION)
    return result, {(cell.method, cell.protocol, cell.length): cell for cell in cells}


def bold_ratio(cell: Cell | None, bold: str = "**") -> str:
    """Return a ratio with its interval, bold if it is significant; empty where there is none."""
    if cell is None or cell.ratio is None or cell.ratio_interval is None:
        return ""
    low, high = map(number, cell.ratio_interval)
    mark = bold if cell.differs else ""
    return f"{mark}{number(cell.ratio)} ({low}-{high}){mark}"


if __name__ == "__main__":
    folder, name = sys.argv[1:]
    EVIDENCE.mkdir(parents=True, exist_ok=True)
    (EVIDENCE / f"{name}.json").write_text(
        to_json(result_of(Path(folder)).to_dict()), encoding="utf-8"
    )
