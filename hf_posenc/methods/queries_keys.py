"""Methods that change queries and keys themselves: xPos, and RoPE with a bias."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hf_posenc.methods.base import Method, count, real

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class XPos(Method):
    """xPos (Sun et al. 2022, arXiv 2212.10554): RoPE whose pairs decay with the distance.

    Pair i of the score is multiplied by `z_i ** ((m - n) / scale_base)`, `z_i = (2i/d + 0.4) / 1.4`,
    after the model's own rotation.

    Args:
        scale_base: Tokens over which the decay is z_i.
    """

    name = "xpos"
    summary = "RoPE whose pairs of features decay with the distance"
    source = "Sun et al. 2022, arXiv 2212.10554; torchscale"
    needs = "training"
    seam = "attention"
    follows_text = True

    scale_base: int = field(default=512, metadata=count())

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
        import torch

        exponents = real(m - origin)[..., None] / self.scale_base
        pairs = (real(torch.arange(0, dim, 2, device=exponents.device)) / dim + 0.4) / 1.4
        return pairs**exponents

    def key_scale(self, n: Tensor, dim: int, origin: int | Tensor) -> Tensor:
        """Return the factor on each pair of the key at n, `z_i ** ((origin - n) / scale_base)`."""
        return self.query_scale(2 * origin - n, dim, origin)


@dataclass(frozen=True, kw_only=True)
class RopeBias(Method):
    """RoPE with learned biases (Su 2023, kexue.fm 9577): the score is `(q + a) R (k + b)`.

    a and b, a vector per head, are added before the rotation R and start as zeros. `a R b` alone is a
    score that decays with the distance, which helps past the trained length.
    """

    name = "rope_bias"
    summary = "a learned vector added to queries and keys before the rotation"
    source = "Su 2023, kexue.fm 9577"
    needs = "training"
    seam = "attention"
    follows_text = True
    trainable = True

    def parameters_for(
        self, heads: int, key_heads: int, head_dim: int, original: int
    ) -> dict[str, Tensor]:
        """Return a of shape (heads, head_dim) and b of shape (key_heads, head_dim), float32, zeros."""
        import torch

        return {"a": torch.zeros(heads, head_dim), "b": torch.zeros(key_heads, head_dim)}
