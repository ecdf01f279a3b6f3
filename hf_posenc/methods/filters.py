"""Filters on a finished table: clipped slow pairs, whole wavelengths, and Giraffe's bases."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_posenc.errors import PosencError
from hf_posenc.methods.base import TableFilter, count, number
from hf_posenc.rope import RopeSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Clip(TableFilter):
    """The slowest pairs slowed or stopped; a pair with frequency 0 does not rotate. At most one option is given.

    Args:
        soft: CoPE (arXiv 2602.05258): the slowest c pairs times `0.5 (1 + cos(pi j / (c-1)))`, j = 0 .. c-1. The
            default of the method: 20 of 64 pairs, as the authors have it, or as large a share of others, halves
            rounded up, and 3 at least: fewer are a hard clip or none.
        pairs: The slowest c pairs stopped ("HardClip" in the same code).
        share: p-RoPE (arXiv 2410.06205): all but the fastest `floor(p d/2)` pairs stopped.
        turns: Pairs stopped that make fewer turns than this over the original context.
    """

    name = "clip"
    summary = "the slowest pairs slowed or stopped"
    source = "arXiv 2602.05258 (CoPE), 2410.06205 (p-RoPE); hrlics/CoPE"

    soft: int | None = field(default=None, metadata=count())
    pairs: int | None = field(default=None, metadata=count())
    share: float | None = field(default=None, metadata=number(0))
    turns: float | None = field(default=None, metadata=number(0, above=True))

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.options()) > 1:
            given = ", ".join(self.options())
            raise PosencError(f"{self.name} takes one of soft, pairs, share, turns, not {given}.")
        if self.share is not None and self.share > 1:
            raise PosencError(
                f"{self.name}: share is a part of the pairs, 0 to 1, not {self.share}."
            )

    def filtered(self, frequencies: Tensor, rope: RopeSpec) -> Tensor:
        import torch

        kept = len(frequencies)
        if self.turns is not None:
            turns = frequencies * rope.original_max_position_embeddings / (2 * math.pi)
            return torch.where(turns < self.turns, torch.zeros_like(frequencies), frequencies)
        if self.pairs is None and self.share is None:
            share = max(3, (20 * kept + 32) // 64)
            clipped = min(kept, share if self.soft is None else self.soft)
            ramp = torch.linspace(
                0, math.pi, clipped, dtype=torch.float64, device=frequencies.device
            )
            slowed = frequencies[kept - clipped :] * (0.5 * (1 + ramp.cos()))
            return torch.cat((frequencies[: kept - clipped], slowed))
        # As transformers rounds it.
        fastest = int((self.share or 0.0) * rope.dim // 2)
        kept = max(0, kept - self.pairs) if self.pairs else fastest
        return torch.cat((frequencies[:kept], torch.zeros_like(frequencies[kept:])))

    def rope_parameters(self, rope: RopeSpec) -> dict[str, Any] | None:
        if self.share is None:
            return None
        return {"rope_type": "proportional", "partial_rotary_factor": self.share}


@dataclass(frozen=True, kw_only=True)
class ResonanceRoPE(TableFilter):
    """Resonance RoPE (Wang et al. 2024, arXiv 2403.00071): `2 pi / round(2 pi / f_i)`.

    The wavelength of each pair is rounded to the nearest whole number of tokens, and to one at least. A pair
    whose wavelength fits into the training length then meets no new angle at any position. After YaRN it is
    the paper's Resonance YaRN.
    """

    name = "resonance"
    aliases = ("resonance_rope",)
    summary = "the wavelength of every pair rounded to whole tokens"
    source = "Wang et al. 2024, arXiv 2403.00071; sheryc/resonance_rope"

    def filtered(self, frequencies: Tensor, rope: RopeSpec) -> Tensor:
        # A frequency of 0 has an infinite wavelength, and stays.
        return 2 * math.pi / (2 * math.pi / frequencies).round().clamp(min=1)


@dataclass(frozen=True, kw_only=True)
class PowerBasis(TableFilter):
    """Giraffe's power basis (Pal et al. 2023, arXiv 2308.10882): `f_i (1 - 2i/d)^k`.

    Args:
        power: k.
    """

    name = "power_basis"
    aliases = ("giraffe_power",)
    summary = "pair i times (1 - 2i/d)^k: slow pairs slowed ever more"
    source = "Pal et al. 2023, arXiv 2308.10882; abacusai/Long-Context"

    power: float = field(metadata=number(0))

    def filtered(self, frequencies: Tensor, rope: RopeSpec) -> Tensor:
        return frequencies * (1 - rope.exponents().to(frequencies.device)) ** self.power


@dataclass(frozen=True, kw_only=True)
class TruncatedBasis(TableFilter):
    """Giraffe's truncated basis (Pal et al. 2023, arXiv 2308.10882).

    Pairs of a wavelength up to T tokens stay. Slower ones get the frequency `t/16` with `t = 2 pi / T`, or 0
    where theirs is below `t/8`, as in the authors' code.

    Args:
        wavelength: T, in tokens (`truncate` in the authors' code).
    """

    name = "truncated_basis"
    aliases = ("giraffe_truncated",)
    summary = "slow pairs set to one frequency, the slowest stopped"
    source = "Pal et al. 2023, arXiv 2308.10882; abacusai/Long-Context"

    wavelength: float = field(metadata=number(1))

    def filtered(self, frequencies: Tensor, rope: RopeSpec) -> Tensor:
        cutoff = 2 * math.pi / self.wavelength
        slowed = frequencies.new_full(frequencies.shape, cutoff / 16)
        slowed = slowed.where(frequencies >= cutoff / 8, 0.0)
        return frequencies.where(frequencies >= cutoff, slowed)
