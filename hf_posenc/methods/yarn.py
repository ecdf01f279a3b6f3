"""Tables blended by ramps over the pairs: partial NTK, NTK-by-parts, YaRN with its temperature, Llama 3.1."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_posenc.errors import PosencError
from hf_posenc.methods.base import (
    Dynamic,
    Length,
    RopeScaling,
    Scaled,
    choice,
    number,
    starting_table,
    switch,
)
from hf_posenc.methods.interpolation import rebased
from hf_posenc.rope import RopeSpec

if TYPE_CHECKING:
    from torch import Tensor


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
    import torch

    low, high = ramp_bounds(rope, fast, slow, truncate=truncate)
    index = torch.arange(rope.dim // 2, dtype=torch.float64)
    return ((index - low) / (high - low)).clamp(0, 1)


def ramp_bounds(
    rope: RopeSpec, fast: float, slow: float, *, truncate: bool = True
) -> tuple[float, float]:
    """Return the pair indices between which `index_ramp` rises from 0 to 1."""
    low, high = rope.pair_index(fast), rope.pair_index(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    return low, high + 0.001 * (low == high)  # the authors' guard against a division by zero


def _check_order(method: RopeScaling, high: str, low: str, *, equal: bool = True) -> None:
    """Raise for the ends of a ramp in the wrong order, which would turn it round."""
    above, below = getattr(method, high), getattr(method, low)
    if above < below or (above == below and not equal):
        least = "at least" if equal else "above"
        raise PosencError(f"{method.name}: {high} ({above:g}) must be {least} {low} ({below:g}).")


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

    ntk_factor: float = field(default=1.0, metadata=number(0, most=1))
    extrapolation_factor: float = field(default=1.0, metadata=number(0, most=1))
    beta_0: float = field(default=1.25, metadata=number(0, above=True))
    beta_1: float = field(default=0.75, metadata=number(0, above=True))
    gamma_0: float = field(default=16.0, metadata=number(0, above=True))
    gamma_1: float = field(default=2.0, metadata=number(0, above=True))

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_order(self, "beta_0", "beta_1")
        _check_order(self, "gamma_0", "gamma_1")

    def inv_freq(self, rope: RopeSpec, length: Length = None) -> Tensor:
        scale = self.scale_at(rope, length)
        default = starting_table(rope, scale)
        ntk = (1 - index_ramp(rope, self.beta_0, self.beta_1)) * self.ntk_factor
        kept = (1 - index_ramp(rope, self.gamma_0, self.gamma_1)) * self.extrapolation_factor
        ntk, kept = ntk.to(default.device), kept.to(default.device)
        interpolated = default / scale * (1 - ntk) + rebased(rope, scale) * ntk
        return interpolated * (1 - kept) + default * kept


@dataclass(frozen=True, kw_only=True)
class PartialNTK(_PartialNTK, Scaled):
    """Partial NTK: two ramps over the pair index (jquesnelle/yarn, bloc97 2023).

    NTK-aware frequencies are blended into linear ones between `beta_0` and `beta_1` turns over the
    original context. The unscaled ones are then blended into the result between `gamma_0` and
    `gamma_1` turns.
    """

    name = "partial_ntk"
    summary = "linear, NTK and unscaled frequencies blended by two ramps"
    source = "bloc97 2023; jquesnelle/yarn"
    needs = "nothing"


@dataclass(frozen=True, kw_only=True)
class DynamicPartialNTK(_PartialNTK, Dynamic):
    """Partial NTK with `s = max(1, N / L)` (jquesnelle/yarn)."""

    name = "dynamic_partial_ntk"
    summary = "partial NTK with s = max(1, N/L)"
    source = "jquesnelle/yarn, 2023"
    needs = "nothing"


def mscale(scale: float | Tensor, weight: float = 1.0) -> float | Tensor:
    """Return YaRN's temperature `0.1 * weight * ln s + 1` (arXiv 2309.00071, sec. 3.4); 1 up to a scale of 1."""
    import torch

    if isinstance(scale, torch.Tensor):
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
    ramp: str = field(default="index", metadata=choice("index", "rotations"))

    def __post_init__(self) -> None:
        super().__post_init__()
        # Equal ends make a ramp of one pair (Kimi K2), and none in turns.
        _check_order(self, "beta_fast", "beta_slow", equal=self.ramp != "rotations")

    def inv_freq(self, rope: RopeSpec, length: Length = None) -> Tensor:
        scale = self.scale_at(rope, length)
        default = starting_table(rope, scale)
        if self.ramp == "index":
            interpolated = index_ramp(rope, self.beta_fast, self.beta_slow, truncate=self.truncate)
        else:
            turns = rope.original_max_position_embeddings * default / (2 * math.pi)
            kept = (turns - self.beta_slow) / (self.beta_fast - self.beta_slow)
            interpolated = 1 - kept.clamp(0, 1)
        interpolated = interpolated.to(default.device)
        return default / scale * interpolated + default * (1 - interpolated)

    def _parameters(self, rope: RopeSpec, scale: float, **factors: Any) -> dict[str, Any] | None:
        """Return the method as transformers' `yarn`; its ramp is linear in the index."""
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

    name = "ntk_by_parts"
    summary = "fast pairs kept, slow ones divided by s, a ramp between"
    source = "Peng et al. 2023, arXiv 2309.00071, sec. 3.2"
    needs = "nothing"

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

    name = "yarn"
    summary = "NTK-by-parts, and cos and sin times 0.1 ln s + 1"
    source = "Peng et al. 2023, arXiv 2309.00071"
    needs = "nothing (fine-tuning helps)"

    attention_factor: float | None = field(default=None, metadata=number(0, above=True))
    mscale: float | None = field(default=None, metadata=number(0))
    mscale_all_dim: float | None = field(default=None, metadata=number(0))

    def cos_sin_factor(self, rope: RopeSpec, length: Length = None) -> float | Tensor:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return mscale(self.scale, self.mscale) / mscale(self.scale, self.mscale_all_dim)
        return mscale(self.scale)

    def rope_parameters(self, rope: RopeSpec) -> dict[str, Any] | None:
        knobs = ("attention_factor", "mscale", "mscale_all_dim")
        given = {knob: value for knob, value in self.options().items() if knob in knobs}
        return self._parameters(rope, self.scale, **given)


@dataclass(frozen=True, kw_only=True)
class DynamicYaRN(_ByParts, Dynamic):
    """YaRN with `s = max(1, N / L)`, its temperature included (jquesnelle/yarn)."""

    name = "dynamic_yarn"
    summary = "YaRN with s = max(1, N/L), its temperature included"
    source = "jquesnelle/yarn, 2023"
    needs = "nothing"

    def cos_sin_factor(self, rope: RopeSpec, length: Length = None) -> float | Tensor:
        return mscale(self.scale_at(rope, length))


@dataclass(frozen=True, kw_only=True)
class MrRoPE(YaRN):
    """Mixed-radix RoPE (Tian et al. 2026, arXiv 2601.22181): `f_i / s^e_i`, with YaRN's bounds and temperature.

    Positions are numbers whose digit i has its own radix, which is multiplied by `s^(e_(i+1) - e_i)`. e_i
    is 0 for the n_0 fastest pairs and 1 from pair n_1 on, the bounds of YaRN's ramp. With `j = i - n_0` and
    `n = n_1 - n_0` it is between them `j / n` (MrRoPE-Uni) or `j (j + 1) / (n (n + 1))` (MrRoPE-Pro).

    Args:
        ramp: `"uniform"`, every radix between the bounds grows alike; `"progressive"`, those of slower pairs more.
    """

    name = "mrrope"
    aliases = ("mrrope_uni", "mixed_radix")
    summary = "pairs between YaRN's bounds divided by powers of s, and YaRN's temperature"
    source = "Tian et al. 2026, arXiv 2601.22181"
    needs = "nothing"

    ramp: str = field(default="uniform", metadata=choice("uniform", "progressive"))

    def inv_freq(self, rope: RopeSpec, length: Length = None) -> Tensor:
        exponents = index_ramp(rope, self.beta_fast, self.beta_slow, truncate=self.truncate)
        if self.ramp == "progressive":
            low, high = ramp_bounds(rope, self.beta_fast, self.beta_slow, truncate=self.truncate)
            pairs = high - low
            exponents = exponents * (exponents * pairs + 1) / (pairs + 1)
        return rope.default_inv_freq() * self.scale**-exponents

    def rope_parameters(self, rope: RopeSpec) -> None:
        return None  # transformers' yarn blends frequencies, and not their logarithms


@dataclass(frozen=True, kw_only=True)
class Llama3(Scaled):
    """Llama 3.1's scaling by wavelength `w = 2 pi / f_i` (meta-llama/llama-models).

    A pair with `w < L / high_freq_factor` keeps its frequency, one with `w > L / low_freq_factor` gets
    `f_i / s`. Between them lies a blend, linear in `L / w`.

    Args:
        scale: The divisor `s` of the slow pairs (8 in Llama 3.1, 32 in Llama 3.2).
        low_freq_factor: Turns over `L` below which a pair is divided in full.
        high_freq_factor: Turns above which it is kept; the same for a step without a blend (Llama 4 Scout).
    """

    name = "llama3"
    summary = "Llama 3.1's blend by wavelength"
    source = "Llama 3.1, 2024 (meta-llama/llama-models)"
    needs = "nothing (fine-tuning helps)"

    low_freq_factor: float = field(default=1.0, metadata=number(0, above=True))
    high_freq_factor: float = field(default=4.0, metadata=number(0, above=True))

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_order(
            self, "high_freq_factor", "low_freq_factor"
        )  # equal in Llama 4 Scout: no blend

    def inv_freq(self, rope: RopeSpec, length: Length = None) -> Tensor:
        import torch

        default = rope.default_inv_freq()
        turns = rope.original_max_position_embeddings * default / (2 * math.pi)
        width = self.high_freq_factor - self.low_freq_factor
        smooth = (turns - self.low_freq_factor) / width if width else torch.ones_like(turns)
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
