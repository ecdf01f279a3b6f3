"""RoPE with a bias on queries and keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.methods.base import Method
from hf_posenc.methods.bias import Weights


@dataclass(frozen=True, kw_only=True)
class RopeBias(Method):
    """RoPE with learned biases (Su 2023, kexue.fm 9577): the score is `(q + a) R (k + b)`.

    a and b, a vector per head, are added before the rotation R and start as zeros. `a R b` alone is a
    score that decays with the distance, which helps past the trained length.
    """

    name: ClassVar[str] = "rope_bias"
    summary: ClassVar[str] = "a learned vector on queries and keys before the rotation"
    source: ClassVar[str] = "Su 2023, kexue.fm 9577"
    needs: ClassVar[str] = "training"
    seam: ClassVar[str] = "attention"
    follows_text: ClassVar[bool] = True
    trainable: ClassVar[bool] = True

    def parameters_for(
        self, heads: int, key_heads: int, head_dim: int, original: int
    ) -> dict[str, Tensor]:
        return self.initial(heads, key_heads, head_dim)

    def initial(self, heads: int, key_heads: int, head_dim: int) -> dict[str, Tensor]:
        """Return the parameters to train, float32, zeros: a of shape (heads, head_dim), b (key_heads, head_dim).

        Args:
            heads: Query heads.
            key_heads: Key heads.
            head_dim: Width of a head, in features.
        """
        return {"a": torch.zeros(heads, head_dim), "b": torch.zeros(key_heads, head_dim)}

    def shifted_query(self, query: Tensor, parameters: Weights) -> Tensor:
        """Return `q + a`, for unrotated queries of shape (..., heads, length, head_dim)."""
        return query + parameters["a"][:, None].to(query.dtype)

    def shifted_key(self, key: Tensor, parameters: Weights) -> Tensor:
        """Return `k + b`, for unrotated keys of shape (..., key_heads, length, head_dim)."""
        return key + parameters["b"][:, None].to(key.dtype)
