"""The page's colours: enough contrast in light (print too) and in dark, for text and for lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hf_posenc
from tests.support.page_results import drawn

PAGE = Path(hf_posenc.__file__).parent / "evaluation/page"
COLOURS = (PAGE / "colours.css").read_text(encoding="utf-8")


def _palettes() -> dict[str, dict[str, str]]:
    """The colours of both modes."""
    pairs = re.findall(r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\);", COLOURS)
    aliases = re.findall(r"--([\w-]+): var\(--([\w-]+)\);", COLOURS)
    found = {"light": {n: one for n, one, _ in pairs}, "dark": {n: two for n, _, two in pairs}}
    return {
        mode: palette | {name: palette[of] for name, of in aliases}
        for mode, palette in found.items()
    }


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
