"""LaMPE: far positions in groups of tokens that grow with the text."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hf_posenc.methods.bands import Band, GrowingBands, same
from hf_posenc.methods.base import count, number

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LaMPE(GrowingBands):
    """Length-aware multi-grained positional encoding (arXiv 2508.02308), for texts past the original context.

    A text of N tokens has room for `T = floor(capacity / (1 + exp(-(growth N + shift))))` positions, to
    which `M(p) = floor(T p / (N-1))` maps those of its middle:

    - fewer than `head` tokens back, the relative position is `m - n`;
    - from there, it is `M(m) - M(n) + b`, with `b = head - M(head) - 1`;
    - `N - t` tokens back and more, it is `m - n` less a constant, so that the start of the text has single
      positions again for its end. t is the last of the tokens that share the place of the token at `tail`.

    N is pinned for each row of the batch while its cache lives, as with `update="request"` of the dynamic
    methods, and grows by whole buckets. A text of at most L tokens, of less than `2 head` tokens, or with room
    for all of its tokens, is read as unpatched.

    Args:
        growth: Of the sigmoid, per token. The authors fit the three numbers for each model; see the recipes.
        shift: Of the sigmoid.
        capacity: Of the sigmoid, in tokens.
        head: Distances below it are kept, in tokens.
        tail: First tokens, at least, that have single positions for the last ones.
        bucket: Tokens by which N grows at once; half of the original context by default.
    """

    name = "lampe"
    summary = (
        "positions in groups of tokens that grow with the text, single ones near and at its ends"
    )
    source = "arXiv 2508.02308; scar-on/LaMPE"
    needs = "nothing"

    growth: float = field(metadata=number(0))
    shift: float
    capacity: float = field(metadata=number(1))
    head: int = field(default=512, metadata=count())
    tail: int = field(default=200, metadata=count(0))

    def room(self, length: int) -> int:
        """Return T, the positions that a text of so many tokens is mapped to."""
        return int(self.capacity / (1 + math.exp(-(self.growth * length + self.shift))))

    def bands(self, original: int, length: int) -> tuple[Band, ...]:
        room, last = self.room(length), length - 1
        if length <= original or length < 2 * self.head or room >= last or room < 1:
            return (Band(query_position=same, key_position=same),)

        def mapped(p: Tensor) -> Tensor:
            return p * room // last

        shift = self.head - self.head * room // last - 1
        alike = self.tail * room // last
        tail = min(
            -(-(alike + 1) * last // room) - 1, last
        )  # the last token in the place of `tail`
        border = last - tail
        back = border - border * room // last - shift
        return (
            Band(query_position=same, key_position=same, below=self.head),
            Band(
                query_position=lambda m: mapped(m) + shift,
                key_position=mapped,
                least=self.head,
                below=max(self.head, border + 1),
            ),
            Band(
                query_position=lambda m: m - back,
                key_position=same,
                least=max(self.head, border + 1),
            ),
        )
