"""Long texts stay in their files, and many tokens go to files."""

from __future__ import annotations

import gzip
import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
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
from hf_posenc.evaluation.documents import tokens as joining
from tests.evaluation.documents.test_documents import write
from tests.support.documents_forms import PACK, json_lines
from tests.support.tiny_text import byte_tokenizer, prose

DIGESTS = ["16548db1638b", "37039cc6b8cc"]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("ending", PACK)
def test_long_files_stay_on_disk_and_give_the_same_tokens(ending: str, tmp_path: Path) -> None:
    text = prose(2000) * 10 + " é"
    path = write(tmp_path / f"long.txt{ending}", PACK[ending](text.encode()))
    (entry,) = read_paths([str(path)])
    assert isinstance(entry, LongDocument)
    reports: list[str] = []
    (found,), _ = load_documents([entry], byte_tokenizer(), min_tokens=9, seen=reports.append)
    expected = tokenize(Document(str(path), text), byte_tokenizer())
    assert found.to_dict() == expected.to_dict()
    assert found.to_dict()["text_sha256_of"] == "all"
    assert reports[0] == str(path)
    assert len(reports) > 5


@pytest.mark.usefixtures("small")
def test_reading_stops_where_enough_is_known_and_the_result_says_so(tmp_path: Path) -> None:
    path = tmp_path / "huge.txt"
    text = prose(2000) * 100
    path.write_bytes(text.encode())
    with path.open("r+b") as file:
        file.truncate(
            50 << 30
        )  # 50 GB of NUL bytes behind the text, as a sparse file: reading one is an error
    (found,), skipped = load_documents(
        read_paths([str(path)]), byte_tokenizer(), min_tokens=9, max_tokens=4096
    )
    assert not skipped
    expected = tokenize(Document("d", text[:4096]), byte_tokenizer())
    assert found.ids.tolist() == expected.ids.tolist()
    assert found.sha256 == expected.sha256
    assert found.to_dict()["text_sha256_of"] == "the first 4096 bytes"


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
def test_tokens_and_names_are_fixed_for_ever(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of interrupted runs and results name documents by these fields."""
    monkeypatch.setattr(joining, "IN_MEMORY", limit)
    monkeypatch.chdir(tmp_path)
    write(Path("a.txt"), "\ufeff" + prose(300) + "\r\nnaïve 東京 😀\n")
    write(Path("b.txt.gz"), gzip.compress((prose(9000, 1) + " é").encode()))
    rows = [{"text": prose(200 + row, row), "ids": [5, 6, row]} for row in range(3)]
    write(Path("c.jsonl"), json_lines(rows))
    np.save("d.npy", np.arange(40, dtype=np.uint16).reshape(2, 20))
    write(Path("e.bin"), np.arange(30, dtype="<u4").tobytes())
    write(
        Path("f.txt"), prose(300, 2) + "\ud83d".encode("utf-16", "surrogatepass").decode("latin-1")
    )
    tokenizer, digests = AutoTokenizer.from_pretrained(model_path()), []
    files = ["a.txt", "b.txt.gz", "c.jsonl", "d.npy", "e.bin", "f.txt", "a.txt", "none.txt"]
    for most in (None, 1000):
        entries = read_paths(files, token_dtype="uint32")
        usable, skipped = load_documents(entries, tokenizer, min_tokens=25, max_tokens=most)
        ends = [
            end.tolist() for d in usable for end in (d.byte_ends, d.word_ends) if end is not None
        ]
        known = [document.to_dict() for document in usable], skipped, ends
        digests.append(hashlib.sha256(repr(known).encode()).hexdigest()[:12])
    assert digests == DIGESTS


def test_the_page_names_the_limits_that_hold() -> None:
    page = (Path(__file__).parents[3] / "docs" / "documents.md").read_text(encoding="utf-8")
    sizes = joining.SIZES
    limits = (sizes.window, sizes.whole, sizes.largest, sizes.overlap // 4, joining.IN_MEMORY)
    for limit in limits:
        assert f"{limit:,}" in page
    assert f"text of up to {readers.SMALL >> 20} MiB is read at once" in page
    assert f"may have up to {readers.LONGEST >> 20} MiB" in page
    assert f"count beyond {joining.LONGEST_COUNT}" in page
