"""`hf-posenc bench`: the command on the embedded model, its files, and what it refuses."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from hf_posenc.evaluation.bench import BenchResult
from hf_posenc.evaluation.flags import parse_tasks
from hf_posenc.evaluation.plots import available
from hf_posenc.evaluation.retrieval.tasks import TASKS
from hf_posenc.evaluation.suites import SUITES
from hf_posenc.files import to_json
from tests.cli.test_cli import invoke


@pytest.mark.slow
def test_the_smoke_suite_runs_on_a_cpu_and_writes_its_files(tmp_path: Path) -> None:
    result = invoke("bench", "--suite", "smoke", "--output", tmp_path)
    assert result.exit_code == 0, result.output
    figures = {"curve.png", "heatmap.png"} if available() else set()
    written = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert written == {"bench.json", "bench.csv", "retrieval.csv", "table.md", *figures}
    text = (tmp_path / "bench.json").read_text()
    read = BenchResult.from_dict(json.loads(text))
    assert to_json(read.to_dict()) == text
    assert (tmp_path / "table.md").read_text() == read._repr_markdown_()
    suite = SUITES["smoke"]
    assert [entry.spec for entry in read.perplexity.candidates] == list(suite.methods)
    assert len(read.perplexity.documents) == suite.documents
    assert read.perplexity.settings.lengths == (256, 512)
    assert read.perplexity.command == "hf-posenc bench --suite smoke"
    rows = list(csv.DictReader((tmp_path / "bench.csv").open()))
    assert len(rows) == len(suite.methods) * 2 * 2
    assert all(row["status"] == "ok" for row in rows)
    assert read.speed is not None
    assert all(read.speed.row(name).tokens_per_second for name in read.speed.methods)
    rows = [row for row in rows if (row["protocol"], row["length"]) == ("tail", "512")]
    # the embedded model breaks past its trained length, and these methods mend it
    tail = {row["method"]: float(row["perplexity"]) for row in rows}
    assert tail["none"] > 3 * max(tail["truncation"], tail["yarn (auto)"], tail["rerope"])
    for shown in (
        "passkey",
        "tokens/s",
        "GiB",
        "yarn (auto)",
        "Wrote bench.json, bench.csv, table.md, retrieval.csv",
    ):
        assert shown in result.output


def test_what_it_will_cost(model: Path, texts: Path, tmp_path: Path) -> None:
    result = invoke("bench", model, "--text", texts / "0.txt", "--lengths", "64,128", "--dry-run",
                    "--tasks", "none", "--patch", "none", "--rounds", 2, "--output", tmp_path / "new")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "timed prefill, warm-ups included: 512 tokens" in result.output
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("text", "tasks"),
    [("all", tuple(TASKS)), ("none", ()), ("vt, fwe", ("vt", "fwe")), (None, None)],
)
def test_tasks_by_name(text: str | None, tasks: Any) -> None:
    assert (None if text is None else parse_tasks(text)) == tasks
