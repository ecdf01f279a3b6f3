"""Results of many runs and machines in one report: what shares a table, what stands apart, what is missing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from hf_posenc.cli import measure
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.measuring.statistics import Record, summarize
from hf_posenc.evaluation.page import collect, render
from hf_posenc.evaluation.page.compare import ratio_text
from tests.support.page_results import CURVES, LENGTHS, Page, exact, page, result, write
from tests.support.selection import late


def test_runs_of_one_model_share_a_table_and_a_baseline(tmp_path: Path) -> None:
    first = result({name: CURVES[name] for name in ("none", "yarn")})
    second = result({"truncation": CURVES["truncation"], "yarn": (15.6, 14.8, 14.3, 15.7)})
    for index, document in enumerate(second["documents"]):  # another machine has them elsewhere
        document["name"] = f"/elsewhere/{index}.txt"
    for record in second["records"]:
        record["document"] = f"/elsewhere/{record['document'].removeprefix('doc ')}.txt"
    made = page(write(tmp_path / "a", first), write(tmp_path / "b", second))
    assert len([h for h in made.root.all("h2") if h.text.startswith("Perplexity")]) == 1
    cells, ratios = made.table("Perplexity, tail"), made.table("Ratios, tail")
    row = "truncation [2]"
    assert {name for name, _ in cells} == {"none [1]", "yarn [1]", row, "yarn [2]"}
    for length in LENGTHS:
        numbers = next(
            c
            for c in second["summary"]
            if (c["method"], c["protocol"], c["length"]) == ("truncation", "tail", length)
        )
        assert exact(cells[row, f"{length:,}x{length / 256:.3g}"]) == [numbers["perplexity"]]
        records = [
            Record(**{**r, "document": r["document"].removesuffix(".txt")[-1], "method": f"{k}"})
            for k, d in enumerate((first, second))
            for r in d["records"]
            if (r["protocol"], r["length"]) == ("tail", length)
            and r["method"] == ("none", "truncation")[k]
        ]
        expected = summarize(records, comparisons=3)[-1]  # of four rows
        shown = ratios[row, f"{length:,}to the baseline"]
        assert exact(shown) == [expected.ratio]
        low, high = expected.ratio_interval or (0.0, 0.0)
        assert f"{ratio_text(low)}-{ratio_text(high)}" in shown.text


def _set(data: dict[str, Any], path: str, value: Any) -> None:
    *above, last = path.split(".")
    for name in above:
        data = data[int(name) if isinstance(data, list) else name]
    data[last] = value


@pytest.mark.parametrize(
    ("path", "value", "apart"),
    [
        ("documents.0.tokens_sha256", "c" * 64, True),
        ("model.tokenizer.sha256", "c" * 64, True),
        ("model.weights_sha256", "ee" * 32, True),
        ("settings.tail_tokens", 32, True),
        *late(["model.bos.token_ids"], [[1]], [True]),
        *late(["settings.windows_per_document"], [3], [True]),
        ("settings.chunk", 64, False),
        ("settings.stride", 64, False),  # of a protocol that neither has
    ],
)
def test_numbers_of_another_meaning_are_another_section(
    tmp_path: Path, path: str, value: Any, apart: bool
) -> None:
    other = result()
    _set(other, path, value)
    made = page(write(tmp_path / "a", result()), write(tmp_path / "b", other))
    heads = [h.text for h in made.root.all("h2") if h.text.startswith("Perplexity")]
    assert heads == (["Perplexity 1", "Perplexity 2"] if apart else ["Perplexity"])
    assert ("only numbers of one section" in made.root.text) == apart
    for place in range(len(heads)):  # the same numbers are one row
        names = {name for name, _ in made.table("Perplexity, tail", place)}
        assert names == (set(CURVES) if apart else {f"{name} [1, 2]" for name in CURVES})


def test_settings_say_where_runs_differ(tmp_path: Path) -> None:
    other = result({"none": CURVES["none"]})
    other["model"]["dtype"] = "bfloat16"
    made = page(write(tmp_path / "a", result()), write(tmp_path / "b", other))
    differ = made.table("Settings that differ")
    assert [differ["model.dtype", f"run {n}"].text for n in (1, 2)] == ["float32", "bfloat16"]
    shared = made.table("Settings of all results that have them")
    weights = shared["model.weights_sha256", "value"]
    assert (weights.text, weights.attributes["title"]) == ("aaaaaaaaaaaa…", "aa" * 32)
    names = {name for name, _ in shared}
    assert names >= {"model.tokenizer.sha256", "settings.aggregate", "environment.torch"}
    assert not names & {name for name, _ in differ}
    assert made.root.text.count("hf-posenc perplexity --patch none --patch yarn") == 2
    assert "bad.txt: not UTF-8" in made.root.text


def test_an_unfinished_run_says_what_it_has(tmp_path: Path) -> None:
    records = tmp_path / "run" / "records" / "abc"
    records.mkdir(parents=True)
    (records / "settings.json").write_text(json.dumps({"command": "hf-posenc perplexity --x <y>"}))
    for shard, lines in ((1, 3), (2, 2)):
        text = "{}\n" * lines + '{"torn'
        (records / f"shard-{shard}-of-2.jsonl").write_text(text)
    line = f"{tmp_path}/run: unfinished, with 5 values; the same command resumes it. hf-posenc perplexity --x <y>"
    with pytest.raises(PosencError, match=re.escape(line)):
        collect([tmp_path / "run"])
    write(tmp_path / "other", result())
    assert line in page(tmp_path).root.text
    write(tmp_path / "run", result())
    assert not collect([tmp_path / "run"]).remarks


def test_what_is_no_result_is_said(tmp_path: Path) -> None:
    write(tmp_path / "runs" / "a", result())
    write(tmp_path / "runs" / "b", result())
    (tmp_path / "runs" / "c").mkdir()
    (tmp_path / "runs" / "c" / "perplexity.json").write_text("{")
    (tmp_path / "runs" / "c" / "sweep.json").write_text("[]")
    found = collect([tmp_path / "runs"])
    assert [Path(source.name).name for source in found.sources] == ["a"]
    reasons = " ".join(found.remarks)
    for text in ("the same result as", "cannot be read", "not a result of hf-posenc"):
        assert text in reasons
    assert "the same result as" in Page(render(found, figures=False)).root.text
    with pytest.raises(PosencError, match="There is no folder"):
        collect([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(PosencError, match=r"nothing to report.*perplexity\.json"):
        collect([tmp_path / "empty"])


@pytest.mark.parametrize("lost", ["documents", "records", "settings", "model", "methods", "curve"])
def test_a_result_that_lost_a_part_is_named_and_left_out(tmp_path: Path, lost: str) -> None:
    whole = result()
    write(tmp_path / "a", whole)
    write(tmp_path / "b", {name: value for name, value in whole.items() if name != lost})
    found = collect([tmp_path / "a", tmp_path / "b"])
    assert len(found.sources) == 1
    assert f"it lacks {lost}." in found.remarks[0]
    write(tmp_path / "b", {**whole, lost: None})
    with pytest.raises(PosencError, match=r"perplexity\.json: damaged, or written by another"):
        collect([tmp_path / "b"])


def test_a_file_may_be_given_and_the_page_is_the_same_every_time(tmp_path: Path) -> None:
    write(tmp_path / "a", result())
    file = tmp_path / "renamed.json"
    (tmp_path / "a" / "perplexity.json").rename(file)
    assert page(file).source == page(file).source
    assert collect([file]).sources[0].kind == "perplexity"


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(measure.report)
    write(tmp_path / "runs" / "a", result())
    (tmp_path / "runs" / "b").mkdir()
    (tmp_path / "runs" / "b" / "perplexity.json").write_text("{")
    target = tmp_path / "page.html"
    options = ["--output", str(target), "--title", "Ours & theirs"]
    done = CliRunner().invoke(app, [str(tmp_path / "runs"), *options])
    assert done.exit_code == 0, done.output
    assert "1 result" in " ".join(done.stdout.split())
    assert "cannot be read" in done.stderr
    made = Page(target.read_text(encoding="utf-8"))
    assert made.root.all("h1")[0].text == "Ours & theirs"
    assert len(made.root.all("svg")) == 5
