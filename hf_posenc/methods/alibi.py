"""ALiBi: a linear penalty on the distance."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.methods.base import number
from hf_posenc.methods.bias import DistanceBias, Weights, per_head


@dataclass(frozen=True, kw_only=True)
class ALiBi(DistanceBias):
    """Attention with linear biases (Press et al. 2021, arXiv 2108.12409): `-slope_h * (m - n)`.

    The slopes are `2 ** (-8 (h+1) / H)` for a power of two of heads H; else those of the power of two
    P below H, then every second slope of 2P. They are not trained. Dividing them by the scale
    interpolates a model that was trained with ALiBi (arXiv 2310.13017).

    Args:
        scale: Divides the slopes: target context as a multiple of the one that ALiBi was trained with.
    """

    name: ClassVar[str] = "alibi"
    summary: ClassVar[str] = "a penalty in proportion to the distance, a slope for every head"
    source: ClassVar[str] = (
        "Press et al. 2021, arXiv 2108.12409; Al-Khateeb et al. 2023, arXiv 2310.13017"
    )
    needs: ClassVar[str] = "training, or a model that was trained with it"
    follows_text: ClassVar[bool] = False

    scale: float = field(default=1.0, metadata=number(1))

    def slopes(self, heads: int) -> Tensor:
        """Return the slopes, shape (heads,), float64, in score per token; divided by the scale."""
        below = 2 ** math.floor(math.log2(heads))
        exponents = [8 * (h + 1) / below for h in range(below)]
        exponents += [8 * (2 * h + 1) / (2 * below) for h in range(heads - below)]
        return 2.0 ** -torch.tensor(exponents, dtype=torch.float64) / self.scale

    def bias(
        self,
        distance: Tensor,
        heads: int,
        parameters: Weights,
        query_position: Tensor | None = None,
    ) -> Tensor:
        slopes = self.slopes(heads).to(distance.dtype).to(distance.device)
        return -per_head(slopes, distance) * distance

    def horizon(self, drop: Tensor, heads: int, parameters: Weights | None = None) -> Tensor:
        return drop / self.slopes(heads).to(drop.dtype).to(drop.device)
