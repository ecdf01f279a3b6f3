"""A part of a text, tokenized on its own, whose tokens know their place in the whole text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_posenc.evaluation.documents.cutting import Cutting
from hf_posenc.evaluation.documents.places import Numbers, bytes_up_to, code_points, words_up_to


@dataclass(frozen=True)
class Tokens:
    """Consecutive tokens, with the ends of `TokenizedDocument`: numpy arrays of one length, int64."""

    ids: Numbers
    byte_ends: Numbers | None
    word_ends: Numbers | None

    def __len__(self) -> int:
        return len(self.ids)

    def cut(self, begin: int, stop: int | None) -> Tokens:
        """Tokens `begin .. stop-1` of these."""
        byte_ends = None if self.byte_ends is None else self.byte_ends[begin:stop]
        word_ends = None if self.word_ends is None else self.word_ends[begin:stop]
        return Tokens(self.ids[begin:stop], byte_ends, word_ends)


@dataclass(frozen=True)
class Part:
    """A part of a text that is not tokenized yet.

    Attributes:
        text: Its characters.
        begin: The first of them, counted in the whole text.
        bytes_before: UTF-8 bytes of the text in front of it.
        words_before: Words that begin in front of it.
        inside: The character in front of it belongs to a word.
    """

    text: str
    begin: int = 0
    bytes_before: int = 0
    words_before: int = 0
    inside: bool = False

    @property
    def end(self) -> int:
        """The character behind it, counted in the whole text."""
        return self.begin + len(self.text)

    def tail(self, size: int, more: str) -> Part:
        """The part that begins `size` characters in front of this one's end and goes on with `more` text."""
        kept = len(self.text) - size
        points = code_points(self.text[:kept])
        return Part(
            self.text[kept:] + more,
            self.begin + kept,
            self.bytes_before + int(bytes_up_to(points)[-1]),
            self.words_before + int(words_up_to(points, self.inside)[-1]),
            not self.text[kept - 1].isspace() if kept else self.inside,
        )


@dataclass(frozen=True)
class Window:
    """A part of the text with its tokens.

    Attributes:
        part: The text.
        tokens: Its tokens, with ends counted in the whole text.
        starts: First character of each token, counted in the whole text, never falling, shape (n,).
        stops: The character behind each token, likewise.
        cuts: Whether two windows may be joined in front of a token, shape (n,), bool.
    """

    part: Part
    tokens: Tokens
    starts: Numbers
    stops: Numbers
    cuts: Numbers


def open_window(part: Part, tokenizer: Any, cutting: Cutting) -> Window:
    """Tokenizes a part, without special tokens."""
    fast = bool(getattr(tokenizer, "is_fast", False))
    encoded = tokenizer(
        part.text, add_special_tokens=False, return_offsets_mapping=fast, verbose=False
    )
    ids = np.asarray(encoded["input_ids"], dtype=np.int64)
    nothing = np.zeros(0, dtype=np.int64)
    if not fast:
        return Window(part, Tokens(ids, None, None), nothing, nothing, nothing)
    places = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
    # a place may run backwards, and a token takes nothing away from those in front of it
    starts, stops = np.maximum.accumulate(places, axis=0).T
    points = code_points(part.text)
    byte_ends = part.bytes_before + bytes_up_to(points)[stops]
    word_ends = part.words_before + words_up_to(points, part.inside)[stops]
    cuts = np.diff(starts, prepend=-1) > 0  # never within a character that takes several tokens
    if cutting is Cutting.AT_WORDS:
        cuts &= np.diff(np.asarray(encoded.word_ids(0), dtype=np.int64), prepend=-1) != 0
    tokens = Tokens(ids, byte_ends, word_ends)
    return Window(part, tokens, starts + part.begin, stops + part.begin, cuts)
