"""The sections of the other results: retrieval with heat maps, benchmarks, sweeps and searches."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from hf_posenc.cli import measure
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.bench import BenchResult
from hf_posenc.evaluation.grid import percent
from hf_posenc.evaluation.page import collect, render
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.evaluation.retrieval.result import Failure, LeftOut, Record, RetrievalResult, mcnemar
from hf_posenc.evaluation.retrieval.tasks import RetrievalSettings
from tests.support.page_results import CURVES, Page, entry, exact, page, result, write
from tests.support.sweep_cases import planted

DEPTHS = (0.0, 0.5, 1.0)


def retrieval(right: dict[str, Sequence[float]], *longer: int) -> dict[str, Any]:
    """Build a `retrieval.json` with these accuracies by depth, the same at both lengths; none at a longer one."""
    samples = 4
    records = []
    for method, shares in right.items():
        for length in (256, 512):
            for depth, share in zip(DEPTHS, shares, strict=True):
                for sample in range(samples):
                    correct = sample < share * samples
                    if (method, length) != ("yarn", 512):
                        values = (correct, float(correct), 1.5, 1 if correct else 3, 11, 100)
                        records.append(Record(method, "passkey", length, depth, sample, *values))
    made = RetrievalResult(
        model=result()["model"],
        haystack={"kind": "noise"},
        settings=RetrievalSettings((256, 512, *longer), ("passkey",), DEPTHS, samples),
        original=256,
        candidates=[entry(name) for name in right],
        records=records,
        failures=[Failure("yarn", "passkey", 512, "out of memory")] if "yarn" in right else [],
        left_out=[LeftOut("passkey", 1024, 2000)],
        command="hf-posenc retrieval --task passkey",
    )
    return made.to_dict()


def test_retrieval_has_its_table_and_its_heat_maps(tmp_path: Path) -> None:
    data = retrieval({"none": (0.0, 0.5, 1.0), "yarn": (1.0, 1.0, 1.0)}, 1024)
    made = page(write(tmp_path / "a", data, "retrieval"), figures=True)
    cells = made.table("Retrieval, passkey")
    for cell in data["summary"]:
        shown = cells[cell["method"], f"{cell['length']:,}x{cell['length'] // 256}"]
        assert exact(shown) == [cell["accuracy"]]
        assert f"1st {percent(cell['first'])}" in shown.text
    assert cells["yarn", "512x2"].text.startswith("OOM")
    assert "passkey needs at least 2,000 tokens" in made.root.text
    assert cells["yarn", "passes80%"].text == "256"
    maps = made.root.all("figure", class_="map")
    assert ["Answers right" in each.attributes["aria-label"] for each in maps] == [True, False]
    texts = [{text.text for text in each.all("text")} for each in maps]
    assert texts[0] >= {"none", "yarn", "0", "50", "100", "OOM", "too short"}
    assert texts[1] >= {"80"}  # third of eleven: 8 of 10 distractors are less probable
    assert all(image.attributes["xlink:href"].startswith("data:") for image in maps[0].all("image"))
    assert "hf-posenc retrieval --task passkey" in made.root.text
    assert "out of memory" in made.root.text


def test_a_benchmark_is_its_table_and_its_results(tmp_path: Path) -> None:
    bench = BenchResult(
        perplexity=PerplexityResult.from_dict(result({"none": CURVES["none"]})),
        retrieval=RetrievalResult.from_dict(retrieval({"none": (0.0, 0.5, 1.0)}, 1024)),
        suite="quick",
        remarks=["Said."],
    )
    folder = write(tmp_path / "a", bench.to_dict(), "bench")
    kinds = [source.kind for source in collect([folder]).sources]
    assert kinds == ["bench", "perplexity", "retrieval"]
    made = page(folder)
    for caption in ("Perplexity, tail", "Retrieval, passkey"):
        assert made.table(caption)
    runs = made.table("Results in this report")
    assert {name for name, _ in runs} == {"1"}
    assert runs["1", "model"].text == "tiny"
    assert "Said." in made.root.text
    assert "Benchmark, suite quick" in made.root.text
    assert len(made.root.all("pre")) == 1


def test_a_sweep_shows_its_own_table_and_notes_and_the_recipe(tmp_path: Path) -> None:
    losses = {"none": 3.0, "control": 2.5, "yarn": 2.0, "pi": math.nan}
    made = planted({name: [loss + n / 50 for n in range(8)] for name, loss in losses.items()})
    made.recipe = {"method": "yarn", "scale": 4, "note": "<b>"}
    shown = page(write(tmp_path / "a", made.to_dict(), "sweep"))
    (grid,) = made.tables()
    cells = [cell.text for cell in shown.table(grid.title).values()]
    assert cells == ["".join(f.text.split("\n")) for row in grid.rows for f in row.fields[1:]]
    assert '"note": "<b>"' in shown.root.text
    assert not shown.root.all("b")
    first, *others = made.notes()
    assert verdicts(shown) == [f"Sweep (run 1): {' '.join(others)}"]
    assert first in [p.text for p in shown.root.all("p")]
    assert "Run 1, pi: failed" in shown.root.text


def verdicts(made: Page) -> list[str]:
    assert made.root.all("h2")[0].text == "Verdict"
    return [item.text for item in made.root.all("main")[0].all("ul")[0].all("li")]


def test_the_page_opens_with_the_best_method_against_the_control(tmp_path: Path) -> None:
    (tmp_path / "wrong").mkdir()
    (tmp_path / "wrong" / "bench.json").write_text("[]")
    better = {**CURVES, "yarn": (15.5, 14.7, 13.9, 9.0), "pi": (15.5, 14.7, 13.9, 12.0)}
    data = result(better, protocols=("tail",))
    made = page(write(tmp_path / "a", data), tmp_path / "wrong")
    yarn, control = (
        next(c for c in data["summary"] if (c["method"], c["length"]) == (method, 1024))
        for method in ("yarn", "truncation")
    )
    (said,) = verdicts(made)
    assert said.startswith(
        "Perplexity (run 1): tail, 1,024 tokens, truncation as the control, 6 documents: yarn has "
        f"{yarn['perplexity'] / control['perplexity']:.3g} ("
    )
    assert said.endswith("significantly better; significantly better too: pi.")
    assert made.root.all("h2")[-1].text == "Not in this report"


@pytest.mark.parametrize(
    ("curves", "documents", "expected"),
    [
        (CURVES, 6, "no method is significantly better; yarn has 1.1"),
        (CURVES, 3, "too few documents for a verdict"),
        ({"none": CURVES["none"]}, 6, "no method has a number to compare"),
        ({"none": CURVES["none"], "yarn": CURVES["yarn"]}, 6, "breaks down: add truncation"),
    ],
)
def test_the_verdict_claims_no_more_than_was_shown(
    tmp_path: Path, curves: dict[str, tuple[float, ...]], documents: int, expected: str
) -> None:
    data = result(curves, documents=documents, protocols=("tail",))
    assert expected in verdicts(page(write(tmp_path / "a", data)))[0]


def test_retrieval_is_judged_by_the_same_prompts(tmp_path: Path) -> None:
    data = retrieval({"none": (0.0, 0.0, 0.0), "pi": (0.5, 1.0, 1.0)})
    (said,) = verdicts(page(write(tmp_path / "a", data, "retrieval")))
    assert "512 tokens, none as the control, 12 prompts: pi answers 10, none 0" in said
    assert said.endswith(f"significantly better (exact McNemar test, p = {2 / 2**10:.2g}).")
    few = retrieval({"none": (0.0, 0.0, 0.0), "pi": (0.0, 0.25, 1.0)})  # 5 of 12 more
    (said,) = verdicts(page(write(tmp_path / "b", few, "retrieval")))
    assert "no method is significantly better; pi answers 5, none 0" in said
    assert said.endswith("not significantly different (exact McNemar test, p = 0.062).")
    assert "times" not in said  # the control is no rival
    assert mcnemar(700, 700) == 1
    normal = math.erfc(199 / math.sqrt(2 * 1400))  # with its correction for continuity
    assert mcnemar(600, 800) == pytest.approx(normal, rel=0.05)
    # 6 of 12 more than the control's: p = 0.03, but the best of two
    data = retrieval({"none": (0.0, 0.0, 0.0), "pi": (0.0, 0.5, 1.0), "ntk": (0.0, 0.0, 0.0)})
    (said,) = verdicts(page(write(tmp_path / "c", data, "retrieval")))
    test = "exact McNemar test, times 2 methods, p = 0.062"
    assert said.endswith(f"not significantly different ({test}).")


# Results of many runs and machines in one report.
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
        (records / f"shard-{shard}-of-2.jsonl").write_text("{}\n" * lines + '{"torn')
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
    with pytest.raises(PosencError, match="There is no path"):
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
