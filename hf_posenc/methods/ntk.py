"""NTK-aware scaling: a larger base, so that fast frequencies stay and slow ones are interpolated."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_posenc.methods.base import Length, LengthDependent, Scaled, number, running_scale
from hf_posenc.rope import RopeSpec


def rebased(frequencies: Tensor, dim: int, growth: float | Tensor) -> Tensor:
    """Return the table for the base `b * growth ** (d / (d-2))`.

    `b' ** (-2i/d) = f_i * growth ** (-2i / (d-2))`: the fastest pair keeps its frequency, the
    slowest is divided by `growth`. As a ratio, a growth of 1 changes no bit.
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.float64) / max(dim - 2, 1)
    if isinstance(growth, Tensor):
        frequencies, exponents = frequencies.to(growth.device), exponents.to(growth.device)
    return frequencies * growth**-exponents


@dataclass(frozen=True, kw_only=True)
class NTKAware(Scaled):
    """NTK-aware scaling: `f_i = b' ** (-2i/d)` with `b' = b * s ** (d / (d-2))` (bloc97 2023).

    The slowest pair is interpolated by exactly `s`, the fastest not at all, the others by less than
    `s`. Without training the method therefore works up to somewhat less than `s` times the context.
    """

    name: ClassVar[str] = "ntk"
    aliases: ClassVar[tuple[str, ...]] = ("ntk_aware",)
    summary: ClassVar[str] = "base times s^(d/(d-2)): slow pairs interpolated, fast ones kept"
    source: ClassVar[str] = "bloc97 2023, NTK-Aware Scaled RoPE"
    needs: ClassVar[str] = "nothing"

    def inv_freq(self, rope: RopeSpec, length: Length = None) -> Tensor:
        return rebased(rope.default_inv_freq(), rope.dim, self.scale)

    def rope_parameters(self, rope: RopeSpec) -> dict[str, Any]:
        theta = rope.theta * self.scale ** (rope.dim / max(rope.dim - 2, 1))
        return {"rope_type": "default", "rope_theta": theta}


@dataclass(frozen=True, kw_only=True)
class DynamicNTK(LengthDependent):
    """NTK-aware scaling that grows with the sequence (emozilla 2023).

    For `N > L`: `a' = a N / L - (a - 1)`, `b' = b * a' ** (d / (d-2))`; up to `L` nothing changes.

    Args:
        scale: The factor `a`; 1 is the original proposal, above 1 is transformers' `factor`.
    """

    name: ClassVar[str] = "dynamic_ntk"
    aliases: ClassVar[tuple[str, ...]] = ("dynamic",)
    summary: ClassVar[str] = "NTK-aware scaling that grows with the sequence"
    source: ClassVar[str] = "emozilla 2023, Dynamically Scaled RoPE"
    needs: ClassVar[str] = "nothing"
    follows_text: ClassVar[bool] = True

    scale: float = field(default=1.0, metadata=number(1))

    def inv_freq(self, rope: RopeSpec, length: Length = None) -> Tensor:
        growth = self.scale * running_scale(rope, length) - (self.scale - 1)
        return rebased(rope.default_inv_freq(), rope.dim, growth)

    def rope_parameters(self, rope: RopeSpec) -> dict[str, Any]:
        return {"rope_type": "dynamic", "factor": float(self.scale)}


@dataclass(frozen=True, kw_only=True)
class NTKMixed(Scaled):
    """NTK-RoPE-mixed, from the reading of RoPE as a number system (Su 2023, kexue.fm 9706).

    `f_i * exp(-a (i+1)^q)` with `a = ln s / (d/2)^q`: every pair is slowed by a factor of its own, the
    slowest by `s`.

    Args:
        q: Exponent: 0.75 in the author's code (bojone/rerope), 0.625 in the derivation.
    """

    name: ClassVar[str] = "ntk_mixed"
    aliases: ClassVar[tuple[str, ...]] = ("beta_ary",)
    summary: ClassVar[str] = "a factor of its own for every pair, growing to s at the slowest"
    source: ClassVar[str] = "Su 2023, kexue.fm 9706; bojone/rerope"
    needs: ClassVar[str] = "nothing"

    q: float = field(default=0.75, metadata=number(0, above=True))

    def inv_freq(self, rope: RopeSpec, length: Length = None) -> Tensor:
        pairs = rope.dim // 2
        slowing = math.log(self.scale) / pairs**self.q
        index = torch.arange(1, pairs + 1, dtype=torch.float64)
        return rope.default_inv_freq() * torch.exp(-slowing * index**self.q)
