"""The sections of the other results: retrieval with heat maps, benchmarks, sweeps and searches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hf_posenc.evaluation import published
from hf_posenc.evaluation.measuring.result import MethodEntry
from hf_posenc.evaluation.page import collect
from hf_posenc.evaluation.retrieval.result import (
    Failure,
    LeftOut,
    Record,
    RetrievalResult,
    mcnemar,
)
from hf_posenc.evaluation.retrieval.tasks import RetrievalSettings
from tests.support.page_results import CURVES, Page, exact, page, result, write

DEPTHS = (0.0, 0.5, 1.0)


def retrieval(
    right: dict[str, Sequence[float]], *, samples: int = 4, **more: Any
) -> dict[str, Any]:
    """Build a `retrieval.json` with these accuracies by depth, the same at both lengths."""
    records = []
    for method, shares in right.items():
        for length in (256, 512):
            for depth, share in zip(DEPTHS, shares, strict=True):
                for sample in range(samples):
                    correct = sample < share * samples
                    if (method, length) != ("yarn", 512):
                        values = (correct, float(correct), 1.5, 1 if correct else 3, 11, 100)
                        records.append(Record(method, "passkey", length, depth, sample, *values))
    entries = [
        MethodEntry(name, name, None if name == "none" else name, [], {}, None, False, 256, False)
        for name in right
    ]
    made = RetrievalResult(
        model=result()["model"],
        haystack={"kind": "noise"},
        settings=RetrievalSettings((256, 512, 1024), ("passkey",), DEPTHS, samples),
        original=256,
        candidates=entries,
        records=records,
        failures=[Failure("yarn", "passkey", 512, "out of memory")] if "yarn" in right else [],
        left_out=[LeftOut("passkey", 1024, 2000)],
        command="hf-posenc retrieval --task passkey",
    )
    return {**made.to_dict(), **more}


def test_retrieval_has_a_table_and_heat_maps_with_the_numbers_of_the_result(tmp_path: Path) -> None:
    data = retrieval({"none": (0.0, 0.5, 1.0), "yarn": (1.0, 1.0, 1.0)})
    made = page(write(tmp_path / "a", data, "retrieval"))
    cells = made.table("Retrieval, passkey")
    for cell in data["summary"]:
        shown = exact(cells[cell["method"], f"{cell['length']:,}"])
        assert shown == [
            *(cell["accuracy"], *cell["interval"]),
            *(cell["first"], *cell["first_interval"]),
        ]
    assert "above chance" in cells["yarn", "256"].text
    assert cells["yarn", "512"].text.startswith("OOM")
    assert cells["none", "1,024"].attributes["title"] == "the shortest prompt has 2,000 tokens"
    assert cells["yarn", "passes 80 %"].text == "256"
    heat = made.table("none")
    assert {head for _, head in heat} == {"256", "512"}
    for cell in data["by_depth"]:
        if cell["method"] == "none":
            field = heat[f"{100 * cell['depth']:.0f} %", f"{cell['length']}"]
            assert exact(field) == [cell["accuracy"]]
            assert field.attributes["style"] == f"--part: {100 * cell['accuracy']:.0f}%"
    assert "hf-posenc retrieval --task passkey" in made.root.text
    assert "out of memory" in made.root.text


def test_where_nothing_is_right_the_map_shows_ranks(tmp_path: Path) -> None:
    data = retrieval({"none": (0.0, 0.0, 0.0)})
    made = page(write(tmp_path / "a", data, "retrieval"))
    beaten = [c["beaten"] for c in data["by_depth"]]
    assert set(beaten) == {0.8}  # third of eleven: 8 of 10 distractors
    assert {tuple(exact(field)) for field in made.table("none").values()} == {(0.8,)}
    assert "share of distractors" in made.root.text


def test_other_prompts_are_another_section(tmp_path: Path) -> None:
    one = write(tmp_path / "a", retrieval({"none": (0.0, 0.5, 1.0)}), "retrieval")
    two = write(tmp_path / "b", retrieval({"none": (0.0, 0.5, 1.0)}, samples=8), "retrieval")
    three = write(tmp_path / "c", retrieval({"rerope": (1.0, 0.5, 1.0)}), "retrieval")
    made = page(one, two, three)
    heads = [h.text for h in made.root.all("h2") if h.text.startswith("Retrieval")]
    assert heads == ["Retrieval 1", "Retrieval 2"]
    notes = [p.text for p in made.root.all("p", class_="apart")]
    assert notes == ["Not comparable with Retrieval 1: samples 8 instead of 4."]
    names = {name for name, _ in made.table("Retrieval, passkey")}
    assert names == {"nonerun 1, tiny", "reroperun 3, tiny"}


def bench(**more: Any) -> dict[str, Any]:
    speed = {
        "length": 2048,
        "device": "GPU",
        "threads": None,
        "memory": "all tensors",
        "summary": [
            {
                "method": "none",
                "tokens_per_second": 1000.5,
                "lowest": 900.0,
                "highest": 1100.0,
                "ratio": 1.0,
                "peak_bytes": 3 * 2**30,
                "prefill": None,
                "failed": None,
            },
            {
                "method": "yarn",
                "tokens_per_second": None,
                "lowest": None,
                "highest": None,
                "ratio": None,
                "peak_bytes": None,
                "prefill": None,
                "failed": "out of memory",
            },
        ],
    }
    parts = {"perplexity": result(), "retrieval": retrieval({"none": (0.0, 0.5, 1.0)})}
    about = {"kind": "bench", "format": 1, "suite": "quick", "compare": [], "remarks": ["Said."]}
    return {**about, **parts, "speed": speed, **more}


def test_a_benchmark_is_its_results_and_a_table_of_speed(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", bench(), "bench")
    assert [source.kind for source in collect([folder]).sources] == [
        *("bench", "perplexity", "retrieval"),
    ]
    made = page(folder)
    cells = made.table("Speed and memory")
    assert exact(cells["none", "tokens per second"]) == [1000.5, 900.0, 1100.0]
    assert cells["none", "tokens per second"].text == "1,000900–1,100"
    assert cells["none", "peak memory"].text == "3.00 GiB"
    assert cells["yarn", "tokens per second"].text == "OOM"
    assert made.table("Perplexity, tail")
    assert made.table("Retrieval, passkey")
    runs = made.table("Results in this report.")
    assert {name for name, _ in runs} == {"1"}
    assert runs["1", "model"].text == "tiny"
    assert "Said." in made.root.text
    assert len(made.root.all("pre")) == 1


def test_a_published_table_that_differs_says_in_what(tmp_path: Path) -> None:
    tables = [published.get(name) for name in published.available()]
    chosen = next(table for table in tables if table.protocol.name == "prefix")
    made = page(write(tmp_path / "a", bench(compare=[chosen.id, "no such table"]), "bench"))
    notes = [p.text for p in made.root.all("p", class_="apart")]
    assert len(notes) == 2
    assert notes[0].startswith("NOT comparable with this run: ")
    assert "lengths" in notes[0]
    assert notes[1] == "NOT comparable with this run: this version of hf-posenc does not have it."
    assert f"Published: {chosen.paper}, {chosen.table}" in [h.text for h in made.root.all("h3")]


def test_a_published_table_stands_beside_as_it_was_printed(tmp_path: Path) -> None:
    tables = [published.get(name) for name in published.available()]
    chosen = next(t for t in tables if t.protocol.name == "prefix" and t.metric == "perplexity")
    lengths = [int(length) for length in chosen.columns[:2]]
    ours = result({"none": (9.0, 8.0)}, lengths=lengths, protocols=("prefix",))
    made = page(write(tmp_path / "a", bench(compare=[chosen.id], perplexity=ours), "bench"))
    assert not made.root.all("p", class_="apart")
    cells = made.table("As printed")
    row = next(r for r in chosen.rows if isinstance(chosen.value(r, lengths[0]), float))
    shown = cells[f"{row.method}{row.model}", f"{lengths[0]:,}"]
    assert float(shown.text) == chosen.value(row, lengths[0])


def sweep(kind: str = "sweep") -> dict[str, Any]:
    row = {
        "label": "yarn (scale 4)",
        "control": False,
        "documents": 8,
        "perplexity": 10.5,
        "interval": [9.0, 12.0],
        "short": {"ratio": 1.05, "interval": [1.01, 1.1]},
        "to_best": None,
        "failed": None,
    }
    worse = {
        **row,
        "label": "pi (scale 4)",
        "perplexity": 30.25,
        "documents": 5,
        "to_best": {"ratio": 2.5, "interval": [2.0, 3.0]},
    }
    broken = {
        **row,
        "label": "none",
        "control": True,
        "perplexity": None,
        "interval": None,
        "short": None,
        "failed": "out of memory",
    }
    return {
        "kind": kind,
        "format": 1,
        "model": result()["model"],
        "protocol": "the same tokens",
        "settings": {"original": 256, "target": 1024},
        "documents": result()["documents"],
        "skipped": [],
        "methods": [{"label": "none", "spec": "none", "method": None, "scale": None}],
        "summary": [row, worse, broken],
        "winner": "yarn (scale 4)",
        "undecided": [],
        "recipe": {"method": "yarn", "scale": 4, "note": "<b>"},
        "records": [],
    }


@pytest.mark.parametrize("kind", ["sweep", "search"])
def test_a_sweep_shows_its_rows_the_price_on_short_texts_and_the_recipe(
    tmp_path: Path, kind: str
) -> None:
    made = page(write(tmp_path / "a", sweep(kind), kind))
    caption = "Ratios are paired"
    cells = made.table(caption)
    best, pi = "yarn (scale 4)best", "pi (scale 4)"
    assert exact(cells[best, "at 1,024 tokens"]) == [10.5, 9.0, 12.0]
    short = cells[best, "at 256, to the unpatched model"]
    assert exact(short) == [1.05, 1.01, 1.1]
    assert short.text.endswith("worse")
    assert exact(cells[pi, "at 1,024, to the best"]) == [2.5, 2.0, 3.0]
    assert cells["nonecontrol", "at 1,024 tokens"].text == "OOM"
    assert '"note": "<b>"' in made.root.text
    assert not made.root.all("b")
    assert "tail at 1,024" in made.root.text


# Verdicts


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
        "Perplexity, tail, 1,024 tokens, truncation as the control, 6 documents: yarn is "
        f"significantly better, with {yarn['perplexity'] / control['perplexity']:.3g} ("
    )
    assert said.endswith("the best of 2; so are pi.")
    assert made.root.all("h2")[-1].text == "Not in this report"


@pytest.mark.parametrize(
    ("curves", "documents", "expected"),
    [
        (CURVES, 6, "no method is significantly better; yarn is nearest, with 1.1"),
        (CURVES, 3, "too few for a verdict; yarn is lowest"),
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
    data["settings"]["lengths"] = [256, 512]
    (said,) = verdicts(page(write(tmp_path / "a", data, "retrieval")))
    assert "512 tokens, none as the control, 12 prompts: pi answers 10, none 0" in said
    assert said.endswith(f"significantly better (exact McNemar test, p = {2 / 2**10:.2g}).")
    few = retrieval({"none": (0.0, 0.0, 0.0), "pi": (0.0, 0.25, 1.0)})  # 5 of 12 more
    few["settings"]["lengths"] = [256, 512]
    (said,) = verdicts(page(write(tmp_path / "b", few, "retrieval")))
    assert "no method is significantly better; pi answers 5, none 0" in said
    assert said.endswith("not significantly different (exact McNemar test, p = 0.062).")
    assert "times" not in said  # the control is no rival
    assert mcnemar(700, 700) == 1
    normal = math.erfc(199 / math.sqrt(2 * 1400))  # with its correction for continuity
    assert mcnemar(600, 800) == pytest.approx(normal, rel=0.05)
    # 6 of 12 more than the control's: p = 0.03, but the best of two
    data = retrieval({"none": (0.0, 0.0, 0.0), "pi": (0.0, 0.5, 1.0), "ntk": (0.0, 0.0, 0.0)})
    data["settings"]["lengths"] = [256, 512]
    (said,) = verdicts(page(write(tmp_path / "c", data, "retrieval")))
    assert said.endswith(
        "not significantly different (exact McNemar test, times 2 methods, p = 0.062)."
    )


def test_retrieval_of_two_models_is_judged_by_model(tmp_path: Path) -> None:
    equal: dict[str, Sequence[float]] = {"truncation": (0.0, 0.0, 0.0), "pi": (0.0, 0.0, 0.0)}
    first = retrieval(equal)
    able = retrieval(dict.fromkeys(equal, (1.0, 1.0, 1.0)))
    able["model"] = {**able["model"], "weights_sha256": "another"}
    longer = retrieval({"none": (0.0, 0.0, 0.0)})
    longer["model"] = first["model"]
    for data, lengths in ((first, [256, 512]), (able, [256, 512]), (longer, [256, 512, 1024])):
        data["settings"]["lengths"] = lengths
    folders = [
        write(tmp_path / name, data, "retrieval")
        for name, data in (("a", first), ("b", able), ("c", longer))
    ]
    (said,) = verdicts(page(*folders))
    assert said.count("512 tokens, truncation") == 2
    assert said.count("p = 1)") == 2
    assert "times" not in said


@pytest.mark.parametrize(
    ("ratio", "interval", "expected"),
    [
        (
            1.25,
            [1.1, 1.4],
            "yarn (scale 4) is significantly better than truncation, with 0.800",
        ),
        (1.25, [0.9, 1.6], "no method is significantly better than the control"),
        (0.8, [0.7, 0.9], "is significantly worse than truncation, with 1.25"),
    ],
)
def test_the_verdict_on_a_sweep(
    tmp_path: Path, ratio: float, interval: list[float], expected: str
) -> None:
    data = sweep()
    to_best = {"ratio": ratio, "interval": interval}
    window = {"label": "truncation", "control": True, "to_best": to_best}
    data["summary"].append({**data["summary"][0], **window})
    assert expected in verdicts(page(write(tmp_path / "a", data, "sweep")))[0]
    assert "no method has a number" in verdicts(page(write(tmp_path / "b", sweep(), "sweep")))[0]
