"""The page's colours: enough contrast in light, in dark and in print, for text and for lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hf_posenc
from tests.support.page_results import page, result, write

STYLE = (Path(hf_posenc.__file__).parent / "evaluation/page/style.css").read_text(encoding="utf-8")


def _palettes() -> dict[str, dict[str, str]]:
    blocks = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
    found = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in blocks]
    return dict(zip(("light", "dark", "print"), found, strict=True))


def _luminance(colour: str) -> float:
    channels = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, two: str) -> float:
    """The contrast ratio of WCAG 2.2."""
    light, dark = sorted((_luminance(one), _luminance(two)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("mode", ["light", "dark", "print"])
def test_contrast(mode: str) -> None:
    palette = _palettes()[mode]
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    texts = [name for name in palette if name.startswith("text-") and name[5:] not in ("paper",)]
    for name in [*texts, "ink", "muted", "link", "good", "bad", "warn-edge"]:
        assert contrast(palette[name], palette["paper"]) >= 4.5, name
    for name in ("ink", "muted", "link"):
        assert contrast(palette[name], palette["panel"]) >= 4.5, name
    assert contrast(palette["ink"], palette["heat"]) >= 4.5
    for name in [name for name in palette if name.startswith("line-")]:
        assert contrast(palette[name], palette["paper"]) >= 3, name


def test_all_modes_have_the_same_colours_and_the_page_uses_no_other(tmp_path: Path) -> None:
    palettes = _palettes()
    assert set(palettes["light"]) == set(palettes["dark"]) == set(palettes["print"])
    source = page(write(tmp_path / "a", result()), figures=True).source
    used = set(re.findall(r"var\(--([\w-]+)\)", source)) - {"part"}  # a heat map's own number
    assert used <= set(palettes["light"])
    body = source[source.index("</style>") :]
    assert not re.findall(r"(?:fill|stroke): ?#", body), "a colour that does not follow the mode"
