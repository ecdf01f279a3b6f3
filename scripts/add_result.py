"""Add a result of any machine to docs/data/evidence/: `python -m scripts.add_result FOLDER MODEL-TEXTS-MACHINE`.

FOLDER is the output of `hf-posenc bench --suite evidence`, `perplexity` or `retrieval`; or only the records of
perplexity: of a run that did not end, methods are kept that were measured on every document. Then run
`python -m scripts.make_readme`.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_posenc.evaluation.measuring.candidates import Candidate
from hf_posenc.evaluation.measuring.result import MethodEntry
from hf_posenc.evaluation.measuring.statistics import Record
from hf_posenc.evaluation.measuring.store import record_line
from hf_posenc.evaluation.perplexity.protocols import Settings
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.files import to_json
from scripts import results

NAME = re.compile(r"[a-z0-9._]+-[a-z0-9]+-[a-z0-9_]+")


def values_of(folder: Path) -> dict[str, Any]:
    """Return the values of the result in a folder, or of that of its records."""
    files = (folder / f"{kind}.json" for kind in ("bench", "perplexity", "retrieval"))
    if file := next((file for file in files if file.is_file()), None):
        return dict(json.loads(file.read_text(encoding="utf-8")))
    return unfinished(folder).to_dict()


def unfinished(folder: Path) -> PerplexityResult:
    """Return the result of the records of a run that did not end."""
    (records,) = (folder / "records").iterdir()
    about = json.loads((records / "settings.json").read_text(encoding="utf-8"))
    values: dict[tuple[Any, ...], Any] = {}
    for file in sorted(records.glob("shard-*.jsonl")):
        for line in file.read_bytes().splitlines(keepends=True):
            entry = json.loads(line)
            if record_line(tuple(entry["key"]), entry["value"]) != line:
                sys.exit(f"{file} has a damaged record: {line[:80]!r}")
            values[tuple(entry["key"])] = entry["value"]
    measured = {key[0]: json.loads(key[0])[2] for key in values}
    given = [
        replace(Candidate.parse(spec), original=original)
        for spec in results.specs(about["command"])
        for original in measured.values()
    ]
    candidates = {c.key: c for c in given if c.key in measured}
    documents = dict.fromkeys(key[3] for key in values)
    sums: dict[tuple[str, str, int], dict[str, list[Any]]] = defaultdict(dict)
    for key, value in values.items():
        for protocol, length, *numbers in value.get("sums", ()):  # none if it failed
            cell = sums[candidates[key[0]].label, protocol, length]
            before = cell.get(key[3], [0] * len(numbers))
            cell[key[3]] = [a + b for a, b in zip(before, numbers, strict=True)]
    named = {document: document.rsplit(" ", 2) for document in documents}  # name and two hashes
    return PerplexityResult(
        settings=Settings.from_dict(about["settings"]),
        candidates=[MethodEntry.of(c) for c in candidates.values()],
        records=[
            Record(*cell, named[document][0], *numbers)
            for cell, of in sums.items()
            if of.keys() == documents.keys()
            for document, numbers in of.items()
        ],
        failures=[],
        documents=[
            dict(zip(("name", "tokens_sha256", "text_sha256"), parts, strict=True))
            for parts in named.values()
        ],
        model=about["model"],
        original=max(filter(None, measured.values())),
        environment=about["environment"],
        command=about["command"],
        fingerprint=records.name,
    )


def main(folder: str, name: str) -> None:
    """Write the values of a folder under a name."""
    if not NAME.fullmatch(name):
        sys.exit(f"{name} is no MODEL-TEXTS-MACHINE: give three words, such as smollm2-books-h100.")
    file = results.DATA / "evidence" / f"{name}.json"
    file.write_text(to_json(values_of(Path(folder))), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
