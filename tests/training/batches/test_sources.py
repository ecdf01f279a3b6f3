"""Conversations, mixtures of sources, streams and several processes that tokenize."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents import Conversation, Document, read_paths
from hf_posenc.training.batches.blocks import Blocks, mix_blocks, prepare_blocks
from hf_posenc.training.batches.collator import IGNORED, PositionCollator
from tests.support.tiny_text import byte_tokenizer, prose
from tests.training.batches.test_training_data import SOURCE, documents, tokenizer

PLAIN = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}</>{% endgeneration %}{% else %}{{ message.content }}</>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Thoughts are shown in the last message only, as in templates of reasoning models.
FORGETFUL = (
    "{% for message in messages %}<{{ message.role }}>{% if loop.last %}(thought){% endif %}"
    "{{ message.content }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def chat_tokenizer(template: str | None = PLAIN) -> Any:
    made = tokenizer(bos=True, eos=True)
    made.chat_template = template
    return made


def conversation(*contents: str, name: str = "talk") -> Conversation:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return Conversation(name, messages)


def numbered(letter: str, blocks: int, **options: Any) -> Blocks:
    """Blocks of ten tokens, no two the same, that begin with the letter."""
    text = "".join(f"{letter}{i:09d}" for i in range(blocks))
    return prepare_blocks([Document(letter, text)], byte_tokenizer(), length=10, **options)


def letters_of(blocks: Blocks) -> list[str]:
    made = byte_tokenizer()
    return [made.decode(row)[0] for row in rows_of(blocks)]


def rows_of(blocks: Blocks) -> list[list[int]]:
    return [row["input_ids"].tolist() for row in blocks.rows.with_format("numpy")]


def trained_text(batch: dict[str, Any], made: Any) -> list[str]:
    """The text of each run of tokens with a label."""
    texts, run = [], list[int]()
    for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        for token, label in zip([*ids, 0], [*labels, IGNORED], strict=True):
            if label != IGNORED:
                assert label == token
                run.append(label)
            elif run:
                texts.append(made.decode(run))
                run = []
    return texts


# Conversations


@pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["plain", "marked"])
def test_only_the_assistant_has_a_loss(template: str) -> None:
    made = chat_tokenizer(template)
    talk = conversation("hello you", "good day", "and now", "good night")
    text = made.apply_chat_template(talk.messages, tokenize=False)
    length = len(made(text, add_special_tokens=False)["input_ids"])
    blocks = prepare_blocks([talk], made, length=length, positions="packed")
    assert blocks.counts.conversations == 1
    (row,) = rows_of(blocks)
    assert made.decode(row) == text
    assert row.count(made.bos_token_id) == 1, "the template's own BOS is the only one"
    batch = PositionCollator("packed")([*blocks.dataset])
    assert trained_text(batch, made) == ["good day</>", "good night</>"]


def test_conversations_and_texts_share_a_block() -> None:
    made = chat_tokenizer()
    text, talk = Document("text", "abcdef"), conversation("hi", "yes")
    length = 2 + 6 + len(made.apply_chat_template(talk.messages)["input_ids"])
    blocks = prepare_blocks([text, talk], made, length=length, positions="packed")
    batch = PositionCollator("packed")([*blocks.dataset])
    assert trained_text(batch, made) == ["abcdef</s>", "yes</>"]


def test_a_block_without_the_assistant_is_left_out() -> None:
    made = chat_tokenizer()
    talk = conversation("question " * 10, "answer")
    blocks = prepare_blocks([talk], made, length=20, positions="packed")
    batches = PositionCollator("packed")([*blocks.dataset])
    assert all((row != IGNORED).any() for row in batches["labels"])
    tokens = len(made.apply_chat_template(talk.messages)["input_ids"]) - 1  # the BOS is a prefix
    assert blocks.counts.tokens + blocks.counts.unused == tokens


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (PLAIN, ("only a question",), "no message is the assistant's"),
        (FORGETFUL, ("one", "two", "three", "four"), "otherwise when others follow; mark"),
        ("{{ raise_exception('roles must alternate') }}", ("one", "two"), "roles must alternate"),
    ],
)
def test_a_conversation_that_cannot_be_used_is_skipped(
    template: str, messages: tuple[str, ...], reason: str
) -> None:
    entries = [conversation(*messages), *documents(30)]
    blocks = prepare_blocks(entries, chat_tokenizer(template), length=10)
    assert blocks.counts.skipped == 1
    assert reason in blocks.counts.reasons[0].reason


def test_a_tokenizer_without_a_chat_template_is_refused() -> None:
    with pytest.raises(PosencError, match="has no chat template: give --tokenizer"):
        prepare_blocks([conversation("one", "two")], chat_tokenizer(None), length=4)


def test_another_chat_template_is_not_read_from_the_cache(tmp_path: Path) -> None:
    made = chat_tokenizer(PLAIN)
    options: dict[str, Any] = {"length": 12, "positions": "packed", "source": SOURCE}
    first = prepare_blocks([conversation("hi", "yes")] * 3, made, cache=tmp_path, **options)
    made.chat_template = PLAIN.replace("</>", "</turn>")
    other = prepare_blocks([conversation("hi", "yes")] * 3, made, cache=tmp_path, **options)
    assert rows_of(first) != rows_of(other)


def test_rows_of_messages_are_conversations(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"messages": []},
        {"messages": ["text"]},
        {"messages": "a text"},
    ]
    file = tmp_path / "chat.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kinds = [type(entry).__name__ for entry in read_paths([str(file)], column="messages")]
    assert kinds == ["Conversation", "Skipped", "Skipped", "Document"]


# Mixtures


def test_a_mixture_has_the_shares_of_its_weights_and_repeats_nothing() -> None:
    parts = [(numbered("a", 400), 3.0), (numbered("b", 400), 1.0)]
    mixed = mix_blocks(parts, seed=5)
    counts = Counter(letters_of(mixed))
    assert len(mixed) == counts.total() > 400
    assert counts["a"] / len(mixed) == pytest.approx(0.75, abs=0.05)
    assert len({tuple(row) for row in rows_of(mixed)}) == len(mixed)
    assert rows_of(mixed) == rows_of(mix_blocks(parts, seed=5))
    assert rows_of(mixed) != rows_of(mix_blocks(parts, seed=6))
    assert mixed.counts.sha256 != mix_blocks(parts[::-1], seed=5).counts.sha256


def test_a_mixture_of_texts_and_conversations_keeps_the_labels() -> None:
    made = chat_tokenizer()
    talks = [conversation("question", f"answer {i}", name=str(i)) for i in range(40)]
    chats = prepare_blocks(talks, made, length=16, positions="packed")
    texts = prepare_blocks(documents(600), made, length=16, positions="packed")
    mixed = mix_blocks([(chats, 1), (texts, 1)])
    batch = PositionCollator("packed")([*mixed.dataset])
    masked = (batch["labels"] == IGNORED).float().mean(dim=1)
    assert (masked > 0.3).any()
    assert (masked < 0.2).any()


def test_weights_are_positive_and_blocks_of_one_length() -> None:
    made = byte_tokenizer()
    eight, ten = (prepare_blocks(documents(40), made, length=n) for n in (8, 10))
    for weights in ((1, 0), (1, -1), (1, float("nan")), ()):
        with pytest.raises(PosencError, match="positive weights"):
            mix_blocks([(eight, weight) for weight in weights])
    with pytest.raises(PosencError, match="one length and kind"):
        mix_blocks([(eight, 1.0), (ten, 1.0)])


# Streams


@pytest.mark.parametrize("positions", ["contiguous", "packed"])
def test_a_stream_has_the_blocks_of_a_cache(positions: str, tmp_path: Path) -> None:
    made, entries = byte_tokenizer(), documents(95, 40, 230)
    options: dict[str, Any] = {"length": 10, "positions": positions, "source": SOURCE}
    stream = prepare_blocks(entries, made, stream=True, **options)
    cached = prepare_blocks(entries, made, cache=tmp_path, **options)
    assert stream.streamed
    assert not cached.streamed
    once, again = rows_of(stream), rows_of(stream)
    assert once == again
    assert sorted(once) == sorted(rows_of(cached))
    assert once != rows_of(cached), "shuffled"
    assert stream.counts.largest >= cached.counts.largest


def test_a_stream_writes_nothing_and_reads_only_what_is_needed() -> None:
    read = []

    class Endless:
        def __iter__(self) -> Any:
            for i in range(10**9):
                read.append(i)
                yield Document(str(i), prose(5000, seed=i % 7))

    stream = prepare_blocks(Endless(), byte_tokenizer(), length=10, stream=True, source=SOURCE)
    rows = iter(stream.dataset)
    assert len(next(rows)["input_ids"]) == 10
    assert len(read) < 10


def test_a_stream_reads_its_documents_again_and_takes_no_processes() -> None:
    options: dict[str, Any] = {"length": 10, "stream": True, "source": SOURCE}
    with pytest.raises(PosencError, match="reads its documents in every epoch"):
        prepare_blocks(iter(documents(40)), byte_tokenizer(), **options)
    with pytest.raises(PosencError, match="a stream is tokenized where it is read"):
        prepare_blocks(documents(40), byte_tokenizer(), **options, workers=2)


def test_a_stream_repeats_and_one_without_a_block_is_an_error() -> None:
    stream = numbered("a", 5, stream=True, source=SOURCE)
    rows = [row["input_ids"].tolist() for row in itertools.islice(stream.dataset, 12)]
    assert rows == (rows_of(stream) * 3)[:12]
    empty = prepare_blocks(documents(5), byte_tokenizer(), length=10, stream=True, source=SOURCE)
    with pytest.raises(PosencError, match="too short: 5 tokens, 10 are needed"):
        next(iter(empty.dataset))


def test_streams_mix() -> None:
    parts = [(numbered(letter, 400, stream=True, source=SOURCE), n) for letter, n in ("a1", "b4")]
    letters = letters_of(mix_blocks([(blocks, float(weight)) for blocks, weight in parts]))
    assert letters.count("a") / len(letters) == pytest.approx(0.2, abs=0.06)


# Several processes, each of which imports torch first


@pytest.mark.slow
def test_the_number_of_processes_changes_no_block(tmp_path: Path) -> None:
    made = chat_tokenizer()
    (tmp_path / "long.txt").write_text(prose(4000) * 300, encoding="utf-8")
    talks = [conversation("question", f"answer {i}", name=str(i)) for i in range(5)]
    entries = [*documents(300, 0, 20, 700), *read_paths([str(tmp_path)]), *talks]
    one, two = (prepare_blocks(entries, made, length=64, workers=n) for n in (1, 2))
    assert one.counts == two.counts


@pytest.mark.slow
def test_a_limit_stops_all_processes() -> None:
    read = []

    def endless() -> Any:
        for i in range(10**9):
            read.append(i)
            yield Document(str(i), prose(50, seed=i % 7))

    blocks = prepare_blocks(endless(), byte_tokenizer(), length=10, workers=2, limit=12)
    assert blocks.counts.documents == 12
    assert len(read) < 40
