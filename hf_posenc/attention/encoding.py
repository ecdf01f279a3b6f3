"""The methods in force in one attention layer, and the plan that they make: computed once per patch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor

from hf_posenc.attention.rotation import Rotation
from hf_posenc.errors import PosencError
from hf_posenc.methods import (
    Band,
    DistanceBias,
    Growing,
    GrowingBands,
    LengthDependent,
    Method,
    RelativeKeys,
    RopeBias,
    RotaryBands,
    XPos,
    seam_of,
)
from hf_posenc.methods.bands import moved
from hf_posenc.rope import RopeSpec

Kernel = Literal["causal", "bands", "chunks", "buckets"]

KEPT = 64
"""Lengths of which a layer keeps the bands."""
# Positions at which two position maps are compared.
_PROBE = (0, 1, 2, 3, 5, 17, 1001, 65537, 1 << 20, (1 << 26) + 1, 1 << 30)


@dataclass(frozen=True, eq=False)
class Encoding:
    """The methods in force in one attention layer, one of a seam at most.

    Attributes:
        original: The original context length L, in tokens.
        heads: Number of query heads that this process computes.
        rotation: The layer's own rotation; `None` where it has none, or where it need not be known.
        method: The method that moves queries and keys: bands, moving frequencies, factors or offsets.
        bias: The method that adds to the scores.
        query: The method that multiplies the queries.
        own_factor: The factor of the model's own that `query` replaces, as a function of positions.
        spec: The table that frequencies that move with the length start from.
        factor: The factor on cos and sin of that table, which the method's own multiplies.
        parameters: The trained parameters, of `method` and `bias`.
        rotates: False if a bias drops the layer's own rotation.
        bidirectional: True for a layer of an encoder, which reads the keys after a query too.
        cached_by: The encoding whose positions the keys have, for a layer that is not patched but shares its rotary
            table with patched ones.
        share: This process's number among those that share the heads of the layer, in order, and how many these are.
        unmoved: True if the keys of bands are cached where the model rotates them, and not where the last band does.
        plan: All that follows from these and not from a call.
    """

    original: int
    heads: int = 1
    rotation: Rotation | None = None
    method: Method | None = None
    bias: DistanceBias | RelativeKeys | None = None
    query: Method | None = None
    own_factor: Callable[[Tensor], Tensor] | None = None
    spec: RopeSpec | None = None
    factor: float = 1.0
    parameters: Mapping[str, Tensor] | None = None
    rotates: bool = True
    bidirectional: bool = False
    cached_by: Encoding | None = None
    share: tuple[int, int] = (0, 1)
    unmoved: bool = False
    plan: Plan = field(init=False)

    @classmethod
    def of(cls, methods: Sequence[Method], original: int) -> Encoding:
        """Return the encoding of methods on different seams, for a layer that is not known yet.

        Raises:
            PosencError: A method of no family that the engine knows.
        """
        by_seam: dict[str, Any] = {seam_of(method): method for method in methods}
        method, bias, query = (by_seam.get(seam) for seam in ("attention", "bias", "query"))
        if bias is not None and not isinstance(bias, DistanceBias | RelativeKeys):
            raise PosencError(f"{bias.name} has no place in the attention engine.")
        rotates = bias is None or bias.keep_rope
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
        other = self._with(parameters=parameters)
        if isinstance(self.plan, OffsetPlan):  # the one plan that reads them
            other.__dict__["plan"] = OffsetPlan(other)
        return other

    def at_length(self, length: int) -> Encoding:
        """Return the encoding of texts of one length, whose bands are fixed, of one with a `GrowingPlan`."""
        assert isinstance(self.plan, GrowingPlan)
        return self._with(unmoved=True, plan=self.plan.fixed(length))

    def _with(self, **fields: Any) -> Encoding:
        """Return a copy with other values, and with this plan if none is among them."""
        other = object.__new__(Encoding)
        other.__dict__.update(self.__dict__, **fields)
        return other

    def cached_position(self, n: Tensor) -> Tensor:
        """Return the rotary position at which a key at n is cached; a method `by_pair` adds a last axis of parts."""
        return self.plan.cached_position(n) if self.rotates else torch.zeros_like(n)

    @property
    def all_heads(self) -> int:
        """The number of query heads of the layer, on all processes."""
        return self.heads * self.share[1]

    def own(self, values: Tensor) -> Tensor:
        """Return the entries of this process's heads; the first axis has one for every head, or one for all."""
        number, processes = self.share
        return values if len(values) == 1 or processes == 1 else values.chunk(processes)[number]

    def key_place(self, n: Tensor) -> Tensor:
        """Return the rotary position at which this layer's rotary table places a key at n."""
        return (self.cached_by or self).cached_position(n)

    def scaled(self, query: Tensor, m: Tensor) -> Tensor:
        """Return queries, (batch, heads, queries, head_dim), times the factor of positions (batch or 1, queries)."""
        method = self.query or self.method
        factor = None if method is None else method.query_factor(m, self.original)
        if factor is None:
            return query
        if self.own_factor is not None:
            factor = factor / self.own_factor(m)
        factor = factor[:, None, :, None].to(torch.promote_types(query.dtype, torch.float32))
        if self.query is not None and self.query.trainable:
            assert self.parameters is not None
            factor = factor * self.own(self.parameters["query_scale"])[:, None, None]
        return (query * factor).to(query.dtype)

    @property
    def kind(self) -> str:
        """The kind of computation, by which backends are checked: a bias by name, else the plan's, or `"general"`."""
        return self.bias.name if self.bias is not None else self.plan.kernel or "general"

    @property
    def outline(self) -> tuple[object, ...]:
        """All that decides which pairs belong to which band: equal for the layers of one patch."""
        bands = self.plan.bands if isinstance(self.plan, BandPlan) else ()
        shapes = ((band.least, band.below, band.keys, band.chunk) for band in bands)
        return self.plan.kernel, self.unmoved, *shapes

    @property
    def in_blocks(self) -> bool:
        """True if PyTorch computes a text on a GPU, in blocks: biases of more than the distance, xPos, rope_bias."""
        distance = isinstance(self.bias, DistanceBias) and not self.bias.of_query
        return not (self.bias is None or distance) or isinstance(self.plan, XPosPlan | OffsetPlan)

    @property
    def plain(self) -> bool:
        """True for attention without any method, which reads no positions."""
        return all(x is None for x in (self.method, self.bias, self.query, self.cached_by))


class Branch:
    """One way to score pairs; this one takes queries and keys as they come."""

    shares_cache: bool = True
    """True if keys are read as they are cached."""

    def query(self, x: Tensor, m: Tensor, origin: Tensor) -> Tensor:
        """Return queries, (batch, heads, queries, head_dim), for positions (batch or 1, queries) and `Plan.origin`."""
        return x

    def key(self, x: Tensor, n: Tensor, origin: Tensor) -> Tensor:
        """Return the keys of the branch; as `query`, for keys at positions n."""
        return x

    def contains(self, m: Tensor, n: Tensor, origin: Tensor | None = None) -> Tensor | None:
        """Return a mask of the pairs that it scores, for positions that broadcast; `None`: all."""
        return None


class Plan(Branch):
    """The part of an encoding that no call changes; this one is of a layer whose positions are the model's own.

    A plan that scores all pairs alike is its own and only branch.
    """

    kernel: Kernel | None = "causal"
    """The kernel that computes whole sequences on a CPU; `None`: only the general path does."""
    shares_keys: bool = True
    """True if all queries read the same keys."""
    counts_from_zero: bool = False
    """True if a band depends on the position of a key, and not on the distance alone."""
    exported: int | None = None
    """The most queries in a call of `torch.export`, whose graph has no steps that follow positions; `None`: any."""

    def __init__(self, encoding: Encoding) -> None:
        # `None` where the encoding computes no attention and only places keys.
        self.rotation = cast(Rotation, encoding.rotation)

    @property
    def branches(self) -> tuple[Branch, ...]:
        """The ways to score pairs; no pair belongs to two."""
        return (self,)

    def cached_position(self, n: Tensor) -> Tensor:
        """Return the rotary position at which a key at n is cached, of n's shape."""
        return n

    def bucket(self, m: Tensor) -> Tensor:
        """Return a number for each query, of m's shape: queries of equal number may share keys."""
        return torch.zeros_like(m)

    def origin(self, m: Tensor, lengths: Tensor | None) -> Tensor:
        """Return the 0-dim `origin` of queries of one bucket and one row: m (1, queries) and its `Call.lengths`."""
        return m.new_zeros(())

    def at(self, origin: Tensor) -> Plan:
        """Return the plan of queries with an origin."""
        return self


class SharedTablePlan(Plan):
    """A layer without a method, whose keys are cached where the patched layers of its table cache them."""

    shares_cache = False

    def __init__(self, encoding: Encoding) -> None:
        super().__init__(encoding)
        assert encoding.cached_by is not None
        self.cached = encoding.cached_by.cached_position

    def query(self, x: Tensor, m: Tensor, origin: Tensor) -> Tensor:
        return self.rotation.turn(x, moved(m, self.cached(m)))

    def key(self, x: Tensor, n: Tensor, origin: Tensor) -> Tensor:
        return self.rotation.of_keys.turn(x, moved(n, self.cached(n)))


@dataclass(frozen=True, eq=False)
class BandBranch(Branch):
    """The positions of one band.

    Attributes:
        rotation: The layer's own rotation.
        band: The band.
        cached: The position at which a key is cached.
        keeps_query: True if the band's query position is the cached one, for every position.
        shares_cache: The same of its key position.
    """

    rotation: Rotation
    band: Band
    cached: Callable[[Tensor], Tensor]
    keeps_query: bool
    shares_cache: bool

    def query(self, x: Tensor, m: Tensor, origin: Tensor) -> Tensor:
        return x if self.keeps_query else self.rotation.turn(x, self.query_turn(m))

    def key(self, x: Tensor, n: Tensor, origin: Tensor) -> Tensor:
        return x if self.shares_cache else self.rotation.of_keys.turn(x, self.key_turn(n))

    def query_turn(self, m: Tensor) -> Tensor:
        """Return the positions by which cached queries at m are turned, of m's shape, or with a last axis of parts."""
        return moved(self.band.query_position(m), self.cached(m))

    def key_turn(self, n: Tensor) -> Tensor:
        """Return the positions by which cached keys at n are turned, as `query_turn`."""
        return moved(self.band.key_position(n), self.cached(n))

    def contains(self, m: Tensor, n: Tensor, origin: Tensor | None = None) -> Tensor | None:
        return self.band.contains(m, n)


class BandPlan(Plan):
    """Positions by band."""

    branches: tuple[Branch, ...] = ()

    def __init__(self, encoding: Encoding, bands: tuple[Band, ...] | None = None) -> None:
        super().__init__(encoding)
        method, original, both = encoding.method, encoding.original, encoding.bidirectional
        assert method is not None
        if bands is None:
            assert isinstance(method, RotaryBands)
            bands = method.bidirectional_bands(original) if both else method.bands(original)
        self.bands = bands
        far = bands[-1].key_position
        self._cached = cached = super().cached_position if encoding.unmoved else far
        self.kernel = None if both else _band_kernel(bands)
        self.counts_from_zero = any(b.chunk is not None or b.keys is not None for b in bands)
        if encoding.rotation is None:
            return
        parts = far(torch.zeros(1, dtype=torch.long)).shape[1:]
        pairs = len(self.rotation.inv_freq)
        if parts and pairs % parts[0]:
            raise PosencError(
                f"{method.name} has {parts[0]} factors, which do not divide the {pairs} pairs that this model rotates."
            )
        # Maps are compared here: in a forward, a branch on a tensor's value would break the graph of torch.compile.
        probe = torch.tensor(_PROBE)
        self.branches = tuple(
            BandBranch(
                self.rotation,
                band,
                cached,
                torch.equal(band.query_position(probe).double(), cached(probe).double()),
                torch.equal(band.key_position(probe).double(), cached(probe).double()),
            )
            for band in bands
        )

    def cached_position(self, n: Tensor) -> Tensor:
        return self._cached(n)


Changes = tuple[Tensor | None, float | Tensor]
"""The changes by a length: frequencies beyond those that rotated, and the factor on rotated queries."""


class LengthPlan(Plan):
    """A plan that follows the length of the text: `origin`, the length in force, is read by the host once a forward."""

    shares_keys = False
    shares_cache = False

    def __init__(self, encoding: Encoding) -> None:
        super().__init__(encoding)
        assert isinstance(encoding.method, Growing)
        self.method, self.original = encoding.method, encoding.original

    def bucket(self, m: Tensor) -> Tensor:
        return self.method.bucket_of(m, self.original)

    def origin(self, m: Tensor, lengths: Tensor | None) -> Tensor:
        length = self.bucket(m[0, 0]) if lengths is None else lengths[0]
        return length if torch.compiler.is_compiling() else length.cpu()


class MovingPlan(LengthPlan):
    """Frequencies that move with the length, by row or by request; tables are computed on the CPU and kept."""

    kernel = "buckets"
    method: LengthDependent

    def __init__(self, encoding: Encoding) -> None:
        super().__init__(encoding)
        self.exported = 1 if self.method.update == "row" else None
        self.spec = cast(RopeSpec, encoding.spec)  # `None` where the rotation is
        self.factor = encoding.factor

    def query(self, x: Tensor, m: Tensor, origin: Tensor) -> Tensor:
        moved, factor = self.table(origin, x.device)
        return x if moved is None else self.rotation.turn(x, m, moved, factor)

    def key(self, x: Tensor, n: Tensor, origin: Tensor) -> Tensor:
        moved, _ = self.table(origin, x.device)
        return x if moved is None else self.rotation.of_keys.turn(x, n, moved)

    def table(self, length: int | Tensor, device: torch.device) -> Changes:
        """Return the changes by a length.

        `None` instead of frequencies: it changes nothing. Cos and sin of both sides carry the factor, which all goes to
        the query. Unless compiling, the factor is a number.
        """
        if torch.compiler.is_compiling():
            return self._computed(length, device)
        length = int(length)
        # The method is part of the answer, so that its id stays its own.
        question = id(self.method), self.original, self.factor, length, device
        answer = self.rotation.kept(question, lambda: (self._computed(length, device), self.method))
        return answer[0]

    def _computed(self, length: int | Tensor, device: torch.device) -> Changes:
        factor = self.method.cos_sin_factor(self.spec, length) * self.factor
        factor = (factor / self.rotation.factor) ** 2
        inv_freq = self.method.frequencies(self.spec, length).float()
        if self.spec.order is not None:
            inv_freq = inv_freq[self.spec.order.to(inv_freq.device)]
        moved = inv_freq - self.rotation.on(inv_freq.device)
        if torch.compiler.is_compiling():
            return moved, factor
        changes = bool(moved.any()) or float(factor) != 1.0
        return moved.to(device) if changes else None, float(factor)


class GrowingPlan(LengthPlan):
    """Bands whose positions depend on the length of the text."""

    kernel = None
    counts_from_zero = True
    exported = 0
    method: GrowingBands

    def __init__(self, encoding: Encoding) -> None:
        super().__init__(encoding)
        self._unmoved = encoding._with(unmoved=True)
        self._fixed: dict[int, BandPlan] = {}

    @property
    def branches(self) -> tuple[Branch, ...]:
        """The ways to score pairs of a long text."""
        return self.fixed(4 * self.original).branches

    def at(self, origin: Tensor) -> Plan:
        return self.fixed(int(origin))

    def fixed(self, length: int) -> BandPlan:
        """Return the plan of texts of one length, whose bands are fixed; other threads may make the same one."""
        plan = self._fixed.get(length)
        if plan is None:
            plan = BandPlan(self._unmoved, self.method.bands(self.original, length))
            if len(self._fixed) >= KEPT:
                self._fixed.clear()
            self._fixed[length] = plan
        return plan


class XPosPlan(Plan):
    """Factors on the pairs, with exponents counted from the first query of a block so that they stay small."""

    kernel = None
    shares_keys = False
    shares_cache = False
    exported = 1

    def __init__(self, encoding: Encoding) -> None:
        super().__init__(encoding)
        assert isinstance(encoding.method, XPos)
        self.method = encoding.method

    def bucket(self, m: Tensor) -> Tensor:
        return m // self.method.scale_base

    def origin(self, m: Tensor, lengths: Tensor | None) -> Tensor:
        return m.min()

    def query(self, x: Tensor, m: Tensor, origin: Tensor) -> Tensor:
        factor = self.method.query_scale(m, self.rotation.layout.dim, origin)
        return self._scaled(self.rotation, x, factor)

    def key(self, x: Tensor, n: Tensor, origin: Tensor) -> Tensor:
        # No query of the bucket sees a later key, whose factor would overflow, and its gradient be NaN.
        n = torch.minimum(n, origin + self.method.scale_base)
        factor = self.method.key_scale(n, self.rotation.layout.dim, origin)
        return self._scaled(self.rotation.of_keys, x, factor)

    def _scaled(self, rotation: Rotation, x: Tensor, factor: Tensor) -> Tensor:
        factor = factor[:, None].to(torch.promote_types(x.dtype, torch.float32))
        first, second = rotation.pairs(x, factor.dtype)
        return rotation.joined(x, first * factor, second * factor)


class OffsetPlan(Plan):
    """Trained offsets, `(q + a) R (k + b)`; q and k come rotated, so a and b are rotated to their positions."""

    kernel = None
    shares_cache = False

    def __init__(self, encoding: Encoding) -> None:
        super().__init__(encoding)
        self.parameters, self.own = encoding.parameters or {}, encoding.own

    def query(self, x: Tensor, m: Tensor, origin: Tensor) -> Tensor:
        return self._shifted(self.rotation, x, m, "a")

    def key(self, x: Tensor, n: Tensor, origin: Tensor) -> Tensor:
        return self._shifted(self.rotation.of_keys, x, n, "b")

    def _shifted(self, rotation: Rotation, x: Tensor, positions: Tensor, name: str) -> Tensor:
        offset = self.own(self.parameters[name]).to(torch.promote_types(x.dtype, torch.float32))
        every = offset[None, :, None].expand(len(positions), -1, positions.shape[1], -1)
        return x + rotation.turn(every, positions).to(x.dtype)


PLANS: Mapping[type[Method], type[Plan]] = {
    RotaryBands: BandPlan,
    LengthDependent: MovingPlan,
    GrowingBands: GrowingPlan,
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
    return Plan(encoding)


def _band_kernel(bands: Sequence[Band]) -> Kernel | None:
    shape = [(band.least, band.below, band.keys, band.chunk) for band in bands]
    size, below = bands[0].chunk, bands[0].below
    if size is not None:
        expected = [(0, 1, None, size), (1, 2, None, size), (2, None, None, size)]
        return "chunks" if shape == expected else None
    far = [(below, None, band.keys, None) for band in bands[1:]]
    return "bands" if len(bands) < 3 and shape == [(0, below, None, None), *far] else None
