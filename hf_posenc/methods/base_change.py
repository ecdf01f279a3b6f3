"""Adjusted base frequency and NoPE: another base given outright, and no rotation at all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_posenc.methods.base import Length, RopeScaling, number
from hf_posenc.rope import RopeSpec


@dataclass(frozen=True, kw_only=True)
class ABF(RopeScaling):
    """Adjusted base frequency: `f_i = rope_theta ** (-2i/d)` (Xiong et al. 2023, arXiv 2309.16039).

    Most long-context checkpoints (CodeLlama, ProLong) were continued this way; it needs that
    training.

    Args:
        rope_theta: The new base.
    """

    name: ClassVar[str] = "abf"
    aliases: ClassVar[tuple[str, ...]] = ("adjusted_base_frequency",)
    summary: ClassVar[str] = "another rope_theta given outright"
    source: ClassVar[str] = "Xiong et al. 2023, arXiv 2309.16039"
    needs: ClassVar[str] = "fine-tuning"
    identity_at_scale_one: ClassVar[bool] = False

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

    name: ClassVar[str] = "nope"
    summary: ClassVar[str] = "no rotation: cos = 1, sin = 0"
    source: ClassVar[str] = "arXiv 2203.16634, 2305.19466"
    needs: ClassVar[str] = "training"
    identity_at_scale_one: ClassVar[bool] = False
    only_lowers_frequencies: ClassVar[bool] = False

    def inv_freq(self, rope: RopeSpec, length: Length = None) -> Tensor:
        return torch.zeros(rope.dim // 2, dtype=torch.float64)
