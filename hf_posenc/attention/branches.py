"""Ways to score a pair of query and key: by band, by the length in force, with factors or offsets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_posenc.methods import Band, LengthDependent, XPos
from hf_posenc.rope import RopeSpec

Positions = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Layout:
    """The place of the rotated pairs in a head's features.

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
        layout: The place of the pairs.
        factor: The factor on cos and sin (`attention_scaling` in transformers).
    """

    inv_freq: Tensor
    layout: Layout
    factor: float = 1.0

    def turn(self, x: Tensor, positions: Tensor, inv_freq: Tensor | None = None) -> Tensor:
        """Rotate by so many tokens, in addition to the rotation that x already has.

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
        cos, sin = angles.cos(), angles.sin() * self.layout.sign
        first, second = self.pairs(x, exact)
        return self.joined(x, first * cos - second * sin, second * cos + first * sin)

    def pairs(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the first and the second feature of every pair, each of shape (..., d/2)."""
        layout = self.layout
        rotated = x[..., layout.start : layout.start + layout.dim].to(dtype)
        if layout.interleaved:
            return rotated[..., ::2], rotated[..., 1::2]
        return rotated[..., : layout.dim // 2], rotated[..., layout.dim // 2 :]

    def joined(self, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """Return x with other pairs; the features that are not rotated stay."""
        layout = self.layout
        if layout.interleaved:
            rotated = torch.stack((first, second), -1).flatten(-2).to(x.dtype)
        else:
            rotated = torch.cat((first, second), -1).to(x.dtype)
        if layout.dim == x.shape[-1]:
            return rotated
        before, after = x[..., : layout.start], x[..., layout.start + layout.dim :]
        return torch.cat((before, rotated, after), -1)


class Branch:
    """One way to score pairs; this one takes queries and keys as they come.

    Attributes:
        shares_cache: True if keys are read as they are cached.
    """

    shares_cache: bool = True

    def query(self, x: Tensor, m: Tensor, origin: Tensor) -> Tensor:
        """Return the queries of the branch.

        Args:
            x: Shape (batch, heads, queries, head_dim).
            m: Positions, shape (batch or 1, queries).
            origin: `Plan.origin` of these queries, 0-dim.
        """
        return x

    def key(self, x: Tensor, n: Tensor, origin: Tensor) -> Tensor:
        """Return the keys of the branch; as `query`, for keys at positions n."""
        return x

    def contains(self, m: Tensor, n: Tensor) -> Tensor | None:
        """Return a mask of the pairs that it scores, for positions that broadcast; `None`: all."""
        return None


@dataclass(frozen=True, eq=False)
class BandBranch(Branch):
    """The positions of one band.

    Attributes:
        rotation: The layer's own rotation.
        band: The band.
        cached: The position at which a key is cached.
        keeps_query: True if the band's query position is the cached one, for every position.
        keeps_key: The same of its key position.
    """

    rotation: Rotation
    band: Band
    cached: Positions
    keeps_query: bool
    keeps_key: bool

    @property
    def shares_cache(self) -> bool:  # type: ignore[override]
        return self.keeps_key

    def query(self, x: Tensor, m: Tensor, origin: Tensor) -> Tensor:
        if self.keeps_query:
            return x
        return self.rotation.turn(x, self.band.query_position(m) - self.cached(m))

    def key(self, x: Tensor, n: Tensor, origin: Tensor) -> Tensor:
        if self.keeps_key:
            return x
        return self.rotation.turn(x, self.band.key_position(n) - self.cached(n))

    def contains(self, m: Tensor, n: Tensor) -> Tensor | None:
        return self.band.contains(m, n)


@dataclass(frozen=True, eq=False)
class MovingBranch(Branch):
    """Frequencies of the length in force; `origin` is that length."""

    shares_cache = False

    rotation: Rotation
    method: LengthDependent
    spec: RopeSpec

    def query(self, x: Tensor, m: Tensor, origin: Tensor) -> Tensor:
        # Cos and sin of both sides carry the factor; all of it is applied to the query.
        factor = (self.method.cos_sin_factor(self.spec, origin) / self.rotation.factor) ** 2
        turned = self.key(x, m, origin)
        if isinstance(factor, Tensor):
            factor = factor.to(torch.promote_types(x.dtype, torch.float32))
        return (turned * factor).to(x.dtype)

    def key(self, x: Tensor, n: Tensor, origin: Tensor) -> Tensor:
        inv_freq = self.method.inv_freq(self.spec, origin).float()
        if self.spec.order is not None:
            inv_freq = inv_freq[self.spec.order.to(inv_freq.device)]
        moved = inv_freq - self.rotation.inv_freq.to(inv_freq.device)
        if not torch.compiler.is_compiling() and not moved.any():
            return x
        return self.rotation.turn(x, n, moved)


@dataclass(frozen=True, eq=False)
class XPosBranch(Branch):
    """The factor of xPos, with exponents counted from `origin` so that they stay small."""

    shares_cache = False

    rotation: Rotation
    method: XPos

    def query(self, x: Tensor, m: Tensor, origin: Tensor) -> Tensor:
        return self._scaled(x, self.method.query_scale(m, self.rotation.layout.dim, origin))

    def key(self, x: Tensor, n: Tensor, origin: Tensor) -> Tensor:
        return self._scaled(x, self.method.key_scale(n, self.rotation.layout.dim, origin))

    def _scaled(self, x: Tensor, factor: Tensor) -> Tensor:
        factor = factor[:, None].to(torch.promote_types(x.dtype, torch.float32))
        first, second = self.rotation.pairs(x, factor.dtype)
        return self.rotation.joined(x, first * factor, second * factor)


@dataclass(frozen=True, eq=False)
class OffsetBranch(Branch):
    """`(q + a) R (k + b)`; q and k come rotated, so a and b are rotated to their positions."""

    shares_cache = False

    rotation: Rotation
    parameters: Mapping[str, Tensor]

    def query(self, x: Tensor, m: Tensor, origin: Tensor) -> Tensor:
        return self._shifted(x, m, "a")

    def key(self, x: Tensor, n: Tensor, origin: Tensor) -> Tensor:
        return self._shifted(x, n, "b")

    def _shifted(self, x: Tensor, positions: Tensor, name: str) -> Tensor:
        offset = self.parameters[name].to(torch.promote_types(x.dtype, torch.float32))
        every = offset[None, :, None].expand(len(positions), -1, positions.shape[1], -1)
        return x + self.rotation.turn(every, positions).to(x.dtype)
