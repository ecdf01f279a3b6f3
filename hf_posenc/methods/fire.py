"""FIRE: a small network of the distance as a fraction of the query's position."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_posenc.errors import PosencError
from hf_posenc.methods.base import count, number
from hf_posenc.methods.bias import DistanceBias, Weights


@dataclass(frozen=True, kw_only=True)
class FIRE(DistanceBias):
    """FIRE (Li et al. 2023, arXiv 2310.04418): `MLP(psi(m - n) / psi(max(m, T)))`, `psi(x) = ln(c x + 1)`.

    Every distance is read as a fraction of the query's own position, so that no input of the network
    is new. The MLP has one hidden layer with ReLU, initialised as `torch.nn.Linear`;
    c and T (as a multiplier of its initial value, as in the authors' code) are learned too.

    Args:
        hidden: Width of the hidden layer.
        threshold: Initial T in tokens: up to it, positions count as T.
        c: Initial c.
    """

    name: ClassVar[str] = "fire"
    summary: ClassVar[str] = "a learned function of the distance over the query's position"
    source: ClassVar[str] = "Li et al. 2023, arXiv 2310.04418"
    trainable: ClassVar[bool] = True
    of_query: ClassVar[bool] = True

    hidden: int = field(default=32, metadata=count())
    threshold: float = field(default=512.0, metadata=number(0, above=True))
    c: float = field(default=0.1, metadata=number(0, above=True))

    def initial(self, heads: int, original: int) -> dict[str, Tensor]:
        def uniform(bound: float, *shape: int) -> Tensor:
            return (2 * torch.rand(shape) - 1) * bound

        narrow = 1 / math.sqrt(self.hidden)
        return {
            "c": torch.tensor(float(self.c)),
            "multiplier": torch.tensor(1.0),
            "weight_in": uniform(1.0, self.hidden, 1),
            "bias_in": uniform(1.0, self.hidden),
            "weight_out": uniform(narrow, heads, self.hidden),
            "bias_out": uniform(narrow, heads),
        }

    def bias(
        self,
        distance: Tensor,
        heads: int,
        parameters: Weights,
        query_position: Tensor | None = None,
    ) -> Tensor:
        if query_position is None:
            raise PosencError(f"{self.name} depends on the query's position: give query_position.")
        c = parameters["c"]
        threshold = (parameters["multiplier"] * self.threshold).abs()
        longest = torch.maximum(query_position.to(distance.dtype), threshold.to(distance.dtype))
        # |c x|, as in the authors' code: a c that training made negative must not end in a logarithm of less than 0.
        whole = torch.log1p((c * longest).abs())
        fraction = torch.log1p((c * distance).abs()) / whole.clamp(
            min=torch.finfo(whole.dtype).tiny
        )
        weight_in, weight_out = parameters["weight_in"], parameters["weight_out"]
        hidden = F.linear(fraction[..., None].to(weight_in.dtype), weight_in, parameters["bias_in"])
        return F.linear(hidden.relu(), weight_out, parameters["bias_out"]).movedim(-1, 0)
