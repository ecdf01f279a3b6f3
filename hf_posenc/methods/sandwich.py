"""Sandwich: the inner product of sinusoidal position embeddings as a bias."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.errors import PosencError
from hf_posenc.methods.base import count
from hf_posenc.methods.bias import DistanceBias, Weights, per_head
from hf_posenc.methods.log_n import real


@dataclass(frozen=True, kw_only=True)
class Sandwich(DistanceBias):
    """Sandwich (Chi et al. 2022, arXiv 2212.10356): a decaying sum of cosines of the distance.

    `(sum_i cos((m - n) / 10000 ** (2i/D)) - D/2) / (8 (h+1) / H)` for `i = 1 .. D/2`: the inner product
    of two sinusoidal embeddings, shifted to 0 at distance 0 and divided by a slope per head.

    Args:
        dim: Width D of the sinusoidal embeddings; independent of the model's own width.
    """

    name: ClassVar[str] = "sandwich"
    summary: ClassVar[str] = "a decaying sum of cosines of the distance"
    source: ClassVar[str] = "Chi et al. 2022, arXiv 2212.10356"

    dim: int = field(default=128, metadata=count(2))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim % 2:
            raise PosencError(f"{self.name}: dim is even, not {self.dim}.")

    def bias(
        self,
        distance: Tensor,
        heads: int,
        parameters: Weights,
        query_position: Tensor | None = None,
    ) -> Tensor:
        pairs = self.dim // 2
        exact = real(distance)
        below_zero = torch.zeros_like(exact)
        for i in range(1, pairs + 1):  # one pair at a time: no scratch of D/2 times the distances
            below_zero += torch.cos(exact / 10_000 ** (2 * i / self.dim)) - 1
        slopes = 8 * real(torch.arange(1, heads + 1, device=exact.device)) / heads
        return (below_zero / per_head(slopes, distance)).to(distance.dtype)
