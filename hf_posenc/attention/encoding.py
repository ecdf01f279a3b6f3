"""What one attention layer of a patched model does with positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_posenc.attention.branches import (
    BandBranch,
    Branch,
    MovingBranch,
    OffsetBranch,
    PlainBranch,
    Rotation,
    XPosBranch,
)
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

    def with_parameters(self, parameters: Mapping[str, Tensor] | None) -> Encoding:
        """The same methods, with others of what they train in force."""
        other = object.__new__(Encoding)  # so that `keeps` need not be found out again
        other.__dict__.update(self.__dict__, parameters=parameters)
        return other

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
            return (MovingBranch(self.rotation, self.moving, self.spec),)
        if isinstance(self.pairs, XPos):
            assert self.rotation is not None
            return (XPosBranch(self.rotation, self.pairs),)
        if isinstance(self.pairs, RopeBias):
            assert self.rotation is not None
            return (OffsetBranch(self.rotation, self.parameters or {}),)
        return (PlainBranch(),)

    def scaled(self, query: Tensor, m: Tensor) -> Tensor:
        """Queries times the factor that their positions give them.

        Args:
            query: Shape (batch, heads, queries, head_dim).
            m: Positions, shape (batch or 1, queries).
        """
        method = self.log_n or self.bands
        factor = None if method is None else method.query_factor(m, self.original)
        return query if factor is None else query * factor[:, None, :, None].to(query.dtype)

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


def _same(position: Tensor) -> Tensor:
    return position
