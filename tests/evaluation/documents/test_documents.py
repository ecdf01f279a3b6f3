"""Documents: reading and tokenization."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents import (
    Document,
    Skipped,
    load_documents,
    read_dataset,
    read_paths,
    special_prefix,
    tokenize,
)
from tests.support.tiny_text import byte_tokenizer, prose


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def names(source: object) -> list[str]:
    assert not isinstance(source, str)
    return [Path(entry.name).name for entry in source]  # type: ignore[attr-defined]


def test_files_folders_and_patterns_each_file_once(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "deep/er/c.md", "deep/.hidden/d.txt", ".e.txt"):
        write(tmp_path / name, name)
    assert names(read_paths([str(tmp_path)])) == ["a.txt", "b.txt", "c.md"]
    assert names(read_paths([f"{tmp_path}/*.txt", str(tmp_path / "a.txt")])) == ["a.txt", "b.txt"]
    assert names(read_paths([f"{tmp_path}/**/*.md"])) == ["c.md"]
    assert names(read_paths([str(tmp_path / ".e.txt")])) == [".e.txt"]  # named explicitly


def test_text_is_read_as_it_stands(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\ntwo\xc3\xa9\n")
    assert list(read_paths([str(path)])) == [
        Document(str(path), "one\r\ntwoé\n")
    ]  # without the byte order mark


def test_what_cannot_be_read_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    latin = write(tmp_path / "latin.txt", "naïve".encode("latin-1"))
    entries = list(
        read_paths([str(tmp_path / "absent.txt"), str(tmp_path / "nothing"), str(latin)])
    )
    assert entries == [
        Skipped(str(tmp_path / "absent.txt"), "no such file"),
        Skipped(str(tmp_path / "nothing"), "a folder without files"),
        Skipped(str(latin), "not UTF-8 (byte 0xef at offset 2)"),
    ]


def test_tokens_know_the_bytes_of_their_text() -> None:
    text = "aé€😀b"
    document = tokenize(Document("d", text), byte_tokenizer())
    assert len(document.ids) == len(text.encode()) == 11  # a token a byte
    # the bytes of a character count with its first token
    assert document.byte_ends is not None
    assert document.byte_ends.tolist() == [1, 3, 3, 6, 6, 6, 10, 10, 10, 10, 11]
    assert document.bytes_between(0, 11) == 11
    assert document.bytes_between(1, 3) == 2
    assert document.bytes_between(3, 6) == 3


def test_tokens_whose_place_runs_backwards_take_no_bytes_away() -> None:
    class Tokenizer:
        is_fast = True

        def __call__(self, text: str, **_: object) -> dict[str, object]:
            return {"input_ids": [1, 2, 3], "offset_mapping": [(0, 2), (0, 0), (2, 3)]}

    ends = tokenize(Document("d", "aéb"), Tokenizer()).byte_ends
    assert ends is not None
    assert ends.tolist() == [3, 3, 4]


def test_a_tokenizer_without_offsets_gives_no_bytes() -> None:
    class Tokenizer:
        def __call__(
            self, text: str, *, return_offsets_mapping: bool, **_: object
        ) -> dict[str, object]:
            assert not return_offsets_mapping
            return {"input_ids": [1, 2, 3]}

    document = tokenize(Document("d", "abc"), Tokenizer())
    assert document.byte_ends is None
    assert document.bytes_between(0, 3) is None


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
    usable, skipped = load_documents(
        source, byte_tokenizer(), min_tokens=64, limit=2, seen=seen.append
    )
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
    with pytest.raises(PosencError, match="no document to read"):
        load_documents([], byte_tokenizer(), min_tokens=64)


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    pytest.importorskip("datasets")
    rows = [
        {"text": prose(80, 1), "number": 1},
        {"text": None, "number": 2},
        {"text": prose(90, 2), "number": 3},
    ]
    write(tmp_path / "data" / "test.jsonl", "\n".join(map(json.dumps, rows)))
    return str(tmp_path / "data")


@pytest.mark.parametrize("streaming", [True, False])
def test_rows_of_a_dataset(
    dataset: str, streaming: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    assert list(read_dataset(dataset, streaming=streaming)) == [
        Document(f"{dataset}[test]#0", prose(80, 1)),
        Skipped(f"{dataset}[test]#1", "column 'text' holds null, not text"),
        Document(f"{dataset}[test]#2", prose(90, 2)),
    ]


def test_a_dataset_without_the_column_split_or_name(dataset: str, tmp_path: Path) -> None:
    with pytest.raises(
        PosencError, match=r"no column 'body'; its columns are text, number\. Pass --column"
    ):
        list(read_dataset(dataset, column="body"))
    with pytest.raises(PosencError, match="split 'train'"):
        list(read_dataset(dataset, split="train"))
    with pytest.raises(PosencError, match="cannot be read"):
        list(read_dataset(str(tmp_path / "absent")))
