"""ReRoPE, Leaky ReRoPE and SelfExtend: past a window the distance stops growing, or grows more slowly."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from hf_posenc.errors import PosencError
from hf_posenc.methods.bands import RotaryBands
from hf_posenc.methods.base import count, number, real

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ReRoPE(RotaryBands):
    """Rectified RoPE (Su 2023, kexue.fm 9708): relative positions `min(m - n, w)`.

    Every key past the window counts as w tokens away, so no distance is new to the model at any
    length of text. All distant keys look equally far away. The author's code has `log_n` on.
    """

    name = "rerope"
    summary = "distances past a window all count as the window"
    source = "Su 2023, kexue.fm 9708; bojone/rerope"
    follows_text = True

    def query_position(self, m: Tensor, original: int) -> Tensor:
        return m.new_full(m.shape, self.near_window(original))

    def key_position(self, n: Tensor, original: int) -> Tensor:
        return n.new_zeros(n.shape)


@dataclass(frozen=True, kw_only=True)
class _Slowed(RotaryBands):
    """Distances past the window divided by a number: the knob `divisor`, or what follows from the scale."""

    divisor: ClassVar[str]

    scale: float | None = field(default=None, metadata=number(1))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale is not None and getattr(self, self.divisor) is not None:
            raise PosencError(
                f"{self.name}: scale and {self.divisor} set one number; give one of them."
            )

    def _compression(self, scale: float, original: int) -> float:
        """Return the divisor that makes `scale * L` tokens fit: `(s L - w) / (L - w)`.

        The first w of the L positions are the near band's and are not compressed.
        """
        window = self.near_window(original)
        if window >= original:
            raise PosencError(
                f"{self.name}: with scale={scale:g} the window ({window}) is below the original context "
                f"of {original} tokens, so that positions are left for the far band."
            )
        return (scale * original - window) / (original - window)


@dataclass(frozen=True, kw_only=True)
class LeakyReRoPE(_Slowed):
    """Leaky ReRoPE (Su 2023, kexue.fm 9708): past the window, distances grow at a rate of 1/k.

    The relative position is `m - n` below the window and `w + (m - n - w) / k` past it. The author's
    code has `log_n` on.

    Args:
        scale: Target context as a multiple s of the original one, from which
            `k = (s L - w) / (L - w)`: a text of s L tokens then stays within L positions.
        window: Distances below it are kept; half of the original context by default.
        k: The divisor of distances past the window, given outright; 16 if there is no scale either, as
            in the author's code.
    """

    name = "leaky_rerope"
    summary = "distances past a window grow at a rate of 1/k"
    source = "Su 2023, kexue.fm 9708; bojone/rerope"

    divisor = "k"

    k: float | None = field(default=None, metadata=number(1))

    def slowness(self, original: int) -> float:
        """Return the k in force."""
        if self.scale is not None:
            return self._compression(self.scale, original)
        return 16.0 if self.k is None else float(self.k)

    def query_position(self, m: Tensor, original: int) -> Tensor:
        k = self.slowness(original)
        return real(m) / k + self.near_window(original) * (1 - 1 / k)

    def key_position(self, n: Tensor, original: int) -> Tensor:
        return real(n) / self.slowness(original)


@dataclass(frozen=True, kw_only=True)
class SelfExtend(_Slowed):
    """SelfExtend (Jin et al. 2024, arXiv 2401.01325): floor division of the positions past a window.

    Neighbours keep `m - n`; past the window the relative position is
    `floor(m/G) + W - floor(W/G) - floor(n/G)`, an integer that occurred in training.

    Args:
        scale: Target context as a multiple s of the original one, from which
            `G = ceil((s L - W) / (L - W))`: a text of s L tokens then stays within about L positions.
        window: Distances W below it are kept; half of the original context by default.
        group: Tokens G that share a position past the window, given outright; 8 if there is no
            scale either.
    """

    name = "self_extend"
    aliases = ("longlm",)
    summary = "positions past a window are counted in groups of tokens"
    source = "Jin et al. 2024, arXiv 2401.01325"

    divisor = "group"

    group: int | None = field(default=None, metadata=count())

    def group_size(self, original: int) -> int:
        """Return the G in force, in tokens."""
        if self.scale is not None:
            return math.ceil(self._compression(self.scale, original))
        return 8 if self.group is None else self.group

    def query_position(self, m: Tensor, original: int) -> Tensor:
        group, window = self.group_size(original), self.near_window(original)
        # The paper and the authors' flash decoding round W/G down, their prefill does not: the two
        # differ wherever G does not divide W.
        return m // group + (window - window // group)

    def key_position(self, n: Tensor, original: int) -> Tensor:
        return n // self.group_size(original)
