"""Bands in numbers: what a kernel must know of them, read off their position maps once per patch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hf_posenc.attention.encoding import BandPlan, Plan, SharedTablePlan
from hf_posenc.methods import Band

PositionMap = Callable[[Tensor], Tensor]

# Every position up to the first number, in which a group of tokens is found, and a few up to 2^30.
_DENSE = 4096
_FAR = (65_537, 1 << 20, (1 << 26) + 1, (1 << 30) - 1, 1 << 30)


class Shift(NamedTuple):
    """The shift of a rotary position x, `min(top, start + slope * x + step * (x // group))` tokens."""

    start: float
    slope: float = 0.0
    step: float = 0.0
    group: int = 1
    top: float | None = None

    def at(self, x: Tensor) -> Tensor:
        """Return the shift of positions x, an integer tensor; float64."""
        value = self.start + self.slope * x.double() + self.step * (x // self.group).double()
        return value if self.top is None else value.clamp(max=self.top)


class Scored(NamedTuple):
    """The pairs of one band, and how they are turned.

    Attributes:
        least: The least distance, in tokens or chunks.
        below: The bound above; `None`: no bound.
        keys: Only so many first keys; `None`: all.
        shift: Beyond the rotation that queries have; `None`: it stays.
        turns_keys: True if the keys are turned too: by `shift` without its start.
    """

    least: int = 0
    below: int | None = None
    keys: int | None = None
    shift: Shift | None = None
    turns_keys: bool = False

    def numbers(self) -> tuple[float, ...]:
        """Return `FIELDS` numbers: the bounds (-1: none), turned, turns_keys, and the shift (its top bounded, top)."""
        start, slope, step, group, top = self.shift or Shift(0.0)
        bounds = (-1 if bound is None else bound for bound in (self.below, self.keys))
        turned = int(self.shift is not None), int(self.turns_keys)
        shift = start, slope, step, group, int(top is not None), top or 0.0
        return self.least, *bounds, *turned, *shift


FIELDS = 11
"""Numbers of a band."""
UNTURNED = (0, 0, 0, 1)
"""The features of a scheme that turns nothing."""


class Scheme(NamedTuple):
    """All that a kernel is compiled for: the bands, the last of which is that of the cached keys.

    Attributes:
        bands: The bands; no pair belongs to two.
        chunk: Distances are counted in chunks of that many tokens; 1: in tokens.
        features: First rotated feature, number of rotated features, 1 if they are interleaved and the sign of the
            angle.
    """

    bands: tuple[Scored, ...] = (Scored(),)
    chunk: int = 1
    features: tuple[int, int, int, int] = UNTURNED

    def numbers(self) -> tuple[tuple[float, ...], int, tuple[int, ...]]:
        """Return the bands in one row, the chunk and the features: Triton 3.4 compiles neither nesting nor `None`."""
        return tuple(x for band in self.bands for x in band.numbers()), self.chunk, self.features


def scheme_of(plan: Plan) -> Scheme | None:
    """Return the scheme of a plan; `None` for one that is not made of bands, or of other maps than `Shift` has."""
    if type(plan) is Plan:
        return Scheme()
    if isinstance(plan, BandPlan):
        bands, cached = plan.bands, plan.cached_position
    elif isinstance(plan, SharedTablePlan):
        own = Band(query_position=lambda m: m, key_position=lambda n: n)
        bands, cached = (own,), plan.cached
    else:
        return None
    if cached(torch.zeros(1, dtype=torch.long)).dim() > 1:
        return None  # a position for each part of the pairs
    found = tuple(filter(None, (_scored(band, cached) for band in bands)))
    chunks = {band.chunk or 1 for band in bands}
    if len(found) < len(bands) or len(chunks) > 1:
        return None
    features = UNTURNED
    if any(band.shift is not None for band in found):
        rotation = plan.rotation
        if rotation is None or rotation.layout.dim % 2 or rotation.norm is not None:
            return None
        layout = plan.rotation.layout
        features = layout.start, layout.dim, int(layout.interleaved), layout.sign
    return Scheme(found, chunks.pop(), features)


def _scored(band: Band, cached: PositionMap) -> Scored | None:
    """A band in numbers; `None` where queries and keys do not move alike, so that angles grow with the text."""
    query = shift_of(band.query_position, cached, band.chunk)
    key = shift_of(band.key_position, cached, band.chunk)
    if query is None or key is None:
        return None
    pairs = band.least, band.below, band.keys
    if key == Shift(0.0):
        return Scored(*pairs, None if query == key else query)
    if query._replace(start=key.start) != key or key.top is not None:
        return None
    return Scored(*pairs, query._replace(start=query.start - key.start), turns_keys=True)


def shift_of(position: PositionMap, cached: PositionMap, period: int | None) -> Shift | None:
    """Return the shift from one position map to another; `None` if it is none of the form.

    Args:
        position: From integer positions to rotary positions.
        cached: The same of the cache.
        period: A length at whose multiples the maps may jump; the first jump is found anyway.
    """

    def shift(x: Tensor) -> Tensor:
        return position(x).double() - cached(x).double()

    steps = shift(torch.arange(_DENSE)).diff()
    jumps = ((steps - steps[0]).abs() > 1e-6).nonzero()
    for group in {1: None, period or 1: None, int(jumps[0]) + 1 if len(jumps) else 1: None}:
        around = [end + x for end in (group, 2 * group) for x in (-2, -1, 0, 1) if end + x >= 0]
        x = torch.cat((torch.arange(_DENSE), torch.tensor([*_FAR, *around])))
        y = shift(x)
        found = _fitted(shift, group)
        if bool((found.at(x) > y.max() + 1e-6).any()):
            found = found._replace(top=round(float(y.max()), 6))
        if torch.allclose(found.at(x), y, rtol=1e-12, atol=2e-6):
            return found
    return None


def _fitted(shift: PositionMap, group: int) -> Shift:
    """The shift through a few far points, where no `top` bounds it."""
    end = ((1 << 20) // group + 2) * group
    if group == 1:
        near, far = shift(torch.tensor([end, 1 << 30])).tolist()
        slope, step = (far - near) / ((1 << 30) - end), 0.0
        return Shift(round(near - slope * end, 6) + 0.0, round(slope, 15) + 0.0)  # no -0.0
    # The last position of two groups, and the one before it: a step of a sawtooth is bounded at its start, if at all.
    before, last, earlier = shift(torch.tensor([end - 2, end - 1, end - 1 - group])).tolist()
    slope = round(last - before, 6)
    step = round(last - earlier - slope * group, 6)
    start = last - slope * (end - 1) - step * ((end - 1) // group)
    return Shift(round(start, 6), slope, step, group)
