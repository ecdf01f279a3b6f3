"""What one attention layer of a patched model does with positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from hf_posenc.attention.rotation import Rotation
from hf_posenc.methods import (
    Band,
    DistanceBias,
    LengthDependent,
    LogN,
    RelativeKeys,
    RopeBias,
    RotaryBands,
    XPos,
)
from hf_posenc.methods.base import bucket_length
from hf_posenc.rope import RopeSpec

Bias = DistanceBias | RelativeKeys
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
class Encoding:
    """The methods in force in one attention layer; at most one of each kind.

    Attributes:
        original: The original context length L, in tokens.
        heads: Number of query heads.
        rotation: The layer's own rotation; `None` where it has none.
        bands: Positions by band.
        moving: Frequencies that depend on the length (`update="row"` or `"request"`), with `spec`.
        spec: The table that `moving` starts from.
        pairs: A factor or an offset on the features before or beside the rotation.
        bias: What is added to the scores.
        log_n: A factor on the queries.
        parameters: What is trained: of `pairs` and `bias`.
        rotates: Whether the layer's own rotation is in force at all; a bias drops it.
        cached_by: The encoding whose positions the keys have, for a layer that is left alone but shares its rotary
            table with patched ones.
        keeps: For each band, whether its queries and its keys stand where keys are cached anyway.
    """

    original: int
    heads: int
    rotation: Rotation | None = None
    bands: RotaryBands | None = None
    moving: LengthDependent | None = None
    spec: RopeSpec | None = None
    pairs: XPos | RopeBias | None = None
    bias: Bias | None = None
    log_n: LogN | None = None
    parameters: Mapping[str, Tensor] | None = None
    rotates: bool = True
    cached_by: Encoding | None = None
    keeps: tuple[tuple[bool, bool], ...] = field(init=False)

    def __post_init__(self) -> None:
        bands = () if self.bands is None else self.bands.bands(self.original)
        # Found out once: a value that decides would stop torch.compile.
        probe = torch.tensor([0, 1, 2, 3, 5, 17, 1001, 65537, 1 << 20, (1 << 26) + 1, 1 << 30])
        cached = self.cached_position(probe).double()
        keeps = tuple(
            (
                torch.equal(band.query_position(probe).double(), cached),
                torch.equal(band.key_position(probe).double(), cached),
            )
            for band in bands
        )
        object.__setattr__(self, "keeps", keeps)

    def cached_position(self, n: Tensor) -> Tensor:
        """The rotary position at which a key at n is cached."""
        if not self.rotates:
            return torch.zeros_like(n)
        return n if self.bands is None else self.bands.cached_position(n, self.original)

    def branches(self) -> tuple[Branch, ...]:
        """The ways in which pairs are scored; no pair belongs to two."""
        if self.cached_by is not None:
            assert self.rotation is not None
            own = Band(query_position=_same, key_position=_same)
            return (BandBranch(self.rotation, own, self.cached_by.cached_position, False, False),)
        if self.bands is not None and self.rotates:
            assert self.rotation is not None
            cached = self.cached_position
            bands = self.bands.bands(self.original)
            return tuple(
                BandBranch(self.rotation, band, cached, *keeps)
                for band, keeps in zip(bands, self.keeps, strict=True)
            )
        if self.moving is not None:
            assert self.rotation is not None
            assert self.spec is not None
            return (_MovingBranch(self.rotation, self.moving, self.spec),)
        if isinstance(self.pairs, XPos):
            assert self.rotation is not None
            return (_XPosBranch(self.rotation, self.pairs),)
        if isinstance(self.pairs, RopeBias):
            assert self.rotation is not None
            return (_OffsetBranch(self.rotation, self.parameters or {}),)
        return (_PlainBranch(),)

    def query_factor(self, m: Tensor) -> Tensor | None:
        """The factor on a query at m, of the shape of m; `None`: 1."""
        if self.log_n is not None:
            return self.log_n.query_factor(m, self.original)
        return None if self.bands is None else self.bands.query_factor(m, self.original)

    def bucket(self, m: Tensor) -> Tensor:
        """Which queries may share keys: those of equal value, of the shape of m."""
        if self.moving is not None and self.moving.update == "row":
            return bucket_length(m, self.original, self.moving.bucket_size(self.original))
        if isinstance(self.pairs, XPos):
            return m // self.pairs.scale_base
        return torch.zeros_like(m)

    def origin(self, m: Tensor, lengths: Tensor | None) -> Tensor:
        """The `origin` for queries at m, which are all of one bucket and one row of the batch; a 0-dim tensor.

        Args:
            m: Positions, shape (1, queries).
            lengths: `Call.lengths` of that row.
        """
        if isinstance(self.pairs, XPos):
            return m.min()
        if self.moving is None or self.moving.update == "row":
            return self.bucket(m[0, 0])
        assert lengths is not None
        return lengths[0]

    @property
    def plain(self) -> bool:
        """Whether this is attention as it comes, which reads no positions."""
        methods = (self.bands, self.moving, self.pairs, self.bias, self.log_n, self.cached_by)
        return all(method is None for method in methods)

    @property
    def counts_from_zero(self) -> bool:
        """Whether a band is told by where a key stands, and not by distance alone."""
        bands = () if self.bands is None else self.bands.bands(self.original)
        return any(band.chunk is not None or band.keys is not None for band in bands)

    @property
    def shares_keys(self) -> bool:
        """Whether all queries read the same keys."""
        return self.moving is None and not isinstance(self.pairs, XPos)


@dataclass(frozen=True, eq=False)
class _PlainBranch:
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
class _MovingBranch:
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
class _XPosBranch:
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
class _OffsetBranch:
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


def _same(position: Tensor) -> Tensor:
    return position
