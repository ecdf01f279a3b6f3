"""Where tokens end in their text: counted in characters by the tokenizer, here in bytes and words."""

from __future__ import annotations

from typing import Any

import numpy as np

Numbers = np.ndarray[Any, np.dtype[Any]]

# Every character that `str.split` splits at; none lies behind the ideographic space.
_SPACES = np.array([point for point in range(0x3001) if chr(point).isspace()], dtype=np.uint32)


def code_points(text: str) -> Numbers:
    """The characters of a text as numbers, shape (characters,), uint32."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


def bytes_up_to(points: Numbers) -> Numbers:
    """UTF-8 bytes in front of each character and behind the last, shape (characters + 1,), int64."""
    sizes = 1 + (points > 0x7F).astype(np.int64) + (points > 0x7FF) + (points > 0xFFFF)
    return np.concatenate([[0], np.cumsum(sizes)])


def words_up_to(points: Numbers, inside: bool = False) -> Numbers:
    """Words that begin in front of each character and behind the last, shape (characters + 1,), int64.

    Args:
        points: From `code_points`.
        inside: The character in front of the text belongs to a word.
    """
    solid = ~np.isin(points, _SPACES)
    begins = solid & ~np.concatenate([[inside], solid[:-1]])
    return np.concatenate([[0], np.cumsum(begins, dtype=np.int64)])
