"""The ways in which pairs of a query and a key are scored: by band, by the length in force, with factors or offsets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hf_posenc.methods import Band, LengthDependent, XPos
from hf_posenc.rope import RopeSpec

# Rotating queries and keys a little further than the model has.


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


Positions = Callable[[Tensor], Tensor]


class Branch(Protocol):
    """One way in which pairs of a query and a key are scored."""

    def query(self, x: Tensor, m: Tensor, origin: Tensor) -> Tensor:
        """The queries, shape (batch, heads, queries, head_dim), at positions m, (batch or 1, queries)."""

    def key(self, x: Tensor, n: Tensor, origin: Tensor) -> Tensor:
        """The same for keys at positions n."""

    def contains(self, m: Tensor, n: Tensor) -> Tensor | None:
        """The pairs it scores, for positions that broadcast; `None`: all."""

    @property
    def shares_cache(self) -> bool:
        """Whether keys are read as they are cached."""


@dataclass(frozen=True, eq=False)
class PlainBranch:
    """Queries and keys as they come."""

    def query(self, x: Tensor, m: Tensor, origin: Tensor) -> Tensor:
        return x

    def key(self, x: Tensor, n: Tensor, origin: Tensor) -> Tensor:
        return x

    def contains(self, m: Tensor, n: Tensor) -> Tensor | None:
        return None

    @property
    def shares_cache(self) -> bool:
        return True


@dataclass(frozen=True, eq=False)
class BandBranch:
    """The positions of one band."""

    rotation: Rotation
    band: Band
    cached: Positions
    keeps_query: bool
    keeps_key: bool

    def query(self, x: Tensor, m: Tensor, origin: Tensor) -> Tensor:
        return x if self.keeps_query else self._turned(x, m, self.band.query_position)

    def key(self, x: Tensor, n: Tensor, origin: Tensor) -> Tensor:
        return x if self.keeps_key else self._turned(x, n, self.band.key_position)

    def contains(self, m: Tensor, n: Tensor) -> Tensor | None:
        return self.band.contains(m, n)

    def _turned(self, x: Tensor, positions: Tensor, wanted: Positions) -> Tensor:
        return self.rotation.turn(x, wanted(positions) - self.cached(positions))

    @property
    def shares_cache(self) -> bool:
        return self.keeps_key


@dataclass(frozen=True, eq=False)
class MovingBranch:
    """Frequencies of the length in force; `origin` is that length."""

    rotation: Rotation
    method: LengthDependent
    spec: RopeSpec

    def query(self, x: Tensor, m: Tensor, origin: Tensor) -> Tensor:
        # Cos and sin of both sides carry the factor; all of it lands on the query.
        factor = (self.method.cos_sin_factor(self.spec, origin) / self.rotation.factor) ** 2
        turned = self.key(x, m, origin)
        if isinstance(factor, Tensor):
            factor = factor.to(torch.promote_types(x.dtype, torch.float32))
        return (turned * factor).to(x.dtype)

    def key(self, x: Tensor, n: Tensor, origin: Tensor) -> Tensor:
        wanted = self.method.inv_freq(self.spec, origin).float()
        if self.spec.order is not None:
            wanted = wanted[self.spec.order.to(wanted.device)]
        moved = wanted - self.rotation.inv_freq.to(wanted.device)
        if not torch.compiler.is_compiling() and not moved.any():
            return x
        return self.rotation.turn(x, n, moved)

    def contains(self, m: Tensor, n: Tensor) -> Tensor | None:
        return None

    @property
    def shares_cache(self) -> bool:
        return False


@dataclass(frozen=True, eq=False)
class XPosBranch:
    """The factor of xPos, with exponents counted from `origin` so that they stay small."""

    rotation: Rotation
    method: XPos

    def query(self, x: Tensor, m: Tensor, origin: Tensor) -> Tensor:
        return self._scaled(x, self.method.query_scale(m, self.rotation.layout.dim, origin))

    def key(self, x: Tensor, n: Tensor, origin: Tensor) -> Tensor:
        return self._scaled(x, self.method.key_scale(n, self.rotation.layout.dim, origin))

    def contains(self, m: Tensor, n: Tensor) -> Tensor | None:
        return None

    @property
    def shares_cache(self) -> bool:
        return False

    def _scaled(self, x: Tensor, factor: Tensor) -> Tensor:
        factor = factor[:, None].to(torch.promote_types(x.dtype, torch.float32))
        first, second = self.rotation.pairs(x, factor.dtype)
        return self.rotation.joined(x, first * factor, second * factor)


@dataclass(frozen=True, eq=False)
class OffsetBranch:
    """`(q + a) R (k + b)`; q and k come rotated, so a and b are rotated to where they are added."""

    rotation: Rotation
    parameters: Mapping[str, Tensor]

    def query(self, x: Tensor, m: Tensor, origin: Tensor) -> Tensor:
        return self._shifted(x, m, "a")

    def key(self, x: Tensor, n: Tensor, origin: Tensor) -> Tensor:
        return self._shifted(x, n, "b")

    def contains(self, m: Tensor, n: Tensor) -> Tensor | None:
        return None

    @property
    def shares_cache(self) -> bool:
        return False

    def _shifted(self, x: Tensor, positions: Tensor, name: str) -> Tensor:
        offset = self.parameters[name].to(torch.promote_types(x.dtype, torch.float32))
        every = offset[None, :, None].expand(len(positions), -1, positions.shape[1], -1)
        return x + self.rotation.turn(every, positions).to(x.dtype)
