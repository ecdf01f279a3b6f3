"""Files that are no text, or not what their names say: each is counted with a reason, none stops the run."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import signal
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents import (
    Document,
    LongDocument,
    Skipped,
    files,
    joining,
    jsonl,
    load_documents,
    read_dataset,
    read_paths,
)
from tests.tiny_text import byte_tokenizer, prose, tiny_checkpoint

PATIENCE = 60
"""Seconds after which something hangs."""


@pytest.fixture(autouse=True)
def _no_hanging() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError("this hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(PATIENCE)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


GOOD = prose(300)


def zstd(data: bytes) -> bytes:
    return bytes(pytest.importorskip("zstandard").ZstdCompressor().compress(data))


def npy(values: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, values, **options)
    return file.getvalue()


def npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, a=np.arange(3))
    return file.getvalue()


def damaged(data: bytes) -> bytes:
    return data[:-8] + bytes(byte ^ 0xFF for byte in data[-8:])


class Evil:
    """What must never be unpickled."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, ("unpickled",)


# The name of a file, its content, and a part of the reason why it is not read.
FILES: dict[str, tuple[bytes, str]] = {
    "empty.txt": (b"", "empty"),
    "blank.txt": (b" \n\t\r\n \xe3\x80\x80", "empty"),
    "only-bom.txt": (b"\xef\xbb\xbf", "empty"),
    "utf16.txt": (GOOD.encode("utf-16"), "UTF-16 (or UTF-32), not UTF-8: convert it with iconv"),
    "utf16-be.txt": (b"\xfe\xff" + GOOD.encode("utf-16-be"), "UTF-16, not UTF-8"),
    "utf16-bare.txt": (GOOD.encode("utf-16-le"), "no text: a NUL byte at offset 1"),
    "latin1.txt": (
        b"x" * 70_000 + "naïve".encode("latin-1"),
        "not UTF-8 (byte 0xef at offset 70002)",
    ),
    "cut.txt": ("three €".encode()[:-1], "not UTF-8 (byte 0xe2 at offset 6)"),
    "nul.txt": (b"a" * 70_000 + b"\0b", "no text: a NUL byte at offset 70,000"),
    "binary.txt": (bytes(range(256)) * 50, "no text: a NUL byte at offset 0"),
    "picture.txt": (b"\x89PNG\r\n\x1a\n", "not UTF-8 (byte 0x89 at offset 0)"),
    "gzip.txt": (gzip.compress(GOOD.encode()), "gzip data: its name must end in .gz"),
    "text.gz": (GOOD.encode(), "not gzip data, or damaged"),
    "torn.txt.gz": (
        gzip.compress(os.urandom(5000).hex().encode())[:3000],
        "cut off: its gzip data",
    ),
    "damaged.txt.gz": (damaged(gzip.compress(GOOD.encode())), "not gzip data, or damaged"),
    "empty.txt.gz": (gzip.compress(b""), "empty"),
    "binary.txt.gz": (gzip.compress(b"\xff" * 100), "not UTF-8"),
    "array.jsonl": (b"[1, 2]\n", "a JSON list, not an object with columns"),
    "number.jsonl": (b"3\n", "a JSON int, not an object with columns"),
    "torn.jsonl": (b'{"text": "it ends he', "; the file ends within this line"),
    "no-column.jsonl": (
        b'{"body": "x"}\n',
        "no column 'text'; its columns are body. Pass --column",
    ),
    "no-columns.jsonl": (b"{}\n", "no column 'text'; its columns are none"),
    "null.jsonl": (b'{"text": null}\n', "column 'text' holds null, not text"),
    "seven.jsonl": (b'{"text": 7}\n', "column 'text' holds int, not text"),
    "surrogate.jsonl": (b'{"text": "half \\ud83d of it"}\n', "half of a surrogate pair (\\ud83d)"),
    "latin1.jsonl": (b'{"text": "na\xefve"}\n', "not UTF-8 (byte 0xef)"),
    "deep.jsonl": (b"[" * 100_000 + b"\n", "JSON beyond what Python reads"),
    "digits.jsonl": (b'{"text": ' + b"7" * 9000 + b"}\n", "JSON beyond what Python reads"),
    "blank.jsonl": (b"\n \n\n", "empty"),
    "empty.jsonl": (b"", "empty"),
    "text.parquet": (GOOD.encode(), "not a parquet file, or damaged"),
    "empty.parquet": (b"", "not a parquet file, or damaged"),
    "rows.parquet.gz": (gzip.compress(b"PAR1"), "decompress it first"),
    "object.npy": (npy(np.array([Evil()]), allow_pickle=True), "not a .npy file of numbers"),
    "pickle.npy": (pickle.dumps([1, 2]), "not a .npy file of numbers"),
    "float.npy": (
        npy(np.ones(9)),
        "holds an array of float64, 1 dimension, not a list of token ids",
    ),
    "cube.npy": (npy(np.ones((2, 2, 2), int)), "3 dimensions, not a list of token ids"),
    "one.npy": (npy(np.array(7)), "not a list of token ids"),
    "none.npy": (npy(np.zeros(0, int)), "empty"),
    "torn.npy": (npy(np.arange(999))[:500], "not a .npy file of numbers"),
    "empty.npy": (b"", "not a .npy file of numbers"),
    "archive.npy": (npz(), "not a .npy file but a .npz archive"),
    "negative.npy": (npy(np.array([1, -2, 3])), "token -2 is negative"),
    "outside.npy": (npy(np.array([1, 257])), "token 257 is outside the vocabulary of 257"),
    "huge.npy": (npy(np.array([1, 2**63 + 5], np.uint64)), "is negative"),
    "odd.bin": (b"\1\0\2", "3 bytes are no whole number of uint16 ids; --token-dtype says"),
    "empty.bin": (b"", "empty"),
    "outside.bin": (b"\xff\xff" * 9, "token 65,535 is outside the vocabulary of 257"),
}

ZSTD: dict[str, tuple[Callable[[], bytes], str]] = {
    "text.zst": (lambda: GOOD.encode(), "not zstd data, or damaged"),
    "torn.txt.zst": (
        lambda: zstd(os.urandom(5000).hex().encode())[:3000],
        "cut off: its zstd data",
    ),
    "damaged.txt.zst": (lambda: zstd(b"x" * 9)[:5] + b"\xff" * 20, "not zstd data, or damaged"),
    "zstd.txt": (lambda: zstd(b"abc"), "zstd data: its name must end in .zst"),
}


def refusal(*paths: Path, **options: Any) -> str:
    """The one error that reading these gives."""
    with pytest.raises(PosencError) as caught:
        load_documents(read_paths(map(str, paths), **options), byte_tokenizer(), min_tokens=1)
    return str(caught.value)


@pytest.mark.parametrize("name", FILES)
def test_each_is_refused_with_its_reason(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    content, reason = FILES[name]
    (tmp_path / name).write_bytes(content)
    message = refusal(tmp_path / name)
    assert message.startswith(f"No document can be used ({tmp_path / name}")
    assert reason in message
    assert "\n" not in message
    assert [path.name for path in tmp_path.iterdir()] == [
        name
    ]  # nothing was executed, nothing is left


@pytest.mark.parametrize("name", ZSTD)
def test_zstd_garbage(name: str, tmp_path: Path) -> None:
    content, reason = ZSTD[name]
    (tmp_path / name).write_bytes(content())
    assert reason in refusal(tmp_path / name)


def test_libraries_that_are_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("zstandard", "pyarrow", "datasets"):
        monkeypatch.setitem(sys.modules, library, None)
    for name, library in (("a.txt.zst", "zstandard"), ("a.parquet", "pyarrow")):
        (tmp_path / name).write_bytes(b"x")
        message = refusal(tmp_path / name)
        assert f"need the {library} library: pip install 'hf-posenc[data]'" in message
    with pytest.raises(
        PosencError, match=r"needs the datasets library: pip install 'hf-posenc\[data\]'"
    ):
        list(read_dataset("anything"))


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
    for name in NAMES:
        with open(os.path.join(os.fsencode(tmp_path), name), "wb") as file:  # noqa: PTH118, PTH123
            file.write(GOOD.encode())
    usable, skipped = load_documents(read_paths([str(tmp_path)]), byte_tokenizer(), min_tokens=1)
    assert not skipped
    shown = {document.name.removeprefix(f"{tmp_path}/") for document in usable}
    assert {r"new\nline.txt", r"tab\t\x1b[31mred.txt", "[bold]x.txt", "[/red].txt", "*.txt"} < shown
    assert {"naïve 東京 😀.txt", r"\u202e.txt"} < shown
    assert len(shown) == len(NAMES)
    for printed in shown:
        assert printed.isprintable()
        printed.encode()


def test_rows_that_are_no_documents(tmp_path: Path) -> None:
    lines = [json.dumps({"text": GOOD}), "", "[]", json.dumps({"text": 1.5}), '{"text": "to']
    path = tmp_path / "a.jsonl"
    path.write_text("\ufeff" + "\n".join(lines))
    good, *others = read_paths([str(path)])
    assert good == Document(f"{path}:1", GOOD)
    assert [entry.name for entry in others] == [f"{path}:{number}" for number in (3, 4, 5)]
    torn = tmp_path / "b.jsonl.gz"
    torn.write_bytes(gzip.compress(f"{lines[0]}\n{os.urandom(200_000).hex()}".encode())[:99_000])
    good, end = read_paths([str(torn)])
    assert (good.name, end.name) == (f"{torn}:1", str(torn))
    assert isinstance(end, Skipped)
    assert end.reason == "cut off: its gzip data end too early"


def test_a_parquet_file_without_rows(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    parquet.write_table(
        pyarrow.table({"text": pyarrow.array([], "string")}), tmp_path / "a.parquet"
    )
    assert "a parquet file without rows" in refusal(tmp_path / "a.parquet")
    parquet.write_table(pyarrow.table({"text": ["a", None]}), tmp_path / "b.parquet")
    assert list(read_paths([str(tmp_path / "b.parquet")])) == [
        Document(f"{tmp_path}/b.parquet#0", "a"),
        Skipped(f"{tmp_path}/b.parquet#1", "column 'text' holds null, not text"),
    ]
    whole = (tmp_path / "b.parquet").read_bytes()
    (tmp_path / "c.parquet").write_bytes(whole[:-20])
    assert "not a parquet file, or damaged" in refusal(tmp_path / "c.parquet")


def test_a_dataset_without_rows(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    (tmp_path / "data").mkdir()
    datasets.Dataset.from_dict({"text": ["a"]}).select([]).to_parquet(
        tmp_path / "data" / "test.parquet"
    )
    (entry,) = read_dataset(str(tmp_path / "data"))
    assert entry == Skipped(f"{tmp_path}/data[test]", "a split without rows")


def test_datasets_that_are_damaged_or_empty(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": []}).save_to_disk(tmp_path / "empty")
    assert "of dataset" in refusal(tmp_path / "empty")
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "damaged")
    for path in (tmp_path / "damaged").glob("*.arrow"):
        path.write_bytes(b"garbage")
    assert "of dataset" in refusal(tmp_path / "damaged")
    (tmp_path / "damaged" / "state.json").write_text("{")
    assert "cannot be read" in refusal(tmp_path / "damaged")


def test_a_line_of_several_megabytes(tmp_path: Path) -> None:
    text = prose(1000).replace("\n", " ") * 3000
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + "\n")
    (tmp_path / "b.txt").write_text(text)
    row, file = read_paths([str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")])
    assert row == Document(f"{tmp_path}/a.jsonl:1", text)
    assert isinstance(file, LongDocument)
    usable, _ = load_documents([row, file], byte_tokenizer(), min_tokens=9, max_tokens=5000)
    assert [len(document) for document in usable] == [5000, 5000]
    assert usable[0].ids.tolist() == usable[1].ids.tolist()


BOMB = 64 << 20


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_bombs_take_little_memory(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "LONGEST", 1 << 20)
    sizes = joining.Sizes(window=1 << 14, overlap=1 << 9, largest=1 << 16)
    monkeypatch.setattr(joining, "SIZES", sizes)
    pack = gzip.compress if ending == ".gz" else zstd
    (tmp_path / f"letters.txt{ending}").write_bytes(pack(b"a" * BOMB))
    (tmp_path / f"line.jsonl{ending}").write_bytes(pack(b"a" * BOMB + b'\n{"text": "end"}'))
    (tmp_path / f"zeros.txt{ending}").write_bytes(pack(b"\0" * BOMB))
    (tmp_path / f"words.txt{ending}").write_bytes(pack(b"many words " * (BOMB // 11)))
    tracemalloc.start()
    try:
        usable, skipped = load_documents(
            read_paths([str(tmp_path)]), byte_tokenizer(), min_tokens=1, max_tokens=999
        )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    reasons = {Path(entry.name).name: entry.reason for entry in skipped}
    assert "no place to cut its text" in reasons[f"letters.txt{ending}"]
    assert reasons[f"line.jsonl{ending}:1"] == "a line of more than 1,048,576 bytes"
    assert reasons[f"zeros.txt{ending}"] == "no text: a NUL byte at offset 0"
    assert [len(document) for document in usable] == [3, 999]
    assert peak < BOMB // 2


def test_a_run_over_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from hf_posenc.cli.app import app

    monkeypatch.setattr(files, "SMALL", 1 << 12)
    folder = tmp_path / "inputs"
    folder.mkdir()
    for name, (content, _) in FILES.items():
        (folder / name).write_bytes(content)
    (folder / "good.txt").write_text(GOOD)
    os.mkfifo(folder / "pipe.txt")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "[red]\n[").write_bytes(b"")
    model = tiny_checkpoint(tmp_path / "model")
    arguments = ["perplexity", model, "--text", folder, "--lengths", "32,64", "--patch", "none"]
    result = CliRunner().invoke(
        app, [*map(str, arguments), "--no-plot", "--output", str(tmp_path / "out")]
    )
    assert result.exit_code == 0, result.output
    known = json.loads((tmp_path / "out" / "perplexity.json").read_text())
    assert [Path(document["name"]).name for document in known["documents"]] == ["good.txt"]
    assert len(known["skipped"]) == len(FILES) + 3
