"""LongRoPE: a searched factor for every pair, one list up to the original length and one past it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_posenc.errors import PosencError
from hf_posenc.methods.base import UPDATES, Length, LengthDependent, choice, number, several
from hf_posenc.rope import RopeSpec

if TYPE_CHECKING:
    from torch import Tensor

_DIVISORS = several(number(0, above=True))


@dataclass(frozen=True, kw_only=True)
class LongRoPE(LengthDependent):
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753): a divisor of its own for every pair.

    `f_i / short_factor_i` for texts of up to `L` tokens, `f_i / long_factor_i` past it.

    cos and sin are multiplied by `sqrt(1 + ln s / ln L)`. Any static table can be written in this form,
    with both lists `f_i / f'_i`, for engines that have no other.

    Args:
        short_factor: d/2 divisors for sequences of at most `L` tokens.
        long_factor: d/2 divisors for longer ones.
        scale: Target context as a multiple `s` of the original one.
        attention_factor: The factor on cos and sin, given outright.
        short_mscale: The factor up to `L` (Phi-3.5-MoE); wins over `attention_factor`.
        long_mscale: The factor past `L`; wins over `attention_factor`.
        update: The length: `"row"`, that of each query's position; `"request"`, each batch row's own;
            `"sequence"`, the longest row of the batch, for which LongRoPE models are trained and which
            is the default here.
        bucket: Tokens by which the length grows at once in the modes `"row"` and `"request"`; half of `L` by
            default.
    """

    name = "longrope"
    aliases = ("su",)
    summary = "a searched divisor for every pair"
    source = "Ding et al. 2024, arXiv 2402.13753"
    needs = "searched factors; fine-tuning past 8 times the context"
    identity_at_scale_one = False
    only_lowers_frequencies = False

    short_factor: Sequence[float] = field(metadata=_DIVISORS)
    long_factor: Sequence[float] = field(metadata=_DIVISORS)
    scale: float = field(default=1.0, metadata=number(1))
    attention_factor: float | None = field(default=None, metadata=number(0, above=True))
    short_mscale: float | None = field(default=None, metadata=number(0, above=True))
    long_mscale: float | None = field(default=None, metadata=number(0, above=True))
    update: str = field(default="sequence", metadata=choice(*UPDATES))

    def __post_init__(self) -> None:
        super().__post_init__()
        for knob in ("short_factor", "long_factor"):
            # A tuple, so that the frozen method stays hashable.
            object.__setattr__(self, knob, tuple(map(float, getattr(self, knob))))

    @property
    def length_dependent(self) -> bool:  # type: ignore[override]
        """True if the two lists, or the factors beside them, differ."""
        lists = self.short_factor != self.long_factor
        return lists or self.short_mscale != self.long_mscale

    def inv_freq(self, rope: RopeSpec, length: Length = None) -> Tensor:
        import torch

        for knob in ("short_factor", "long_factor"):
            factors = len(getattr(self, knob))
            if factors != rope.dim // 2:
                raise PosencError(
                    f"longrope: {knob} has {factors} numbers, but this model rotates {rope.dim // 2} pairs of features."
                )
        default = rope.default_inv_freq()
        short = default / torch.tensor(self.short_factor, dtype=torch.float64)
        long = default / torch.tensor(self.long_factor, dtype=torch.float64)
        if isinstance(length, torch.Tensor):
            past = length > rope.original_max_position_embeddings
            return torch.where(past, long.to(length.device), short.to(length.device))
        return long if (length or 0) > rope.original_max_position_embeddings else short

    def cos_sin_factor(self, rope: RopeSpec, length: Length = None) -> float | Tensor:
        import torch

        trained = rope.original_max_position_embeddings
        factor = self.attention_factor
        if factor is None:
            grown = math.log(self.scale) / math.log(trained) if self.scale > 1 else 0.0
            factor = math.sqrt(1 + grown)
        short = factor if self.short_mscale is None else self.short_mscale
        long = factor if self.long_mscale is None else self.long_mscale
        if isinstance(length, torch.Tensor):
            return short if short == long else torch.where(length > trained, long, short)
        return long if (length or 0) > trained else short

    def rope_parameters(self, rope: RopeSpec) -> dict[str, Any]:
        knobs = ("attention_factor", "short_mscale", "long_mscale")
        given = {knob: value for knob, value in self.options().items() if knob in knobs}
        return {
            "rope_type": "longrope",
            "short_factor": list(self.short_factor),
            "long_factor": list(self.long_factor),
            "factor": float(self.scale),
            "original_max_position_embeddings": rope.original_max_position_embeddings,
            **given,
        }
