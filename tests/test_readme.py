"""The README and the pages: generated parts are up to date, and links lead somewhere. Their code: test_blocks.py."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from hf_posenc.cli.app import app
from hf_posenc.evaluation.measuring.statistics import Cell
from hf_posenc.methods import METHODS, ReRoPE
from scripts import add_result, make_readme, method_pages
from scripts.add_result import EVIDENCE
from tests.support.tiny_text import prose, tiny_checkpoint

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
FOLDERS = [ROOT / "docs", ROOT / "docs" / "concepts", ROOT / "docs" / "methods"]
PAGES += [page for folder in FOLDERS for page in sorted(folder.glob("*.md"))]
EXPORTED = [ROOT / "docs" / "methods" / f"{m.name}.md" for m in METHODS if m.kind == "frequencies"]
EXPORTED += [ROOT / "README.md", ROOT / "docs" / "shipping.md", ROOT / "docs" / "vllm.md"]
EXPORTED += [ROOT / "docs" / "methods.md"]


@pytest.mark.parametrize(
    "page",
    [
        # These need an export of every frequency method to every engine.
        pytest.param(page, id=page.name, marks=pytest.mark.slow if page in EXPORTED else ())
        for page in make_readme.PAGES
    ],
)
def test_generated_parts_are_up_to_date(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == make_readme.filled(page)


def test_a_page_takes_what_was_measured_on_the_real_model_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(method_pages, "REAL_MODEL", tmp_path)
    assert method_pages.measured(ReRoPE).endswith("not measured on it.")
    benchmarks = ROOT / "docs/data/benchmarks"
    passkeys = json.loads((benchmarks / "bench.json").read_text(encoding="utf-8"))["retrieval"]
    (tmp_path / "passkey.json").write_text(json.dumps(passkeys), encoding="utf-8")
    shutil.copy(benchmarks / "methods.json", tmp_path / "tail-1k.json")
    line = method_pages.measured(ReRoPE).splitlines()[-1]
    assert re.search(
        r": `rerope` \d+\.\d+ \(.* times truncation's, .*\) at 1,024 tokens, 0 of 10 passkeys at 2,048",
        line,
    )


def test_a_result_is_added_from_its_records_alone(tmp_path: Path) -> None:
    text, model = tmp_path / "a.txt", tiny_checkpoint(tmp_path / "model")
    text.write_text(prose(300), encoding="utf-8")
    patches = [f"--patch={spec}" for spec in ("none", "truncation", "yarn", "rerope:window=9")]
    words = f"perplexity {model} --text {text} --lengths 64,128 --no-plot --quiet --output {tmp_path / 'run'}"
    assert CliRunner().invoke(app, [*words.split(), *patches]).exit_code == 0

    def cells() -> dict[tuple[str, str, int], Cell]:
        return {
            (c.method, c.protocol, c.length): c
            for c in add_result.result_of(tmp_path / "run").cells
        }

    whole = cells()
    (tmp_path / "run" / "perplexity.json").unlink()
    assert cells() == whole
    (records,) = (tmp_path / "run" / "records").glob("*/shard-*.jsonl")
    lines = records.read_bytes().splitlines(keepends=True)
    records.write_bytes(b"".join(line for line in lines if b"rerope" not in line))
    assert {key for key in whole if key not in cells()} == {
        ("rerope (window 9)", protocol, length)
        for protocol in ("prefix", "tail")
        for length in (64, 128)
    }


def test_a_number_of_the_evidence_is_computed_again() -> None:
    """The ratio of perplexities over whole files of code, with its interval simultaneous over five methods."""
    result = json.loads((EVIDENCE / "smollm2-code-h100.json").read_text(encoding="utf-8"))
    nats = {
        method: np.array(
            [
                r["nats"]
                for r in result["records"]
                if (r["method"], r["protocol"], r["length"]) == (method, "prefix", 16384)
            ]
        )
        for method in ("self_extend (scale 2)", "truncation")
    }
    difference = (nats["self_extend (scale 2)"] - nats["truncation"]) / 16383
    center = difference.mean()
    quantile = 2.845340  # of Student's t at 1 - 0.025 / 5, 20 degrees of freedom, from a table
    half = quantile * difference.std(ddof=1) / math.sqrt(21)
    want = "0.9931 (0.9868-0.9995)"
    assert want == "{:.4f} ({:.4f}-{:.4f})".format(*np.exp([center, center - half, center + half]))
    assert f"| `self_extend (scale 2)` | 0.9588 (0.9071-1.013) | **{want}**" in (
        ROOT / "docs/real_model.md"
    ).read_text(encoding="utf-8")


def test_has_at_most_200_lines_and_code_in_the_first_screen() -> None:
    lines = README.splitlines()
    assert len(lines) <= 200
    assert lines.index("```python") < 15


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing
