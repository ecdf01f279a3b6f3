"""T5: a learned bias per bucket of distances."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.errors import PosencError
from hf_posenc.methods.base import count
from hf_posenc.methods.bias import DistanceBias, Weights


@dataclass(frozen=True, kw_only=True)
class T5(DistanceBias):
    """T5's relative position bias (Raffel et al. 2019, arXiv 1910.10683), causal.

    A table of `buckets` x heads, zeros at first. The first half of the buckets holds one distance each,
    the other half logarithmically wider ranges up to `max_distance`; all beyond share the last.

    Args:
        buckets: Rows of the table.
        max_distance: Distance in tokens from which all keys share a bucket.
    """

    name: ClassVar[str] = "t5"
    aliases: ClassVar[tuple[str, ...]] = ("t5_bias",)
    summary: ClassVar[str] = "a learned bias per bucket of distances"
    source: ClassVar[str] = "Raffel et al. 2019, arXiv 1910.10683"
    trainable: ClassVar[bool] = True

    buckets: int = field(default=32, metadata=count(2))
    max_distance: int = field(default=128, metadata=count())

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_distance <= self.buckets // 2:
            raise PosencError(
                f"{self.name}: max_distance ({self.max_distance}) is above {self.buckets // 2}, the "
                "distances that have a bucket each (half of the buckets)."
            )

    def initial(self, heads: int, original: int) -> dict[str, Tensor]:
        return {"table": torch.zeros(self.buckets, heads)}

    def bucket(self, distance: Tensor) -> Tensor:
        """Return the row of the table for each distance, of its shape, int64."""
        exact = self.buckets // 2
        # In float32 and in transformers' order, so that a trained table is read by the same rows.
        growth = torch.log(distance.clamp(min=1).float() / exact)
        steps = growth / math.log(self.max_distance / exact) * (self.buckets - exact)
        far = (exact + steps.to(torch.int64)).clamp(max=self.buckets - 1)
        return torch.where(distance < exact, distance.to(torch.int64), far)

    def bias(
        self,
        distance: Tensor,
        heads: int,
        parameters: Weights,
        query_position: Tensor | None = None,
    ) -> Tensor:
        return parameters["table"][self.bucket(distance)].movedim(-1, 0)
