"""NTK-by-parts and YaRN: fast pairs kept, slow pairs interpolated, a ramp between; YaRN adds a temperature."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_posenc.errors import PosencError, unknown
from hf_posenc.methods.base import (
    Length,
    LengthDependent,
    RopeScaling,
    Scaled,
    number,
    running_scale,
    switch,
)
from hf_posenc.methods.partial_ntk import index_ramp
from hf_posenc.rope import RopeSpec


def mscale(scale: float | Tensor, weight: float = 1.0) -> float | Tensor:
    """Return YaRN's temperature `0.1 * weight * ln s + 1` (arXiv 2309.00071, sec. 3.4); 1 up to a scale of 1."""
    if isinstance(scale, Tensor):
        return 0.1 * weight * torch.log(scale) + 1.0
    return 0.1 * weight * math.log(scale) + 1.0 if scale > 1 else 1.0


@dataclass(frozen=True, kw_only=True)
class _ByParts(RopeScaling):
    """The ramp of NTK-by-parts, YaRN and dynamic YaRN.

    Args:
        beta_fast: Turns above which a pair is kept.
        beta_slow: Turns below which it is interpolated in full.
        truncate: Round the ends of the ramp outwards to whole pairs.
        ramp: `"index"`, linear in the pair index, as in the authors' code and transformers;
            `"rotations"`, linear in the number of turns, as in the paper's text (eq. 18).
    """

    beta_fast: float = field(default=32.0, metadata=number(0, above=True))
    beta_slow: float = field(default=1.0, metadata=number(0, above=True))
    truncate: bool = field(default=True, metadata=switch())
    ramp: str = "index"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta_fast <= self.beta_slow:
            raise PosencError(
                f"{self.name}: beta_fast ({self.beta_fast:g}) is above beta_slow ({self.beta_slow:g})."
            )
        if self.ramp not in ("index", "rotations"):
            raise unknown(f"ramp of {self.name}", self.ramp, ["index", "rotations"])

    def _by_parts(self, rope: RopeSpec, scale: float | Tensor) -> Tensor:
        default = rope.default_inv_freq()
        if self.ramp == "index":
            interpolated = index_ramp(rope, self.beta_fast, self.beta_slow, truncate=self.truncate)
        else:
            turns = rope.original_max_position_embeddings * default / (2 * math.pi)
            interpolated = 1 - ((turns - self.beta_slow) / (self.beta_fast - self.beta_slow)).clamp(
                0, 1
            )
        if isinstance(scale, Tensor):
            default, interpolated = default.to(scale.device), interpolated.to(scale.device)
        return default / scale * interpolated + default * (1 - interpolated)

    def _parameters(self, rope: RopeSpec, scale: float, **factors: Any) -> dict[str, Any] | None:
        if self.ramp != "index":
            return None
        return {
            "rope_type": "yarn",
            "factor": float(scale),
            "original_max_position_embeddings": rope.original_max_position_embeddings,
            "beta_fast": float(self.beta_fast),
            "beta_slow": float(self.beta_slow),
            "truncate": self.truncate,
            **factors,
        }


@dataclass(frozen=True, kw_only=True)
class NTKByParts(_ByParts, Scaled):
    """NTK-by-parts interpolation (Peng et al. 2023, arXiv 2309.00071, sec. 3.2).

    Pairs that make more than `beta_fast` turns over the original context keep their frequency, those
    that make fewer than `beta_slow` get `f_i / s`, with a ramp between. It is YaRN without its
    temperature.
    """

    name: ClassVar[str] = "ntk_by_parts"
    summary: ClassVar[str] = "fast pairs kept, slow ones divided by s, a ramp between"
    source: ClassVar[str] = "Peng et al. 2023, arXiv 2309.00071, sec. 3.2"
    needs: ClassVar[str] = "nothing"

    def inv_freq(self, rope: RopeSpec, length: Length = None) -> Tensor:
        return self._by_parts(rope, self.scale)

    def rope_parameters(self, rope: RopeSpec) -> dict[str, Any] | None:
        return self._parameters(rope, self.scale, attention_factor=1.0)


@dataclass(frozen=True, kw_only=True)
class YaRN(_ByParts, Scaled):
    """YaRN (Peng et al. 2023, arXiv 2309.00071): NTK-by-parts and a temperature.

    cos and sin are multiplied by `t = 0.1 ln s + 1` (sec. 3.4), the scores thus by `t ** 2`.

    Args:
        attention_factor: The factor on cos and sin, given outright.
        mscale: DeepSeek's weight of the logarithm in the numerator; used together with
            `mscale_all_dim` only.
        mscale_all_dim: The same in the denominator. DeepSeek's attention multiplies its scores by
            this temperature.
    """

    name: ClassVar[str] = "yarn"
    summary: ClassVar[str] = "NTK-by-parts, and cos and sin times 0.1 ln s + 1"
    source: ClassVar[str] = "Peng et al. 2023, arXiv 2309.00071"
    needs: ClassVar[str] = "nothing (fine-tuning helps)"

    attention_factor: float | None = field(default=None, metadata=number(0, above=True))
    mscale: float | None = field(default=None, metadata=number(0))
    mscale_all_dim: float | None = field(default=None, metadata=number(0))

    def inv_freq(self, rope: RopeSpec, length: Length = None) -> Tensor:
        return self._by_parts(rope, self.scale)

    def cos_sin_factor(self, rope: RopeSpec, length: Length = None) -> float | Tensor:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return mscale(self.scale, self.mscale) / mscale(self.scale, self.mscale_all_dim)
        return mscale(self.scale)

    def rope_parameters(self, rope: RopeSpec) -> dict[str, Any] | None:
        knobs = ("attention_factor", "mscale", "mscale_all_dim")
        given = {knob: getattr(self, knob) for knob in knobs if getattr(self, knob) is not None}
        return self._parameters(rope, self.scale, **given)


@dataclass(frozen=True, kw_only=True)
class DynamicYaRN(_ByParts, LengthDependent):
    """YaRN with `s = max(1, N / L)`, its temperature included (jquesnelle/yarn)."""

    name: ClassVar[str] = "dynamic_yarn"
    summary: ClassVar[str] = "YaRN with s = max(1, N/L), its temperature included"
    source: ClassVar[str] = "jquesnelle/yarn"
    needs: ClassVar[str] = "nothing"
    follows_text: ClassVar[bool] = True

    def inv_freq(self, rope: RopeSpec, length: Length = None) -> Tensor:
        return self._by_parts(rope, running_scale(rope, length))

    def cos_sin_factor(self, rope: RopeSpec, length: Length = None) -> float | Tensor:
        return mscale(running_scale(rope, length))
