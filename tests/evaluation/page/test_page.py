"""The report's page: well-formed, self-contained, escaped, readable; its numbers are those of the results."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest

from hf_posenc.evaluation.grid import number
from hf_posenc.evaluation.measuring.statistics import Record, summarize
from hf_posenc.evaluation.page import collect, render
from hf_posenc.evaluation.page.perplexity import ratio_span
from tests.support.page_results import (
    CURVES,
    LENGTHS,
    Element,
    Page,
    drawn,
    exact,
    page,
    result,
    write,
)

HOSTILE = "</style></title><script>alert(1)</script>\"'><img src=x onerror=alert(2)>$a_{b}$ {{ 7*7 }} &lt;"


@pytest.fixture
def one() -> Page:
    return drawn()


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
        plain = [number(v, 4 if i == 0 else 3) for i, v in enumerate(expected[:3])]
        assert texts == plain + [ratio_span(ratio).text for ratio in expected[3:]]


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        *((1.0, "1.00"), (0.5, "0.500"), (12.34, "12.3"), (1.0123, "1.012"), (0.95, "0.950")),
        *((1.0004, "1.0004"), (0.9998, "0.9998"), (0.99996, "1.00"), (1 + 1e-9, "1.00")),
    ],
)
def test_a_ratio_that_is_one_but_for_rounding_and_no_other_reads_one(
    ratio: float, text: str
) -> None:
    assert ratio_span(ratio).text == text
    assert ratio_span(ratio).value == ratio


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
        cell = summarize([*base, *mine], comparisons=2)[-1]  # of three methods
        return [cell.ratio or 0, *(cell.ratio_interval or ())]

    short, long = "256 tokens, to the baseline", "1,024 tokens, to the baseline"
    assert exact(cells["yarn", short]) == ratio("yarn", 256, "none", 256)
    assert exact(cells["yarn", long]) == ratio("yarn", 1024, "none", 1024)
    control = "1,024 tokens, to truncation"
    assert exact(cells["yarn", control]) == ratio("yarn", 1024, "truncation", 1024)
    assert _verdict(cells["yarn", control]) == "worse"
    gain = "1,024 tokens, to none at 256"
    assert exact(cells["truncation", gain]) == ratio("truncation", 1024, "none", 256)
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
    assert cells["yarn", "1,024×4"].attributes["title"] == "ValueError: no"
    assert cells["pi", "512×2"].text == "nan"
    assert exact(cells["truncation", "1,024×4"])[3:] == []  # its baseline has no number there
    reasons = {
        tr.text for tr in made.root.all("tr") if "out of memory" in tr.text or "finite" in tr.text
    }
    assert reasons == {
        "1nonetail at 1,024out of memory",
        "1piprefix at 512the loss is not finite",
        "1pitail at 512the loss is not finite",
    }


def test_many_lengths_go_down_the_page(tmp_path: Path) -> None:
    lengths = [64 * step for step in range(1, 17)]
    curve = [20.0 - step / 2 for step in range(16)]
    made = page(write(tmp_path / "a", result({"none": curve, "yarn": curve}, lengths=lengths)))
    cells = made.table("Perplexity, prefix")
    assert len(cells) == 32
    assert exact(cells["1,024×4", "yarn"])[0] == pytest.approx(curve[-1], rel=0.01)


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
