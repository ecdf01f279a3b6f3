"""Random choices that depend on their name alone: the same in every process, Python and order of work."""

from __future__ import annotations

import hashlib
import random
import uuid
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Draws:
    """A stream of random choices, named by what it is for.

    Only `random.Random.random` is used: of Python's generator it alone is promised to give the same numbers for the
    same seed in every version.

    Args:
        *name: What the stream is for, e.g. seed, task, length, depth and sample. Streams of different names are
            independent.
    """

    def __init__(self, *name: str | int | float | None) -> None:
        digest = hashlib.sha256("/".join(map(repr, name)).encode()).digest()
        self._random = random.Random(int.from_bytes(digest[:8], "big"))

    def fraction(self) -> float:
        """A number of [0, 1)."""
        return self._random.random()

    def below(self, count: int) -> int:
        """A whole number of `0 .. count-1`."""
        return int(self._random.random() * count)

    def choice(self, values: Sequence[T]) -> T:
        """One of the values."""
        return values[self.below(len(values))]

    def digits(self, count: int) -> str:
        """A decimal number of so many digits; the first is not 0."""
        lowest = 10 ** (count - 1)
        return str(lowest + self.below(9 * lowest))

    def letters(self, count: int, alphabet: str) -> str:
        """A word of so many letters of an alphabet."""
        return "".join(self.choice(alphabet) for _ in range(count))

    def uuid(self) -> str:
        """A version 4 UUID."""
        bits = 0
        for _ in range(4):
            bits = bits << 32 | self.below(2**32)
        return str(uuid.UUID(int=bits, version=4))

    def shuffled(self, values: Sequence[T]) -> list[T]:
        """The values in a random order."""
        order = sorted((self.fraction(), place) for place in range(len(values)))
        return [values[place] for _, place in order]
