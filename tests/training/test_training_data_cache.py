"""Training data on disk: found again, read by one process for all, whole after any interruption."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents import Entry, TokenizedDocument, read_paths
from hf_posenc.training.blocks import Blocks, Cutter, prepare_blocks
from tests.support.processes import PATIENCE, running, start
from tests.support.tiny_text import byte_tokenizer, prose
from tests.training.test_training_data import SOURCE, documents, rows_of


def unread() -> Iterator[Entry]:
    pytest.fail("the documents were read again")
    yield


def cached(folder: Path, entries: Iterable[Entry], **options: Any) -> Blocks:
    settings: dict[str, Any] = {"length": 10, "source": SOURCE, **options}
    return prepare_blocks(entries, byte_tokenizer(), cache=folder / "cache", **settings)


@pytest.mark.parametrize("positions", ["contiguous", "packed"])
def test_a_cache_gives_what_reading_gives(tmp_path: Path, positions: str) -> None:
    entries = documents(25, 7, 40)
    fresh = prepare_blocks(entries, byte_tokenizer(), length=10, positions=positions)
    first = cached(tmp_path, entries, positions=positions)
    again = cached(tmp_path, unread(), positions=positions)
    for other in (first, again):
        assert other.counts == fresh.counts
        assert rows_of(other) == rows_of(fresh)


@pytest.mark.parametrize(
    "other",
    [
        {"length": 11},
        {"positions": "packed"},
        {"limit": 1},
        {"source": {"kind": "other"}},
    ],
)
def test_other_settings_are_other_blocks(tmp_path: Path, other: dict[str, Any]) -> None:
    cached(tmp_path, documents(25))
    cached(tmp_path, documents(25), **other)
    assert len(list((tmp_path / "cache").glob("*/"))) == 2


def test_drawn_positions_share_the_blocks_of_contiguous_ones(tmp_path: Path) -> None:
    cached(tmp_path, documents(25))
    cached(tmp_path, unread(), positions="pose")


def test_a_file_that_was_changed_is_read_again(tmp_path: Path) -> None:
    text = tmp_path / "texts" / "a.txt"
    text.parent.mkdir()
    hashes = []
    for number in range(3):
        if number != 1:
            text.write_text(prose(30 + number, seed=number))
        for path in (str(text), str(text.parent), str(text.parent / "*.txt")):
            source = {"kind": "text", "paths": [path]}
            entries = unread() if number == 1 else read_paths([path])
            hashes.append(cached(tmp_path, entries, source=source).counts.sha256)
    assert hashes[:3] == hashes[3:6]
    assert not set(hashes[:3]) & set(hashes[6:])


def test_the_hash_is_of_tokens_and_of_boundaries() -> None:
    def of(*sizes: int) -> str:
        ids = torch.arange(20).split(sizes)
        whole = [TokenizedDocument(str(i), part, None, None) for i, part in enumerate(ids)]
        blocks = prepare_blocks(whole, byte_tokenizer(), length=10, positions="packed")
        assert rows_of(blocks) == [list(range(10)), list(range(10, 20))]
        return blocks.counts.sha256

    assert of(5, 15) == of(5, 15)
    assert of(5, 15) != of(6, 14)


def test_a_reader_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def failing() -> Iterator[Entry]:
        yield from documents(25)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached(tmp_path, failing())
    assert not list(tmp_path.rglob("*.arrow"))
    assert len(cached(tmp_path, documents(25, 25))) == 4


def _slow(folder: Path, begun: Path) -> None:
    def entries() -> Iterator[Entry]:
        yield from documents(*[20] * 200)
        begun.touch()
        time.sleep(60)

    cached(folder, entries())


@pytest.mark.slow
def test_a_killed_process_leaves_nothing_that_is_taken_for_complete(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    with running(_slow, tmp_path, begun) as process:
        while process.is_alive() and not begun.exists():
            time.sleep(0.01)
    assert [path.name for path in tmp_path.rglob("*.incomplete")] == ["0.0.0.incomplete"]
    assert len(cached(tmp_path, documents(25, 25))) == 4
    assert not list(tmp_path.rglob("*.incomplete"))


def _rank(folder: Path, rank: int) -> None:
    def entries() -> Iterator[Entry]:
        (folder / f"read-{rank}").touch()
        for entry in documents(25, 40):
            time.sleep(0.2)
            yield entry

    blocks = cached(folder, entries())
    (folder / f"hash-{rank}").write_text(blocks.counts.sha256)


@pytest.mark.slow
def test_of_several_processes_one_reads_and_all_have_the_same(tmp_path: Path) -> None:
    ranks = [start(_rank, tmp_path, rank) for rank in range(3)]
    for process in ranks:
        process.join(PATIENCE)
    assert len(list(tmp_path.glob("read-*"))) == 1
    hashes = [path.read_text() for path in tmp_path.glob("hash-*")]
    assert len(hashes) == 3
    assert len(set(hashes)) == 1


@pytest.mark.parametrize("cache", [True, False])
def test_a_full_disk_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: bool
) -> None:
    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Cutter, "cut", full)
    options: Any = {"cache": tmp_path / "cache", "source": SOURCE} if cache else {}
    with pytest.raises(PosencError, match=r"cannot be written to .*: No space left on device"):
        prepare_blocks(documents(25), byte_tokenizer(), length=10, **options)
    assert not list(tmp_path.rglob("*.arrow"))


def test_a_cache_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(
        PosencError, match=r"cannot be written to the cache .*cache: Not a directory"
    ):
        cached(tmp_path, documents(25))


@pytest.mark.parametrize("name", ["*.arrow", "blocks.json"])
def test_a_damaged_cache_says_so(tmp_path: Path, name: str) -> None:
    cached(tmp_path, documents(25))
    (file,) = tmp_path.rglob(name)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(PosencError, match="damaged: remove that folder"):
        cached(tmp_path, unread())
