"""Bands that follow the length of the text: LaMPE, and Jet-Long."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hf_posenc.errors import PosencError
from hf_posenc.methods.bands import Band, GrowingBands, same
from hf_posenc.methods.base import UPDATES, choice, count, number, real

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
    shift: float = field(metadata=number(-700))  # exp of more overflows
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


@dataclass(frozen=True, kw_only=True)
class JetLong(GrowingBands):
    """A near window and a far factor that follows the text (arXiv 2607.07740).

    Fewer than w tokens back, the relative position is `m - n`, as trained. From there it is `w + (m - n - w) / s`. With
    N tokens, `s = max(1, (N - 1 - w) / (L - 1 - w))`: the first key has the farthest trained position for the last
    query, L - 1, and no pair has a farther one. A text of at most L tokens is read as unpatched.

    The authors published no code. Choices of this package: one factor for all pairs of frequencies, no rounding of
    positions, w half of the original context, and N by buckets of each query's own position.

    Args:
        window: w, the width of the near band in tokens; half of the original context by default.
    """

    name = "jet_long"
    summary = (
        "a near window as trained; beyond it positions divided by a factor of the text's length"
    )
    source = "arXiv 2607.07740"
    needs = "nothing"

    update: str = field(default="row", metadata=choice(*UPDATES[1:]))
    window: int | None = field(default=None, metadata=count())

    def bands(self, original: int, length: int) -> tuple[Band, ...]:
        window = max(1, original // 2) if self.window is None else self.window
        if window >= original - 1:
            raise PosencError(
                f"{self.name}: window={window} leaves no trained positions for the far keys of a model of {original} "
                f"tokens. Give at most {original - 2}."
            )
        near = Band(query_position=same, key_position=same)
        if length <= original:
            return (near,)
        factor = (length - 1 - window) / (original - 1 - window)
        far = Band(
            query_position=lambda m: real(m) / factor + (window - window / factor),
            key_position=lambda n: real(n) / factor,
            least=window,
        )
        return replace(near, below=window), far
