"""Numbers as users give them; lengths in tokens: whole numbers, whole floats, or text such as `"32k"`."""

from __future__ import annotations

import contextlib
import operator
from typing import Any

from hf_posenc.errors import PosencError

_MOST_DIGITS = 15

MOST_LENGTHS = 1000
"""The most lengths that a range may stand for, and the most depths."""


def plain(value: Any) -> Any:
    """Return numbers and arrays of numpy and torch as numbers and lists of Python; others as they are."""
    return value.tolist() if hasattr(value, "tolist") else value


def read_length(value: Any, name: str) -> int:
    """Return a length of at least one token; k is 1,024, and M is 1,048,576.

    The value is an integer of any library, a whole float, or text such as `"4096"`; the name is for the message.
    """
    length = 0
    if isinstance(value, str):
        text = value.strip().lower()
        factor = {"k": 1024, "m": 1024**2}.get(text[-1:], 1)
        digits = text if factor == 1 else text[:-1]
        if digits.isdecimal() and len(digits) <= _MOST_DIGITS:
            length = int(digits) * factor
    elif isinstance(value, float):
        length = int(value) if value.is_integer() else 0
    elif not isinstance(value, bool):
        with contextlib.suppress(TypeError, ValueError):
            length = operator.index(value)
    if length < 1:
        raise PosencError(
            f"{name}: {value!r} is no length; give a whole number of tokens, such as 4096 or 32k."
        )
    return length


def even_depths(count: Any, name: str = "--depths") -> Any:
    """Return so many depths from 0 to 1 at equal distances, a single one in the middle; a list of depths as it is."""
    if not isinstance(count, int):
        return count
    if count > MOST_LENGTHS:
        raise PosencError(f"{name}: at most {MOST_LENGTHS:,} depths are measured.")
    return tuple(index / (count - 1) for index in range(count)) if count > 1 else (0.5,)
