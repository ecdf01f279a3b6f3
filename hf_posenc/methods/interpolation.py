"""Position interpolation: every frequency divided by the same number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from hf_posenc.methods.base import Length, LengthDependent, Scaled, running_scale
from hf_posenc.rope import RopeSpec


@dataclass(frozen=True, kw_only=True)
class PositionInterpolation(Scaled):
    """Position interpolation: `f_i / s`.

    Positions are squeezed into the trained range, `m -> m / s` (Chen et al. 2023, arXiv 2306.15595,
    eq. 4), which is the same as dividing every frequency. Neighbouring tokens are then `s` times
    closer than in training, so the method needs a short fine-tuning.
    """

    name: ClassVar[str] = "pi"
    aliases: ClassVar[tuple[str, ...]] = ("linear", "position_interpolation")
    summary: ClassVar[str] = "every frequency divided by the scale"
    source: ClassVar[str] = "Chen et al. 2023, arXiv 2306.15595"
    needs: ClassVar[str] = "fine-tuning"

    def inv_freq(self, rope: RopeSpec, length: Length = None) -> Tensor:
        return rope.default_inv_freq() / self.scale

    def rope_parameters(self, rope: RopeSpec) -> dict[str, Any]:
        return {"rope_type": "linear", "factor": float(self.scale)}


@dataclass(frozen=True, kw_only=True)
class DynamicPI(LengthDependent):
    """Position interpolation by the length of the text: `f_i / s`, `s = max(1, N / L)`.

    Up to the original length `L` nothing changes (emozilla 2023, "Dynamically Scaled RoPE").
    """

    name: ClassVar[str] = "dynamic_pi"
    aliases: ClassVar[tuple[str, ...]] = ("dynamic_linear",)
    summary: ClassVar[str] = "position interpolation with s = max(1, N/L)"
    source: ClassVar[str] = "emozilla 2023, Dynamically Scaled RoPE"
    needs: ClassVar[str] = "fine-tuning"
    follows_text: ClassVar[bool] = True

    def inv_freq(self, rope: RopeSpec, length: Length = None) -> Tensor:
        scale = running_scale(rope, length)
        return rope.default_inv_freq().to(scale.device) / scale
