"""The ways in which pairs of a query and a key are scored: by band, by the length in force, with factors or offsets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hf_posenc.attention.rotation import Rotation
from hf_posenc.methods import Band, LengthDependent, XPos
from hf_posenc.rope import RopeSpec

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
