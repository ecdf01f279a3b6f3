"""Rotating queries and keys a little further than the model has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Where in a head's features the rotated pairs lie.

    Attributes:
        start: The first rotated feature.
        dim: Number of rotated features d; even.
        interleaved: Pair i is features 2i and 2i+1 (GPT-J) instead of i and i + d/2 (Llama).
        sign: 1; -1 where the model turns the other way.
    """

    start: int
    dim: int
    interleaved: bool
    sign: int = 1


@dataclass(frozen=True, eq=False)
class Rotation:
    """The rotation of one attention layer.

    Attributes:
        inv_freq: The frequencies in force, shape (d/2,), float32, radians per token.
        layout: Where the pairs lie.
        factor: What cos and sin are multiplied by (`attention_scaling` in transformers).
    """

    inv_freq: Tensor
    layout: Layout
    factor: float = 1.0

    def turn(self, x: Tensor, positions: Tensor, inv_freq: Tensor | None = None) -> Tensor:
        """Rotates by so many tokens, on top of what x has been rotated by.

        Args:
            x: Shape (batch, heads, length, head_dim).
            positions: Shape (batch or 1, length or 1); may be negative or fractional.
            inv_freq: Other frequencies than the layer's own, shape (d/2,).

        Returns:
            Of the shape and dtype of x; angles, sines and products are at least float32.
        """
        table = self.inv_freq if inv_freq is None else inv_freq
        exact = torch.promote_types(x.dtype, torch.float32)
        angles = positions[:, None, :, None].to(exact) * table.to(x.device, exact)
        return self.apply(x, angles.cos(), angles.sin() * self.layout.sign)

    def apply(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Turns every pair by the angle with this cosine and sine.

        Args:
            x: Shape (batch, heads, length, head_dim).
            cos: Broadcasts with (batch, heads, length, d/2), as does `sin`.
            sin: See `cos`.
        """
        first, second = self.pairs(x, cos.dtype)
        return self.joined(x, first * cos - second * sin, second * cos + first * sin)

    def pairs(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The first and the second feature of every pair, each of shape (..., d/2)."""
        layout = self.layout
        rotated = x[..., layout.start : layout.start + layout.dim].to(dtype)
        if layout.interleaved:
            return rotated[..., ::2], rotated[..., 1::2]
        return rotated[..., : layout.dim // 2], rotated[..., layout.dim // 2 :]

    def joined(self, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """Puts pairs back between the features of x that are not rotated."""
        layout = self.layout
        pairs = torch.stack((first, second), -1) if layout.interleaved else None
        rotated = torch.cat((first, second), -1) if pairs is None else pairs.flatten(-2)
        rotated = rotated.to(x.dtype)
        if layout.dim == x.shape[-1]:
            return rotated
        before, after = x[..., : layout.start], x[..., layout.start + layout.dim :]
        return torch.cat((before, rotated, after), -1)
