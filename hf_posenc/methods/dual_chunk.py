"""Dual chunk attention: positions start anew in every chunk, with a bridge to the chunk before."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.errors import PosencError
from hf_posenc.methods.bands import Band, RotaryBands
from hf_posenc.methods.base import count


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

    name: ClassVar[str] = "dual_chunk"
    aliases: ClassVar[tuple[str, ...]] = ("dca", "chunkllama")
    summary: ClassVar[str] = "positions start anew in every chunk, the chunk before is bridged"
    source: ClassVar[str] = "An et al. 2024, arXiv 2402.17463"
    follows_text: ClassVar[bool] = True
    keeps_order: ClassVar[bool] = False

    chunk: int | None = field(default=None, metadata=count())

    def near_window(self, original: int) -> int:
        """Return the chunk: a text of no more tokens is read as unpatched."""
        return max(1, 3 * original // 4) if self.chunk is None else self.chunk

    def local_window(self, original: int) -> int:
        """Return the w in force, in tokens.

        Raises:
            PosencError: A chunk and a window that take more than L positions.
        """
        chunk = self.near_window(original)
        window = max(1, original - chunk) if self.window is None else self.window
        if chunk + window > max(original, 2):
            raise PosencError(
                f"{self.name}: chunk ({chunk}) and window ({window}) together are at most the original "
                f"context of {original} tokens."
            )
        return window

    def query_position(self, m: Tensor, original: int) -> Tensor:
        return torch.full_like(m, self.near_window(original) + self.local_window(original) - 1)

    def key_position(self, n: Tensor, original: int) -> Tensor:
        return n % self.near_window(original)

    def bands(self, original: int) -> tuple[Band, ...]:
        chunk = self.near_window(original)
        last = chunk + self.local_window(original) - 1

        def within(position: Tensor) -> Tensor:
            return position % chunk

        def bridged(m: Tensor) -> Tensor:
            return (m % chunk + chunk).clamp(max=last)

        def far(m: Tensor) -> Tensor:
            return torch.full_like(m, last)

        return (
            Band(query_position=within, key_position=within, below=1, chunk=chunk),
            Band(query_position=bridged, key_position=within, least=1, below=2, chunk=chunk),
            Band(query_position=far, key_position=within, least=2, chunk=chunk),
        )
