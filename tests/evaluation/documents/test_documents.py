"""Documents: files by their names, tokens, and what is left out."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from hf_posenc.embedded import model_path
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents import (
    Document,
    LongDocument,
    Skipped,
    load_documents,
    read_paths,
    readers,
    special_prefix,
    tokenize,
)
from hf_posenc.evaluation.documents import source as joining
from tests.support.documents_forms import GOOD, PACK, json_lines, refusal
from tests.support.tiny_text import byte_tokenizer, prose


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def names(source: Any) -> list[str]:
    return [Path(entry.name).name for entry in source]


def listed(ends: Any) -> list[int]:
    found: list[int] = ends.tolist()
    return found


def test_files_folders_and_patterns_each_file_once(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "deep/er/c.md", "deep/.hidden/d.txt", ".e.txt"):
        write(tmp_path / name, name)
    assert names(read_paths([str(tmp_path)])) == ["a.txt", "b.txt", "c.md"]
    assert names(read_paths([f"{tmp_path}/*.txt", str(tmp_path / "a.txt")])) == ["a.txt", "b.txt"]
    assert names(read_paths([f"{tmp_path}/**/*.md"])) == ["c.md"]
    assert names(read_paths([str(tmp_path / ".e.txt")])) == [".e.txt"]  # named explicitly
    for one in (str(tmp_path / "a.txt"), tmp_path / "a.txt"):
        assert names(read_paths(one)) == ["a.txt"]


def test_tokens_know_the_bytes_of_their_text() -> None:
    text = "aé€😀b"
    document = tokenize(Document("d", text), byte_tokenizer())
    assert len(document.ids) == len(text.encode()) == 11  # a token a byte
    # the bytes of a character count with its first token
    assert listed(document.byte_ends) == [1, 3, 3, 6, 6, 6, 10, 10, 10, 10, 11]
    assert [document.bytes_between(*span) for span in ((0, 11), (1, 3), (3, 6))] == [11, 2, 3]


@pytest.mark.parametrize(
    ("fast", "ends"), [(True, [3, 3, 4]), (False, None)], ids=["offsets that run backwards", "none"]
)
def test_bytes_follow_from_offsets_alone(fast: bool, ends: list[int] | None) -> None:
    class Tokenizer:
        is_fast = fast

        def __call__(self, text: str, return_offsets_mapping: bool, **_: object) -> dict[str, Any]:
            assert return_offsets_mapping == fast
            return {"input_ids": [1, 2, 3], "offset_mapping": [(0, 2), (0, 0), (2, 3)]}

    document = tokenize(Document("d", "aéb"), Tokenizer())
    assert (document.byte_ends if ends is None else listed(document.byte_ends)) == ends
    assert document.bytes_between(0, 3) == (ends and 4)


def test_documents_are_cut_after_tokenization_and_hashed_before() -> None:
    tokenizer = byte_tokenizer(bos=True)
    whole = tokenize(Document("d", "abcdef"), tokenizer)
    cut = tokenize(Document("d", "abcdef"), tokenizer, max_tokens=4)
    assert cut.ids.tolist() == whole.ids.tolist()[:4]
    assert len(whole.ids) == 6  # no <s>: special tokens belong to windows
    assert cut.sha256 == whole.sha256
    assert cut.to_dict()["tokens_sha256"] != whole.to_dict()["tokens_sha256"]
    assert (cut.to_dict()["tokens"], cut.to_dict()["bytes"]) == (4, 4)


def test_special_tokens_in_front() -> None:
    plain, with_bos = byte_tokenizer(), byte_tokenizer(bos=True)
    assert special_prefix(plain, "auto") == []
    assert special_prefix(with_bos, "auto") == [0]
    assert special_prefix(plain, "always") == special_prefix(with_bos, "always") == [0]
    assert special_prefix(with_bos, "never") == []
    for bos, eos, expected in ((0, 2, [0]), (None, 2, [2])):
        either = SimpleNamespace(bos_token_id=bos, eos_token_id=eos)
        assert special_prefix(either, "bos-or-eos") == expected
    with pytest.raises(PosencError, match="has neither"):
        special_prefix(SimpleNamespace(bos_token_id=None, eos_token_id=None), "bos-or-eos")
    plain.bos_token = None
    with pytest.raises(PosencError, match="has no BOS token"):
        special_prefix(plain, "always")
    with pytest.raises(PosencError, match="Unknown BOS policy 'sometimes'"):
        special_prefix(plain, "sometimes")


def test_unusable_documents_are_counted_and_reading_stops_at_the_limit() -> None:
    source: list[Document | Skipped] = [
        Document("short", prose(20)),
        Document("empty", " \n\t"),
        Skipped("gone", "no such file"),
        *(Document(f"long {index}", prose(100, index)) for index in range(5)),
    ]
    seen: list[str] = []
    given: dict[str, Any] = {"min_tokens": 64, "limit": 2, "seen": seen.append}
    usable, skipped = load_documents(source, byte_tokenizer(), **given)
    assert [document.name for document in usable] == ["long 0", "long 1"]
    assert skipped == [
        Skipped("short", "too short: 20 tokens, 64 are needed"),
        Skipped("empty", "empty"),
        Skipped("gone", "no such file"),
    ]
    assert seen == ["short", "empty", "gone", "long 0", "long 1"]


@pytest.mark.parametrize("tokenized", [False, True])
def test_a_copy_is_no_document_of_its_own(tokenized: bool) -> None:
    """With copies, the same text could choose a method and judge it, and intervals would be too narrow."""
    source: list[Any] = [Document(name, prose(100, int(name[0]))) for name in ("1", "2", "1 again")]
    if tokenized:
        source = [tokenize(document, byte_tokenizer()) for document in source]
    usable, skipped = load_documents(source, byte_tokenizer(), min_tokens=64, limit=3)
    assert [document.name for document in usable] == ["1", "2"]
    assert skipped == [Skipped("1 again", "the same text as 1")]


def test_no_usable_document_is_an_error_that_says_what_to_do() -> None:
    source = [Document("a", prose(20)), Document("b", prose(50))]
    with pytest.raises(PosencError) as caught:
        load_documents(source, byte_tokenizer(), min_tokens=64)
    assert str(caught.value) == (
        "No document can be used (a: too short: 20 tokens, 64 are needed; and 1 more). "
        "The longest document has 50 tokens, 64 are needed: give shorter lengths, or longer documents."
    )
    with pytest.raises(PosencError, match="or a larger --max-doc-tokens"):
        load_documents(source, byte_tokenizer(), min_tokens=40, max_tokens=30)
    with pytest.raises(PosencError, match="no document to read"):
        load_documents([], byte_tokenizer(), min_tokens=64)


# Names, links, pipes and permissions: each file is read once.
@pytest.mark.timeout(60)  # nothing waits for what never comes
def test_links_and_pipes(tmp_path: Path) -> None:
    (tmp_path / "dangling.txt").symlink_to("nowhere")
    (tmp_path / "circle.txt").symlink_to("circle.txt")
    os.mkfifo(tmp_path / "pipe.txt")
    os.mkfifo(tmp_path / "pipe.jsonl")
    pipe = "a pipe or a device, not a file: write its content to a file first"
    reasons = {"dangling.txt": "a link that leads nowhere", "pipe.txt": pipe, "pipe.jsonl": pipe}
    reasons["circle.txt"] = "cannot be read (Too many levels of symbolic links)"
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
    for name in ("secret.txt", "secret.jsonl"):
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
    skipped = [Skipped(name, denied) for name in ("closed", "secret.jsonl", "secret.txt")]
    assert entries == [skipped[0], Document("open.txt", GOOD), *skipped[1:]]


NAMES = [
    *(b"new\nline.txt", b"tab\t\x1b[31mred.txt", b"[bold]x.txt", b"[/red].txt", b"-dash.txt"),
    *(b"not-utf8-\xff.txt", "naïve 東京 😀.txt".encode(), b"%s {} $HOME `x`.txt", b"*.txt"),
    "\u202e.txt".encode(),
]


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


# Long texts stay in their files, and many tokens go to files.

DIGESTS = ["8ebeee326cac", "630e8391e42b"]
_FRAGMENTS = "the |def |\n|  | |\t|\r\n|\u00a0|\u3000|\x85|a|Word|x_y|don't|12|½|e\u0301|東京|😀|क्षि|\u200d|<s>|▁"
FRAGMENTS = _FRAGMENTS.split("|")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that counts as large is small."""
    monkeypatch.setattr(readers, "SMALL", 1000)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("ending", PACK)
def test_long_files_stay_on_disk_and_give_the_same_tokens(ending: str, tmp_path: Path) -> None:
    text = prose(2000) * 10 + " é"
    path = write(tmp_path / f"long.txt{ending}", PACK[ending](text.encode()))
    (entry,) = read_paths([str(path)])
    assert isinstance(entry, LongDocument)
    (found,), _ = load_documents([entry], byte_tokenizer(), min_tokens=9)
    assert found.to_dict() == tokenize(Document(str(path), text), byte_tokenizer()).to_dict()
    assert found.to_dict()["text_sha256_of"] == "all"


@settings(max_examples=60)
@given(st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=6), min_size=3))
def test_bytes_and_words_are_those_of_the_text(fragments: list[str]) -> None:
    text, tokenizer = "".join(fragments) + ".", AutoTokenizer.from_pretrained(model_path())
    document = tokenize(Document("d", text), tokenizer)
    places = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ends = np.maximum.accumulate([end for _, end in places["offset_mapping"]])
    assert listed(document.byte_ends) == [len(text[:end].encode()) for end in ends]
    begins = [match.start() for match in re.finditer(r"\S+", text)]
    assert listed(document.word_ends) == np.searchsorted(begins, ends, side="left").tolist()
    assert document.words_between(0, len(document)) == len(text.split())


def test_a_very_long_text_is_tokenized_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    text = "naïve 東京 😀 some words\nand two  more\n" * 99
    whole = tokenize(Document("d", text), tokenizer)
    monkeypatch.setattr(joining, "PART", 1000)
    document = tokenize(Document("d", text), tokenizer)
    assert document.to_dict() == whole.to_dict()
    assert listed(document.byte_ends) == listed(whole.byte_ends)
    assert listed(document.word_ends) == listed(whole.word_ends)
    first = tokenize(Document("d", text), tokenizer, max_tokens=9).to_dict()
    assert first["tokens"] == 9
    end = text[:1000].rindex("\n") + 1
    assert first["text_sha256_of"] == f"the first {len(text[:end].encode())} bytes"
    assert first["text_sha256"] == hashlib.sha256(text[:end].encode()).hexdigest()
    # Without a line's end the cut is in front of a blank, without a blank anywhere.
    assert list(joining.parts(["a" * 600 + " b" * 300])) == ["a" * 600 + " b" * 199, " b" * 101]
    assert [len(part) for part in joining.parts(["a" * 700, "a" * 1800])] == [1000, 1000, 500]
    # Never between two lines' ends, which may be one token.
    blank = "\n" * 998
    assert list(joining.parts(["a\nb" + blank + "c" * 9])) == ["a\n", "b" + blank, "c" * 9]


@pytest.mark.usefixtures("small")
def test_a_long_file_of_white_space_is_empty(tmp_path: Path) -> None:
    path = write(tmp_path / "blank.txt", " \n\u3000" * 3000)
    source = [*read_paths([str(path)]), Document("d", prose(99))]
    assert isinstance(source[0], LongDocument)
    usable, skipped = load_documents(source, byte_tokenizer(), min_tokens=9)
    assert skipped == [Skipped(str(path), "empty")]
    assert [document.name for document in usable] == ["d"]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("limit", [0, 4500, 30_000])
def test_long_texts_in_files(limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (5000, 20, 9000, 200, 4000)
    source = [Document(f"d{size}", prose(size, size)) for size in sizes]
    torn = write(tmp_path / "torn.txt.gz", gzip.compress(prose(9000).encode())[:-9])
    expected = [tokenize(each, byte_tokenizer()).to_dict() for each in source if each != source[1]]
    mapped, memmap = list[str](), np.memmap

    def spy(*given: Any, **more: Any) -> Any:
        mapped.append("once")
        return memmap(*given, **more)

    monkeypatch.setattr(np, "memmap", spy)
    monkeypatch.setattr(joining, "IN_MEMORY", limit)
    entries = [*source[:2], *read_paths([str(torn)]), *source[2:]]
    usable, skipped = load_documents(entries, byte_tokenizer(), min_tokens=64)
    assert [document.to_dict() for document in usable] == expected
    assert [entry.name for entry in skipped] == ["d20", str(torn)]
    assert len(mapped) == sum(size > limit for size in sizes)


def test_a_full_disk_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.BytesIO):
        def __init__(self, *_: object, **__: object) -> None: ...

        def write(self, data: Any) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(joining, "IN_MEMORY", 0)
    monkeypatch.setattr("tempfile.TemporaryFile", Full)
    with pytest.raises(PosencError, match=r"cannot be written to .*: No space left.* TMPDIR"):
        tokenize(Document("d", prose(100)), byte_tokenizer())


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("limit", [0, 1 << 24])
def test_tokens_stay_fixed(limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of interrupted runs and results name documents by these fields."""
    monkeypatch.setattr(joining, "IN_MEMORY", limit)
    monkeypatch.chdir(tmp_path)
    write(Path("a.txt"), "\ufeff" + prose(300) + "\r\nnaïve 東京 😀\n")
    write(Path("b.txt.gz"), gzip.compress((prose(9000, 1) + " é").encode()))
    rows = [{"text": prose(200 + row, row), "ids": [5, 6, row]} for row in range(3)]
    write(Path("c.jsonl"), json_lines(rows))
    half = "\ud83d".encode("utf-16", "surrogatepass").decode("latin-1")
    write(Path("f.txt"), prose(300, 2) + half)
    tokenizer, digests = AutoTokenizer.from_pretrained(model_path()), []
    files = ["a.txt", "b.txt.gz", "c.jsonl", "f.txt", "a.txt", "none.txt"]
    for most in (None, 1000):
        given: dict[str, Any] = {"min_tokens": 25, "max_tokens": most}
        usable, skipped = load_documents(read_paths(files), tokenizer, **given)
        every = (end for d in usable for end in (d.byte_ends, d.word_ends))
        ends = [listed(end) for end in every if end is not None]
        known = [document.to_dict() for document in usable], skipped, ends
        digests.append(hashlib.sha256(repr(known).encode()).hexdigest()[:12])
    assert digests == DIGESTS


def test_the_page_names_the_limits_that_hold() -> None:
    page = (Path(__file__).parents[3] / "docs" / "documents.md").read_text(encoding="utf-8")
    for limit in (joining.PART, joining.IN_MEMORY):
        assert f"{limit:,}" in page
    assert f"text of up to {readers.SMALL >> 20} MiB is read at once" in page
    assert f"may have up to {readers.LONGEST >> 20} MiB" in page
