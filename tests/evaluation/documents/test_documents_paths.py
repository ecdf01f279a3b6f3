"""Links, pipes, permissions and names: each file is read once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hf_posenc.evaluation.documents import Document, Skipped, load_documents, read_paths
from tests.support.documents_forms import GOOD, refusal
from tests.support.tiny_text import byte_tokenizer

pytestmark = pytest.mark.timeout(60)  # nothing waits for what never comes


def test_links_and_pipes(tmp_path: Path) -> None:
    (tmp_path / "dangling.txt").symlink_to("nowhere")
    (tmp_path / "circle.txt").symlink_to("circle.txt")
    os.mkfifo(tmp_path / "pipe.txt")
    os.mkfifo(tmp_path / "pipe.jsonl")
    os.mkfifo(tmp_path / "pipe.npy")
    reasons = {
        "dangling.txt": "a link that leads nowhere",
        "circle.txt": "cannot be read (Too many levels of symbolic links)",
        **dict.fromkeys(
            ("pipe.txt", "pipe.jsonl", "pipe.npy"),
            "a pipe or a device, not a file: write its content to a file first",
        ),
    }
    for name, reason in reasons.items():
        assert list(read_paths([str(tmp_path / name)])) == [Skipped(str(tmp_path / name), reason)]
    found = {Path(entry.name).name: entry for entry in read_paths([str(tmp_path)])}
    assert {name: getattr(entry, "reason", None) for name, entry in found.items()} == reasons
    assert "a pipe or a device" in refusal(Path("/dev/zero"))


def test_one_file_by_several_names_is_read_once(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "1.txt").write_text(GOOD)
    (folder / "2.txt").symlink_to("1.txt")
    os.link(folder / "1.txt", folder / "3.txt")
    (folder / "again").symlink_to(folder)
    entries = list(read_paths([str(folder), str(folder / "1.txt"), f"{folder}/*.txt"]))
    first = str(folder / "1.txt")
    same = [Skipped(str(folder / name), f"the same file as {first}") for name in ("2.txt", "3.txt")]
    link = Skipped(str(folder / "again"), "a link to a folder that is read already")
    assert entries == [Document(first, GOOD), *same, link, *same]


def test_folders_without_files_and_names_without_a_file(tmp_path: Path) -> None:
    (tmp_path / "nothing" / ".hidden").mkdir(parents=True)
    names = [str(tmp_path / "nothing"), "x" * 5000, "a\0b", "[", "~nobody-at-all/x", ""]
    entries = list(read_paths(names))
    assert all(isinstance(entry, Skipped) for entry in entries)
    assert entries[0] == Skipped(names[0], "a folder without files")
    assert {getattr(entry, "reason", "") for entry in entries[1:]} == {"no such file"}


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no users here")
def test_what_nobody_may_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("secret.txt", "secret.jsonl", "secret.npy"):
        (tmp_path / name).write_bytes(b"x")
        (tmp_path / name).chmod(0)
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed" / "a.txt").write_text(GOOD)
    (tmp_path / "closed").chmod(0)
    (tmp_path / "open.txt").write_text(GOOD)
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        entries = list(read_paths(["."]))
    finally:
        if root:
            os.seteuid(0)
        (tmp_path / "closed").chmod(0o755)
    denied = "cannot be read (Permission denied)"
    names = ("closed", "secret.jsonl", "secret.npy", "secret.txt")
    skipped = [Skipped(name, denied) for name in names]
    assert entries == [skipped[0], Document("open.txt", GOOD), *skipped[1:]]


NAMES = (
    *(
        b"new\nline.txt",
        b"tab\t\x1b[31mred.txt",
        b"[bold]x.txt",
        b"[/red].txt",
        b"not-utf8-\xff.txt",
    ),
    *(
        "naïve 東京 😀.txt".encode(),
        b"-dash.txt",
        b"%s {} $HOME `x`.txt",
        b"*.txt",
        "\u202e.txt".encode(),
    ),
)


def test_names_can_be_printed_on_one_line(tmp_path: Path) -> None:
    (tmp_path / "[").mkdir()
    for index, name in enumerate(NAMES):
        with open(os.path.join(os.fsencode(tmp_path), name), "wb") as file:  # noqa: PTH118, PTH123
            file.write(f"{GOOD}{index}".encode())
    usable, skipped = load_documents(read_paths([str(tmp_path)]), byte_tokenizer(), min_tokens=1)
    assert not skipped
    shown = {document.name.removeprefix(f"{tmp_path}/") for document in usable}
    assert {r"new\nline.txt", r"tab\t\x1b[31mred.txt", "[bold]x.txt", "[/red].txt", "*.txt"} < shown
    assert {"naïve 東京 😀.txt", r"\u202e.txt"} < shown
    assert len(shown) == len(NAMES)
    for printed in shown:
        assert printed.isprintable()
        printed.encode()
