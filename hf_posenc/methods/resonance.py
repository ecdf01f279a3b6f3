"""Resonance RoPE: each pair turns once in a whole number of tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hf_posenc.methods.base import Length, RopeScaling
from hf_posenc.methods.yarn import YaRN
from hf_posenc.rope import RopeSpec


def resonant(frequencies: Tensor) -> Tensor:
    """Return `2 pi / round(2 pi / f_i)`, with at least one token a turn; 0 stays 0."""
    return 2 * math.pi / (2 * math.pi / frequencies).round().clamp(min=1)


@dataclass(frozen=True, kw_only=True)
class ResonanceRoPE(RopeScaling):
    """Resonance RoPE (Wang et al. 2024, arXiv 2403.00071): `2 pi / round(2 pi / f_i)`.

    The wavelength of each pair is rounded to the nearest whole number of tokens. A pair whose wavelength
    fits into the training length then meets no new angle at any position.
    """

    name = "resonance"
    aliases = ("resonance_rope",)
    summary = "the wavelength of every pair rounded to whole tokens"
    source = "Wang et al. 2024, arXiv 2403.00071; sheryc/resonance_rope"
    needs = "fine-tuning"
    identity_at_scale_one = False
    only_lowers_frequencies = False

    def inv_freq(self, rope: RopeSpec, length: Length = None) -> Tensor:
        return resonant(rope.default_inv_freq())


@dataclass(frozen=True, kw_only=True)
class ResonanceYaRN(YaRN):
    """Resonance YaRN (Wang et al. 2024, arXiv 2403.00071): YaRN, then `2 pi / round(2 pi / f'_i)`.

    The wavelengths of YaRN's frequencies `f'_i` are rounded to whole tokens; its temperature stays.
    """

    name = "resonance_yarn"
    summary = "YaRN with the wavelength of every pair rounded to whole tokens"
    source = "Wang et al. 2024, arXiv 2403.00071; sheryc/resonance_rope"
    needs = "fine-tuning"
    identity_at_scale_one = False
    only_lowers_frequencies = False

    def inv_freq(self, rope: RopeSpec, length: Length = None) -> Tensor:
        return resonant(super().inv_freq(rope, length))

    def rope_parameters(self, rope: RopeSpec) -> dict[str, Any] | None:
        return None
