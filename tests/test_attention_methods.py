"""The methods on the attention, bias and query seams against the papers, written naively."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from hf_posenc.errors import PosencError
from hf_posenc.methods import (
    METHODS,
    T5,
    ALiBi,
    DistanceBias,
    LogN,
    Method,
    RelativeKeys,
    RopeBias,
    RotaryBands,
    Shaw,
    TransformerXL,
    XPos,
    get_method,
)
from tests import attention_references as naive

BANDS = tuple(m.name for m in METHODS if issubclass(m, RotaryBands))
BIASES = tuple(m.name for m in METHODS if issubclass(m, DistanceBias))
SEAMS = {
    "attention": {*BANDS, "xpos", "rope_bias"},
    "bias": {*BIASES, "shaw", "transformer_xl"},
    "query": {"log_n"},
}
OTHERS = tuple(m.name for m in METHODS if m.seam != "rotary")


def bands(name: str, **knobs: Any) -> RotaryBands:
    method = get_method(name).from_options(**knobs)
    assert isinstance(method, RotaryBands)
    return method


def distance_bias(name: str, **knobs: Any) -> DistanceBias:
    method = get_method(name).from_options(**knobs)
    assert isinstance(method, DistanceBias)
    return method


def position_map(method: RotaryBands, length: int, original: int) -> Tensor:
    """`P[m, n]` by the method's bands, NaN where no band has the pair."""
    m, n = torch.arange(length)[:, None], torch.arange(length)[None]
    relative = torch.full((length, length), math.nan, dtype=torch.float64)
    times = torch.zeros(length, length, dtype=torch.int64)
    for band in method.bands(original):
        query, key = band.query_position(m[:, 0]), band.key_position(n[0])
        assert all(p.dtype in (torch.int64, torch.float64) for p in (query, key))
        inside = band.contains(m, n)
        times += inside
        relative[inside] = (query[:, None] - key[None]).double()[inside]
    assert times.max() <= 1, "a pair is in two bands"
    return relative


def assert_same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=1e-9, equal_nan=True)


def test_every_method_has_a_reference() -> None:
    assert set(naive.RELATIVE) == set(BANDS)
    assert set(naive.BIAS) == set(BIASES)
    for seam, names in SEAMS.items():
        assert {m.name for m in METHODS if m.seam == seam} == names


# ------------------------------------------------------------------------------------------
# Rotary bands

windows = st.integers(1, 40)
KNOBS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "rerope": {"window": windows},
    "leaky_rerope": {"window": windows, "k": st.floats(1.0, 32.0)},
    "self_extend": {"window": windows, "group": st.integers(1, 9)},
    "dual_chunk": {"chunk": st.integers(1, 30), "window": st.integers(1, 20)},
    "string": {"shift": windows, "window": windows},
    "lm_infinite": {"window": windows, "sinks": st.integers(1, 6)},
    "attention_sinks": {"window": windows, "sinks": st.integers(1, 6)},
    "sliding_window": {"window": windows},
}


@pytest.mark.parametrize("name", BANDS)
@given(data=st.data())
@settings(max_examples=40)
def test_positions_equal_the_paper(name: str, data: st.DataObject) -> None:
    knobs = {knob: data.draw(values, knob) for knob, values in KNOBS[name].items()}
    if name == "string":
        knobs["window"] = min(knobs["window"], knobs["shift"])
    length, original = data.draw(st.integers(1, 60), "length"), data.draw(st.integers(50, 80), "L")
    method = bands(name, **knobs)
    want = naive.position_map(name, length, **knobs)
    assert_same(position_map(method, length, original), want)


DEFAULTS = [
    ("rerope", {}, {"window": 32}),
    ("leaky_rerope", {}, {"window": 32, "k": 16.0}),
    ("leaky_rerope", {"scale": 4.0}, {"window": 32, "k": (256 - 32) / 32}),
    ("leaky_rerope", {"scale": 4.0, "window": 16}, {"window": 16, "k": (256 - 16) / 48}),
    ("self_extend", {}, {"window": 32, "group": 8}),
    ("self_extend", {"scale": 4.0}, {"window": 32, "group": 7}),
    ("self_extend", {"scale": 4.0, "window": 16}, {"window": 16, "group": 5}),
    ("self_extend", {"scale": 4.1}, {"window": 32, "group": 8}),
    ("dual_chunk", {}, {"chunk": 48, "window": 16}),
    ("dual_chunk", {"chunk": 40}, {"chunk": 40, "window": 24}),
    ("dual_chunk", {"window": 4}, {"chunk": 48, "window": 4}),
    ("string", {}, {"shift": 21, "window": 20}),
    ("string", {"shift": 8}, {"shift": 8, "window": 7}),
    ("lm_infinite", {}, {"window": 64, "sinks": 10}),
    ("attention_sinks", {}, {"window": 60, "sinks": 4}),
    ("sliding_window", {}, {"window": 64}),
]


@pytest.mark.parametrize(("name", "given_knobs", "in_force"), DEFAULTS)
def test_defaults_follow_the_original_context(
    name: str, given_knobs: dict[str, Any], in_force: dict[str, Any]
) -> None:
    got = position_map(bands(name, **given_knobs), 150, 64)
    assert_same(got, naive.position_map(name, 150, **in_force))


def test_string_at_a_real_context() -> None:
    """The authors' setting for Llama 3.1: a third of 128k, and 128 tokens."""
    method = get_method("string")()
    assert isinstance(method, RotaryBands)
    near, far = method.bands(131_072)
    assert near.below == far.least == 43_691
    assert int(far.query_position(torch.tensor(43_691)) - far.key_position(torch.tensor(0))) == 128


def last_row(method: RotaryBands, length: int, original: int) -> list[int | None]:
    row = position_map(method, length, original)[-1].tolist()
    return [None if math.isnan(value) else int(value) for value in row]


def test_examples_in_the_papers() -> None:
    # SelfExtend, figure 3: ten tokens, a model of seven, G = 2, W = 4.
    row = last_row(bands("self_extend", group=2, window=4), 10, 7)
    assert row == [6, 6, 5, 5, 4, 4, 3, 2, 1, 0]
    # Dual chunk attention, figure 2: twelve tokens, a model of ten, chunks of six, w = 4.
    row = last_row(bands("dual_chunk", chunk=6), 12, 10)
    assert row == [9, 8, 7, 6, 5, 4, 5, 4, 3, 2, 1, 0]
    assert position_map(bands("dual_chunk", chunk=6), 12, 10)[6].tolist()[:7] == [
        6,
        5,
        4,
        3,
        2,
        1,
        0,
    ]
    # STRING, figure 5: nine tokens, S = 3, here with W = 2.
    row = last_row(bands("string", shift=3, window=2), 9, 9)
    assert row == [7, 6, 5, 4, 3, 2, 2, 1, 0]
    # StreamingLLM, section 3.2: tokens 0 1 2 3 6 7 8 are cached and 9 comes: positions 0 to 7.
    row = last_row(bands("attention_sinks", sinks=4, window=4), 10, 100)
    assert row == [7, 6, 5, 4, None, None, 3, 2, 1, 0]
    # LM-Infinite: the first keys at no more than the window.
    row = last_row(bands("lm_infinite", sinks=2, window=3), 7, 3)
    assert row == [3, 3, None, None, 2, 1, 0]
    assert last_row(bands("rerope", window=3), 6, 6) == [3, 3, 3, 2, 1, 0]


@pytest.mark.parametrize("name", BANDS)
@pytest.mark.parametrize("length", [1, 2, 24])
def test_a_short_text_is_read_as_unpatched(name: str, length: int) -> None:
    """A window (a chunk, a shift) at least as long as the text gives m - n, and every key is read."""
    wide = {"dual_chunk": {"chunk": 24, "window": 1}, "string": {"shift": 24}}
    method = bands(name, **wide.get(name, {"window": 24}))
    assert method.near_window(64) == 24
    m = torch.arange(length, dtype=torch.float64)
    plain = (m[:, None] - m).masked_fill(m[:, None] < m, math.nan)
    assert_same(position_map(method, length, 64), plain)
    longer = position_map(method, 60, 64)
    assert not torch.equal(longer.nan_to_num(-1), naive_plain(60).nan_to_num(-1))


def naive_plain(length: int) -> Tensor:
    return naive.position_map("rerope", length, window=length)


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("leaky_rerope", {"k": 1.0, "window": 5}),
        ("leaky_rerope", {"scale": 1.0}),
        ("self_extend", {"group": 1, "window": 5}),
        ("self_extend", {"scale": 1.0}),
        ("string", {"shift": 7, "window": 7}),
    ],
)
def test_neutral_knobs_change_nothing(name: str, knobs: dict[str, Any]) -> None:
    assert_same(position_map(bands(name, **knobs), 60, 24), naive_plain(60))


@given(original=st.integers(8, 200), scale=st.floats(1.0, 12.0), share=st.floats(0.05, 0.95))
@settings(max_examples=60)
def test_a_scale_keeps_the_text_within_the_trained_positions(
    original: int, scale: float, share: float
) -> None:
    window = max(1, int(original * share))
    last = torch.tensor(math.floor(original * scale) - 1)
    for name in ("leaky_rerope", "self_extend"):
        _, far = bands(name, scale=scale, window=window).bands(original)
        reached = float(far.query_position(last) - far.key_position(torch.tensor(0)))
        assert reached <= original
        if last >= 2 * window and scale > 2:
            assert reached > original / 4  # and not squeezed without need


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        *(("rerope", 32), ("dual_chunk", 63), ("lm_infinite", 64)),
        *(("attention_sinks", 63), ("sliding_window", 63)),
    ],
)
def test_no_position_is_new_at_any_length(name: str, bound: int) -> None:
    reached = position_map(bands(name), 300, 64)
    assert reached[~reached.isnan()].max() == bound
    assert reached[~reached.isnan()].min() == 0


@pytest.mark.parametrize("name", sorted(set(BANDS) - {"dual_chunk", "string"}))
@given(data=st.data())
@settings(max_examples=20)
def test_farther_keys_never_lie_nearer(name: str, data: st.DataObject) -> None:
    knobs = {knob: data.draw(values, knob) for knob, values in KNOBS[name].items()}
    for row in position_map(bands(name, **knobs), 50, 64):
        read = row[~row.isnan()]
        assert torch.all(read[:-1] >= read[1:])
        assert read[-1] == 0  # the token itself


@pytest.mark.parametrize("name", BANDS)
def test_keys_are_cached_where_the_last_band_has_them(name: str) -> None:
    """One position per key, whatever the query and the length; bands that share it need no turning."""
    method, n = bands(name), torch.arange(300)
    cached = method.cached_position(n, 64)
    assert torch.equal(cached, method.bands(64)[-1].key_position(n))
    assert torch.equal(cached[:50], method.cached_position(n[:50], 64))
    if name in ("string", "attention_sinks", "sliding_window"):
        assert torch.equal(cached, n)
    if name in ("rerope", "lm_infinite"):
        assert not cached.any()
    shared = [torch.equal(band.key_position(n), cached) for band in method.bands(64)]
    assert all(shared) is (name in ("dual_chunk", "string", "attention_sinks", "sliding_window"))


@pytest.mark.parametrize("name", BANDS)
@pytest.mark.parametrize("far_away", [2**24 + 3, 2**31 + 5])
def test_large_positions_stay_exact(name: str, far_away: int) -> None:
    knobs = {"window": 64, "k": 8.0} if name == "leaky_rerope" else {}
    method, m = bands(name, **knobs), torch.tensor(far_away)
    for band in method.bands(4096):
        for n in (far_away, far_away - 9, far_away - 5000, 3):
            if not band.contains(m, torch.tensor(n)):
                continue
            got = float(band.query_position(m) - band.key_position(torch.tensor(n)))
            filled = {"window": method.near_window(4096), **method.options()}
            if name == "dual_chunk":
                filled = {"chunk": 3072, "window": 1024}
            elif name == "string":
                filled = {"shift": 1365, "window": 128}
            elif name == "self_extend":
                filled["group"] = 8
            elif name in ("lm_infinite", "attention_sinks"):
                filled["sinks"] = method.knobs()["sinks"]
            if name == "attention_sinks":  # the naive one would build a list of the whole text
                want: float | None = far_away - n if n > 3 else 4095 - n
            else:
                want = naive.RELATIVE[name](far_away, n, **filled)
            assert got == want


@pytest.mark.parametrize("name", BANDS)
def test_rotating_to_the_positions_gives_the_relative_scores(name: str) -> None:
    """The point of it all: R(pq) q . R(pk) k is RoPE at the relative position of the map."""
    torch.manual_seed(0)
    length, frequencies = 40, [1.0, 0.3, 0.05]
    q, k = torch.randn(2, length, 6, dtype=torch.float64)
    method = bands(name, **({"sinks": 2} if "sinks" in get_method(name).knobs() else {}))
    want = naive.position_map(name, length, **_in_force(method, 16))
    m, n = torch.arange(length)[:, None], torch.arange(length)[None]
    for band in method.bands(16):
        turned_q = turn(q, band.query_position(m[:, 0]), frequencies)
        turned_k = turn(k, band.key_position(n[0]), frequencies)
        scores = turned_q @ turned_k.T
        pairs = band.contains(m, n).nonzero().tolist()
        assert pairs
        for i, j in pairs[:: max(1, len(pairs) // 40)]:
            expected = naive.rope_score(q[i], k[j], float(want[i, j]), frequencies)
            assert float(scores[i, j]) == pytest.approx(expected, abs=1e-9)


def _in_force(method: RotaryBands, original: int) -> dict[str, Any]:
    name = method.name
    knobs = {"window": method.near_window(original)}
    extra: dict[str, dict[str, Any]] = {
        "leaky_rerope": {"k": 16.0},
        "self_extend": {"group": 8},
        "dual_chunk": {"chunk": 12, "window": 4},
        "string": {"shift": 5, "window": 4},
        "lm_infinite": {"sinks": 2},
        "attention_sinks": {"sinks": 2},
    }
    return knobs | extra.get(name, {})


def turn(x: Tensor, position: Tensor, frequencies: list[float]) -> Tensor:
    """RoPE in the half-split layout by complex numbers."""
    half = x.shape[-1] // 2
    angles = position.double()[:, None] * torch.tensor(frequencies, dtype=torch.float64)
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1)


# ------------------------------------------------------------------------------------------
# log n


def test_log_n_is_one_up_to_the_original_context() -> None:
    m = torch.tensor([0, 1, 30, 62, 63, 64, 127, 4095, 10**6])
    factor = LogN().query_factor(m, 64)
    want = [max(1.0, math.log(int(i) + 1) / math.log(64)) for i in m]
    assert factor.tolist() == pytest.approx(want, rel=1e-12)
    assert torch.all(factor[:5] == 1)
    assert float(factor[-2]) == 2.0  # 64 squared
    assert factor.dtype == torch.float64


@pytest.mark.parametrize("name", BANDS)
def test_log_n_is_an_option_of_every_band(name: str) -> None:
    m = torch.arange(300)
    assert bands(name).query_factor(m, 64) is None
    factor = bands(name, log_n=True).query_factor(m, 64)
    assert factor is not None
    assert torch.equal(factor, LogN().query_factor(m, 64))


# ------------------------------------------------------------------------------------------
# Distance biases

BIAS_KNOBS: dict[str, list[dict[str, Any]]] = {
    "alibi": [{}, {"scale": 4.0}],
    "kerple_log": [{}],
    "kerple_power": [{}],
    "sandwich": [{}, {"dim": 6}],
    "t5": [{}, {"buckets": 8, "max_distance": 20}],
    "fire": [{"threshold": 5.0}, {"hidden": 3, "c": 0.7}],
}


@pytest.mark.parametrize(
    ("name", "knobs"), [(name, knobs) for name in BIASES for knobs in BIAS_KNOBS[name]]
)
@pytest.mark.parametrize("heads", [1, 4, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bias_equals_the_paper(
    name: str, knobs: dict[str, Any], heads: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(heads)
    length, method = 40, distance_bias(name, **knobs)
    parameters = {key: value.to(dtype) for key, value in method.initial(heads, 32).items()}
    if name == "t5":
        parameters["table"].normal_()
    for key in ("r1", "r2"):
        if key in parameters:
            parameters[key].clamp_(min=0.02)
    assert bool(parameters) is method.trainable
    values: dict[str, Any] = naive.as_numbers(parameters) | knobs
    if name == "fire":
        values = {k: v for k, v in values.items() if k not in ("multiplier", "hidden")}
        values |= {"c": float(parameters["c"]), "threshold": knobs.get("threshold", 512.0)}
    if name == "sandwich":
        values.setdefault("dim", 128)
    want = naive.bias_matrix(name, length, heads, **values)

    m = torch.arange(length, dtype=dtype)
    distance = (m[:, None] - m).clamp(min=0)
    position = torch.arange(length)[:, None] if method.of_query else None
    got = method.bias(distance, heads, parameters, position)
    assert got.dtype == dtype
    assert got.shape == (heads, length, length)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(
        got[:, causal].double(), want[:, causal], rtol=tolerance, atol=tolerance
    )
    if not method.of_query:  # a function of the distance alone
        table = method.bias(m, heads, parameters)
        torch.testing.assert_close(table[:, distance.long()], got, rtol=tolerance / 100, atol=0)


def test_alibi_slopes_of_the_paper() -> None:
    powers = [2.0**-h for h in range(1, 9)]
    assert ALiBi().slopes(8).tolist() == pytest.approx(powers, rel=1e-12)
    between = [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]
    assert ALiBi().slopes(12).tolist() == pytest.approx(powers + between, rel=1e-12)
    assert ALiBi().slopes(1).tolist() == [2.0**-8]
    assert ALiBi(scale=4).slopes(8).tolist() == pytest.approx([p / 4 for p in powers], rel=1e-12)


@pytest.mark.parametrize("heads", [1, 2, 7, 8, 12, 14, 32, 40, 71])
def test_alibi_equals_bloom_and_mpt(heads: int) -> None:
    slopes = ALiBi().slopes(heads)
    bloom = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(slopes.float(), bloom, rtol=1e-6, atol=0)
    mpt = build_mpt_alibi_tensor(heads, 2)[:, 0, 0]
    torch.testing.assert_close(slopes.float(), -mpt, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("buckets", "max_distance"), [(32, 128), (32, 256), (64, 1024), (8, 20), (9, 64), (2, 5)]
)
def test_t5_buckets_equal_transformers(buckets: int, max_distance: int) -> None:
    distance = torch.arange(3000)
    want = T5Attention._relative_position_bucket(
        -distance, bidirectional=False, num_buckets=buckets, max_distance=max_distance
    )
    method = T5(buckets=buckets, max_distance=max_distance)
    for dtype in (torch.float32, torch.float64, torch.int64):
        assert torch.equal(method.bucket(distance.to(dtype)), want)


def test_t5_buckets_by_hand() -> None:
    """Below 16 one by one, then log-spaced: 16 to 18 share a bucket, from 113 on all share the last."""
    bucket = T5().bucket(torch.tensor([0.0, 15.0, 16.0, 18.0, 19.0, 112.0, 113.0, 128.0, 10_000.0]))
    assert bucket.tolist() == [0, 15, 16, 16, 17, 30, 31, 31, 31]


@pytest.mark.parametrize("name", ["alibi", "kerple_log", "kerple_power", "sandwich"])
def test_penalties_start_at_zero(name: str) -> None:
    torch.manual_seed(1)
    method, distance = distance_bias(name), torch.arange(200, dtype=torch.float64)
    bias = method.bias(distance, 8, method.initial(8, 64))
    assert torch.all(bias[:, 0] == 0)
    assert torch.all(bias[:, 1:] < 0)
    if name != "sandwich":  # which only tends downwards
        assert torch.all(bias[:, 1:] < bias[:, :-1])


@pytest.mark.parametrize("name", ["alibi", "kerple_log", "kerple_power"])
def test_nothing_counts_beyond_the_horizon(name: str) -> None:
    torch.manual_seed(2)
    method, heads = distance_bias(name), 6
    parameters = {k: v.double() for k, v in method.initial(heads, 64).items()}
    drop = torch.linspace(0.5, 12, heads, dtype=torch.float64)
    horizon = method.horizon(drop, heads, parameters)
    assert horizon is not None
    assert horizon.shape == (heads,)
    for h in range(heads):
        at = method.bias(horizon[h : h + 1], heads, parameters)[h]
        assert float(at) == pytest.approx(-float(drop[h]), rel=1e-9)
        assert torch.all(method.bias(horizon[h : h + 1] * 1.01, heads, parameters)[h] < -drop[h])
    if method.trainable:
        assert method.horizon(drop, heads) is None


@pytest.mark.parametrize("name", ["sandwich", "t5", "fire"])
def test_where_nobody_knows_the_horizon(name: str) -> None:
    method = distance_bias(name)
    assert method.horizon(torch.ones(4), 4, method.initial(4, 64)) is None


@pytest.mark.parametrize("name", [n for n in BIASES if distance_bias(n).trainable])
def test_every_parameter_gets_a_gradient(name: str) -> None:
    torch.manual_seed(3)
    method = distance_bias(name)
    parameters = {k: v.double().requires_grad_() for k, v in method.initial(4, 64).items()}
    distance = torch.arange(700, dtype=torch.float64)
    position = distance if method.of_query else None
    bias = method.bias(distance, 4, parameters, position)
    (bias * torch.randn_like(bias)).sum().backward()
    for key, value in parameters.items():
        assert value.grad is not None, key
        assert torch.isfinite(value.grad).all(), key
        assert value.grad.abs().max() > 0, key


@pytest.mark.parametrize("name", ["kerple_log", "kerple_power"])
def test_kerple_stays_positive_and_can_come_back(name: str) -> None:
    """A value that training pushed out of bounds reads as the bound and still has a gradient."""
    method, distance = distance_bias(name), torch.arange(1, 50, dtype=torch.float64)
    astray = {"r1": torch.tensor([-3.0]).double(), "r2": torch.tensor([-0.5]).double()}
    bound = {"r1": torch.tensor([0.01]).double(), "r2": torch.tensor([0.01]).double()}
    learned = {k: v.clone().requires_grad_() for k, v in astray.items()}
    bias = method.bias(distance, 1, learned)
    torch.testing.assert_close(bias, method.bias(distance, 1, bound), rtol=1e-12, atol=0)
    bias.sum().backward()
    for value in learned.values():
        assert value.grad is not None
        assert value.grad.abs() > 0
    if name == "kerple_power":
        steep = method.bias(distance, 1, {"r1": bound["r1"], "r2": torch.tensor([9.0]).double()})
        torch.testing.assert_close(steep[0], -0.01 * distance**2, rtol=1e-12, atol=0)


def test_initial_values_are_the_papers() -> None:
    torch.manual_seed(0)
    log, power = (distance_bias(n).initial(4000, 64) for n in ("kerple_log", "kerple_power"))
    for values, most in ((log["r1"], 2), (log["r2"], 1), (power["r1"], 1), (power["r2"], 2)):
        assert 0 <= values.min() <= values.max() <= most
        assert float(values.mean()) == pytest.approx(most / 2, abs=0.05)
    fire = distance_bias("fire").initial(1000, 64)
    assert float(fire["c"]) == pytest.approx(0.1)
    linear = torch.nn.Linear(32, 1000)
    for key, like in (("weight_out", linear.weight), ("bias_out", linear.bias)):
        assert fire[key].shape == like.shape
        assert float(fire[key].abs().max()) == pytest.approx(
            float(like.detach().abs().max()), rel=0.02
        )
    assert torch.all(distance_bias("t5").initial(4, 64)["table"] == 0)
    every = [distance_bias(n).initial(4, 64) for n in BIASES]
    assert all(v.dtype == torch.float32 for values in every for v in values.values())


def test_fire_reads_distances_as_fractions_and_survives_odd_parameters() -> None:
    method = distance_bias("fire", threshold=4.0)
    parameters = {k: v.double() for k, v in method.initial(2, 64).items()}
    with pytest.raises(PosencError, match="query_position"):
        method.bias(torch.arange(4.0), 2, parameters)
    # At the text's first token every query longer than T stands at the fraction 1.
    m = torch.tensor([10.0, 1000.0]).double()
    first = method.bias(m, 2, parameters, m)
    torch.testing.assert_close(first[:, 0], first[:, 1], rtol=1e-12, atol=1e-12)
    zero = torch.zeros((), dtype=torch.float64)
    for odd in ({"c": zero}, {"c": zero - 0.3}, {"multiplier": zero}, {"multiplier": zero - 1}):
        bias = method.bias(torch.arange(9.0).double(), 2, parameters | odd, torch.arange(9))
        assert torch.isfinite(bias).all()


# ------------------------------------------------------------------------------------------
# Relative keys, xPos, RoPE with biases


def relative_scores(
    method: RelativeKeys, q: Tensor, k: Tensor, parameters: dict[str, Tensor]
) -> Tensor:
    """The scores that `RelativeKeys` promises, (heads, length, length), unscaled; q, k (heads, length, d)."""
    heads, length, dim = q.shape
    m = torch.arange(length, dtype=torch.float64)
    embedded = method.relative((m[:, None] - m).clamp(min=0), heads, dim, parameters)
    assert embedded.shape in ((1, length, length, dim), (heads, length, length, dim))
    u, v = method.content_bias(parameters), method.position_bias(parameters)
    content = q if u is None else q + u[:, None]
    position = q if v is None else q + v[:, None]
    return content @ k.mT + torch.einsum(
        "hmd,hmnd->hmn", position, embedded.expand(heads, -1, -1, -1)
    )


def test_relative_keys_equal_the_papers() -> None:
    torch.manual_seed(0)
    heads, length, dim = 3, 24, 8
    q, k = torch.randn(2, heads, length, dim, dtype=torch.float64)
    for method in (Shaw(max_distance=5), TransformerXL()):
        start = {name: v.double() for name, v in method.initial(heads, dim, 64).items()}
        learned = {name: torch.randn_like(v) for name, v in start.items()}
        got = relative_scores(method, q, k, learned)
        for h in range(heads):
            for m in range(length):
                for n in range(m + 1):
                    args = (q[h, m], k[h, n], m - n)
                    if isinstance(method, Shaw):
                        want = naive.shaw_score(*args, learned["table"])
                    else:
                        u, v, weight = (learned[name][h] for name in ("u", "v", "weight"))
                        want = naive.transformer_xl_score(*args, u, v, weight)
                    assert float(got[h, m, n]) == pytest.approx(want, abs=1e-9)
        # At first they add nothing.
        torch.testing.assert_close(relative_scores(method, q, k, start), q @ k.mT)


def test_where_relative_keys_become_constant() -> None:
    method = Shaw(max_distance=5)
    assert method.constant_from() == 5
    table = torch.randn(6, 4)
    far = method.relative(torch.tensor([5.0, 6.0, 99.0]), 2, 4, {"table": table})
    assert torch.equal(far, table[5].expand(1, 3, 4))
    assert TransformerXL().constant_from() is None
    with pytest.raises(PosencError, match="head_dim"):
        TransformerXL().initial(2, 7, 64)


@pytest.mark.parametrize("method", [Shaw(), TransformerXL()], ids=lambda method: method.name)
def test_relative_keys_can_be_trained_from_zero(method: RelativeKeys) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 20, 8, dtype=torch.float64)
    start = {n: v.double().requires_grad_() for n, v in method.initial(2, 8, 64).items()}
    scores = relative_scores(method, q, k, start)
    (scores * torch.randn_like(scores)).sum().backward()
    moved = {n for n, v in start.items() if v.grad is not None and v.grad.abs().max() > 0}
    assert moved == set(start) - {"v"}  # v meets W R_r, which is zero until W has moved


def test_xpos_decays_as_published() -> None:
    torch.manual_seed(0)
    length, frequencies = 30, [1.0, 0.3, 0.05]
    q, k = torch.randn(2, length, 6, dtype=torch.float64)
    method, position = XPos(scale_base=16), torch.arange(length)
    z = [(2 * i / 6 + 0.4) / 1.4 for i in range(3)]
    assert method.pair_scale(6).tolist() == pytest.approx(z, rel=1e-12)
    for origin in (0, 13, 29):
        scaled_q = turn(q, position, frequencies) * method.query_scale(position, 6, origin).repeat(
            1, 2
        )
        scaled_k = turn(k, position, frequencies) * method.key_scale(position, 6, origin).repeat(
            1, 2
        )
        scores = scaled_q @ scaled_k.T
        for m in range(0, length, 3):
            for n in range(m + 1):
                want = naive.xpos_score(q[m], k[n], m - n, frequencies, base=16)
                assert float(scores[m, n]) == pytest.approx(want, abs=1e-9)


def test_xpos_factors_stay_finite_from_the_chunk() -> None:
    """With the origin at the first query of a chunk, half a million keys give no overflow in float32."""
    method, chunk, end = XPos(), 1024, 500_000
    queries = method.query_scale(torch.arange(end - chunk, end), 64, end - chunk)
    keys = method.key_scale(torch.arange(end), 64, end - chunk)
    most = 3.5 ** (chunk / 512)
    assert queries.max() <= 1
    assert keys.max() <= most
    assert 0 < keys[end - chunk].min() <= 1
    assert not torch.isfinite(method.key_scale(torch.tensor([end]), 64, 0).float()).all()


def test_rope_bias_adds_before_the_rotation() -> None:
    torch.manual_seed(0)
    method, frequencies = RopeBias(), [1.0, 0.2]
    start = method.initial(4, 2, 4)
    assert start["a"].shape == (4, 4)
    assert start["b"].shape == (2, 4)
    assert not any(value.any() for value in start.values())
    q, k = torch.randn(4, 12, 4, dtype=torch.float64), torch.randn(2, 12, 4, dtype=torch.float64)
    assert torch.equal(method.shifted_query(q, start), q)
    learned = {name: torch.randn_like(value).double() for name, value in start.items()}
    shifted_q, shifted_k = method.shifted_query(q, learned), method.shifted_key(k, learned)
    for h, m, n in ((0, 11, 3), (3, 7, 7), (2, 5, 0)):
        want = naive.rope_score(
            q[h, m] + learned["a"][h], k[h // 2, n] + learned["b"][h // 2], m - n, frequencies
        )
        turned_q = turn(shifted_q[h], torch.arange(12), frequencies)[m]
        turned_k = turn(shifted_k[h // 2], torch.arange(12), frequencies)[n]
        assert float(turned_q @ turned_k) == pytest.approx(want, abs=1e-9)


# ------------------------------------------------------------------------------------------
# Options, refusals, a method of one's own

SAVED: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in OTHERS),
    ("rerope", {"window": 512, "log_n": True}),
    ("leaky_rerope", {"scale": 8.0, "window": 512}),
    ("leaky_rerope", {"k": 4.0}),
    ("self_extend", {"group": 4, "window": 1024}),
    ("self_extend", {"scale": 4.0, "log_n": True}),
    ("dual_chunk", {"chunk": 1000, "window": 24}),
    ("string", {"shift": 900, "window": 64}),
    ("lm_infinite", {"sinks": 100}),
    ("attention_sinks", {"sinks": 1, "window": 7}),
    ("alibi", {"scale": 2.0, "keep_rope": True}),
    ("t5", {"buckets": 64, "max_distance": 512}),
    ("sandwich", {"dim": 64}),
    ("fire", {"hidden": 16, "threshold": 64.0, "c": 0.5}),
    ("shaw", {"max_distance": 64}),
    ("xpos", {"scale_base": 1024}),
]


@pytest.mark.parametrize(("name", "options"), SAVED)
def test_options_travel_as_json(name: str, options: dict[str, Any]) -> None:
    method = get_method(name).from_options(**options)
    saved = json.loads(json.dumps(method.options()))
    assert saved == options
    again = get_method(name).from_options(**saved)
    assert again == method
    assert hash(again) == hash(method)


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        *((name, {"window": 0}, "window") for name in BANDS),
        *((name, {"window": 64.5}, "window") for name in BANDS),
        *((name, {"log_n": "yes"}, "log_n") for name in BANDS),
        *((name, {"keep_rope": 1}, "keep_rope") for name in SEAMS["bias"]),
        *((name, {"sclae": 1}, "sclae") for name in OTHERS),
        ("rerope", {"scale": 4.0}, "scale"),
        ("leaky_rerope", {"k": 0.5}, "k "),
        ("leaky_rerope", {"scale": 0.5}, "scale"),
        ("leaky_rerope", {"scale": 4.0, "k": 4.0}, "scale and k"),
        ("self_extend", {"group": 0}, "group"),
        ("self_extend", {"group": 2.5}, "group"),
        ("self_extend", {"scale": math.nan}, "scale"),
        ("self_extend", {"scale": 4.0, "group": 4}, "scale and group"),
        ("dual_chunk", {"chunk": 0}, "chunk"),
        ("dual_chunk", {"chunk": True}, "chunk"),
        ("string", {"shift": -1}, "shift"),
        ("lm_infinite", {"sinks": 0}, "sinks"),
        ("attention_sinks", {"sinks": "4"}, "sinks"),
        ("alibi", {"scale": 0.0}, "scale"),
        ("sandwich", {"dim": 7}, "dim"),
        ("t5", {"buckets": 1}, "buckets"),
        ("t5", {"max_distance": 16}, "max_distance"),
        ("fire", {"hidden": 0}, "hidden"),
        ("fire", {"threshold": 0}, "threshold"),
        ("fire", {"c": -0.1}, r"\bc\b"),
        ("shaw", {"max_distance": 0}, "max_distance"),
        ("xpos", {"scale_base": 0}, "scale_base"),
        ("log_n", {"original": 64}, "original"),
    ],
)
def test_bad_values_are_refused_by_name(name: str, options: dict[str, Any], named: str) -> None:
    with pytest.raises(PosencError, match=named):
        get_method(name).from_options(**options)


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("leaky_rerope", {"scale": 4.0, "window": 64}, "window.*64"),
        ("self_extend", {"scale": 4.0, "window": 100}, "window.*64"),
        ("dual_chunk", {"chunk": 64}, "chunk.*64"),
        ("dual_chunk", {"chunk": 50, "window": 15}, "chunk.*64"),
        ("string", {"shift": 8, "window": 9}, "window.*8"),
        ("string", {"window": 30}, "window.*21"),
        ("attention_sinks", {"sinks": 64}, "sinks.*64"),
    ],
)
def test_knobs_that_do_not_fit_the_model_are_refused(
    name: str, options: dict[str, Any], named: str
) -> None:
    method = bands(name, **options)
    with pytest.raises(PosencError, match=named):
        [band.query_position(torch.arange(3)) for band in method.bands(64)]


def test_a_method_of_ones_own_from_the_page() -> None:
    """The classes of the page's last section work as they stand there."""
    page = (Path(__file__).parents[1] / "docs" / "methods.md").read_text(encoding="utf-8")
    section = page.partition("\n## A method of your own\n")[2]
    code = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(compile(code.partition("\nmodel = ")[0], "docs/methods.md", "exec"), names)
    own = [
        value
        for value in names.values()
        if isinstance(value, type) and issubclass(value, Method) and value.__module__ == "builtins"
    ]
    assert {base.__bases__[0] for base in own} == {RotaryBands, DistanceBias}
    for method in own:
        built = method()
        assert built.summary
        if isinstance(built, RotaryBands):
            relative = position_map(built, 60, 16)
            assert torch.equal(relative.diagonal(), torch.zeros(60).double())
            assert not torch.equal(relative.nan_to_num(-1), naive_plain(60).nan_to_num(-1))
        elif isinstance(built, DistanceBias):
            bias = built.bias(torch.arange(9.0), 4, built.initial(4, 16))
            assert bias.shape == (4, 9)


@pytest.mark.parametrize("name", OTHERS)
def test_every_method_has_its_picture(name: str) -> None:
    docs = Path(__file__).parents[1] / "docs"
    section = (docs / "methods.md").read_text(encoding="utf-8").partition(f"\n## `{name}`\n")[2]
    picture = re.search(r"!\[.+?\]\((.+?)\)", section.partition("\n## ")[0])
    assert picture is not None
    assert picture[1] == f"methods/{name}.png"
    assert 5_000 < (docs / picture[1]).stat().st_size < 100_000


def test_pictures_are_drawn_from_the_methods(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from scripts.draw_methods import PICTURES, draw, position_map

    assert set(OTHERS) < set(PICTURES)
    written = draw(["rerope", "shaw"], tmp_path)
    assert [path.name for path in written] == ["rerope.png", "shaw.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    drawn = position_map(bands("self_extend", window=32, group=4))
    assert_same(drawn, naive.position_map("self_extend", len(drawn), window=32, group=4))


def test_bases_say_what_is_missing() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Unfinished(RotaryBands):
        name: ClassVar[str] = "unfinished"
        summary: ClassVar[str] = "nothing yet"
        source: ClassVar[str] = "this test"

    with pytest.raises(NotImplementedError):
        position_map(Unfinished(), 9, 4)
