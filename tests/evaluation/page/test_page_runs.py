"""Results of many runs and machines in one report: what shares a table, what stands apart, what is missing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from hf_posenc.cli import measure
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.page import collect, render
from tests.support.page_results import CURVES, Page, page, result, write


def test_every_run_has_a_section_of_its_own(tmp_path: Path) -> None:
    first = result({name: CURVES[name] for name in ("none", "yarn")})
    second = result({name: CURVES[name] for name in ("none", "truncation")})
    made = page(write(tmp_path / "a", first), write(tmp_path / "b", second))
    heads = [h.text for h in made.root.all("h2") if h.text.startswith("Perplexity")]
    assert heads == ["Perplexity (run 1)", "Perplexity (run 2)"]
    for place, names in enumerate(({"none", "yarn"}, {"none", "truncation"})):
        assert {name for name, _ in made.table("Perplexity, tail", place)} == names


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
