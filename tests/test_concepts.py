"""The pictures, measurements and the explorer of docs/concepts/."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from hf_posenc.cli.inspection import kinds
from hf_posenc.evaluation.recommend.options import met_until
from hf_posenc.methods import RopeScaling, bucket_length, get_method
from hf_posenc.rope import RopeSpec
from tests.support.pictures import assert_same_picture

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "concepts"
PICTURES = FOLDER / "pictures"
HEADS = (
    # scale, base, rotary dimension, original length
    (8.0, 10_000.0, 128, 4096),
    (1.0, 10_000.0, 128, 4096),
    (4.0, 500_000.0, 128, 8192),
    (1.5, 1_000.0, 16, 131_072),
    (64.0, 10_000_000.0, 256, 256),
    (16.0, 10_000.0, 32, 256),
)
EXPLORE = """
const explorer = require(process.argv[1]);
const found = JSON.parse(process.argv[2]).map((head) => Object.fromEntries(
  Object.entries(explorer.METHODS).map(([name, table]) => {
    const values = table(head);
    const until = explorer.trainedUntil(head, values);
    return [name, {
      table: values, factor: explorer.factor(name, head), until: until === Infinity ? null : until,
      counts: explorer.counts(head, values), slow: explorer.turns(head).filter((turns) => turns < 1).length,
    }];
  }),
));
console.log(JSON.stringify(found));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_explorer_computes_what_the_methods_do() -> None:
    keys = ("scale", "base", "dim", "context")
    heads = json.dumps([dict(zip(keys, head, strict=True)) for head in HEADS])
    command = ["node", "-e", EXPLORE, str(FOLDER / "scale.js"), heads]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    for (scale, base, dim, length), found in zip(HEADS, json.loads(done.stdout), strict=True):
        rope = RopeSpec(dim, base, length)
        plain = rope.default_inv_freq()
        assert set(found) == {"pi", "ntk", "ntk_by_parts", "yarn", "llama3"}
        for name, values in found.items():
            method = get_method(name).from_options(scale=scale)
            assert isinstance(method, RopeScaling)
            table = method.inv_freq(rope)
            torch.testing.assert_close(
                torch.tensor(values["table"], dtype=torch.float64), table, rtol=1e-12, atol=0
            )
            assert values["factor"] == pytest.approx(method.cos_sin_factor(rope), rel=1e-12)
            until = met_until(plain, table, length)
            assert values["until"] == (None if until == math.inf else pytest.approx(until))
            assert values["slow"] == int((length * plain < 2 * math.pi).sum())
            kept = int((plain / table < 1 + 1e-9).sum())
            divided = int((plain / table > scale * (1 - 1e-9)).sum()) if scale > 1 else 0
            counts = {"kept": kept, "between": dim // 2 - kept - divided, "divided": divided}
            assert values["counts"] == counts


def test_the_explorer_has_its_place_and_loads_nothing() -> None:
    page = (FOLDER / "scale.md").read_text(encoding="utf-8")
    script = (FOLDER / "scale.js").read_text(encoding="utf-8")
    (place,) = re.findall(r'getElementById\("(.+?)"\)', script)
    assert f'<div id="{place}"></div>' in page
    (picture,) = re.findall(r'img\[src\*="(.+?)"\]', script)  # hidden where the script runs
    assert f"]({picture})" in page
    site = (FOLDER.parents[1] / "mkdocs.yml").read_text(encoding="utf-8")
    assert "path: concepts/scale.js," in site
    assert set(re.findall(r"https?://[^\"]+", script)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\b(fetch|import|XMLHttpRequest|innerHTML)\b", script)


def test_every_picture_is_shown_and_described() -> None:
    shown = []
    for page in sorted(FOLDER.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        for alternative, picture in re.findall(r"!\[(.*?)\]\((.+?)\)", text, re.DOTALL):
            assert len(alternative) > 20, picture
            shown.append(FOLDER / picture)
        assert "\n## What to read next\n" in text, page.name
    assert sorted(shown) == sorted(PICTURES.iterdir())
    assert all(4_000 < path.stat().st_size < 100_000 for path in shown)


def texts_of(diagram: str) -> list[str]:
    svg = ElementTree.fromstring((PICTURES / diagram).read_text(encoding="utf-8"))
    return [element.text or "" for element in svg.iter("{http://www.w3.org/2000/svg}text")]


def test_the_diagram_of_places_names_methods_of_their_kind() -> None:
    texts = ["Others" if text == "Temperature" else text for text in texts_of("places.svg")]
    for title, group in kinds().items():
        place = texts.index(title.partition(":")[0])  # then the effect, then the methods
        assert {*texts[place + 2].split(", ")} <= {method.name for method in group}


def test_the_diagram_of_the_cache_has_the_lengths_in_force() -> None:
    trained, tokens, bucket = 4, 8, 2
    sequence = [max(trained, position + 1) for position in range(tokens)]
    row = int(bucket_length(torch.tensor(tokens - 1), trained, bucket))
    # Of each drawing the keys, and then the query.
    lengths = [*sequence[:trained], trained, *sequence, tokens, *[row] * (tokens + 1)]
    drawn = [text for text in texts_of("cached.svg") if re.fullmatch(r"N = \d+", text)]
    assert drawn == [f"N = {length}" for length in lengths]


@pytest.mark.slow
def test_pictures_are_drawn_anew_as_they_are(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from scripts.draw_concepts import PICTURES as DRAWN
    from scripts.draw_concepts import SIZES
    from scripts.drawing import draw

    for path in draw(list(DRAWN), tmp_path, DRAWN, SIZES):
        assert_same_picture(path, PICTURES / path.name)


def test_attention_by_distance() -> None:
    from scripts.measure_attention import EDGES, by_distance, keys_read
    from scripts.results import ATTENTION, read

    generator = torch.Generator().manual_seed(0)
    attention = torch.randn(2, 3, 40, generator=generator)
    first = 37
    seen = torch.arange(40) <= first + torch.arange(3)[:, None]
    attention = attention.masked_fill(~seen, -math.inf).softmax(-1)
    expected = [0.0] * (len(EDGES) - 1)
    entropy = 0.0
    for head in range(2):
        for query in range(3):
            for key in range(first + query + 1):
                share = float(attention[head, query, key])
                distance = first + query - key
                (place,) = (k for k, e in enumerate(EDGES[:-1]) if e <= distance < EDGES[k + 1])
                expected[place] += share / 6
                entropy -= share * math.log(share) / 6
    assert by_distance(attention, first).tolist() == pytest.approx(expected, rel=1e-6)
    assert keys_read(attention) == pytest.approx(math.exp(entropy), rel=1e-6)
    for row in read(ATTENTION)["rows"]:
        assert sum(row["share_by_distance"]) == pytest.approx(1, abs=1e-4)


def test_slowed_pairs_are_those_without_a_full_turn() -> None:
    from scripts.measure_attention import SLOWED

    knobs = {knob: value for knob, value in SLOWED.items() if knob != "method"}
    method = get_method(SLOWED["method"]).from_options(**knobs)
    assert isinstance(method, RopeScaling)
    plain = [10_000 ** (-i / 16) for i in range(16)]  # the embedded Llama's, trained on 256 tokens
    expected = [f / SLOWED["scale"] if 256 * f < 2 * math.pi else f for f in plain]
    assert method.inv_freq(RopeSpec(32, 1e4, 256)).tolist() == pytest.approx(expected, rel=1e-12)
