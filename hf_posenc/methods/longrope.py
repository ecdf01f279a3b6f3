"""LongRoPE: a searched factor for every pair, one list up to the original length and one past it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_posenc.errors import PosencError
from hf_posenc.methods.base import Length, LengthDependent, check_range
from hf_posenc.rope import RopeSpec


@dataclass(frozen=True, kw_only=True)
class LongRoPE(LengthDependent):
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753): a divisor of its own for every pair.

    `f_i / short_factor_i` for texts of up to `L` tokens, `f_i / long_factor_i` past it.

    cos and sin are multiplied by `sqrt(1 + ln s / ln L)`. Also the form in which any static table
    travels to engines that know no other: both lists `f_i / f'_i`.

    Args:
        short_factor: d/2 divisors for sequences of at most `L` tokens.
        long_factor: d/2 divisors for longer ones.
        scale: Target context as a multiple `s` of the original one.
        attention_factor: The factor on cos and sin, given outright.
        short_mscale: The factor up to `L` (Phi-3.5-MoE); wins over `attention_factor`.
        long_mscale: The factor past `L`; wins over `attention_factor`.
        update: What the length is: `"row"`, that of each query's position; `"request"`, each batch row's
            own; `"sequence"`, the longest row of the batch, which is what LongRoPE models are
            trained for and the default here.
        bucket: By how many tokens at once it moves on in the first two; half of `L` by default.
    """

    name: ClassVar[str] = "longrope"
    aliases: ClassVar[tuple[str, ...]] = ("su",)
    summary: ClassVar[str] = "a searched divisor for every pair"
    source: ClassVar[str] = "Ding et al. 2024, arXiv 2402.13753"
    needs: ClassVar[str] = "searched factors; fine-tuning past 8 times the context"

    short_factor: Sequence[float]
    long_factor: Sequence[float]
    scale: float = 1.0
    attention_factor: float | None = None
    short_mscale: float | None = None
    long_mscale: float | None = None
    update: str = "sequence"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "scale", 1)
        for knob in ("short_factor", "long_factor"):
            given = getattr(self, knob)
            if (
                isinstance(given, str)
                or not isinstance(given, Sequence)
                or not given
                or not all(isinstance(f, int | float) and 0 < f < math.inf for f in given)
            ):
                raise PosencError(
                    f"longrope: {knob} is a list of positive numbers, one for each pair of features, "
                    f"not {given!r}."
                )
            # A tuple, so that the frozen method stays hashable.
            object.__setattr__(self, knob, tuple(float(factor) for factor in given))

    def inv_freq(self, rope: RopeSpec, length: Length = None) -> Tensor:
        default = rope.default_inv_freq()
        for knob in ("short_factor", "long_factor"):
            given = len(getattr(self, knob))
            if given != rope.dim // 2:
                raise PosencError(
                    f"longrope: {knob} has {given} numbers, but this model rotates {rope.dim // 2} pairs of features."
                )
        short = default / torch.tensor(self.short_factor, dtype=torch.float64)
        long = default / torch.tensor(self.long_factor, dtype=torch.float64)
        if isinstance(length, Tensor):
            past = length > rope.original_max_position_embeddings
            return torch.where(past, long.to(length.device), short.to(length.device))
        return (
            long if length is not None and length > rope.original_max_position_embeddings else short
        )

    def cos_sin_factor(self, rope: RopeSpec, length: Length = None) -> float | Tensor:
        trained = rope.original_max_position_embeddings
        default = self.attention_factor
        if default is None:
            default = (
                math.sqrt(1 + math.log(self.scale) / math.log(trained)) if self.scale > 1 else 1.0
            )
        short = default if self.short_mscale is None else self.short_mscale
        long = default if self.long_mscale is None else self.long_mscale
        if isinstance(length, Tensor) and short != long:
            past = length > trained
            return torch.where(past, long, short)
        if length is not None and not isinstance(length, Tensor) and length > trained:
            return long
        return short

    def rope_parameters(self, rope: RopeSpec) -> dict[str, Any]:
        parameters = {
            "rope_type": "longrope",
            "short_factor": list(self.short_factor),
            "long_factor": list(self.long_factor),
            "factor": float(self.scale),
            "original_max_position_embeddings": rope.original_max_position_embeddings,
        }
        knobs = {
            knob: getattr(self, knob)
            for knob in ("attention_factor", "short_mscale", "long_mscale")
        }
        return {**parameters, **{knob: value for knob, value in knobs.items() if value is not None}}
