"""Long texts stay in their files, and many tokens go to files."""

from __future__ import annotations

import gzip
import hashlib
import io
import re
from pathlib import Path
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
    tokenize,
)
from hf_posenc.evaluation.documents import source as joining
from tests.evaluation.documents.test_documents import write
from tests.support.documents_forms import PACK, json_lines
from tests.support.tiny_text import byte_tokenizer, prose

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
    expected = tokenize(Document(str(path), text), byte_tokenizer())
    assert found.to_dict() == expected.to_dict()
    assert found.to_dict()["text_sha256_of"] == "all"


@settings(max_examples=60)
@given(st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=6), min_size=3))
def test_bytes_and_words_are_those_of_the_text(fragments: list[str]) -> None:
    text, tokenizer = "".join(fragments) + ".", AutoTokenizer.from_pretrained(model_path())
    document = tokenize(Document("d", text), tokenizer)
    places = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ends = np.maximum.accumulate([end for _, end in places["offset_mapping"]])
    assert document.byte_ends is not None
    assert document.byte_ends.tolist() == [len(text[:end].encode()) for end in ends]
    begins = [match.start() for match in re.finditer(r"\S+", text)]
    assert document.word_ends is not None
    assert document.word_ends.tolist() == np.searchsorted(begins, ends, side="left").tolist()
    assert document.words_between(0, len(document)) == len(text.split())


def test_a_very_long_text_is_tokenized_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    text = "naïve 東京 😀 some words\nand two  more\n" * 99
    whole = tokenize(Document("d", text), tokenizer)
    monkeypatch.setattr(joining, "PART", 1000)
    document = tokenize(Document("d", text), tokenizer)
    assert document.to_dict() == whole.to_dict()
    for ours, theirs in (
        (document.byte_ends, whole.byte_ends),
        (document.word_ends, whole.word_ends),
    ):
        assert ours is not None
        assert theirs is not None
        assert ours.tolist() == theirs.tolist()
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
def test_long_documents_lie_in_files(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    write(
        Path("f.txt"), prose(300, 2) + "\ud83d".encode("utf-16", "surrogatepass").decode("latin-1")
    )
    tokenizer, digests = AutoTokenizer.from_pretrained(model_path()), []
    files = ["a.txt", "b.txt.gz", "c.jsonl", "f.txt", "a.txt", "none.txt"]
    for most in (None, 1000):
        entries = read_paths(files)
        usable, skipped = load_documents(entries, tokenizer, min_tokens=25, max_tokens=most)
        ends = [
            end.tolist() for d in usable for end in (d.byte_ends, d.word_ends) if end is not None
        ]
        known = [document.to_dict() for document in usable], skipped, ends
        digests.append(hashlib.sha256(repr(known).encode()).hexdigest()[:12])
    assert digests == DIGESTS


def test_the_page_names_the_limits_that_hold() -> None:
    page = (Path(__file__).parents[3] / "docs" / "documents.md").read_text(encoding="utf-8")
    for limit in (joining.PART, joining.IN_MEMORY):
        assert f"{limit:,}" in page
    assert f"text of up to {readers.SMALL >> 20} MiB is read at once" in page
    assert f"may have up to {readers.LONGEST >> 20} MiB" in page
