"""Shared by the tests of methods inside attention: building them, reading their positions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hf_posenc.methods import METHODS, DistanceBias, RelativeKeys, RotaryBands, get_method
from tests.support import attention_references as naive

BANDS = tuple(m.name for m in METHODS if issubclass(m, RotaryBands) and not m.by_pair)
BIASES = tuple(m.name for m in METHODS if issubclass(m, DistanceBias))
SEAMS = {
    "attention": {*BANDS, "dpe", "lampe", "jet_long", "xpos", "rope_bias"},
    "bias": {*BIASES, *(m.name for m in METHODS if issubclass(m, RelativeKeys))},
    "query": {"log_n", "temperature"},
}
OTHERS = tuple(m.name for m in METHODS if m.seam != "rotary" and m.for_rotary)


def bands(name: str, **knobs: Any) -> RotaryBands:
    method = get_method(name).from_options(**knobs)
    assert isinstance(method, RotaryBands)
    return method


def distance_bias(name: str, **knobs: Any) -> DistanceBias:
    method = get_method(name).from_options(**knobs)
    assert isinstance(method, DistanceBias)
    return method


def position_map(
    method: RotaryBands, length: int, original: int, *, bidirectional: bool = False
) -> Tensor:
    """`P[m, n]` by the method's bands, NaN where no band has the pair."""
    m, n = torch.arange(length)[:, None], torch.arange(length)[None]
    relative = torch.full((length, length), math.nan, dtype=torch.float64)
    times = torch.zeros(length, length, dtype=torch.int64)
    for band in (method.bidirectional_bands if bidirectional else method.bands)(original):
        query, key = band.query_position(m[:, 0]), band.key_position(n[0])
        assert all(p.dtype in (torch.int64, torch.float64) for p in (query, key))
        inside = band.contains(m, n) & (bidirectional | (n <= m))  # a causal mask hides the rest
        times += inside
        relative[inside] = (query[:, None] - key[None]).double()[inside]
    assert times.max() <= 1, "a pair is in two bands"
    return relative


def assert_same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=1e-9, equal_nan=True)


def naive_plain(length: int) -> Tensor:
    return naive.position_map("rerope", length, window=length)


def turn(x: Tensor, position: Tensor, frequencies: list[float]) -> Tensor:
    """RoPE in the half-split layout by complex numbers."""
    half = x.shape[-1] // 2
    angles = position.double()[:, None] * torch.tensor(frequencies, dtype=torch.float64)
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1)
