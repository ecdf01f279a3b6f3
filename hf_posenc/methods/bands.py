"""Rotary bands: methods that choose, pair by pair, the rotary positions of a query and a key."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from hf_posenc.errors import PosencError
from hf_posenc.methods.base import UPDATES, Growing, Method, choice, count, switch
from hf_posenc.methods.temperature import log_n_factor

if TYPE_CHECKING:
    from torch import Tensor

PositionMap = Callable[["Tensor"], "Tensor"]


def same(position: Tensor) -> Tensor:
    """Return the positions of ordinary RoPE."""
    return position


def moved(position: Tensor, cached: Tensor) -> Tensor:
    """Return how far positions are from those at which tokens are cached; either may have a last axis of parts."""
    if position.dim() > cached.dim():
        return position - cached[..., None]
    return (position if position.dim() == cached.dim() else position[..., None]) - cached


@dataclass(frozen=True, kw_only=True)
class Band:
    """The pairs of a query at position m and a key at position n that are rotated by one rule.

    A pair belongs to the band if its distance is at least `least` and less than `below`, and if
    `n < keys`. The distance is `m - n`, or with `chunk` the number of chunk borders between the two,
    `m // chunk - n // chunk`. In an encoder, a band has a side.

    Attributes:
        query_position: From m, an integer tensor of any shape, to the rotary position of the query; may be fractional.
            A map of a method `by_pair` adds a last axis, one position for each part of the rotary pairs.
        key_position: The same for n and the key.
        least: The least distance.
        below: The bound above; `None`: no bound.
        keys: Only that many first keys; `None`: all.
        chunk: Count distances in chunks of this size; `None`: in tokens.
        side: The keys of the band: `"before"` the query, which counts a key after it as one at distance 0; `"after"`
            the query, by the distance `n - m`; or `"around"` it, by `|m - n|`.
    """

    query_position: PositionMap
    key_position: PositionMap
    least: int = 0
    below: int | None = None
    keys: int | None = None
    chunk: int | None = None
    side: str = "before"

    def mirrored(self) -> Band:
        """Return the band of the keys after the query: what a key before it is to the query, the query is to them."""
        return dataclasses.replace(
            self, query_position=self.key_position, key_position=self.query_position, side="after"
        )

    def contains(self, m: Tensor, n: Tensor) -> Tensor:
        """Return which pairs belong to the band, for positions that broadcast.

        A key after the query has distance 0, as in RoPE. A causal mask hides such keys; a block of image
        tokens shows them.
        """
        distance = m - n if self.chunk is None else m // self.chunk - n // self.chunk
        if self.side == "around":
            distance = distance.abs()
        distance = -distance if self.side == "after" else distance.clamp(min=0)
        inside = distance >= self.least
        if self.below is not None:
            inside = inside & (distance < self.below)
        return inside if self.keys is None else inside & (n < self.keys)


@dataclass(frozen=True, kw_only=True)
class RotaryBands(Method):
    """A method with a near band of ordinary RoPE and a far band with positions of its own.

    To write one, override `query_position` and `key_position`, or `bands`. Keys are cached at the last
    band's key position, so that must depend neither on the query nor on the length of the text. Integer
    positions must give integers or float64, so that none is rounded.

    Attributes:
        keeps_order: True if a farther key never gets a nearer position. The tests hold a method to it.
        by_pair: True if far positions have a last axis, a position for each of several equal parts of the rotary pairs.

    Args:
        window: Width of the near band in tokens; half of the original context by default.
        log_n: Multiply the query at m by `max(1, ln(m+1) / ln L)`, as the method `log_n` does.
    """

    kind = "bands"
    seam = "attention"
    needs = "nothing"
    bidirectional = True
    keeps_order: ClassVar[bool] = True
    by_pair: ClassVar[bool] = False

    window: int | None = field(default=None, metadata=count())
    log_n: bool = field(default=False, metadata=switch())

    def query_position(self, m: Tensor, original: int) -> Tensor:
        """Return the rotary position of a query at m in the far band.

        Args:
            m: Positions, an integer tensor of any shape.
            original: The original context length L, in tokens.
        """
        raise NotImplementedError

    def key_position(self, n: Tensor, original: int) -> Tensor:
        """Return the rotary position of a key at n in the far band."""
        raise NotImplementedError

    def bands(self, original: int) -> tuple[Band, ...]:
        """Return the bands, the far one last; a pair belongs to one at most, and to none if it is masked.

        Args:
            original: The original context length L, in tokens.

        Raises:
            PosencError: A knob that does not fit this length.
        """
        return self.near(original), self.far(original)

    def bidirectional_bands(self, original: int) -> tuple[Band, ...]:
        """Return the bands of an encoder, the far one of the keys before the query last.

        A pair (m, n) with n > m has the opposite rotary distance of the pair (n, m): the near band reads both sides,
        and the other bands are mirrored, as LongEmbed (Zhu et al. 2024, arXiv 2404.12096) does for SelfExtend.

        Raises:
            PosencError: A knob that does not fit this length, or is defined for a causal text only.
        """
        if self.log_n:
            raise PosencError(
                f"{self.name}: log_n counts the keys before a query, and this model reads in both directions. Leave "
                "it out."
            )
        near, *others = self.bands(original)
        around = dataclasses.replace(near, side="around")
        return (around, *(band.mirrored() for band in others), *others)

    def near(self, original: int) -> Band:
        """Return the band of ordinary RoPE: the pairs less than `near_window` apart."""
        return Band(query_position=same, key_position=same, below=self.near_window(original))

    def far(self, original: int, keys: int | None = None) -> Band:
        """Return the band of the other pairs, with all keys or only the first ones."""
        window, resolved = self.near_window(original), copy.copy(self)
        # Computed once for the band, and not in every forward.
        object.__setattr__(resolved, "near_window", lambda original: window)
        return Band(
            query_position=lambda m: resolved.query_position(m, original),
            key_position=lambda n: resolved.key_position(n, original),
            least=window,
            keys=keys,
        )

    def near_window(self, original: int) -> int:
        """Return the width of the near band in tokens; a text of no more tokens is read as unpatched."""
        return max(1, original // 2) if self.window is None else self.window

    def cached_position(self, n: Tensor, original: int) -> Tensor:
        """Return the rotary position at which the key at n is cached: that of the last band.

        The keys of the other bands are turned from there, which takes work only where they differ.
        """
        return self.bands(original)[-1].key_position(n)

    def query_factor(self, m: Tensor, original: int) -> Tensor | None:
        return log_n_factor(m, original) if self.log_n else None


@dataclass(frozen=True, kw_only=True)
class GrowingBands(Growing):
    """Rotary bands that depend on the length of the text.

    To write one, override `bands`. Keys are cached at their own positions.

    Args:
        update: The length to follow. `"row"`: `bucket_length` of each query's own position, so that a prefix never
            changes. `"request"`: `max(L, n)` with n the row's own tokens at its first forward; while its cache lives
            it grows by whole buckets.
    """

    kind = "bands"
    seam = "attention"
    follows_text = True

    update: str = field(default="request", metadata=choice(*UPDATES[1:]))

    def bands(self, original: int, length: int) -> tuple[Band, ...]:
        """Return the bands of a text, three at most: first that of plain RoPE, which contains all pairs of short texts.

        Args:
            original: The original context length L, in tokens.
            length: N, in tokens.
        """
        raise NotImplementedError
