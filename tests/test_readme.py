"""The README and the pages: generated parts are up to date, and links lead somewhere. Their code: test_blocks.py."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from hf_posenc.methods import METHODS, ReRoPE
from scripts import make_readme, method_pages

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


def test_a_page_takes_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(method_pages, "REAL_MODEL", tmp_path)
    assert method_pages.measured(ReRoPE).endswith("not measured on it.")
    benchmarks = ROOT / "docs/data/benchmarks"
    passkeys = json.loads((benchmarks / "bench.json").read_text(encoding="utf-8"))["retrieval"]
    (tmp_path / "passkey.json").write_text(json.dumps(passkeys), encoding="utf-8")
    shutil.copy(benchmarks / "methods.json", tmp_path / "tail-1k.json")
    *_, heads, _, cut, line = method_pages.measured(ReRoPE).splitlines()
    assert heads == "| method | tail of 1,024 tokens, / truncation | passkeys in 2,048 |"
    assert cut.startswith("| `truncation` | ")
    assert re.search(r"\| `rerope` \| [\d.]+ \(.*\)<br>×.*\(.*\) \| 0 of 10 \(\d+ first\) \|", line)


def test_has_at_most_200_lines_and_code_in_the_first_screen() -> None:
    lines = README.splitlines()
    assert len(lines) <= 200
    assert lines.index("```python") < 15


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing
