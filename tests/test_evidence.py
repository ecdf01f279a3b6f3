"""The page of evidence: how a result comes to it, and its fields, computed again from the committed records."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts import add_result, evidence_page, results
from tests.support.commands import invoke

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
NUMBER = r"\d[\d.]*(?:e-?\d+)?"
FIELD = re.compile(
    rf"({NUMBER}) \(({NUMBER})-({NUMBER})\)<br>×(\**)({NUMBER}) \((?:({NUMBER})-({NUMBER})|identical)\)\**"
)
PROTOCOLS = ("tail", "prefix")


@functools.cache
def records_of(file: str) -> Any:
    return json.loads((ROOT / "docs/data" / file).read_text(encoding="utf-8"))["records"]


def tables(page: str) -> Iterator[tuple[str, dict[tuple[str, ...], str]]]:
    """Yield each JSON file that the page names, and the table below it: fields by their row's code and their column."""
    pattern = r"data/([\w/-]+\.json)\).*?\n\n((?:\|[^\n]*\n)+)"
    for file, table in re.findall(pattern, page, re.DOTALL):
        lines = [re.split(r" *\| *", line)[1:-1] for line in table.splitlines()]
        fields: dict[tuple[str, ...], str] = {}
        for row in lines[2:]:
            names = tuple(part.strip("`") for part in row if part.startswith("`"))
            columns = list(zip(lines[0], row, strict=True))[len(names) :]
            fields |= {(*names, head): field for head, field in columns}
        yield file, fields


@functools.cache
def quantile(freedom: int, tail: float) -> float:
    """Return Student's t that is exceeded with a probability, by summing its density."""
    points = np.linspace(0, 60, 600_001)
    density = (1 + points**2 / freedom) ** (-(freedom + 1) / 2)
    above = density[::-1].cumsum()[::-1] / density.sum() / 2
    return float(points[np.searchsorted(-above, -tail)])


def shown() -> list[Any]:
    """Return every perplexity of the page that has a ratio: its file, method, column and text."""
    return [
        pytest.param(file, method, head, field, id=f"{file}-{method}-{head}")
        for file, fields in tables(PAGE)
        for (method, *_, head), field in fields.items()
        if FIELD.fullmatch(field) and head.split(",")[0] in PROTOCOLS
    ]


def test_the_page_has_every_perplexity_of_the_added_results() -> None:
    """Those of the control stand without a ratio."""
    fields = {(param.values[0], *param.values[1:3]) for param in shown()}
    for file in (ROOT / "docs/data/evidence").glob("*.json"):
        values = json.loads(file.read_text(encoding="utf-8"))
        for record in values["records"] if values["kind"] == "perplexity" else ():
            head = f"{record['protocol']}, {record['length']:,} tokens"
            key = f"evidence/{file.name}", record["method"], head
            assert key in fields or record["method"] == "truncation", key


@pytest.mark.parametrize(("file", "method", "head", "field"), shown())
def test_a_field_is_computed_again(file: str, method: str, head: str, field: str) -> None:
    """Perplexity, ratio, both intervals and bold type, by numpy from the nats and tokens of the records."""
    protocol, length = head.split(", ")[0], int(head.split(", ")[1].split()[0].replace(",", ""))
    losses: dict[str, dict[str, float]] = {}
    for record in records_of(file):
        if (record["protocol"], record["length"]) == (protocol, length):
            of = losses.setdefault(record["method"], {})
            of[record["document"]] = record["nats"] / record["tokens"]
    control = "truncation" if "truncation" in losses else "none"
    documents = sorted(losses[control])
    own, base = (np.array([losses[name][each] for each in documents]) for name in (method, control))
    count, expected = len(documents), []
    for sample, family in ((own, 1), (own - base, len(losses) - 1)):
        half = quantile(count - 1, 0.025 / family) * sample.std(ddof=1) / math.sqrt(count)
        expected += np.exp(sample.mean() + np.array([0, -half, half])).tolist()
    match = FIELD.fullmatch(field)
    assert match
    texts = [*match.groups()[:3], *match.groups()[4:]]
    wanted = expected if texts[-1] else expected[:4]
    assert [float(text) for text in texts if text] == pytest.approx(wanted, rel=6e-4)
    low, high = expected[4:]
    assert bool(match[4]) == (low > 1.0001 or high < 0.9999)


def test_answers_are_counted_again() -> None:
    counted = 0
    for file, fields in tables(PAGE):
        if not any("answered" in key[-1] for key in fields):
            continue
        for (task, method, head), field in fields.items():
            length, what = head.split(": ")
            own = [
                (r["correct"] if what == "answered" else r["rank"] == 1, r["depth"])
                for r in records_of(file)
                if (r["task"], r["method"], f"{r['length']:,}") == (task, method, length)
            ]
            right, _, total, _ = field.split()
            if len(own) != int(total):  # the depths of the generated answers alone
                depths = [index / 5 for index in range(6)]
                own = [(found, depth) for found, depth in own if depth in depths]
            assert (int(right), int(total)) == (sum(found for found, _ in own), len(own))
            counted += 1
    assert counted > 80


@pytest.mark.parametrize("page", ["evidence", "choosing"])
def test_no_measured_number_is_typed_by_hand(page: str) -> None:
    """In the sections of code and of books, and in all of choosing.md."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    if page == "evidence":
        text = text[text.index("## Which method for code?") : text.index("## Which method for fin")]
    typed = re.sub(r"<!-- generated.*?<!-- end -->", "", text, flags=re.DOTALL)
    assert not re.findall(r"\d+(?:\.\d+)? %|\d\.\d\d+|\d+ (?:of|files|novels|documents)", typed)


@pytest.mark.slow  # a benchmark of the embedded model
def test_a_benchmark_is_a_table_of_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "bench --suite evidence --lengths 256,512 --limit 5 --rounds 1 --tasks passkey --no-plot --quiet"
    patches = [f"--patch={spec}" for spec in ("none", "truncation", "rerope")]
    run = invoke(*words.split(), *patches, "--output", tmp_path / "run")
    assert run.exit_code == 0, run.output
    monkeypatch.setattr(results, "DATA", tmp_path)
    (tmp_path / "evidence").mkdir()
    for folder, name, words in (
        ("run", "embedded", "give three words"),
        ("evidence", "a-b-c", "has no result: run its command again"),
    ):
        with pytest.raises(SystemExit, match=words):
            add_result.main(str(tmp_path / folder), name)
    add_result.main(str(tmp_path / "run"), "embedded-modules-cpu")
    (added,) = (tmp_path / "evidence").iterdir()
    values = json.loads(added.read_text(encoding="utf-8"))
    ((_, fields),) = tables(evidence_page.added("perplexity", "modules"))
    sums = {"rerope": np.zeros(2), "truncation": np.zeros(2)}
    for r in values["perplexity"]["records"]:
        if (r["protocol"], r["length"]) == ("prefix", 512) and r["method"] in sums:
            sums[r["method"]] += r["nats"], r["tokens"]
    own, base = (nats / tokens for nats, tokens in sums.values())
    match = FIELD.fullmatch(fields["rerope", "prefix, 512 tokens"])
    assert match
    assert float(match[1]) == pytest.approx(math.exp(own), rel=6e-4)
    assert float(match[5]) == pytest.approx(math.exp(own - base), rel=6e-4)
    assert "10 prompts at 5 depths" in evidence_page.added("retrieval", "modules")
    assert evidence_page.added("perplexity", "books") == "None so far."
    model = values["perplexity"]["model"]
    for part in (model["weights_sha256"][:16], values["perplexity"]["environment"]["torch"]):
        assert part in evidence_page.commands()
