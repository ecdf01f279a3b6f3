"""The schemes that kernels read off position maps, against the papers' relative positions, pair by pair."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_posenc import PosencError
from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.kernels.bands import UNTURNED, Scheme, Shift, scheme_of, shift_of
from hf_posenc.attention.rotation import Layout, Rotation
from hf_posenc.methods import RotaryBands, get_method
from tests.support import attention_references as naive

LENGTH = 90
ROTATION = Rotation(torch.ones(4), Layout(2, 8, interleaved=True, sign=-1))


def relative_positions(scheme: Scheme, encoding: Encoding, positions: Tensor) -> Tensor:
    """The relative positions of all pairs under a scheme, float64; NaN: of no band."""
    m, n = positions[:, None], positions[None]
    cached = encoding.cached_position(positions).double()
    span = (m // scheme.chunk - n // scheme.chunk).clamp(min=0)
    result = torch.full(span.shape, torch.nan, dtype=torch.float64)
    for band in scheme.bands:
        inside = (span >= band.least) & (m >= n)
        inside &= span < (1 << 40 if band.below is None else band.below)
        inside &= n < (1 << 40 if band.keys is None else band.keys)
        of_query = cached if band.shift is None else cached + band.shift.at(positions)
        of_key = cached
        if band.turns_keys:
            assert band.shift is not None
            of_key = cached + band.shift.at(positions) - band.shift.start
        assert result[inside].isnan().all()
        result = torch.where(inside, of_query[:, None] - of_key[None], result)
    return result


@settings(max_examples=30)
@given(st.sampled_from(sorted(naive.BANDS)), st.data())
def test_a_scheme_gives_the_relative_positions_of_the_paper(name: str, data: st.DataObject) -> None:
    knobs = {knob: data.draw(values, knob) for knob, values in naive.BANDS[name].knobs.items()}
    method: Any = get_method(name)
    try:
        encoding = replace(Encoding.of([method(**knobs)], 512), rotation=ROTATION)
    except PosencError:
        assume(False)
    scheme = scheme_of(encoding.plan)
    assert scheme is not None
    got = relative_positions(scheme, encoding, torch.arange(LENGTH))
    expected = naive.position_map(name, LENGTH, **knobs)
    torch.testing.assert_close(got, expected, equal_nan=True, rtol=1e-9, atol=1e-5)
    assert scheme.features in ((2, 8, 1, -1), UNTURNED)


@pytest.mark.parametrize("start", [1 << 17, (1 << 24) - LENGTH])
@pytest.mark.parametrize("name", sorted({*naive.BANDS} - {"dual_chunk", "attention_sinks"}))
def test_the_maps_hold_far_into_a_text(name: str, start: int) -> None:
    """Near pairs are as far apart there as at the beginning."""
    method: Any = get_method(name)
    encoding = replace(Encoding.of([method(window=LENGTH)], 4096), rotation=ROTATION)
    scheme = scheme_of(encoding.plan)
    assert scheme is not None
    positions = torch.arange(LENGTH)
    got = relative_positions(scheme, encoding, positions + start)
    expected = (positions[:, None] - positions[None]).double()
    expected.masked_fill_(expected < 0, torch.nan)
    torch.testing.assert_close(got, expected, equal_nan=True, rtol=0, atol=1e-5)


def test_a_layer_that_shares_a_patched_table_turns_all_pairs_back() -> None:
    method: Any = get_method("self_extend")
    patched = Encoding.of([method(group=3)], 512)
    scheme = scheme_of(replace(Encoding(512, cached_by=patched), rotation=ROTATION).plan)
    assert scheme is not None
    got = relative_positions(scheme, patched, torch.arange(40))
    positions = torch.arange(40, dtype=torch.float64)
    expected = positions[:, None] - positions[None]
    expected.masked_fill_(expected < 0, torch.nan)
    torch.testing.assert_close(got, expected, equal_nan=True)


@dataclass(frozen=True, kw_only=True)
class Rooted(RotaryBands):
    """Far positions that grow like a root: no kernel knows them."""

    name = "rooted"
    summary = source = ""

    def query_position(self, m: Tensor, original: int) -> Tensor:
        return m.double().sqrt()

    def key_position(self, n: Tensor, original: int) -> Tensor:
        return n.double().sqrt()


def test_other_maps_have_no_scheme() -> None:
    assert scheme_of(replace(Encoding.of([Rooted(window=4)], 16), rotation=ROTATION).plan) is None
    assert shift_of(torch.sin, torch.zeros_like, None) is None
    assert shift_of(lambda x: x % 7, lambda x: x, None) == Shift(0.0, 0.0, -7.0, 7)
