"""The report's page: well-formed, self-contained, escaped, readable; its numbers are those of the results."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest

import hf_posenc
from hf_posenc.evaluation.grid import number
from hf_posenc.evaluation.measuring.statistics import Record, summarize
from hf_posenc.evaluation.page import collect, render
from hf_posenc.evaluation.perplexity.result import ratio_text
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
    links = [element.attributes.get("href", "") for element in everything]
    inside = [link for link in links if link.startswith("#")]
    inside += [f"#{name}" for name in re.findall(r"url\(#([^)]+)\)", one.source)]
    assert len(inside) > 20
    assert {link.removeprefix("#") for link in inside} <= set(ids)
    headings = [int(e.tag[1]) for e in everything if re.fullmatch(r"h[1-6]", e.tag)]
    assert headings[0] == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(headings)), "a level is left out"


def test_nothing_is_loaded_from_anywhere(one: Page) -> None:
    for element in _walk(one.root):
        assert element.tag not in {"script", "link", "iframe", "object", "embed", "base", "form"}
        for name in ("src", "srcset", "data", "poster", "action", "background"):
            assert name not in element.attributes, (element.tag, name)
        if element.tag != "a":
            for name in ("href", "xlink:href"):
                assert element.attributes.get(name, "#").startswith("#")
        assert not [name for name in element.attributes if name.startswith("on")]
    assert not re.search(r"@import|url\((?!#)", one.source)
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
    said, summary = figures[0].attributes["aria-label"], result()["summary"]
    cells = [c for c in summary if (c["method"], c["protocol"]) == ("yarn", "prefix")]
    at = {cell["length"]: cell["perplexity"] for cell in cells}
    assert f"yarn goes from {at[128]:.2f} at 128 to {at[1024]:.2f} at 1,024" in said


@pytest.mark.parametrize("protocol", ["prefix", "tail"])
def test_every_number_is_that_of_the_result(one: Page, protocol: str) -> None:
    data = result()
    numbers = one.table(f"Perplexity, {protocol}")
    ratios = one.table(f"Ratios, {protocol}")
    assert len(numbers) == len(CURVES) * (len(LENGTHS) + 1)  # and bits per byte
    for cell in (cell for cell in data["summary"] if cell["protocol"] == protocol):
        name, length = cell["method"], f"{cell['length']:,}"
        shown = numbers[name, f"{length}x{cell['length'] / 256:.3g}"]
        assert exact(shown) == [cell["perplexity"]]
        low, high = cell["interval"]
        assert f"{number(cell['perplexity'])}" in shown.text
        assert f"{number(low, 3)}-{number(high, 3)}" in shown.text
        ratio = ratios[name, f"{length}to the baseline"]
        if name == "none":
            assert ratio.text == "baseline"
            continue
        assert exact(ratio) == [cell["ratio"]]
        low, high = cell["ratio_interval"]
        assert f"{ratio_text(low)}-{ratio_text(high)}" in ratio.text
        word = "better" if high < 1 else "worse" if low > 1 else ""
        assert _verdict(ratio) == word
        assert ("↓" in shown.text, "↑" in shown.text) == (word == "better", word == "worse")
    assert {_verdict(cell) for cell in ratios.values()} == {"better", "worse", ""}


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        *((1.0, "1.00"), (0.5, "0.500"), (12.34, "12.3"), (1.0123, "1.012"), (0.95, "0.950")),
        *((1.0004, "1.0004"), (0.9998, "0.9998"), (0.99996, "1.00"), (1 + 1e-9, "1.00")),
    ],
)
def test_a_ratio_that_rounds_to_one_reads_one(ratio: float, text: str) -> None:
    assert ratio_text(ratio) == text


def test_the_longest_texts_are_compared_with_the_control_and_with_short_ones(one: Page) -> None:
    data = result()
    cells = one.table("Ratios, tail")

    def ratio(name: str, other: str, other_at: int) -> list[float]:
        mine, base = (
            [
                Record(**{**r, "method": new, "length": 0})
                for r in data["records"]
                if (r["method"], r["length"], r["protocol"]) == (old, length, "tail")
            ]
            for old, new, length in ((name, "mine", 1024), (other, "base", other_at))
        )
        return [summarize([*base, *mine], comparisons=2)[-1].ratio or 0]  # of three methods

    control, gain = "1,024to the control", "1,024, to thebaseline at 256"
    assert exact(cells["yarn", control]) == ratio("yarn", "truncation", 1024)
    assert _verdict(cells["yarn", control]) == "worse"
    assert exact(cells["truncation", gain]) == ratio("truncation", "none", 256)
    assert cells["truncation", control].text == "control"
    assert gain not in {head for _, head in one.table("Ratios, prefix")}


def test_names_from_outside_stay_text(tmp_path: Path) -> None:
    label = "<script>$a_{b}$</script>"
    data = result({"none": CURVES["none"], label: CURVES["yarn"]})
    data["documents"][0]["name"] = data["skipped"][0]["name"] = data["model"]["name"] = HOSTILE
    data["documents"][1]["tokens_sha256"] = data["command"] = data["skipped"][0]["reason"] = HOSTILE
    data["environment"][HOSTILE] = HOSTILE
    for record in data["records"]:
        record["document"] = record["document"].replace("doc 0", HOSTILE)
    data["failures"] = [{"method": label, "protocol": "prefix", "length": 1024, "reason": HOSTILE}]
    made = Page(render(collect([write(tmp_path / "<script>alert(3)<", data)]), title=HOSTILE))
    assert not {element.tag for element in _walk(made.root)} & {"script", "img"}
    assert made.root.all("h1")[0].text == HOSTILE
    assert made.root.all("title")[0].text == HOSTILE
    assert label in [text.text for svg in made.root.all("svg") for text in svg.all("text")]
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
    assert cells["none", "1,024x4"].text == "OOM"
    assert cells["yarn", "1,024x4"].text == "failed"
    assert cells["yarn", "1,024x4"].attributes["title"] == "ValueError: no"
    assert cells["pi", "512x2"].text == "nan"
    assert made.table("Ratios, tail")["truncation", "1,024to the baseline"].text.startswith("-")
    assert [li.text for li in made.root.all("li") if li.text.startswith("Run 1, ")] == [
        "Run 1, none: failed at length 1,024: out of memory",
        "Run 1, yarn: failed at length 1,024: ValueError: no",
        "Run 1, pi: the loss is not a finite number at length 512.",
    ]


def test_without_plots_there_are_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    made = page(write(tmp_path / "a", result()), figures=True)
    assert not made.root.all("svg")
    assert made.table("Perplexity, tail")


def _walk(element: Element) -> Any:
    for child in element.children:
        yield child
        yield from _walk(child)


def _verdict(cell: Element) -> str:
    spans = [span for word in ("better", "worse") for span in cell.all("span", class_=word)]
    return " ".join(span.text for span in spans)


# Colours: enough contrast in light (print too) and in dark, for text and for lines.

PAGE = Path(hf_posenc.__file__).parent / "evaluation/page"
COLOURS = (PAGE / "colours.css").read_text(encoding="utf-8")


def _palettes() -> dict[str, dict[str, str]]:
    pairs = re.findall(r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\);", COLOURS)
    aliases = re.findall(r"--([\w-]+): var\(--([\w-]+)\);", COLOURS)
    found = {"light": {n: one for n, one, _ in pairs}, "dark": {n: two for n, _, two in pairs}}
    for palette in found.values():
        palette.update({name: palette[of] for name, of in aliases})
    return found


def _luminance(colour: str) -> float:
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, two: str) -> float:
    """The contrast ratio of WCAG 2.2."""
    light, dark = sorted((_luminance(one), _luminance(two)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_contrast(mode: str) -> None:
    palette = _palettes()[mode]
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    texts = [name for name in palette if name.startswith("text-") and name[5:] not in ("paper",)]
    assert len(texts) >= 10
    for name in [*texts, "ink", "muted", "link", "accent", "good", "bad", "warn-edge"]:
        assert contrast(palette[name], palette["paper"]) >= 4.5, name
    for name in ("ink", "muted", "link"):
        assert contrast(palette[name], palette["panel"]) >= 4.5, name
    for name in ("bar-ink", "bar-muted"):
        assert contrast(palette[name], palette["bar"]) >= 4.5, name
    for name in [name for name in palette if name.startswith("line-")]:
        assert contrast(palette[name], palette["paper"]) >= 3, name


def test_the_page_and_the_site_have_no_colours_of_their_own() -> None:
    source = drawn().source
    known = set(_palettes()["light"]) | {"text-font", "code-font"}
    used = set(re.findall(r"var\(--([\w-]+)\)", source))
    assert used <= known
    sheet, body = source.split("</style>", 1)
    drawn_in = set(re.findall(r"(?:fill|stroke): ?#[0-9a-fA-F]{6}", body))
    replaced = set(re.findall(r'\[style\*="((?:fill|stroke): #[0-9a-f]{6})"\]', sheet))
    assert len(drawn_in) > 5
    assert drawn_in <= replaced, "a colour that does not follow the mode"
    style = (PAGE / "style.css").read_text(encoding="utf-8")
    assert not re.findall(r"#[0-9a-f]{3,6}\b", style), "colours belong into colours.css"
    site = (PAGE.parents[2] / "docs/assets/site.css").read_text(encoding="utf-8")
    used = set(re.findall(r"var\(--((?!md-)[\w-]+)\)", site))
    assert "paper" in used
    assert used <= known
