"""Partial NTK: linear, NTK-aware and unscaled frequencies blended by two ramps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.methods.base import (
    Length,
    LengthDependent,
    RopeScaling,
    Scaled,
    number,
    running_scale,
)
from hf_posenc.methods.ntk import rebased
from hf_posenc.rope import RopeSpec


def index_ramp(rope: RopeSpec, fast: float, slow: float, *, truncate: bool = True) -> Tensor:
    """Return the ramp over the pair index from 0 at `fast` turns to 1 at `slow` turns, shape (d/2,).

    It is linear in the index, as in jquesnelle/yarn and transformers. The ends are clamped to
    [0, d-1], as there, and not to the last pair d/2-1.

    Args:
        rope: The table; `L`, `b` and `d` place the ramp.
        fast: Turns over `L` tokens at which the ramp leaves 0.
        slow: Turns at which it reaches 1.
        truncate: Round the ends outwards to whole pairs.
    """
    low, high = rope.pair_index(fast), rope.pair_index(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001  # the authors' guard against a division by zero
    index = torch.arange(rope.dim // 2, dtype=torch.float64)
    return ((index - low) / (high - low)).clamp(0, 1)


@dataclass(frozen=True, kw_only=True)
class _PartialNTK(RopeScaling):
    """The blend of the static and the dynamic form.

    Args:
        ntk_factor: Weight of the NTK-aware part, 0 to 1.
        extrapolation_factor: Weight of the unscaled part, 0 to 1.
        beta_0: Turns above which the NTK-aware table counts in full.
        beta_1: Turns below which the linear table counts in full.
        gamma_0: Turns above which the unscaled table counts in full.
        gamma_1: Turns below which it does not count.
    """

    ntk_factor: float = field(default=1.0, metadata=number(0))
    extrapolation_factor: float = field(default=1.0, metadata=number(0))
    beta_0: float = field(default=1.25, metadata=number(0, above=True))
    beta_1: float = field(default=0.75, metadata=number(0, above=True))
    gamma_0: float = field(default=16.0, metadata=number(0, above=True))
    gamma_1: float = field(default=2.0, metadata=number(0, above=True))

    def _blend(self, rope: RopeSpec, scale: float | Tensor) -> Tensor:
        default = rope.default_inv_freq()
        ntk = (1 - index_ramp(rope, self.beta_0, self.beta_1)) * self.ntk_factor
        kept = (1 - index_ramp(rope, self.gamma_0, self.gamma_1)) * self.extrapolation_factor
        if isinstance(scale, Tensor):
            default, ntk, kept = (table.to(scale.device) for table in (default, ntk, kept))
        interpolated = default / scale * (1 - ntk) + rebased(default, rope.dim, scale) * ntk
        return interpolated * (1 - kept) + default * kept


@dataclass(frozen=True, kw_only=True)
class PartialNTK(_PartialNTK, Scaled):
    """Partial NTK: two ramps over the pair index (jquesnelle/yarn, bloc97 2023).

    NTK-aware frequencies are blended into linear ones between `beta_0` and `beta_1` turns over the
    original context. The unscaled ones are then blended into the result between `gamma_0` and
    `gamma_1` turns.
    """

    name: ClassVar[str] = "partial_ntk"
    summary: ClassVar[str] = "linear, NTK and unscaled frequencies blended by two ramps"
    source: ClassVar[str] = "bloc97 2023; jquesnelle/yarn"
    needs: ClassVar[str] = "nothing"

    def inv_freq(self, rope: RopeSpec, length: Length = None) -> Tensor:
        return self._blend(rope, self.scale)


@dataclass(frozen=True, kw_only=True)
class DynamicPartialNTK(_PartialNTK, LengthDependent):
    """Partial NTK with `s = max(1, N / L)` (jquesnelle/yarn)."""

    name: ClassVar[str] = "dynamic_partial_ntk"
    summary: ClassVar[str] = "partial NTK with s = max(1, N/L)"
    source: ClassVar[str] = "jquesnelle/yarn"
    needs: ClassVar[str] = "nothing"
    follows_text: ClassVar[bool] = True

    def inv_freq(self, rope: RopeSpec, length: Length = None) -> Tensor:
        return self._blend(rope, running_scale(rope, length))
