"""Training data: which tokens stand in which block, what bad input says, and what is left after an interruption."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_posenc.embedded import HELD_OUT
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents import (
    Document,
    Entry,
    TokenizedDocument,
    read_dataset,
    read_paths,
)
from hf_posenc.training.blocks import (
    STANDARD_LIBRARY,
    Blocks,
    Cutter,
    prepare_blocks,
    read_standard_library,
)
from hf_posenc.training.collator import PositionCollator
from hf_posenc.training.options import POSITIONS
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


# Which tokens stand where


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
    assert counts.line() == (
        "6 blocks of 10 tokens from 2 documents (8% of their tokens are left over); 1 documents not used"
    )


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
        whole = TokenizedDocument(str(number), torch.tensor(ids), None, None)
        for block in cutter.cut(whole):
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


def test_rows_go_through_the_collator_and_the_trainer(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    from tests.support.zoo import build

    blocks = prepare_blocks(documents(30, 5, 80), tokenizer(), length=16, positions="packed")
    assert all(isinstance(blocks.dataset[0][name], np.ndarray) for name in blocks.dataset[0])

    def train(**options: Any) -> float:
        made, model = PositionCollator("packed"), build("llama", vocab_size=257)
        fixed: Any = {"max_steps": 2, "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
        arguments = TrainingArguments(str(tmp_path), report_to=[], **fixed, **options)
        trainer = Trainer(model, arguments, made, blocks.dataset, callbacks=[made])
        return float(trainer.train().training_loss)

    assert 0 < train(remove_unused_columns=False) < 100
    with pytest.raises(PosencError, match="remove_unused_columns=False"):
        train()


# Bad input


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


# The default text


def test_the_standard_library_is_read_without_what_is_held_out() -> None:
    names = [document.name for document in read_standard_library()]
    assert names == sorted(names)
    assert len(names) > 100
    assert not {Path(name).parts[0].removesuffix(".py") for name in names} & {*HELD_OUT}
    assert not [name for name in names if "test" in Path(name).parts]
    assert json.loads(json.dumps(STANDARD_LIBRARY)) == STANDARD_LIBRARY
