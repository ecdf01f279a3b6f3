"""Tables that one number changes: position interpolation, NTK-aware scaling, another base, no rotation at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_posenc.errors import PosencError
from hf_posenc.methods.base import (
    Dynamic,
    Length,
    Method,
    RopeScaling,
    Scaled,
    number,
    seam_of,
    starting_table,
    switch,
)
from hf_posenc.rope import RopeSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PositionInterpolation(Scaled):
    """Position interpolation: `f_i / s`.

    Positions are squeezed into the trained range, `m -> m / s` (Chen et al. 2023, arXiv 2306.15595,
    eq. 4), which is the same as dividing every frequency. Neighbouring tokens are then `s` times
    closer than in training, so the method needs a short fine-tuning.
    """

    name = "pi"
    aliases = ("linear", "position_interpolation")
    summary = "every frequency divided by the scale"
    source = "Chen et al. 2023, arXiv 2306.15595"
    needs = "fine-tuning"

    def inv_freq(self, rope: RopeSpec, length: Length = None) -> Tensor:
        return rope.default_inv_freq() / self.scale

    def rope_parameters(self, rope: RopeSpec) -> dict[str, Any]:
        return {"rope_type": "linear", "factor": float(self.scale)}


@dataclass(frozen=True, kw_only=True)
class DynamicPI(Dynamic):
    """Position interpolation by the length of the text: `f_i / s`, `s = max(1, N / L)`.

    Up to the original length `L` nothing changes (emozilla 2023, "Dynamically Scaled RoPE").
    """

    name = "dynamic_pi"
    aliases = ("dynamic_linear",)
    summary = "position interpolation with s = max(1, N/L)"
    source = "emozilla 2023, Dynamically Scaled RoPE"
    needs = "fine-tuning"

    def inv_freq(self, rope: RopeSpec, length: Length = None) -> Tensor:
        scale = self.scale_at(rope, length)
        return starting_table(rope, scale) / scale


def rebased(rope: RopeSpec, growth: float | Tensor) -> Tensor:
    """Return the table for the base `b * growth ** (d / (d-2))`.

    `b' ** (-2i/d) = f_i * growth ** (-2i / (d-2))`: the fastest pair keeps its frequency, the
    slowest is divided by `growth`. As a ratio, a growth of 1 changes no bit.
    """
    import torch

    frequencies = starting_table(rope, growth)
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float64) / max(rope.dim - 2, 1)
    return frequencies * growth ** -exponents.to(frequencies.device)


@dataclass(frozen=True, kw_only=True)
class NTKAware(Scaled):
    """NTK-aware scaling: `f_i = b' ** (-2i/d)` with `b' = b * s ** (d / (d-2))` (bloc97 2023).

    The slowest pair is interpolated by exactly `s`, the fastest not at all, the others by less than
    `s`. Without training the method therefore works up to somewhat less than `s` times the context.
    """

    name = "ntk"
    aliases = ("ntk_aware",)
    summary = "base times s^(d/(d-2)): slow pairs interpolated, fast ones kept"
    source = "bloc97 2023, NTK-Aware Scaled RoPE"
    needs = "nothing"

    def inv_freq(self, rope: RopeSpec, length: Length = None) -> Tensor:
        return rebased(rope, self.scale)

    def rope_parameters(self, rope: RopeSpec) -> dict[str, Any]:
        theta = rope.theta * self.scale ** (rope.dim / max(rope.dim - 2, 1))
        return {"rope_type": "default", "rope_theta": theta}


@dataclass(frozen=True, kw_only=True)
class DiffusionNTK(Scaled):
    """Diffusion-aware NTK (UltraLLaDA: He et al. 2025, arXiv 2510.10481), for models that read both sides of a token.

    `b' = (2 s L / 2 pi) ** (d / d_crit)` with the critical dimension `d_crit = 2 ceil(d/2 log_b(2 L / 2 pi))`. These
    are the features whose pairs made a full turn over the `2 L` relative positions that such a model met in training,
    from `-(L-1)` to `L-1`; the next slower pair makes one over the `2 s L` of the target. A base below the model's own,
    which the rounding gives for a scale near 1, is not taken.

    Args:
        both_sides: False for the `L` and `s L` of a causal model, as in LongLLaDA (arXiv 2506.14429).
    """

    name = "diffusion_ntk"
    aliases = ("critical_ntk",)
    summary = "a base by the pairs that turned in training, over distances on both sides"
    source = "He et al. 2025, arXiv 2510.10481; Liu et al. 2025, arXiv 2506.14429"
    needs = "nothing (fine-tuning helps)"
    only_lowers_frequencies = False
    for_causal = False

    both_sides: bool = field(default=True, metadata=switch())

    def base(self, rope: RopeSpec) -> float:
        """Return the base in force, b'."""
        sides = 1 + self.both_sides
        met = sides * rope.original_max_position_embeddings / (2 * math.pi)
        critical = 2 * max(1, math.ceil(rope.pair_index(1 / sides)))
        return float(max(rope.theta, (met * self.scale) ** (rope.dim / critical)))

    def inv_freq(self, rope: RopeSpec, length: Length = None) -> Tensor:
        return rope.default_inv_freq() * (self.base(rope) / rope.theta) ** -rope.exponents()

    def rope_parameters(self, rope: RopeSpec) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": self.base(rope)}


@dataclass(frozen=True, kw_only=True)
class DynamicNTK(Dynamic):
    """NTK-aware scaling that grows with the sequence (emozilla 2023).

    For `N > L`: `a' = a N / L - (a - 1)`, `b' = b * a' ** (d / (d-2))`; up to `L` nothing changes.

    Args:
        scale: The factor `a`; 1 is the original proposal, above 1 is transformers' `factor`.
    """

    name = "dynamic_ntk"
    aliases = ("dynamic",)
    summary = "NTK-aware scaling that grows with the sequence"
    source = "emozilla 2023, Dynamically Scaled RoPE"
    needs = "nothing"

    scale: float = field(default=1.0, metadata=number(1))

    def inv_freq(self, rope: RopeSpec, length: Length = None) -> Tensor:
        return rebased(rope, self.scale * self.scale_at(rope, length) - (self.scale - 1))

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

    name = "ntk_mixed"
    aliases = ("beta_ary",)
    summary = "a factor of its own for every pair, growing to s at the slowest"
    source = "Su 2023, kexue.fm 9706; bojone/rerope"
    needs = "nothing"

    q: float = field(default=0.75, metadata=number(0, above=True))

    def inv_freq(self, rope: RopeSpec, length: Length = None) -> Tensor:
        import torch

        pairs = rope.dim // 2
        slowing = math.log(self.scale) / pairs**self.q
        index = torch.arange(1, pairs + 1, dtype=torch.float64)
        return rope.default_inv_freq() * torch.exp(-slowing * index**self.q)


@dataclass(frozen=True, kw_only=True)
class ABF(RopeScaling):
    """Adjusted base frequency: `f_i = rope_theta ** (-2i/d)` (Xiong et al. 2023, arXiv 2309.16039).

    Most long-context checkpoints (CodeLlama, ProLong) were continued this way; it needs that
    training.

    Args:
        rope_theta: The new base.
    """

    name = "abf"
    aliases = ("adjusted_base_frequency",)
    summary = "another rope_theta given outright"
    source = "Xiong et al. 2023, arXiv 2309.16039"
    needs = "fine-tuning"
    identity_at_scale_one = False

    rope_theta: float = field(metadata=number(1, above=True))

    def inv_freq(self, rope: RopeSpec, length: Length = None) -> Tensor:
        # A ratio, so that the model's own base changes no bit and the zeros of a proportional table
        # stay.
        return rope.default_inv_freq() * (self.rope_theta / rope.theta) ** -rope.exponents()

    def rope_parameters(self, rope: RopeSpec) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": float(self.rope_theta)}


@dataclass(frozen=True, kw_only=True)
class NoPE(RopeScaling):
    """No position encoding: cos = 1, sin = 0 (arXiv 2203.16634, 2305.19466).

    The causal mask is then the only source of order. A checkpoint trained with RoPE needs
    recalibration (DroPE, arXiv 2512.12167) before its output means anything.
    """

    name = "nope"
    summary = "no rotation: cos = 1, sin = 0"
    source = "arXiv 2203.16634, 2305.19466"
    needs = "training"
    identity_at_scale_one = False
    only_lowers_frequencies = False
    stops_pairs = True
    beside = ("query",)

    def check_beside(self, others: Sequence[Method]) -> None:
        if rest := [m.name for m in others if seam_of(m) not in self.beside]:
            raise PosencError(
                f"{self.name} drops the rotation that {', '.join(rest)} changes or keeps: name one of the two."
            )

    def inv_freq(self, rope: RopeSpec, length: Length = None) -> Tensor:
        import torch

        return torch.zeros(rope.dim // 2, dtype=torch.float64)
