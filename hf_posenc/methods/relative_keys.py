"""Relative keys: Shaw's clipped embeddings and Transformer-XL's sinusoidal ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hf_posenc.errors import PosencError
from hf_posenc.methods.base import count, real, switch
from hf_posenc.methods.bias import RelativeKeys, Weights

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Shaw(RelativeKeys):
    """Relative position representations (Shaw et al. 2018, arXiv 1803.02155), those of the keys.

    `q . E[min(m - n, K)] * scaling` is added to the score. The table of K + 1 embeddings is shared by
    all heads and zero at first.

    Args:
        max_distance: The distance K in tokens from which all keys share an embedding.
    """

    name = "shaw"
    summary = "a learned embedding per distance beside the keys"
    source = "Shaw et al. 2018, arXiv 1803.02155"

    max_distance: int = field(default=16, metadata=count())

    def initial(self, heads: int, head_dim: int, original: int) -> dict[str, Tensor]:
        import torch

        return {"table": torch.zeros(self.max_distance + 1, head_dim)}

    def relative(self, distance: Tensor, heads: int, head_dim: int, parameters: Weights) -> Tensor:
        import torch

        rows = distance.clamp(0, self.max_distance).to(torch.int64)
        return parameters["table"][rows][None]

    def constant_from(self) -> int:
        return self.max_distance


@dataclass(frozen=True, kw_only=True)
class TransformerXL(RelativeKeys):
    """Transformer-XL's relative attention (Dai et al. 2019, arXiv 1901.02860).

    The score is `((q + u).k + (q + v).(W R_r)) * scaling` with R_r the sinusoidal embedding of the
    distance, `[sin(r f), cos(r f)]` with `f_i = 10000 ** (-2i/head_dim)`. Each head has its own u, v
    and W, zeros at first. (In the paper R_r is as wide as the model; here as wide as a head.)

    Args:
        shared: One u and v of a head for all layers, as in the paper; W stays each layer's own there too.
    """

    name = "transformer_xl"
    aliases = ("xl",)
    summary = "sinusoidal embeddings of the distance through a learned map"
    source = "Dai et al. 2019, arXiv 1901.02860"

    shared: bool = field(default=False, metadata=switch())

    @property
    def shared_parameters(self) -> tuple[str, ...]:
        return ("u", "v") if self.shared else ()

    def initial(self, heads: int, head_dim: int, original: int) -> dict[str, Tensor]:
        import torch

        if head_dim % 2:
            raise PosencError(f"{self.name} needs an even head_dim, not {head_dim}.")
        return {
            "u": torch.zeros(heads, head_dim),
            "v": torch.zeros(heads, head_dim),
            "weight": torch.zeros(heads, head_dim, head_dim),
        }

    def relative(self, distance: Tensor, heads: int, head_dim: int, parameters: Weights) -> Tensor:
        import torch

        weight = parameters["weight"]
        exponents = torch.arange(0, head_dim, 2, device=distance.device) / head_dim
        # The angle in float64: at a hundred thousand tokens float32 is off by a hundredth of a turn.
        angles = real(distance)[..., None] * 10_000 ** -real(exponents)
        sinusoid = torch.cat((angles.sin(), angles.cos()), dim=-1).to(weight.dtype)
        return torch.einsum("...e,hde->h...d", sinusoid, weight)

    def content_bias(self, parameters: Weights) -> Tensor:
        return parameters["u"]

    def position_bias(self, parameters: Weights) -> Tensor:
        return parameters["v"]
