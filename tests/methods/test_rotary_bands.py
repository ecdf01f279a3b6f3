"""Rotary bands against the papers: which relative position every pair gets."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_posenc.errors import PosencError
from hf_posenc.methods import LaMPE, RotaryBands, get_method
from tests.support import attention_references as naive
from tests.support.attention_methods import (
    BANDS,
    assert_same,
    bands,
    naive_plain,
    position_map,
    turn,
)
from tests.support.references import REQUIRED


@pytest.mark.parametrize("name", BANDS)
@given(data=st.data())
@settings(max_examples=40)
def test_positions_equal_the_paper(name: str, data: st.DataObject) -> None:
    knobs = {knob: data.draw(values, knob) for knob, values in naive.BANDS[name].knobs.items()}
    if name == "string":
        knobs["window"] = min(knobs["window"], knobs["shift"])
    length, original = data.draw(st.integers(1, 60), "length"), data.draw(st.integers(50, 80), "L")
    method = bands(name, **knobs)
    assert_same(position_map(method, length, original), naive.position_map(name, length, **knobs))


@pytest.mark.parametrize("name", [*BANDS, "dpe"])
def test_what_follows_the_text_reads_trained_distances_however_long_it_is(name: str) -> None:
    length, original = 4096, 64
    method = bands(name, **({**REQUIRED[name](4), "window": 32} if name == "dpe" else {}))
    query, keys = torch.tensor(length - 1), torch.arange(length)
    farthest = max(
        (band.query_position(query) - band.key_position(keys))[inside].max()
        for band in method.bands(original)
        if (inside := band.contains(query, keys)).any()
    )
    assert method.follows_text == bool(farthest <= original)


@pytest.mark.parametrize("knobs", [{}, {"tail": 0}, {"tail": 30}, {"capacity": 24.0}])
def test_lampe_gives_every_pair_one_position(knobs: dict[str, Any]) -> None:
    given = {"growth": 0.01, "shift": -0.5, "capacity": 50.0, "head": 6, "tail": 4} | knobs
    method, plain = LaMPE(**given), LaMPE(**given | {"shift": -50.0})  # nowhere to map to
    for length in (n for n in (11, 12, 13, 19, 20, 21, 30, 60, 150) if n > given["tail"]):
        of_text: Any = SimpleNamespace(bands=lambda original, n=length: method.bands(original, n))
        want = naive.lampe(length, length, **given)
        want[torch.ones(length, length, dtype=torch.bool).triu(1)] = math.nan
        assert_same(position_map(of_text, length, 8), want)
        assert [band.below for band in method.bands(length, length)] == [None]
        assert [band.below for band in plain.bands(8, length)] == [None]


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


# As they are computed in the repositories of the papers, loop by loop; `m` is the newest token.


def chunkllama(m: int, trained: int, local_window: int) -> list[list[int]]:
    """Of every key, the positions at which it is read: decoding in `chunkllama_attn_replace.py`."""
    chunk_size = trained * 3 // 4
    chunk_len = chunk_size - local_window
    q_t = list(range(chunk_len))
    qc_t = [min(i + chunk_len, chunk_size) for i in range(chunk_len)]
    k_t = [n % chunk_len for n in range(m + 1)]
    current = m // chunk_len
    found = []
    for n, key in enumerate(k_t):
        if n >= chunk_len * current:
            query = q_t[m % chunk_len]
        elif n >= chunk_len * (current - 1):
            query = qc_t[m % chunk_len]
        else:
            query = qc_t[chunk_len - 1]
        found.append([query - key])
    return found


def string_prefill(m: int, diagonal: int, local_window: int) -> list[list[int]]:
    """A window of `diagonal` keys and the query's own, and the others from `m - diagonal` down: of the flash call."""
    near = {n: m - n for n in range(max(0, m - diagonal), m + 1)}
    far = {n: m - diagonal + local_window - n for n in range(m - diagonal + 1)}
    return [[read[n] for read in (near, far) if n in read] for n in range(m + 1)]


def streaming(length: int, sinks: int, recent: int) -> list[list[list[int]]]:
    """Row by row as in `eval_long_ppl.py`: each token is read with the cache, which is cut back after it."""
    cache: list[int] = []
    rows = []
    for m in range(length):
        cache.append(m)
        place = {n: index for index, n in enumerate(cache)}
        rows.append([[place[m] - place[n]] if n in place else [] for n in range(m + 1)])
        if len(cache) > sinks + recent:
            cache = cache[:sinks] + cache[-recent:]
    return rows


def rows_of(method: RotaryBands, length: int, original: int) -> list[list[list[int]]]:
    found = position_map(method, length, original).tolist()
    return [[[] if math.isnan(p) else [int(p)] for p in r[: m + 1]] for m, r in enumerate(found)]


@pytest.mark.parametrize("trained", [24, 64, 61])
def test_dual_chunk_computes_the_positions_of_chunkllama(trained: int) -> None:
    window = trained // 8
    method = bands("dual_chunk", chunk=3 * trained // 4 - window, window=window + 1)
    assert rows_of(method, 150, trained) == [chunkllama(m, trained, window) for m in range(150)]
    # As its vLLM version is configured: a chunk_size of the whole trained length.
    bands("dual_chunk", chunk=trained - 4, window=5).bands(trained)


def test_string_computes_the_positions_of_its_authors_but_for_a_key_they_count_twice() -> None:
    shift, window = 11, 4
    for m, row in enumerate(rows_of(bands("string", shift=shift, window=window), 60, 64)):
        want = string_prefill(m, shift, window)
        if m >= shift:
            assert want[m - shift] == [shift, window]
            want[m - shift] = [window]
        assert row == want


def test_attention_sinks_computes_the_positions_of_streamingllms_perplexity() -> None:
    method = bands("attention_sinks", sinks=3, window=7 + 1)
    assert rows_of(method, 60, 64) == streaming(60, sinks=3, recent=7)


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
    seventh = position_map(bands("dual_chunk", chunk=6), 12, 10)[6].tolist()
    assert seventh[:7] == [6, 5, 4, 3, 2, 1, 0]
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


@pytest.mark.parametrize("name", [name for name in BANDS if get_method(name).bidirectional])
def test_an_encoder_reads_a_later_key_as_the_opposite_of_the_mirrored_pair(name: str) -> None:
    method = bands(name)
    causal = position_map(method, 150, 64)
    want = torch.where(torch.ones(150, 150, dtype=torch.bool).triu(1), -causal.T, causal)
    if any(band.keys is not None for band in method.bands(64)):  # sinks are the first keys alone
        want[torch.ones(150, 150, dtype=torch.bool).triu(method.near_window(64))] = math.nan
    assert_same(position_map(method, 150, 64, bidirectional=True), want)
    with pytest.raises(PosencError, match="log_n counts the keys before a query"):
        bands(name, log_n=True).bidirectional_bands(64)


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
def test_a_scale_keeps_to_the_trained_positions(original: int, scale: float, share: float) -> None:
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


ORDERED = [name for name in BANDS if bands(name).keeps_order]


def test_who_declines_the_order() -> None:
    assert {"dual_chunk", "string"}.isdisjoint(ORDERED)
    windows = {"lm_infinite", "attention_sinks", "sliding_window"}
    assert {"rerope", "leaky_rerope", "self_extend", *windows} <= {*ORDERED}


@pytest.mark.parametrize("name", ORDERED)
@given(data=st.data())
@settings(max_examples=20)
def test_farther_keys_never_lie_nearer(name: str, data: st.DataObject) -> None:
    knobs = {knob: data.draw(values, knob) for knob, values in naive.BANDS[name].knobs.items()}
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
    shared = all(torch.equal(band.key_position(n), cached) for band in method.bands(64))
    if name in ("dual_chunk", "string", "attention_sinks", "sliding_window"):
        assert shared
    if name in ("rerope", "leaky_rerope", "self_extend", "lm_infinite"):
        assert not shared


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
            filled = {**naive.BANDS[name].defaults(4096), **method.options()}
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
    method, knobs = bands(name), naive.BANDS[name].defaults(16)
    if "sinks" in knobs:
        method = bands(name, sinks=2)
        knobs |= {"sinks": 2, "window": method.near_window(16)}
    want = naive.position_map(name, length, **knobs)
    m, n = torch.arange(length)[:, None], torch.arange(length)[None]
    for band in method.bands(16):
        turned_q = turn(q, band.query_position(m[:, 0]), frequencies)
        scores = turned_q @ turn(k, band.key_position(n[0]), frequencies).T
        pairs = (band.contains(m, n) & (n <= m)).nonzero().tolist()
        assert pairs
        for i, j in pairs[:: max(1, len(pairs) // 40)]:
            expected = naive.rope_score(q[i], k[j], float(want[i, j]), frequencies)
            assert float(scores[i, j]) == pytest.approx(expected, abs=1e-9)
