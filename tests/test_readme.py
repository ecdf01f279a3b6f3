"""The README says what is: its generated parts are up to date, its Python runs, its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_generated_parts_are_up_to_date() -> None:
    command = [sys.executable, "-m", "scripts.make_readme", "--check"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_has_at_most_200_lines_and_code_in_the_first_screen() -> None:
    lines = README.splitlines()
    assert len(lines) <= 200
    assert lines.index("```python") < 15


def test_the_first_example_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On the embedded model instead of the one that it names."""
    from hf_posenc.embedded import model_path

    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert code is not None
    program = code[1].replace("meta-llama/Llama-2-7b-hf", str(model_path()))
    assert program != code[1]
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "README.md", "exec"), {})
    assert (tmp_path / "llama-2-7b-32k" / "config.json").is_file()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing
