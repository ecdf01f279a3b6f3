"""ReRoPE and Leaky ReRoPE: past a window the distance stops growing, or grows more slowly."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.errors import PosencError
from hf_posenc.methods.bands import RotaryBands, compression
from hf_posenc.methods.base import number
from hf_posenc.methods.log_n import real


@dataclass(frozen=True, kw_only=True)
class ReRoPE(RotaryBands):
    """Rectified RoPE (Su 2023, kexue.fm 9708): relative positions `min(m - n, w)`.

    Every key past the window counts as w tokens away, so no distance is new to the model at any
    length of text. All distant keys look equally far away.

    Args:
        window: Distances below it are kept; half of the original context by default.
        log_n: Multiply the query at m by `max(1, ln(m+1) / ln L)`; the author's code does.
    """

    name: ClassVar[str] = "rerope"
    summary: ClassVar[str] = "distances past a window all count as the window"
    source: ClassVar[str] = "Su 2023, kexue.fm 9708; bojone/rerope"
    follows_text: ClassVar[bool] = True

    def query_position(self, m: Tensor, original: int) -> Tensor:
        return torch.full_like(m, self.near_window(original))

    def key_position(self, n: Tensor, original: int) -> Tensor:
        return torch.zeros_like(n)


@dataclass(frozen=True, kw_only=True)
class LeakyReRoPE(RotaryBands):
    """Leaky ReRoPE (Su 2023, kexue.fm 9708): past the window, distances grow at a rate of 1/k.

    The relative position is `m - n` below the window and `w + (m - n - w) / k` past it.

    Args:
        scale: Target context as a multiple s of the original one, from which
            `k = (s L - w) / (L - w)`: a text of s L tokens then stays within L positions.
        window: Distances below it are kept; half of the original context by default.
        k: The divisor of distances past the window, given outright; 16 if there is no scale either, as
            in the author's code.
        log_n: Multiply the query at m by `max(1, ln(m+1) / ln L)`; the author's code does.
    """

    name: ClassVar[str] = "leaky_rerope"
    summary: ClassVar[str] = "distances past a window grow at a rate of 1/k"
    source: ClassVar[str] = "Su 2023, kexue.fm 9708; bojone/rerope"

    scale: float | None = field(default=None, metadata=number(1))
    k: float | None = field(default=None, metadata=number(1))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale is not None and self.k is not None:
            raise PosencError(f"{self.name}: scale and k set the same number; give one of them.")

    def slowness(self, original: int) -> float:
        """Return the k in force."""
        if self.scale is not None:
            return compression(self, self.scale, original)
        return 16.0 if self.k is None else float(self.k)

    def query_position(self, m: Tensor, original: int) -> Tensor:
        k = self.slowness(original)
        return real(m) / k + self.near_window(original) * (1 - 1 / k)

    def key_position(self, n: Tensor, original: int) -> Tensor:
        return real(n) / self.slowness(original)
