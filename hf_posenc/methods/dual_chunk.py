"""Dual chunk attention and STRING: far keys get positions that are frequent in training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hf_posenc.errors import PosencError
from hf_posenc.methods.bands import Band, RotaryBands
from hf_posenc.methods.base import count

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class DualChunk(RotaryBands):
    """Dual chunk attention (An et al. 2024, arXiv 2402.17463).

    Keys lie at `n mod c`. A query reads its own chunk from `m mod c`, and the chunk before from
    `min(m mod c + c, c + w - 1)`, so that the nearest w tokens keep their distance over the border.
    It reads all earlier chunks from `c + w - 1`.

    Args:
        chunk: Tokens c a chunk; three quarters of the original context L by default.
        window: Local window w, the distances that are exact over a chunk's border; `L - c` by
            default, with which positions reach `L - 1`.
    """

    name = "dual_chunk"
    aliases = ("dca", "chunkllama")
    summary = "positions restart in every chunk; near distances across a border stay exact"
    source = "An et al. 2024, arXiv 2402.17463"
    follows_text = True
    keeps_order = False

    chunk: int | None = field(default=None, metadata=count())

    def near_window(self, original: int) -> int:
        """Return the chunk: a text of no more tokens is read as unpatched."""
        return max(1, 3 * original // 4) if self.chunk is None else self.chunk

    def local_window(self, original: int) -> int:
        """Return the w in force, in tokens; with the chunk it takes at most L positions, or `L + 1` if it is given."""
        chunk = self.near_window(original)
        window = max(1, original - chunk) if self.window is None else self.window
        # The authors' code reaches the position L, past the trained ones, in the configuration of its vLLM version.
        most = max(original, 2) if self.window is None else original + 1
        if chunk + window > most:
            raise PosencError(
                f"{self.name}: chunk ({chunk}) and window ({window}) are together at most {max(original, 2)} tokens on "
                f"this model, whose original context is {original}, or {original + 1} if window= is given."
            )
        return window

    def bands(self, original: int) -> tuple[Band, ...]:
        chunk = self.near_window(original)
        last = chunk + self.local_window(original) - 1

        def within(position: Tensor) -> Tensor:
            return position % chunk

        def bridged(m: Tensor) -> Tensor:
            return (m % chunk + chunk).clamp(max=last)

        def far(m: Tensor) -> Tensor:
            return m.new_full(m.shape, last)

        return (
            Band(query_position=within, key_position=within, below=1, chunk=chunk),
            Band(query_position=bridged, key_position=within, least=1, below=2, chunk=chunk),
            Band(query_position=far, key_position=within, least=2, chunk=chunk),
        )


@dataclass(frozen=True, kw_only=True)
class STRING(RotaryBands):
    """STRING, shifted rotary position embedding (An et al. 2024, arXiv 2410.18745).

    Distances below the shift S stay; a distance `m - n` of at least S is read as `m - n - S + W`.
    Long distances are rare in training texts, so a model reads them better as shorter ones. The method
    improves the use of the trained context, and adds `S - W` tokens to it.

    Args:
        shift: Offset S in tokens; a third of the original context by default.
        window: Local window W, the least distance that a shifted pair gets, at most S; by default 128,
            or `S - 1` where that is less, but 1 at least.
    """

    name = "string"
    summary = "distances of S and more are shortened by S - W"
    source = "An et al. 2024, arXiv 2410.18745"
    keeps_order = False

    shift: int | None = field(default=None, metadata=count())

    def near_window(self, original: int) -> int:
        """Return the shift S: a text of no more tokens is read as unpatched."""
        return max(1, round(original / 3)) if self.shift is None else self.shift

    def local_window(self, original: int) -> int:
        """Return the W in force, in tokens; above the shift it would lengthen distances."""
        shift = self.near_window(original)
        if self.window is None:
            return max(1, min(128, shift - 1))
        if self.window > shift:
            raise PosencError(
                f"{self.name}: window ({self.window}) is at most the shift ({shift} tokens here)."
            )
        return self.window

    def query_position(self, m: Tensor, original: int) -> Tensor:
        return m - (self.near_window(original) - self.local_window(original))

    def key_position(self, n: Tensor, original: int) -> Tensor:
        return n
