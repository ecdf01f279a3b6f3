"""The frequency scaling of Llama 3.1."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_posenc.errors import PosencError
from hf_posenc.methods.base import Length, Scaled, number
from hf_posenc.rope import RopeSpec


@dataclass(frozen=True, kw_only=True)
class Llama3(Scaled):
    """Llama 3.1's scaling by wavelength `w = 2 pi / f_i` (meta-llama/llama-models).

    A pair with `w < L / high_freq_factor` keeps its frequency, one with `w > L / low_freq_factor` gets
    `f_i / s`. Between them lies a blend, linear in `L / w`.

    Args:
        scale: The divisor `s` of the slow pairs (8 in Llama 3.1, 32 in Llama 3.2).
        low_freq_factor: Turns over `L` below which a pair is divided in full.
        high_freq_factor: Turns above which it is kept.
    """

    name: ClassVar[str] = "llama3"
    summary: ClassVar[str] = "Llama 3.1's blend by wavelength"
    source: ClassVar[str] = "Llama 3.1 (meta-llama/llama-models)"
    needs: ClassVar[str] = "nothing (fine-tuning helps)"

    low_freq_factor: float = field(default=1.0, metadata=number(0, above=True))
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.high_freq_factor > self.low_freq_factor:
            raise PosencError(
                f"llama3: high_freq_factor ({self.high_freq_factor}) is above low_freq_factor ({self.low_freq_factor})."
            )

    def inv_freq(self, rope: RopeSpec, length: Length = None) -> Tensor:
        default = rope.default_inv_freq()
        turns = rope.original_max_position_embeddings * default / (2 * math.pi)
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = (1 - smooth) * default / self.scale + smooth * default
        slow = torch.where(turns < self.low_freq_factor, default / self.scale, blend)
        return torch.where(turns > self.high_freq_factor, default, slow)

    def rope_parameters(self, rope: RopeSpec) -> dict[str, Any]:
        return {
            "rope_type": "llama3",
            "factor": float(self.scale),
            "original_max_position_embeddings": rope.original_max_position_embeddings,
            "low_freq_factor": float(self.low_freq_factor),
            "high_freq_factor": float(self.high_freq_factor),
        }
