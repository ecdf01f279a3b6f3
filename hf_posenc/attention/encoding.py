"""The methods in force in one attention layer, and the plan that they make: computed once per patch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from hf_posenc.attention.branches import (
    BandBranch,
    Branch,
    MovingBranch,
    OffsetBranch,
    Rotation,
    XPosBranch,
)
from hf_posenc.errors import PosencError
from hf_posenc.methods import (
    Band,
    DistanceBias,
    LengthDependent,
    Method,
    RelativeKeys,
    RopeBias,
    RotaryBands,
    XPos,
    bucket_length,
    seam_of,
)
from hf_posenc.rope import RopeSpec

Kernel = Literal["causal", "bands", "chunks", "buckets"]

# Positions at which two position maps are compared.
_PROBE = (0, 1, 2, 3, 5, 17, 1001, 65537, 1 << 20, (1 << 26) + 1, 1 << 30)


@dataclass(frozen=True, eq=False)
class Encoding:
    """The methods in force in one attention layer, one of a seam at most.

    Attributes:
        original: The original context length L, in tokens.
        heads: Number of query heads.
        rotation: The layer's own rotation; `None` where it has none, or where it need not be known.
        method: The method that moves queries and keys: bands, moving frequencies, factors or offsets.
        bias: The method that adds to the scores.
        query: The method that multiplies the queries.
        spec: The table that frequencies that move with the length start from.
        parameters: The trained parameters, of `method` and `bias`.
        rotates: False if a bias drops the layer's own rotation.
        cached_by: The encoding whose positions the keys have, for a layer that is not patched but shares its rotary
            table with patched ones.
        plan: All that follows from these and not from a call.
    """

    original: int
    heads: int = 1
    rotation: Rotation | None = None
    method: Method | None = None
    bias: DistanceBias | RelativeKeys | None = None
    query: Method | None = None
    spec: RopeSpec | None = None
    parameters: Mapping[str, Tensor] | None = None
    rotates: bool = True
    cached_by: Encoding | None = None
    plan: Plan = field(init=False)

    @classmethod
    def of(cls, methods: Sequence[Method], original: int) -> Encoding:
        """Return the encoding of methods on different seams, for a layer that is not known yet.

        Raises:
            PosencError: A method of no family that the engine knows.
        """
        by_seam: dict[str, Any] = {seam_of(method): method for method in methods}
        method, bias = by_seam.get("attention"), by_seam.get("bias")
        if bias is not None and not isinstance(bias, DistanceBias | RelativeKeys):
            raise PosencError(f"{bias.name} has no place in the attention engine.")
        rotates = bias is None or bias.keep_rope
        query = by_seam.get("query")
        return cls(original, method=method, bias=bias, query=query, rotates=rotates)

    def __post_init__(self) -> None:
        object.__setattr__(self, "plan", plan_of(self))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "plan": None}  # its position maps cannot be pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    def with_parameters(self, parameters: Mapping[str, Tensor] | None) -> Encoding:
        """Return the same methods with other trained parameters."""
        other = object.__new__(Encoding)
        other.__dict__.update(self.__dict__, parameters=parameters)
        other.__dict__["plan"] = self.plan.with_parameters(other)
        return other

    def cached_position(self, n: Tensor) -> Tensor:
        """Return the rotary position at which a key at n is cached."""
        return self.plan.cached_position(n) if self.rotates else torch.zeros_like(n)

    def scaled(self, query: Tensor, m: Tensor) -> Tensor:
        """Return the queries times the factor of their positions.

        Args:
            query: Shape (batch, heads, queries, head_dim).
            m: Positions, shape (batch or 1, queries).
        """
        method = self.query or self.method
        factor = None if method is None else method.query_factor(m, self.original)
        return query if factor is None else query * factor[:, None, :, None].to(query.dtype)

    @property
    def plain(self) -> bool:
        """True for attention without any method, which reads no positions."""
        fields = (self.method, self.bias, self.query, self.cached_by)
        return all(value is None for value in fields)


class Plan:
    """The part of an encoding that no call changes; this one is of a layer whose positions are the model's own.

    Attributes:
        branches: The ways to score pairs; no pair belongs to two. Empty where the rotation is not known.
        kernel: The kernel that computes whole sequences on a CPU; `None`: only the general path does.
        shares_keys: True if all queries read the same keys.
        counts_from_zero: True if a band depends on the position of a key, and not on the distance alone.
    """

    branches: tuple[Branch, ...] = (Branch(),)
    kernel: Kernel | None = "causal"
    shares_keys: bool = True
    counts_from_zero: bool = False

    def with_parameters(self, encoding: Encoding) -> Plan:
        """Return the plan of an encoding that differs in its parameters only."""
        return self

    def cached_position(self, n: Tensor) -> Tensor:
        """Return the rotary position at which a key at n is cached, of n's shape."""
        return n

    def bucket(self, m: Tensor) -> Tensor:
        """Return a number for each query, of m's shape: queries of equal number may share keys."""
        return torch.zeros_like(m)

    def origin(self, m: Tensor, lengths: Tensor | None) -> Tensor:
        """Return the `origin` of queries of one bucket and one row of the batch; a 0-dim tensor.

        Args:
            m: Positions, shape (1, queries).
            lengths: `Call.lengths` of that row.
        """
        return self.bucket(m[0, 0])


class SharedTablePlan(Plan):
    """A layer without a method, whose keys are cached where the patched layers of its table cache them."""

    def __init__(self, encoding: Encoding) -> None:
        assert encoding.rotation is not None
        assert encoding.cached_by is not None
        own, cached = Band(query_position=_same, key_position=_same), encoding.cached_by
        self.branches = (BandBranch(encoding.rotation, own, cached.cached_position, False, False),)


class BandPlan(Plan):
    """Positions by band.

    Attributes:
        bands: The bands, as the method defines them for the original context length.
    """

    def __init__(self, encoding: Encoding) -> None:
        assert isinstance(encoding.method, RotaryBands)
        bands = self.bands = encoding.method.bands(encoding.original)
        self._cached = cached = bands[-1].key_position
        self.kernel = _band_kernel(bands)
        self.counts_from_zero = any(
            band.chunk is not None or band.keys is not None for band in bands
        )
        rotation, probe = encoding.rotation, torch.tensor(_PROBE)
        if rotation is None:
            self.branches = ()
            return
        # Maps are compared here: in a forward, a branch on a tensor's value would break the graph of torch.compile.
        self.branches = tuple(
            BandBranch(
                rotation,
                band,
                cached,
                torch.equal(band.query_position(probe).double(), cached(probe).double()),
                torch.equal(band.key_position(probe).double(), cached(probe).double()),
            )
            for band in bands
        )

    def cached_position(self, n: Tensor) -> Tensor:
        return self._cached(n)


class MovingPlan(Plan):
    """Frequencies that move with the length, by row or by request."""

    kernel = "buckets"
    shares_keys = False

    def __init__(self, encoding: Encoding) -> None:
        assert isinstance(encoding.method, LengthDependent)
        self.method, self.original = encoding.method, encoding.original
        self.branches = ()
        if encoding.rotation is not None and encoding.spec is not None:
            self.branches = (MovingBranch(encoding.rotation, self.method, encoding.spec),)

    def bucket(self, m: Tensor) -> Tensor:
        if self.method.update != "row":
            return torch.zeros_like(m)
        return bucket_length(m, self.original, self.method.bucket_size(self.original))

    def origin(self, m: Tensor, lengths: Tensor | None) -> Tensor:
        return self.bucket(m[0, 0]) if lengths is None else lengths[0]


class XPosPlan(Plan):
    """Factors on the pairs, counted from the first query of a block."""

    kernel = None
    shares_keys = False

    def __init__(self, encoding: Encoding) -> None:
        assert isinstance(encoding.method, XPos)
        self.method, rotation = encoding.method, encoding.rotation
        self.branches = () if rotation is None else (XPosBranch(rotation, self.method),)

    def bucket(self, m: Tensor) -> Tensor:
        return m // self.method.scale_base

    def origin(self, m: Tensor, lengths: Tensor | None) -> Tensor:
        return m.min()


class OffsetPlan(Plan):
    """Trained offsets on queries and keys."""

    kernel = None

    def __init__(self, encoding: Encoding) -> None:
        rotation, parameters = encoding.rotation, encoding.parameters
        self.branches = ()
        if rotation is not None and parameters is not None:
            self.branches = (OffsetBranch(rotation, parameters),)

    def with_parameters(self, encoding: Encoding) -> Plan:
        return OffsetPlan(encoding)


PLANS: Mapping[type[Method], Callable[[Encoding], Plan]] = {
    RotaryBands: BandPlan,
    LengthDependent: MovingPlan,
    XPos: XPosPlan,
    RopeBias: OffsetPlan,
}
"""The plan of each family of methods that move queries and keys."""


def plan_of(encoding: Encoding) -> Plan:
    """Return the plan of an encoding.

    Raises:
        PosencError: A method of no family that the engine knows.
    """
    if encoding.cached_by is not None:
        return SharedTablePlan(encoding)
    for family, plan in PLANS.items():
        if isinstance(encoding.method, family):
            return plan(encoding)
    if encoding.method is not None:
        raise PosencError(f"{encoding.method.name} has no place in the attention engine.")
    return Plan()


def _band_kernel(bands: Sequence[Band]) -> Kernel | None:
    near = bands[0]
    if len(bands) == 3 and near.chunk is not None:
        steps = [(band.least, band.below, band.keys, band.chunk) for band in bands]
        size = near.chunk
        expected = [(0, 1, None, size), (1, 2, None, size), (2, None, None, size)]
        return "chunks" if steps == expected else None
    if any(band.chunk is not None for band in bands) or near.least or near.keys is not None:
        return None
    if len(bands) == 1 or (
        len(bands) == 2 and bands[1].least == near.below and bands[1].below is None
    ):
        return "bands"
    return None


def _same(position: Tensor) -> Tensor:
    return position
