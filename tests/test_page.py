"""The report's page: well-formed, self-contained, escaped, readable; its numbers are those of the results."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.page import collect, render
from hf_posenc.evaluation.report import number
from hf_posenc.evaluation.statistics import Record, summarize
from tests.page_results import CURVES, LENGTHS, Element, Page, exact, page, result, write

HOSTILE = "</style></title><script>alert(1)</script>\"'><img src=x onerror=alert(2)>$a_{b}$ {{ 7*7 }} &lt;"


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Page:
    return page(write(tmp_path_factory.mktemp("runs") / "one", result()), figures=True)


def test_the_page_is_well_formed_and_its_links_lead_somewhere(one: Page) -> None:
    assert one.source.lstrip().startswith("<!DOCTYPE html>")
    assert one.root.all("html")[0].attributes["lang"] == "en"
    assert one.root.all("meta", name="viewport")
    everything = list(_walk(one.root))
    ids = [element.attributes["id"] for element in everything if "id" in element.attributes]
    assert len(ids) == len(set(ids))
    inside = [
        e.attributes["href"] for e in everything if e.attributes.get("href", "").startswith("#")
    ]
    inside += [f"#{name}" for name in re.findall(r"url\(#([^)]+)\)", one.source)]
    assert len(inside) > 20
    assert {link.removeprefix("#") for link in inside} <= set(ids)
    headings = [int(e.tag[1]) for e in everything if re.fullmatch(r"h[1-6]", e.tag)]
    assert headings[0] == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(headings)), (
        "a level of headings is left out"
    )


def test_nothing_is_loaded_from_anywhere(one: Page) -> None:
    for element in _walk(one.root):
        assert element.tag not in {"script", "link", "iframe", "object", "embed", "base", "form"}
        for name in ("src", "srcset", "data", "poster", "action", "background", "xlink:href"):
            assert name not in element.attributes, (element.tag, name)
        if element.tag != "a":
            assert element.attributes.get("href", "#").startswith("#")
        assert not [name for name in element.attributes if name.startswith("on")]
    assert not re.search(r"@import|url\((?!#)", one.source)
    policy = one.root.all("meta", http_equiv_="")  # the attribute's name has a hyphen
    policy = [m for m in one.root.all("meta") if "http-equiv" in m.attributes]
    assert policy[0].attributes["content"].startswith("default-src 'none'")


def test_tables_and_figures_can_be_read_aloud(one: Page) -> None:
    tables = one.root.all("table")
    assert len(tables) >= 7
    for table in tables:
        assert table.all("caption")[0].text
        for heading in table.all("th"):
            assert heading.attributes["scope"] in {"row", "col", "colgroup"}
    figures = one.root.all("figure")
    assert len(figures) == 5  # by length and as ratios for both protocols, by position
    for figure in figures:
        assert figure.attributes["role"] == "img"
        assert len(figure.attributes["aria-label"]) > 40
        assert figure.all("svg")[0].attributes["aria-hidden"] == "true"
    said = figures[0].attributes["aria-label"]
    first, last = (
        next(
            c["perplexity"]
            for c in result()["summary"]
            if (c["method"], c["length"]) == ("yarn", n)
        )
        for n in (128, 1024)
    )
    assert f"yarn goes from {first:.2f} at 128 tokens to {last:.2f} at 1,024" in said


@pytest.mark.parametrize("protocol", ["prefix", "tail"])
def test_every_number_is_that_of_the_result(one: Page, protocol: str) -> None:
    data = result()
    cells = one.table(f"Perplexity, {protocol}")
    assert len(cells) == len(CURVES) * len(LENGTHS)
    for cell in data["summary"]:
        if cell["protocol"] != protocol:
            continue
        head = f"{cell['length']:,}×{cell['length'] / 256:.3g}"
        shown = cells[cell["method"], head]
        expected = [cell["perplexity"], *cell["interval"]]
        if cell["method"] != "none":
            expected += [cell["ratio"], *cell["ratio_interval"]]
        assert exact(shown) == expected
        texts = [data.text for data in shown.all("data")]
        assert texts == [number(v, 4 if i == 0 else 3) for i, v in enumerate(expected)]


def test_better_and_worse_are_said_only_where_the_interval_says_so(one: Page) -> None:
    words = {
        (name, head): _verdict(cell) for (name, head), cell in one.table("Perplexity, tail").items()
    }
    seen = set()
    for cell in result()["summary"]:
        if cell["protocol"] != "tail" or cell["method"] == "none":
            continue
        low, high = cell["ratio_interval"]
        expected = "better" if high < 1 else "worse" if low > 1 else ""
        assert words[cell["method"], f"{cell['length']:,}×{cell['length'] / 256:.3g}"] == expected
        seen.add(expected)
    assert seen == {"better", "worse", ""}
    assert {word for (name, _), word in words.items() if name == "none"} == {""}


def test_with_few_documents_nothing_is_better_or_worse(tmp_path: Path) -> None:
    made = page(write(tmp_path / "few", result(documents=4)))
    assert {_verdict(cell) for cell in made.table("Perplexity, tail").values()} == {""}
    assert {_verdict(cell) for cell in made.table("Short and long texts, tail").values()} == {""}
    assert "Fewer than 5 documents" in made.root.text


def test_short_texts_stand_beside_long_ones(one: Page) -> None:
    data = result()
    cells = one.table("Short and long texts, tail")

    def ratio(name: str, at: int, other: str, other_at: int) -> list[float]:
        mine, base = (
            [
                Record(**{**r, "method": new, "length": 0})
                for r in data["records"]
                if (r["method"], r["length"], r["protocol"]) == (old, length, "tail")
            ]
            for old, new, length in ((name, "mine", at), (other, "base", other_at))
        )
        cell = summarize([*base, *mine], seed=0, resamples=500)[-1]
        return [cell.ratio or 0, *(cell.ratio_interval or ())]

    short, long = "256 tokens, to the baseline", "1,024 tokens, to the baseline"
    assert exact(cells["yarn", short]) == ratio("yarn", 256, "none", 256)
    assert exact(cells["yarn", long]) == ratio("yarn", 1024, "none", 1024)
    control = "1,024 tokens, to sliding_window"
    assert exact(cells["yarn", control]) == ratio("yarn", 1024, "sliding_window", 1024)
    assert _verdict(cells["yarn", control]) == "worse"
    gain = "1,024 tokens, to none at 256"
    assert exact(cells["sliding_window", gain]) == ratio("sliding_window", 1024, "none", 256)
    assert cells["none", short].text.startswith("baseline")
    parts = [th.text for th in one.root.all("th", scope="colgroup")]
    assert parts == ["up to the trained length", "longer than trained"] * 2


def test_names_from_outside_stay_text(tmp_path: Path) -> None:
    label = "<script>$a_{b}$</script>"
    data = result({"none": CURVES["none"], label: CURVES["yarn"]})
    data["documents"][0]["name"] = data["skipped"][0]["name"] = data["model"]["name"] = HOSTILE
    data["documents"][1]["tokens_sha256"] = data["command"] = data["skipped"][0]["reason"] = HOSTILE
    data["protocols"]["tail"] = data["environment"][HOSTILE] = HOSTILE
    for record in data["records"]:
        record["document"] = record["document"].replace("doc 0", HOSTILE)
    data["failures"] = [{"method": label, "protocol": "prefix", "length": 2048, "reason": HOSTILE}]
    folder = write(tmp_path / "<script>alert(3)<", data)
    made = Page(render(collect([folder]), title=HOSTILE))
    tags = {element.tag for element in _walk(made.root)}
    assert not tags & {"script", "img"}
    assert made.root.all("h1")[0].text == HOSTILE
    assert made.root.all("title")[0].text == HOSTILE
    drawn = [text.text for svg in made.root.all("svg") for text in svg.all("text")]
    assert label in drawn
    assert made.source.count("<script") == 0
    assert "49" not in made.root.all("h1")[0].text


def test_what_could_not_be_measured_is_shown_as_such(tmp_path: Path) -> None:
    curves = {**CURVES, "pi": (15.0, 14.5, math.nan, 20.0)}
    failures = [
        {"method": "none", "protocol": "tail", "length": 1024, "reason": "out of memory"},
        {"method": "yarn", "protocol": "tail", "length": 1024, "reason": "ValueError: no"},
    ]
    made = page(write(tmp_path / "a", result(curves, failures=failures)))
    cells = made.table("Perplexity, tail")
    assert cells["none", "1,024×4"].text == "OOM"
    assert cells["yarn", "1,024×4"].text == "failed"
    assert cells["yarn", "1,024×4"].all("span")[0].attributes["title"] == "ValueError: no"
    assert cells["pi", "512×2"].text == "nan"
    assert exact(cells["sliding_window", "1,024×4"])[3:] == []  # its baseline has no number there
    reasons = {
        tr.text for tr in made.root.all("tr") if "out of memory" in tr.text or "finite" in tr.text
    }
    assert reasons == {
        "1nonetail at 1,024out of memory",
        "1piprefix at 512the loss is not finite",
        "1pitail at 512the loss is not finite",
    }


def test_runs_of_one_model_share_a_table_and_a_baseline(tmp_path: Path) -> None:
    first = result({name: CURVES[name] for name in ("none", "yarn")})
    second = result({"sliding_window": CURVES["sliding_window"], "yarn": (15.6, 14.8, 14.3, 15.7)})
    for index, document in enumerate(second["documents"]):  # another machine has them elsewhere
        document["name"] = f"/elsewhere/{index}.txt"
    for record in second["records"]:
        record["document"] = f"/elsewhere/{record['document'].removeprefix('doc ')}.txt"
    made = page(write(tmp_path / "a", first), write(tmp_path / "b", second))
    assert len([h for h in made.root.all("h2") if h.text.startswith("Perplexity")]) == 1
    cells = made.table("Perplexity, tail")
    row = "sliding_windowrun 2"
    assert {name for name, _ in cells} == {"nonerun 1", "yarn [1]run 1", row, "yarn [2]run 2"}
    for length in LENGTHS:
        numbers = next(
            c
            for c in second["summary"]
            if (c["method"], c["protocol"], c["length"]) == ("sliding_window", "tail", length)
        )
        shown = exact(cells[row, f"{length:,}×{length / 256:.3g}"])
        assert shown[:3] == [numbers["perplexity"], *numbers["interval"]]
        records = [
            Record(**{**r, "document": r["document"].removesuffix(".txt")[-1], "method": f"{k}"})
            for k, d in enumerate((first, second))
            for r in d["records"]
            if (r["protocol"], r["length"]) == ("tail", length)
            and r["method"] == ("none", "sliding_window")[k]
        ]
        expected = summarize(records, seed=0, resamples=500)[-1]
        assert shown[3:] == [expected.ratio, *(expected.ratio_interval or ())]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("documents", "other documents (6 instead of 6, 5 in common)"),
        ("cut", "other documents (the same texts, cut at other lengths)"),
        ("tokenizer", "another tokenizer"),
        ("bos", "other special tokens in front ([1] instead of [])"),
    ],
)
def test_what_is_not_comparable_stands_apart_with_the_reason(
    tmp_path: Path, change: str, reason: str
) -> None:
    other = result()
    if change == "documents":
        other["documents"][0] |= {"tokens_sha256": "c" * 64, "text_sha256": "d" * 64}
    elif change == "cut":
        other["documents"][0] |= {"tokens_sha256": "c" * 64}
    elif change == "tokenizer":
        other["model"]["tokenizer"]["sha256"] = "c" * 64
    else:
        other["model"]["bos"]["token_ids"] = [1]
    made = page(write(tmp_path / "a", result()), write(tmp_path / "b", other))
    heads = [h.text for h in made.root.all("h2") if h.text.startswith("Perplexity")]
    assert heads == ["Perplexity 1", "Perplexity 2"]
    notes = [p.text for p in made.root.all("p", class_="apart")]
    assert len(notes) == 1
    assert f"Not comparable with Perplexity 1: {reason}" in notes[0]
    for place in (0, 1):
        assert {name for name, _ in made.table("Perplexity, tail", place)} == set(CURVES)


def test_another_tail_is_another_table(tmp_path: Path) -> None:
    other = result(tail=32)
    made = page(write(tmp_path / "a", result()), write(tmp_path / "b", other))
    titles = [h.text for h in made.root.all("h3") if h.text in ("prefix", "tail")]
    assert titles == ["prefix", "tail", "tail"]  # the prefixes are the same, and share one table
    notes = [p.text for p in made.root.all("p", class_="apart")]
    assert notes == ["Not the tail above, which is: the same last 64 tokens."]
    same = [f"{name}runs 1, 2, the same numbers" for name in CURVES]
    assert {name for name, _ in made.table("Perplexity, prefix")} == set(same)


def test_another_model_has_a_baseline_of_its_own(tmp_path: Path) -> None:
    other = result()
    other["model"]["weights"] = "ee" * 32
    made = page(write(tmp_path / "a", result()), write(tmp_path / "b", other))
    cells = made.table("Perplexity, tail")
    rows = {name for name, _ in cells}
    assert len(rows) == 6
    row = next(name for name in rows if name.startswith("none [2]"))
    assert len(exact(cells[row, "512×2"])) == 3


def test_many_lengths_go_down_the_page(tmp_path: Path) -> None:
    lengths = [64 * step for step in range(1, 17)]
    curve = [20.0 - step / 2 for step in range(16)]
    made = page(write(tmp_path / "a", result({"none": curve, "yarn": curve}, lengths=lengths)))
    cells = made.table("Perplexity, prefix")
    assert len(cells) == 32
    assert exact(cells["1,024×4", "yarn"])[0] == pytest.approx(curve[-1], rel=0.01)


def test_settings_say_where_runs_differ(tmp_path: Path) -> None:
    other = result({"none": CURVES["none"]})
    other["model"]["dtype"] = "bfloat16"
    made = page(write(tmp_path / "a", result()), write(tmp_path / "b", other))
    rows = {tr.children[0].text: tr for tr in made.root.all("tr") if len(tr.children) == 3}
    dtype, attention = rows["model.dtype"], rows["model.attention"]
    assert [cell.text for cell in dtype.children[1:]] == ["float32", "bfloat16"]
    assert dtype.attributes.get("class") == "differs"
    assert attention.attributes.get("class") is None
    for name in (
        "model.tokenizer.sha256",
        "settings.aggregate",
        "environment.torch",
        "model.weights",
    ):
        assert name in rows
    assert made.root.text.count("hf-posenc perplexity --patch none --patch yarn") == 2
    assert "bad.txt: not UTF-8" in made.root.text


def test_an_unfinished_run_says_what_it_has(tmp_path: Path) -> None:
    records = tmp_path / "run" / "records" / "abc"
    records.mkdir(parents=True)
    (records / "settings.json").write_text(json.dumps({"command": "hf-posenc perplexity --x <y>"}))
    for shard, lines in ((1, 3), (2, 2)):
        text = "{}\n" * lines + '{"torn'
        (records / f"shard-{shard}-of-2.jsonl").write_text(text)
    made = page(tmp_path / "run")
    assert "5 values stored by 2 processes" in made.root.text
    assert "hf-posenc perplexity --x <y>" in made.root.text
    write(tmp_path / "run", result())
    assert not collect([tmp_path / "run"]).unfinished


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
    assert "the same result as" in Page(render(found)).root.text
    with pytest.raises(PosencError, match="There is no folder"):
        collect([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(PosencError, match=r"nothing to report.*perplexity\.json"):
        collect([tmp_path / "empty"])


def test_a_file_may_be_given_and_the_page_is_the_same_every_time(tmp_path: Path) -> None:
    write(tmp_path / "a", result())
    file = tmp_path / "renamed.json"
    (tmp_path / "a" / "perplexity.json").rename(file)
    assert page(file).source == page(file).source
    assert collect([file]).sources[0].kind == "perplexity"


def test_without_matplotlib_there_are_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    made = page(write(tmp_path / "a", result()), figures=True)
    assert not made.root.all("svg")
    assert made.table("Perplexity, tail")


def _walk(element: Element) -> Any:
    for child in element.children:
        yield child
        yield from _walk(child)


def _verdict(cell: Element) -> str:
    return " ".join(
        span.text for word in ("better", "worse") for span in cell.all("span", class_=word)
    )
