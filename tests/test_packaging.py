"""Packaging: pyproject.toml, constraints.txt, README.md and the tree agree."""

from __future__ import annotations

import ast
import fnmatch
import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import hf_posenc
from tests.test_imports import imports_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PROJECT["tool"]["setuptools"]


def _folder(package: str) -> Path:
    for name, folder in SETUPTOOLS["package-dir"].items():
        if f"{package}.".startswith(f"{name}."):
            return ROOT.joinpath(folder, *package.removeprefix(name).split(".")[1:])
    return ROOT.joinpath(*package.split("."))


FOLDERS = {package: _folder(package) for package in SETUPTOOLS["packages"]}
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
REQUIRED = [
    *map(Requirement, (*PROJECT["project"]["dependencies"], *itertools.chain(*EXTRAS.values())))
]


def _shipped(folder: Path) -> list[Path]:
    """The files under a folder that somebody wrote, no caches and nothing that an editor left."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and "__pycache__" not in path.parts
        and not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
    ]


def test_every_package_is_listed() -> None:
    with_code = {
        path.parent for top in ("hf_posenc", "patches") for path in (ROOT / top).rglob("*.py")
    }
    listed = set(FOLDERS.values())
    assert with_code <= listed, "add these to packages in pyproject.toml"
    assert all(folder.is_dir() for folder in listed), "pyproject.toml lists a package that is gone"


def test_every_data_file_is_shipped() -> None:
    data = SETUPTOOLS["package-data"]
    for path in (path for top in ("hf_posenc", "patches") for path in _shipped(ROOT / top)):
        shipped = any(
            fnmatch.fnmatch(str(path.relative_to(folder)), pattern.removeprefix("**/"))
            for name, folder in FOLDERS.items()
            if path.is_relative_to(folder)
            for pattern in data.get(name, [])
        )
        assert shipped or path.suffix == ".py", path


def test_the_oldest_supported_python_can_read_every_file() -> None:
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=")
    version = tuple(int(part) for part in oldest.split("."))
    for top in ("hf_posenc", "patches"):  # ruff reads all files as Python 3.10
        for path in (ROOT / top).rglob("*.py"):
            ast.parse(path.read_text(encoding="utf-8"), feature_version=(version[0], version[1]))


def test_the_constraints_pin_every_dependency_within_its_bounds() -> None:
    pins = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            pins[canonicalize_name(name)] = Version(version)
    for requirement in REQUIRED:
        name = canonicalize_name(requirement.name)
        if name == canonicalize_name(PROJECT["project"]["name"]):
            assert requirement.extras <= set(EXTRAS)
        elif requirement.marker is None or requirement.marker.evaluate():
            assert requirement.specifier.contains(pins[name]), f"{requirement} against {pins[name]}"


def test_every_library_that_is_imported_is_declared() -> None:
    # The others are imported under their own name.
    named = {"pillow": "PIL", "pyyaml": "yaml", "flash-attn-4": "flash_attn"}
    # Triton comes with PyTorch's builds for CUDA, CUTLASS with FlashAttention-4.
    tolerated = {"scripts", "tests", "triton", "cutlass"}
    declared = {named.get(n, n.replace("-", "_")) for n in (each.name for each in REQUIRED)}
    for top in ("hf_posenc", "patches", "scripts"):
        for path in (ROOT / top).rglob("*.py"):
            roots = {name.split(".")[0] for name in imports_of(path)}
            assert roots <= sys.stdlib_module_names | declared | tolerated, path


@pytest.mark.slow
def test_patching_needs_no_extra_and_the_rest_names_its_own() -> None:
    """Libraries of extras are hidden; filelock alone is not, without which transformers cannot be imported."""
    code = """
import sys
sys.modules |= dict.fromkeys(("typer", "rich", "jinja2", "markupsafe"))
import hf_posenc.patch.patching, hf_posenc.saving, hf_posenc.engines.exports
from hf_posenc.cli import main
from hf_posenc.training import PositionCollator, chunk_loss
for name, function in (("evaluation", "measure_perplexity"), ("evaluation.extend", "extend"),
                       ("evaluation.recommend", "recommend"), ("training", "Scores")):
    try:
        exec(f"from hf_posenc.{name} import {function}")
    except hf_posenc.PosencError as error:
        print(error)
main(["methods"])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    line = "This needs the library {}: pip install 'hf-posenc[cli]'.\n"
    assert done.returncode == 2, done.stderr
    assert done.stderr.endswith(f"error: {line.format('typer')}")
    libraries = re.findall(r"library (\w+)", done.stdout)
    assert done.stdout == "".join(map(line.format, libraries))
    assert len(libraries) == 4


def test_the_changelog_begins_with_the_version() -> None:
    """`hf_posenc.__version__` is the one place of the version; the changelog and the tag follow it."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version = Version(hf_posenc.__version__)
    headings = re.findall(r"^## (.*)$", changelog, re.MULTILINE)
    dated = rf"\[{re.escape(str(version))}\] - \d{{4}}-\d{{2}}-\d{{2}}"
    assert re.fullmatch(r"\[Unreleased\]" if version.is_devrelease else dated, headings[0])
    assert "version" not in (ROOT / "CITATION.cff").read_text().replace("cff-version", "")


def test_the_release_publishes_what_ci_has_passed_without_a_token() -> None:
    folder = ROOT / ".github" / "workflows"
    release, ci = (yaml.safe_load((folder / f"{n}.yml").read_text()) for n in ("release", "ci"))
    assert ci["jobs"]["ci"]["steps"][-1]["run"].startswith(".ci/run ")
    jobs = release["jobs"]
    assert jobs["ci"]["uses"] == "./.github/workflows/ci.yml"
    assert jobs["publish"]["needs"] == ["ci", "build"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert release["permissions"] == {}
    assert "secrets." not in (folder / "release.yml").read_text()
    for file in folder.iterdir():  # a tag can be moved to another commit
        for used in re.findall(r"uses: (\S+)", file.read_text()):
            assert used.startswith("./") or re.search("@[0-9a-f]{40}$", used), (file.name, used)
    assert any("twine check --strict" in step.get("run", "") for step in jobs["build"]["steps"])


def test_the_linter_refuses_an_adapter_imported_by_name(tmp_path: Path) -> None:
    ruff = shutil.which("ruff") or pytest.skip("ruff is not installed; .ci/run has it")
    for source in ("import patches.llama\n", "from hf_posenc.patches.llama import ADAPTER\n"):
        command = [ruff, "check", "--select", "TID251", "--stdin-filename", "hf_posenc/x.py", "-"]
        options: Any = {"capture_output": True, "text": True, "check": False}
        done = subprocess.run(command, input=source, cwd=ROOT, **options)
        assert done.returncode == 1, done.stdout + done.stderr
        assert "TID251" in done.stdout


@pytest.mark.parametrize("name", ["demo", "tests"])
def test_the_readme_marks_the_commands_that_ci_runs(name: str) -> None:
    block = rf"^<!-- command: {name} -->\n```\w*\n.+?\n```$"
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(block, text, re.MULTILINE | re.DOTALL), name
