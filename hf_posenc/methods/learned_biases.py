"""Biases learned as a whole: T5's table over buckets of distances, FIRE's small network."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_posenc.errors import PosencError
from hf_posenc.methods.base import choice, count, number, real, switch
from hf_posenc.methods.bias import DistanceBias, Weights

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class T5(DistanceBias):
    """T5's relative position bias (Raffel et al. 2019, arXiv 1910.10683), causal.

    A table of `buckets` x heads, zeros at first. The first half of the buckets holds one distance each,
    the other half logarithmically wider ranges up to `max_distance`; all beyond share the last.

    A model that was trained with such tables keeps them: there the method only has `scale` and `mode`.

    Args:
        scale: Target context as a multiple s of the one that the table was trained with.
        mode: `"distance"`: distances r are read as `floor(r / s)`. `"max_distance"`: `max_distance` is multiplied by s,
            so that exact buckets stay and the others widen.
        buckets: Rows of the table.
        max_distance: Distance in tokens up to which the ranges are computed; the last one has no end.
        shared: One table for all layers, as in T5.
    """

    name = "t5"
    aliases = ("t5_bias",)
    summary = "a learned bias per bucket of distances"
    source = "Raffel et al. 2019, arXiv 1910.10683"
    needs = "training, or a model that was trained with it"
    trainable = True

    scale: float = field(default=1.0, metadata=number(1))
    mode: str = field(default="distance", metadata=choice("distance", "max_distance"))
    buckets: int = field(default=32, metadata=count(2))
    max_distance: int = field(default=128, metadata=count())
    shared: bool = field(default=False, metadata=switch())

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_distance <= self.buckets // 2:
            raise PosencError(
                f"{self.name}: max_distance ({self.max_distance}) is above {self.buckets // 2}, the "
                "distances that have a bucket each (half of the buckets)."
            )

    @property
    def shared_parameters(self) -> tuple[str, ...]:
        return ("table",) if self.shared else ()

    def initial(self, heads: int, original: int) -> dict[str, Tensor]:
        import torch

        return {"table": torch.zeros(self.buckets, heads)}

    def bucket(self, distance: Tensor) -> Tensor:
        """Return the row of the table for each distance, of its shape, int64."""
        import torch

        exact, longest = self.buckets // 2, self.max_distance
        if self.mode == "max_distance":
            longest = round(longest * self.scale)
        elif self.scale != 1:
            distance = (real(distance) / self.scale).floor()
        # In float32 and in transformers' order, so that a trained table is read by the same rows.
        growth = torch.log(distance.clamp(min=1).float() / exact)
        steps = growth / math.log(longest / exact) * (self.buckets - exact)
        far = (exact + steps.to(torch.int64)).clamp(max=self.buckets - 1)
        return torch.where(distance < exact, distance.to(torch.int64), far)

    def bias(self, distance: Tensor, heads: int, parameters: Weights, *_: Any) -> Tensor:
        return parameters["table"][self.bucket(distance)].movedim(-1, 0)


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

    name = "fire"
    summary = "a learned function of the distance over the query's position"
    source = "Li et al. 2023, arXiv 2310.04418"
    trainable = True
    of_query = True

    hidden: int = field(default=32, metadata=count())
    threshold: float = field(default=512.0, metadata=number(0, above=True))
    c: float = field(default=0.1, metadata=number(0, above=True))

    def initial(self, heads: int, original: int) -> dict[str, Tensor]:
        import torch

        def uniform(bound: float, *shape: int) -> Tensor:
            return (2 * torch.rand(shape) - 1) * bound

        narrow = 1 / math.sqrt(self.hidden)
        return {
            "c": torch.tensor([float(self.c)]),  # FSDP shards no scalar
            "multiplier": torch.ones(1),
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
        import torch
        import torch.nn.functional as F

        if query_position is None:
            raise PosencError(f"{self.name} depends on the query's position: give query_position.")
        c, multiplier = (parameters[name].squeeze() for name in ("c", "multiplier"))
        threshold = (multiplier * self.threshold).abs()
        longest = torch.maximum(query_position.to(distance.dtype), threshold.to(distance.dtype))
        # |c x|, as in the authors' code: a c that training made negative must not end in a logarithm of less than 0.
        whole = torch.log1p((c * longest).abs())
        tiny = torch.finfo(whole.dtype).tiny
        fraction = torch.log1p((c * distance).abs()) / whole.clamp(min=tiny)
        weight_in, weight_out = parameters["weight_in"], parameters["weight_out"]
        hidden = F.linear(fraction[..., None].to(weight_in.dtype), weight_in, parameters["bias_in"])
        return F.linear(hidden.relu(), weight_out, parameters["bias_out"]).movedim(-1, 0)
