"""Texts tokenized window by window have the tokens of the whole text."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_posenc.evaluation.documents import Document, UnreadableError, tokenize
from hf_posenc.evaluation.documents import tokens as module
from hf_posenc.evaluation.documents.tokens import (
    Cutting,
    Numbers,
    Piece,
    Sizes,
    Window,
    cutting_of,
    join,
    joined,
)
from tests.support.selection import late, quick
from tests.support.tokenizer_kinds import AT_TOKENS, AT_WORDS, NEVER, tokenizer_of

KINDS = [*AT_TOKENS, *AT_WORDS]
QUICK = (
    *("byte-level BPE that nothing cuts", "Llama 2", "BPE with a suffix for words"),
    *("Llama 3", "WordPiece", "Unigram with Metaspace"),
)
"""One for each algorithm and each place of a cut is fast."""
SMALL = Sizes(window=600, overlap=256, largest=1 << 14, whole=1 << 10)
TIGHT = Sizes(window=600, overlap=64, largest=1 << 14, whole=1 << 10)

_FRAGMENTS = (
    "the |def |\n|\n\n|    |  | |\t|\r\n|\u00a0|\u3000|\x85|a|aa|ab|ba|word|Word|x_y|'s|don't|12|345|1|９|½|é|e\u0301|"
    "\u0300|東京|。|😀|👨\u200d👩\u200d👧|ﬁ|İ|Σς|한|\u1112\u1161|ا|क्षि|\u200d|<s>|</s>|<unk>|<0x0A>|``|...|!?|=|#|▁|\ufeff"
)
FRAGMENTS = _FRAGMENTS.split("|")


@st.composite
def long_texts(draw: st.DrawFn) -> str:
    """Draw texts of a few fragments in any order, with repetitions: phases, runs and characters in parts."""
    fragments = draw(st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=6), min_size=3))
    generator = random.Random(draw(st.integers(0, 2**16)))
    repeats = draw(st.sampled_from([(1,), (1, 1, 1, 1, 2, 3, 7), (1, 1, 1, 1, 1, 1, 1, 1, 40)]))
    size = draw(st.integers(300, 5000))
    parts: list[str] = []
    while len(parts) < size:
        parts.append(generator.choice(fragments) * generator.choice(repeats))
    return "".join(parts)[:size]


def chunks(text: str, size: int = 97) -> Iterator[str]:
    return (text[begin : begin + size] for begin in range(0, len(text), size))


def whole_tokens(text: str, tokenizer: Any) -> Numbers:
    (piece,) = joined(iter([text]), tokenizer, None, Sizes(window=len(text)))
    assert piece.text == text
    return piece.tokens


def check(text: str, pieces: list[Piece], whole: Numbers, max_tokens: int | None) -> None:
    found = np.concatenate([piece.tokens for piece in pieces])
    assert found.shape[1] == 3
    assert found.tolist() == whole[:max_tokens].tolist()
    covered = "".join(piece.text for piece in pieces)
    assert not any(piece.stopped for piece in pieces[:-1])
    if pieces[-1].stopped:
        assert max_tokens is not None
        assert len(covered.encode()) == whole[max_tokens - 1, 1]
        assert text.startswith(covered)
    else:
        assert covered == text


@pytest.mark.parametrize(
    ("kind", "examples"),
    [
        *((kind, 10) for kind in QUICK),
        *late([k for k in KINDS if k not in QUICK], [10]),
        *late(KINDS, [40]),
    ],
)
def test_windows_give_the_tokens_of_the_whole(kind: str, examples: int) -> None:
    tokenizer = tokenizer_of(kind)

    @settings(max_examples=examples)
    @given(long_texts(), st.sampled_from([SMALL, TIGHT]), st.none() | st.integers(1, 600))
    def check_windows(text: str, sizes: Sizes, max_tokens: int | None) -> None:
        pieces = list(joined(chunks(text), tokenizer, max_tokens, sizes))
        check(text, pieces, whole_tokens(text, tokenizer), max_tokens)

    check_windows()


CODE = Path(module.__file__).read_text(encoding="utf-8").replace("the", "dès 東京 😀")


@pytest.mark.parametrize("kind", quick(KINDS, QUICK))
def test_ordinary_text_is_cut_into_many_windows(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    sizes = Sizes(window=1000, overlap=512, largest=4000)
    pieces = list(joined(chunks(CODE), tokenizer, None, sizes))
    whole = whole_tokens(CODE, tokenizer)
    check(CODE, pieces, whole, None)
    assert len(pieces) >= len(CODE) // 1000  # no window had to grow


@pytest.mark.parametrize("kind", quick(KINDS, QUICK))
def test_where_texts_may_be_cut(kind: str) -> None:
    expected = Cutting.AT_TOKENS if kind in AT_TOKENS else Cutting.AT_WORDS
    assert cutting_of(tokenizer_of(kind)) is expected


@pytest.mark.parametrize("kind", NEVER)
def test_texts_that_may_not_be_cut_are_tokenized_whole_or_not_at_all(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    assert cutting_of(tokenizer) is Cutting.NEVER
    text = CODE[:1000]
    whole = whole_tokens(text, tokenizer)
    for max_tokens in (None, 5):
        check(text, list(joined(chunks(text), tokenizer, max_tokens, SMALL)), whole, max_tokens)
        with pytest.raises(
            UnreadableError, match="longer than 1,024 characters, and texts of this tokenizer"
        ):
            list(joined(chunks(CODE), tokenizer, max_tokens, SMALL))


def test_windows_join_only_where_all_of_the_middle_agrees() -> None:
    def window(begin: int, **changed: int) -> Window:
        arrays = {"ids": np.arange(100), "starts": np.arange(100), "stops": np.arange(1, 101)}
        arrays["cuts"] = np.arange(100) % 5 == 0
        for name, place in changed.items():
            arrays[name][place] = not arrays[name][place] if name == "cuts" else 50
        parts = {name: values[begin : begin + 80] for name, values in arrays.items()}
        return Window("." * 80, begin, **parts)

    left = window(0)  # the overlap is 20..80, its middle 35..65
    assert join(left, window(20)) == (50, 30)
    assert join(left, window(20, ids=70)) == (50, 30)  # near an edge anything may happen
    for changed in ({"ids": 40}, {"ids": 63}, {"cuts": 60}, {"starts": 51}, {"stops": 51}):
        assert join(left, window(20, **changed)) is None, changed


def test_a_tokenizer_in_python_is_not_cut() -> None:
    def tokenizer(text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in text.split()]}

    assert cutting_of(tokenizer) is Cutting.NEVER
    assert tokenize(Document("d", "one three"), tokenizer).ids.tolist() == [3, 5]


def test_a_word_longer_than_any_window_is_refused() -> None:
    text = "word " * 1000 + "a" * 40_000 + " word" * 1000
    with pytest.raises(UnreadableError, match="no place to cut its text for tokenization within"):
        list(joined(chunks(text), tokenizer_of("GPT-2"), None, SMALL))
    longer = Sizes(window=600, overlap=64, largest=1 << 20)
    whole = whole_tokens(text, tokenizer_of("GPT-2"))
    check(text, list(joined(chunks(text), tokenizer_of("GPT-2"), None, longer)), whole, None)


@pytest.mark.parametrize("size", range(3000, 3006))
def test_reading_stops_early_only_where_the_text_behind_changes_nothing(size: int) -> None:
    # The cheapest path through a word of many a's begins with "aa" or "aaa", depending on where the word ends.
    pieces = [("<unk>", -20.0), ("a", -3.0), ("aa", -3.2), ("aaa", -3.3), ("▁", -2.0), ("b", -3.0)]
    backend: Any = Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    fast: Any = PreTrainedTokenizerFast
    tokenizer = fast(tokenizer_object=backend, unk_token="<unk>")
    text = "b " + "a" * size
    whole = whole_tokens(text, tokenizer)
    check(text, list(joined(chunks(text), tokenizer, 9, TIGHT)), whole, 9)


def test_tokenization_stops_once_there_are_enough_tokens() -> None:
    read = 0

    def endless() -> Iterator[str]:
        nonlocal read
        while True:
            read += 1000
            yield ("many words " * 100)[:1000]

    sizes = Sizes(window=1 << 18, overlap=1 << 10)
    pieces = list(joined(endless(), tokenizer_of("Llama 3"), 50, sizes))
    assert sum(len(piece.tokens) for piece in pieces) == 50
    assert pieces[-1].stopped
    assert read < 10_000


@settings(max_examples=60)
@given(long_texts())
def test_words_count_with_the_token_in_which_they_begin(text: str) -> None:
    tokenizer = tokenizer_of("Llama 3")
    document = tokenize(Document("d", text), tokenizer)
    places = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ends = np.maximum.accumulate([end for _, end in places["offset_mapping"]])
    begins = [match.start() for match in re.finditer(r"\S+", text)]
    expected = np.searchsorted(begins, ends, side="left")
    assert document.word_ends is not None
    assert document.word_ends.tolist() == expected.tolist()
    assert document.words_between(0, len(document)) == len(text.split())
    middle = len(document) // 2
    first, rest = document.words_between(0, middle), document.words_between(middle, len(document))
    assert first is not None
    assert rest is not None
    assert first + rest == len(text.split())
