"""xPos: rotary position embedding with a decay per pair of features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.methods.base import Method, check_count
from hf_posenc.methods.log_n import real


@dataclass(frozen=True, kw_only=True)
class XPos(Method):
    """xPos (Sun et al. 2022, arXiv 2212.10554): RoPE whose pairs decay with the distance.

    Pair i of the score is multiplied by `z_i ** ((m - n) / scale_base)`, `z_i = (2i/d + 0.4) / 1.4`,
    after the model's own rotation.

    Args:
        scale_base: Tokens over which the decay is z_i.
    """

    name: ClassVar[str] = "xpos"
    summary: ClassVar[str] = "RoPE whose pairs of features decay with the distance"
    source: ClassVar[str] = "Sun et al. 2022, arXiv 2212.10554; torchscale"
    needs: ClassVar[str] = "training"
    seam: ClassVar[str] = "attention"
    follows_text: ClassVar[bool] = True

    scale_base: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "scale_base")

    def pair_scale(self, dim: int) -> Tensor:
        """The `z_i` below 1, shape (dim/2,), float64.

        Args:
            dim: The rotary dimension d.
        """
        return (torch.arange(0, dim, 2, dtype=torch.float64) / dim + 0.4) / 1.4

    def query_scale(self, m: Tensor, dim: int, origin: int | Tensor) -> Tensor:
        """The factor on each pair of the query at m, `z_i ** ((m - origin) / scale_base)`.

        Shape (*m.shape, dim/2), float64. Only the product with `key_scale` of the same origin means
        something. With the origin at the first query of a chunk of C tokens, no factor exceeds
        `3.5 ** (C / scale_base)`, whatever the length of the text; with the origin at 0 the keys'
        overflow.

        Args:
            m: Positions, an integer tensor of any shape.
            dim: The rotary dimension d.
            origin: The position from which both count.
        """
        exponents = real(m - origin)[..., None] / self.scale_base
        return self.pair_scale(dim).to(exponents) ** exponents

    def key_scale(self, n: Tensor, dim: int, origin: int | Tensor) -> Tensor:
        """The factor on each pair of the key at n, `z_i ** ((origin - n) / scale_base)`; see `query_scale`."""
        return self.query_scale(2 * origin - n, dim, origin)
