"""Training data: the tokens of each block, bad input, the cache after an interruption, and held-out documents."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_posenc.embedded import HELD_OUT
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents import (
    Document,
    Entry,
    LongDocument,
    Skipped,
    TokenizedDocument,
    read_dataset,
    read_paths,
    tokenize,
)
from hf_posenc.evaluation.documents.readers import document_of_ids
from hf_posenc.evaluation.documents.source import Source
from hf_posenc.training.blocks import (
    STANDARD_LIBRARY,
    Blocks,
    Counts,
    Cutter,
    candidates,
    prepare_blocks,
    read_standard_library,
    without,
)
from hf_posenc.training.options import POSITIONS
from tests.support.processes import PATIENCE, running, start
from tests.support.tiny_text import byte_tokenizer, prose

datasets: Any = pytest.importorskip("datasets")

SOURCE = {"kind": "test"}


def tokenizer(*, bos: bool = False, eos: bool = False) -> Any:
    made = byte_tokenizer(bos=bos)
    if eos:
        made.add_special_tokens({"eos_token": "</s>"})
    return made


def documents(*sizes: int) -> list[Entry]:
    return [Document(f"doc{i}", prose(size, seed=i)) for i, size in enumerate(sizes)]


def ids_of(made: Any, entry: Any) -> list[int]:
    found: list[int] = made(entry.text, add_special_tokens=False)["input_ids"]
    return found


def rows_of(blocks: Blocks, column: str = "input_ids") -> list[list[int]]:
    return [row[column].tolist() for row in blocks.dataset]


@pytest.mark.parametrize("positions", [p for p in POSITIONS if p != "packed"])
def test_a_block_is_of_one_document(positions: str) -> None:
    made, entries = tokenizer(), documents(25, 7, 40)
    blocks = prepare_blocks(entries, made, length=10, positions=positions)
    long, _, longest = (ids_of(made, entry) for entry in entries)
    expected = [long[:10], long[10:20], *(longest[i : i + 10] for i in range(0, 40, 10))]
    assert rows_of(blocks) == expected
    assert blocks.dataset.column_names == ["input_ids"]
    counts = blocks.counts
    assert (counts.blocks, counts.documents, counts.tokens, counts.unused) == (6, 2, 60, 5)
    assert counts.skipped == 1
    assert counts.reason == "doc1: too short: 7 tokens, 10 are needed"
    assert counts.largest == max(map(max, expected))
    line = "6 blocks of 10 tokens from 2 documents (8% of their tokens are left over); 1 document"
    assert counts.line() == f"{line} not used (the first: {counts.reason})"
    assert Counts(10, 1, 1, 10).line().startswith("1 block of 10 tokens from 1 document (")


def test_packed_documents_stand_side_by_side() -> None:
    made, entries = tokenizer(), documents(4, 9, 3, 6)
    blocks = prepare_blocks(entries, made, length=10, positions="packed")
    stream = [token for entry in entries for token in ids_of(made, entry)]
    assert rows_of(blocks) == [stream[:10], stream[10:20]]
    assert rows_of(blocks, "document_lengths") == [[4, 6], [3, 3, 4]]
    assert (blocks.counts.tokens, blocks.counts.unused) == (20, 2)


def test_special_tokens_stand_around_documents() -> None:
    made = tokenizer(bos=True, eos=True)
    begin, end = made.bos_token_id, made.eos_token_id
    first, second = documents(5, 12)
    one, two = ids_of(made, first), ids_of(made, second)
    packed = prepare_blocks([first, second], made, length=10, positions="packed")
    assert rows_of(packed) == [[begin, *one, end, begin, *two[:2]], [begin, *two[2:11]]]
    assert rows_of(packed, "document_lengths") == [[7, 3], [10]]
    alone = prepare_blocks([first, second], made, length=7)
    assert rows_of(alone) == [[begin, *one, end], [begin, *two[:6]], [begin, *two[6:12]]]


def test_ids_that_come_with_special_tokens_get_no_second_ones() -> None:
    made = tokenizer(bos=True, eos=True)
    begin, end = made.bos_token_id, made.eos_token_id
    ids = torch.tensor([begin, 5, 6, 7, end])
    blocks = prepare_blocks([TokenizedDocument("ids", ids, None, None)], made, length=5)
    assert rows_of(blocks) == [ids.tolist()]
    assert blocks.counts.unused == 0


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    length=st.integers(4, 20),
    before=st.integers(0, 2),
    behind=st.integers(0, 1),
    packed=st.booleans(),
)
def test_no_token_is_lost_doubled_or_moved(
    sizes: list[int], length: int, before: int, behind: int, packed: bool
) -> None:
    """Whatever the lengths: documents come out of the blocks as they went in, but for what is counted as unused."""
    prefix, suffix = [-1] * before, [-2] * behind
    cutter = Cutter(length, packed, prefix, suffix)
    stream: list[int] = []
    found: list[int] = []
    for number, size in enumerate(sizes):
        ids = list(range(1000 * number, 1000 * number + size))
        stream += [*ids, *suffix]
        for block in cutter.cut(TokenizedDocument(str(number), torch.tensor(ids), None, None)):
            assert sum(block.documents) == len(block.ids) == length
            assert packed or block.documents == (length,)
            begin = 0
            for each in block.documents:
                part = block.ids[begin : begin + each].tolist()
                assert part[:before] == prefix[:each]
                assert len({token // 1000 for token in part if token >= 0}) <= 1
                found += part[before:]
                begin += each
    cutter.finish()
    assert cutter.tokens == len(stream)
    assert len(found) == cutter.tokens - cutter.unused
    if packed:
        assert found == stream[: len(found)]
        assert cutter.unused < length
    else:
        assert set(found) <= set(stream)
        assert [t for t in found if t >= 0] == sorted(t for t in found if t >= 0)


def test_reading_stops_at_the_limit() -> None:
    def entries() -> Iterator[Entry]:
        yield from documents(12, 3, 12)
        pytest.fail("read on")

    blocks = prepare_blocks(entries(), tokenizer(), length=10, limit=2)
    assert (blocks.counts.documents, blocks.counts.skipped) == (2, 1)


def from_rows(folder: Path, *rows: dict[str, Any], **options: Any) -> Iterable[Entry]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_paths([str(path)], **options)


def nameless(folder: Path) -> Iterable[Entry]:
    return from_rows(folder, {"content": "a" * 30})


def foreign(folder: Path) -> Iterable[Entry]:
    return from_rows(folder, {"ids": [1, 2, 3] * 9}, {"ids": [50_000] * 30}, tokenized="ids")


def chats(folder: Path) -> Iterable[Entry]:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    return from_rows(folder, {"messages": messages}, column="messages")


def saved(folder: Path) -> Iterable[Entry]:
    datasets.Dataset.from_dict({"content": ["a" * 30]}).save_to_disk(str(folder / "saved"))
    return read_dataset(str(folder / "saved"))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (nameless, r"rows.jsonl:1: no column 'text'; its columns are content. Pass --column\)"),
        (saved, "no column 'text'; its columns are content"),
        (chats, "rows.jsonl:1: a conversation, which TRL trains on"),
        (lambda _: documents(4, 9), "doc0: too short: 4 tokens, 10 are needed; and 1 more.* A block has 10 tokens"),
        (foreign, "rows.jsonl:2: token 50,000 is outside the vocabulary of 257.*--tokenizer"),
        (lambda _: [Document("void", " \n")], r"No document can be used for training \(void: empty\)"),
        (lambda _: [], "There is no document to read"),
        (lambda f: read_paths([str(f / "missing")]), "missing: no such file"),
    ],
)  # fmt: skip
def test_bad_input_says_one_line(
    tmp_path: Path, entries: Callable[[Path], Iterable[Entry]], message: str
) -> None:
    with pytest.raises(PosencError, match=message) as raised:
        prepare_blocks(entries(tmp_path), tokenizer(), length=10)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 10, "positions": "pack"}, "Unknown kind of positions 'pack'.*packed"),
        ({"length": 2}, "A block of 2 tokens has none to predict"),
        ({"length": 200, "positions": "packed"}, "together they have 60 tokens.*A block has 200"),
        ({"length": 10, "cache": Path("somewhere")}, "A cache needs source"),
    ],
)
def test_bad_settings_say_so(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PosencError, match=message):
        prepare_blocks(documents(30, 30), tokenizer(bos=True), **options)


def test_the_standard_library_is_read_without_what_is_held_out() -> None:
    names = [document.name for document in read_standard_library()]
    assert names == sorted(names)
    assert len(names) > 100
    assert not {Path(name).parts[0].removesuffix(".py") for name in names} & {*HELD_OUT}
    assert not [name for name in names if "test" in Path(name).parts]
    assert json.loads(json.dumps(STANDARD_LIBRARY)) == STANDARD_LIBRARY


# Training data on disk: found again, read by one process for all, whole after any interruption.
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
    for read in (entries, unread()):
        other = cached(tmp_path, read, positions=positions)
        assert other.counts == fresh.counts
        assert rows_of(other) == rows_of(fresh)


@pytest.mark.parametrize(
    "other", [{"length": 11}, {"positions": "packed"}, {"limit": 1}, {"source": {"kind": "other"}}]
)
def test_other_settings_are_other_blocks(tmp_path: Path, other: dict[str, Any]) -> None:
    cached(tmp_path, documents(25))
    cached(tmp_path, documents(25), **other)
    assert len(list((tmp_path / "cache").glob("*/"))) == 2


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

    (folder / f"hash-{rank}").write_text(cached(folder, entries()).counts.sha256)


@pytest.mark.slow
def test_of_several_processes_one_reads_and_all_have_the_same(tmp_path: Path) -> None:
    for process in [start(_rank, tmp_path, rank) for rank in range(3)]:
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


@pytest.mark.parametrize(
    ("name", "share"), [("blocks.json", 0.5), *(("*.arrow", tenth / 10) for tenth in range(10))]
)
def test_a_damaged_cache_says_so(tmp_path: Path, name: str, share: float) -> None:
    cached(tmp_path, documents(*[25] * 100))
    (file,) = tmp_path.rglob(name)
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])
    with pytest.raises(PosencError, match="damaged: remove that folder"):
        cached(tmp_path, unread())


def test_a_cache_that_lost_a_batch_of_blocks_says_so(tmp_path: Path) -> None:
    cached(tmp_path, documents(*[25] * 100))
    (file,) = tmp_path.rglob("*.arrow")
    reader = pa.ipc.open_stream(file.read_bytes())
    with pa.ipc.new_stream(file, reader.schema) as writer:
        writer.write_batch(next(reader))  # the stream is whole, as after a cut between two batches
    with pytest.raises(PosencError, match=r"damaged: remove that folder \(64 of 200 blocks"):
        cached(tmp_path, unread())


def test_a_cache_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    message = r"cannot be written to the cache .*: (File exists|Not a)"
    with pytest.raises(PosencError, match=message):
        cached(tmp_path, documents(25))


# Which documents are held out to be scored, and that no other part of them is trained on.
TEXT = "".join(chr(97 + i % 26) for i in range(120))


def long(name: str) -> LongDocument:
    return LongDocument(name, lambda: iter([TEXT[:50], TEXT[50:]]))


@pytest.mark.parametrize(
    ("entries", "held_out"),
    [
        ([Document(f"{i}", f"{i} texts") for i in range(25)], ["1", "11", "21"]),
        # What cannot be read does not count.
        ([Skipped("a", "damaged"), Document("b", " "), *map(long, "cde")], ["d"]),
    ],
)
def test_every_tenth_document_is_held_out(entries: Sequence[Entry], held_out: list[str]) -> None:
    assert [entry.name for entry in candidates(entries)] == held_out
    made = tokenizer()
    scored = tokenize(next(candidates(entries)), made)  # type: ignore[arg-type]
    rest = without(Source(lambda: entries, SOURCE, embedded=False), [scored], made)
    # The others are trained on if nothing scores them.
    assert {entry.name for entry in rest} == {entry.name for entry in entries} - {held_out[0]}
    assert rest.about == {"kind": "test", "held_out": held_out[:1]}


@pytest.mark.parametrize("rows", [False, True])  # of token ids, which have special tokens in front
def test_copies_of_what_is_held_out_are_not_trained_on(rows: bool) -> None:
    made = tokenizer(bos=True)
    entries: list[Any] = documents(20, 30, 40, 50)
    entries.append(Document("longer", f"{entries[1].text} and more"))
    scored = tokenize(entries[1], made)
    if rows:
        entries = [document_of_ids(entry.name, made(entry.text).input_ids) for entry in entries]
    source = Source(lambda: entries, SOURCE, embedded=False)
    for own, unused, first in ((True, 1, "longer"), (False, 2, "doc1")):
        kept = without(source, [scored], made, own=own)
        counts = prepare_blocks(kept, made, length=10, source=kept.about).counts
        assert (counts.documents, counts.skipped) == (3, unused)
        assert counts.reason == f"{first}: begins as doc1, which is scored"


IDS = TokenizedDocument("a", torch.arange(30), None, None)


@pytest.mark.parametrize(
    ("document", "end"), [(Document("a", TEXT), 108), (long("a"), 108), (IDS, 27)]
)
def test_the_last_tenth_of_a_single_document_is_held_out(document: Any, end: int) -> None:
    made, source = tokenizer(), Source(lambda: [document], embedded=False)
    (last,) = candidates([document])
    held = last if isinstance(last, TokenizedDocument) else tokenize(last, made)  # type: ignore[arg-type]
    (rest,) = without(source, [held], made)
    ids = document.ids.tolist() if document is IDS else ids_of(made, Document("a", TEXT))
    assert [part.ids.tolist() for part in (rest, held)] == [ids[:end], ids[end:]]  # type: ignore[union-attr]


def test_what_cannot_be_held_out_is_given_with_its_reason() -> None:
    entries: list[Entry] = [Skipped("a", "damaged"), Skipped("b", "a conversation")]
    assert list(candidates(entries)) == entries
