"""Text as tokens the way they stand in the middle of a longer text."""

from __future__ import annotations

import functools
from typing import Any

LINE = "\n"
REMEMBERED = 1024
"""Pieces whose tokens are kept: those that come again, and not every line of a haystack."""


class Encoder:
    """Turns pieces of a prompt into tokens.

    A prompt is put together from tokens, so that its length is exact. Tokenized by itself a piece would begin as a text
    does (SentencePiece puts a space in front, for instance), so it is tokenized behind a few characters, whose
    tokens are then taken off.

    Args:
        tokenizer: A transformers tokenizer; special tokens are never added here.

    Attributes:
        tokenizer: As given.
        newline: The tokens of a line's end; none where the tokenizer drops it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._encoded = functools.lru_cache(maxsize=REMEMBERED)(self._encode)
        self.newline = self.behind("a", LINE)

    def plain(self, text: str) -> tuple[int, ...]:
        """A text by itself, without special tokens."""
        return self.behind("", text)

    def line(self, text: str) -> tuple[int, ...]:
        """A text at the beginning of a line."""
        return self.behind(LINE, text)

    def behind(self, before: str, text: str) -> tuple[int, ...]:
        """The tokens that `text` adds behind `before`.

        Where the last token of `before` changes with what follows it, those of `text` by itself.
        """
        return self._encoded(before, text)

    def _encode(self, before: str, text: str) -> tuple[int, ...]:
        whole, start = self._ids(before + text), self._ids(before) if before else ()
        return whole[len(start) :] if whole[: len(start)] == start else self._ids(text)

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
