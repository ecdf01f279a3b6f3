"""xPos: rotary position embedding with a decay per pair of features."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.methods.base import Method, count
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

    scale_base: int = field(default=512, metadata=count())

    def pair_scale(self, dim: int) -> Tensor:
        """Return the `z_i` below 1, shape (dim/2,), float64.

        Args:
            dim: The rotary dimension d.
        """
        return (torch.arange(0, dim, 2, dtype=torch.float64) / dim + 0.4) / 1.4

    def query_scale(self, m: Tensor, dim: int, origin: int | Tensor) -> Tensor:
        """Return the factor on each pair of the query at m, `z_i ** ((m - origin) / scale_base)`.

        Shape (*m.shape, dim/2), float64. Only its product with the `key_scale` of the same origin has a
        meaning. With the origin at the first query of a chunk of C tokens, no factor exceeds
        `3.5 ** (C / scale_base)` at any length of text; with the origin at 0 the keys' overflow.

        Args:
            m: Positions, an integer tensor of any shape.
            dim: The rotary dimension d.
            origin: The position from which both count.
        """
        exponents = real(m - origin)[..., None] / self.scale_base
        return self.pair_scale(dim).to(exponents) ** exponents

    def key_scale(self, n: Tensor, dim: int, origin: int | Tensor) -> Tensor:
        """Return the factor on each pair of the key at n, `z_i ** ((origin - n) / scale_base)`."""
        return self.query_scale(2 * origin - n, dim, origin)
