"""The path of CUDA's flash attention, run on a CPU by an operator that has its contract."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_posenc import patch_model
from hf_posenc.attention import engine, growing, prefill, windowed
from hf_posenc.attention.call import Call, CausalMask, Run
from hf_posenc.attention.checks.comparison import call_of, encoding_of, problem
from hf_posenc.attention.checks.comparison import check as compared
from hf_posenc.attention.exact import exact
from hf_posenc.attention.fused import EMPTY, Saved, Segments, Shape, one_segment
from hf_posenc.attention.fused.flash4 import Flash4
from hf_posenc.attention.fused.pytorch import CudaFlash, CudnnAttention
from hf_posenc.attention.parts import Part, apart, attend_parts, in_squares
from hf_posenc.attention.windowed import Place, Rectangles, causal, joined
from hf_posenc.methods import RotaryBands, get_method
from hf_posenc.methods.bands import Band, same
from tests.attention.test_attention import FLASH, apply, assert_close, build
from tests.support import zoo
from tests.support.attention_cases import SCALING, attend_naively, leaf, scores_of
from tests.support.emulated import EmulatedCudnn, EmulatedFlash

CPU = torch.device("cpu")
EMULATED = EmulatedFlash()
OPERATORS = EMULATED, EmulatedCudnn()
pytestmark = pytest.mark.filterwarnings("ignore:.*starts untrained")


# The parts, against naive attention over every pair

Sequences = list[tuple[int, int]]
"""Rows and cached keys of each."""


def check(
    plan: Any, naive: Any, sequences: Sequences, gap: int, queries: int = 1, keys: int = 1
) -> None:
    """All sequences in one call, with `gap` rows and keys of padding before each, against each alone."""
    torch.manual_seed(0)
    places, spans = [], []
    row = key = 0
    for rows, offset in sequences:
        row, key = row + gap, key + gap
        places.append((Place(row, key, rows, offset + rows, None), plan(rows, offset)))
        spans.append((slice(row, row + rows), slice(key, key + offset + rows), offset))
        row, key = row + rows, key + offset + rows
    of_queries = [leaf(1, 4, row, 8) for _ in range(queries)]
    of_keys = [leaf(1, 2, key, 8) for _ in range(keys)]
    value = leaf(1, 2, key, 8)
    tensors = [*of_queries, *of_keys, value]
    expected = torch.zeros(1, row, 4, 8).double().transpose(1, 2)
    for own, seen, offset in spans:
        m = torch.arange(offset, offset + own.stop - own.start)[:, None]
        kind, visible = naive(m, torch.arange(seen.stop - seen.start))
        pairs = zip(of_queries, itertools.cycle(of_keys), strict=False)
        every = torch.stack([scores_of(q[:, :, own], k[:, :, seen]) for q, k in pairs])
        scores = every.gather(0, kind.expand(1, *every.shape[1:]).long())[0]
        part = attend_naively(scores, visible, value[:, :, seen])
        expected = torch.cat((expected[:, :, : own.start], part, expected[:, :, own.stop :]), 2)
    grad = torch.randn_like(expected)
    parts = joined(places, row, key)
    wanted = _gradients(expected, tensors, grad)
    for fused in OPERATORS:
        out = attend_parts(parts, of_queries, of_keys, value, SCALING, fused=fused)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-13, msg=fused.name)
        mine = _gradients(out, tensors, grad)
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-12, msg=fused.name)


def _gradients(out: Tensor, tensors: list[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(
        out, tensors, grad, retain_graph=True, materialize_grads=True, allow_unused=True
    )


SEQUENCES = st.lists(
    st.tuples(st.integers(1, 40), st.just(0) | st.integers(1, 50)), min_size=1, max_size=3
)
GAPS = st.sampled_from([0, 3])


@given(SEQUENCES, GAPS)
@settings(max_examples=30)
def test_causal(sequences: Sequences, gap: int) -> None:
    check(windowed.causal, lambda m, n: (torch.zeros_like(m - n), n <= m), sequences, gap)


@example([(21, 0)], 0, 7, None)  # chunks of the window; then a shorter last one, behind a cache
@example([(40, 0)], 0, 7, None)
@example([(40, 6)], 0, 7, 100)
@example([(14, 30)], 0, 7, None)
@example([(40, 3)], 0, 7, 4)
@given(SEQUENCES, GAPS, st.integers(1, 60), st.none() | st.integers(0, 100))
@settings(max_examples=30)
def test_two_bands(sequences: Sequences, gap: int, window: int, far_keys: int | None) -> None:
    def plan(rows: int, offset: int) -> Rectangles:
        return windowed.two_bands(rows, offset, window, far_keys=far_keys)

    def naive(m: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        far = m - n >= window
        return far, (n <= m) & (~far | (n < (far_keys if far_keys is not None else 1000)))

    check(plan, naive, sequences, gap, 2, 2)


@given(SEQUENCES, GAPS, st.integers(1, 60))
@settings(max_examples=30)
def test_three_chunks(sequences: Sequences, gap: int, chunk: int) -> None:
    def naive(m: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        return (m // chunk - n // chunk).clamp(0, 2), n <= m

    def plan(rows: int, offset: int) -> Rectangles:
        return windowed.three_chunks(rows, offset, chunk)

    check(plan, naive, sequences, gap, 3)


# The contract of the operator


def test_rows_without_keys() -> None:
    """Zeros and a log-sum-exp that merges as none, as flash attention gives them."""
    query, key = torch.randn(1, 2, 5, 8), torch.randn(1, 1, 4, 8)
    segments = Segments.of([((1, 3), (0, 2)), ((3, 4), (3, 4))], 5, 4)
    assert segments.queries[-1] == 5
    assert segments.keys[-1] == 4
    assert segments.longest == (2, 2)
    assert Segments.of([((0, 1), (0, 2))], 2, 2).longest == (2, 2)  # an upper bound, never 1
    starts = one_segment(5, 4).on(query.device)
    assert [each.tolist() for each in starts] == [[0, 5], [0, 4]]
    assert {each.dtype for each in starts} == {torch.int32}  # as CUDA's operators take them
    out, lse, _ = EMULATED.forward(query, key, key, Shape(segments=segments))
    empty = [0, 4]
    assert torch.equal(out[:, :, empty], torch.zeros(1, 2, 2, 8))
    assert (lse[:, :, empty] == EMPTY).all()
    alone, _, _ = EMULATED.forward(query[:, :, 1:3], key[:, :, :2], key[:, :, :2], Shape())
    torch.testing.assert_close(out[:, :, 1:3], alone)


@pytest.mark.parametrize(("window", "expected"), [(None, 3), (1, 1), (2, 2)])
def test_calls_are_aligned_to_the_bottom_right(window: int | None, expected: int) -> None:
    query, key = torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 4, 8)
    value = torch.eye(4)[None, None]
    value = torch.cat((value, torch.zeros(1, 1, 4, 4)), -1)
    shape = Shape(causal=True, window=window)
    assert shape.limits == (-1 if window is None else window - 1, 0)
    out, lse, _ = EMULATED.forward(query, key, value, shape)
    assert lse[0, 0, 0] == pytest.approx(math.log(expected))
    assert (out[0, 0, 0] > 0).nonzero()[:, 0].tolist() == list(range(3 - expected, 3))


SHARING = Segments.of([((2, 10), (0, 12)), ((10, 24), (0, 20))], 24, 30)


def test_sequences_that_share_keys() -> None:
    """Rows in none have no keys, and each is a part of its own where an operator does not take them together."""
    assert (SHARING.queries, SHARING.counts) == ((0, 2, 10, 24), (0, 12, 20))
    assert SHARING.longest == (14, 20)
    part = Part((5, 29), (3, 33), segments=SHARING, merge=True)
    pieces = [((7, 15), (3, 15)), ((15, 29), (3, 23))]
    assert [(piece.rows, piece.keys) for piece in apart(part)] == pieces
    assert in_squares(part, 3) == apart(part)
    query, key = torch.randn(1, 2, 24, 8), torch.randn(1, 1, 30, 8)
    out, lse, _ = EMULATED.forward(query, key, key, Shape(segments=SHARING))
    assert (lse[:, :, :2] == EMPTY).all()
    alone, _, _ = EMULATED.forward(query[:, :, 10:], key[:, :, :20], key[:, :, :20], Shape())
    torch.testing.assert_close(out[:, :, 10:], alone)


@pytest.mark.parametrize(
    "shape", [Shape(), Shape(causal=True), Shape(causal=True, window=7), Shape(segments=SHARING)]
)
def test_the_operators_of_cuda_take_these_calls(shape: Shape) -> None:
    """Names, order and shapes of arguments and results; nothing is computed."""
    flash, half = CudaFlash(), functools.partial(torch.empty, dtype=torch.bfloat16, device="meta")
    query = half(1, 24, 4, 16).transpose(1, 2)
    key = half(1, 30, 2, 16).transpose(1, 2)
    out, lse, state = flash.forward(query, key, key, shape)
    assert out.shape == query.shape
    assert lse.shape == query.shape[:3]
    assert lse.dtype == torch.float32
    if shape.segments is SHARING:
        return  # its sequences get a backward each
    grads = flash.backward(out, Saved(query, key, key, out, lse), shape, state)
    assert [x.shape for x in grads] == [x.shape for x in (query, key, key)]


@pytest.mark.parametrize(
    ("major", "served"), [(7, ""), (8, "f"), (9, "fc4"), (10, "fc4"), (12, "fc")]
)
def test_devices_that_an_operator_serves(major: int, served: str, monkeypatch: Any) -> None:
    """As CUDA names them; nothing is computed."""
    cuda, gpu, change = torch.backends.cuda, torch.device("cuda", major), monkeypatch.setattr
    change(torch.version, "cuda", "13.0")
    change(torch.cuda, "get_device_capability", lambda device: (major, 0))
    change(cuda, "is_flash_attention_available", lambda: True)
    for owner, name in ((torch.cuda, "is_available"), (torch.backends.cudnn, "is_available")):
        change(owner, name, lambda: True)
    change(importlib.util, "find_spec", lambda name: name)  # of FlashAttention-4
    every = {"f": CudaFlash(), "c": CudnnAttention(CudaFlash()), "4": Flash4()}

    def found(*given: Any) -> str:
        return "".join(name for name, fused in every.items() if fused.serves(*given))

    assert found(gpu, torch.bfloat16, 128) == served
    assert found(gpu, torch.float16, 256) == served[:1]
    assert found(gpu, torch.float32, 64) == found(torch.device("cpu"), torch.bfloat16, 64) == ""
    change(cuda, "cudnn_sdp_enabled", lambda: False)
    assert found(gpu, torch.bfloat16, 64) == served.replace("c", "")


class InWindow(CausalMask):
    """The mask of a model's own sliding window of 7 tokens."""

    def runs(self, positions: Tensor) -> tuple[Run, ...]:
        return tuple(replace(run, window=7) for run in super().runs(positions) or ())


@pytest.mark.parametrize(
    "fused", [*OPERATORS, None], ids=lambda fused: getattr(fused, "name", "cpu")
)
@pytest.mark.parametrize("own", [False, True])
def test_keys_before_the_window_are_not_read(fused: CudaFlash | None, own: bool) -> None:
    """A part of a text behind a cache, whose near keys start behind the first one; `own`: the window of the model."""
    q, k, v = (leaf(1, heads, length, 8) for heads, length in ((4, 21), (2, 60), (2, 60)))
    n = torch.arange(60)[None]
    method = None if own else get_method("sliding_window").from_options(window=7)
    encoding = encoding_of(method, 8, q.device, 16, (4, 2))
    mask = InWindow(21, 60, q.device) if own else CausalMask(21, 60, q.device)
    call = Call(q, k, v, n[:, 39:], n, mask, SCALING)
    assert windowed.in_runs(call, encoding)
    with_method = encoding_of(get_method("dynamic_ntk").from_options(), 8, q.device, 16, (4, 2))
    assert windowed.in_runs(call, with_method) != own  # one window is enough for a kernel
    growing_bands = encoding_of(get_method("jet_long").from_options(window=4), 8, q.device)
    assert growing.accepts(call, growing_bands) != own
    run = functools.partial(windowed.attend, fused=fused) if fused else prefill.prefill
    got = run(call, encoding)[0]
    distance = torch.arange(39, 60)[:, None] - n[0]
    want = attend_naively(scores_of(q, k), (distance >= 0) & (distance < 7), v)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-13)
    grad = torch.randn_like(want)
    mine, theirs = (_gradients(out, [q, k, v], grad) for out in (got, want))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


FORMS: dict[str, dict[str, Any]] = {"sinks": {"sinks": True}, "soft cap": {"softcap": 2.0}}


@pytest.mark.parametrize("name", ["none", "rerope", "dual_chunk", "dynamic_ntk"])
@pytest.mark.parametrize("backend", [fused.name for fused in OPERATORS])
@pytest.mark.parametrize("form", FORMS)
def test_soft_caps_and_sinks(name: str, backend: str, form: str) -> None:
    """In two sequences behind a cache, one with padding, against the general path, with the gradient of the sinks."""
    knobs: dict[str, Any] = {"window": 7} if name == "rerope" else {}
    method = None if name == "none" else get_method(name).from_options(**knobs)
    encoding = encoding_of(method, 16, CPU, 32)
    made = problem(call_of(torch.float64, 16, CPU), encoding, 40, True)
    sinks = torch.linspace(0, 6, 8, dtype=torch.float64, requires_grad=True)
    call = replace(made, **{**FORMS[form], **({"sinks": sinks} if form == "sinks" else {})})
    computed = not (form == "soft cap" and backend != EMULATED.name)
    leaves = [call.query, call.key, call.value, *([sinks] if form == "sinks" else [])]
    with engine.forced(backend):
        assert engine.choose(call, encoding).name == (backend if computed else "exact")
        got = engine.attend(call, encoding)[0]
    want, plain = exact(call, encoding)[0], exact(made, encoding)[0]
    assert (want - plain).abs().max() > 0.01
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    grad = torch.randn_like(want)
    mine, theirs = (_gradients(out, leaves, grad) for out in (got, want))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-11)


def test_other_kernels_are_checked_for_a_soft_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind of its own, tried on scores that are capped."""
    call, encoding = call_of(torch.float32, 16, CPU), encoding_of(None, 16, CPU)
    backend = engine.backend_of(EmulatedFlash.name)
    case = engine.case_of(backend, replace(call, softcap=30.0), encoding)
    assert case != engine.case_of(backend, call, encoding)
    found = compared(backend, case, CPU)
    assert found is not None
    assert found.reason is None
    with monkeypatch.context() as patch:
        patch.setattr(
            Shape, "softcap", property(lambda shape: None, lambda shape, value: None), raising=False
        )
        broken = compared(backend, case, CPU)
    assert broken is not None
    assert "its output differs" in (broken.reason or "")


# Whole models


@pytest.mark.parametrize("path", FLASH, indirect=True)
def test_layers_that_are_not_patched_and_sliding_windows(path: str) -> None:
    """A layer that shares its table with patched ones, and one with the model's own window."""
    model = build(num_hidden_layers=2)
    before = zoo.logits(model, zoo.tokens(40))
    patch_model(model, "rerope", window=50, layers=[1], original_max_position_embeddings=64)
    assert_close(zoo.logits(model, zoo.tokens(40)), before)
    mistral = zoo.build("mistral", sliding_window=11, initializer_range=0.1)
    ids = zoo.tokens(60)
    patch_model(mistral, "dual_chunk", chunk=9, window=3, layers="all")
    got = zoo.logits(mistral, ids)
    with engine.forced("exact"):
        assert_close(got, zoo.logits(mistral, ids))


@dataclass(frozen=True, kw_only=True)
class Gap(RotaryBands):
    """Bands of a user's own, between which pairs are hidden, or of two sorts of chunks: no kernel's form."""

    name = "gap"
    summary = source = "this test"
    chunk: int | None = None

    def bands(self, original: int) -> tuple[Band, ...]:
        far = functools.partial(torch.full_like, fill_value=12)
        below, least = (8, 20) if self.chunk is None else (1, 1)
        near = Band(query_position=same, key_position=same, below=below, chunk=self.chunk)
        later = Band(query_position=far, key_position=torch.zeros_like, least=least)
        return near, replace(later, chunk=self.chunk)


@pytest.mark.parametrize("chunk", [None, 16])
def test_bands_of_another_form_take_the_general_path(used: list[str], chunk: int | None) -> None:
    model, ids = patch_model(build(), Gap(chunk=chunk)), zoo.tokens(80)
    used.clear()
    got = zoo.logits(model, ids)
    assert set(used) == {"exact"}
    with engine.forced("exact"):
        assert torch.equal(zoo.logits(model, ids), got)


@dataclass(frozen=True, kw_only=True)
class Clamped(RotaryBands):
    """A user's own band, whose query positions end at a limit."""

    name = "clamped"
    summary = source = "this test"
    limit: int

    def bands(self, original: int) -> tuple[Band, ...]:
        ended = functools.partial(torch.clamp, max=self.limit)
        return (Band(query_position=ended, key_position=same),)


@pytest.mark.parametrize("limit", [4, 900, 60_000, 1 << 19, 1 << 29])
def test_positions_that_part_late_are_told_apart(limit: int) -> None:
    branch: Any = encoding_of(Clamped(limit=limit), 8, torch.device("cpu")).plan.branches[0]
    assert not branch.keeps_query
    assert branch.shares_cache
    assert branch.query_turn(torch.tensor([[limit + 3]])).tolist() == [[-3]]


def test_one_band_behind_a_cache() -> None:
    q, k, v = (leaf(1, heads, n, 8) for heads, n in ((4, 21), (2, 60), (2, 60)))
    n = torch.arange(60)[None]
    call = Call(q, k, v, n[:, 39:], n, CausalMask(21, 60, q.device), SCALING)
    encoding = encoding_of(Clamped(limit=50), 8, q.device, heads=(4, 2))
    for run in (prefill.prefill, functools.partial(windowed.attend, fused=EMULATED)):
        got = run(call, encoding)[0]
        torch.testing.assert_close(got, exact(call, encoding)[0], rtol=0, atol=1e-12)


# The table


def test_backends_are_forced_and_struck_by_name(used: list[str]) -> None:
    model, ids = apply(build(), "rerope"), zoo.tokens(80)
    expected = zoo.logits(model, ids)

    def computed_by() -> set[str]:
        used.clear()
        assert_close(zoo.logits(model, ids), expected)
        return set(used)

    for name in ("prefill", EmulatedFlash.name, "exact"):  # the last is not what the table chooses
        with engine.forced(name):
            assert computed_by() == {name}
    try:
        engine.strike(engine.Case("prefill", "bands", "float32", 16), torch.device("cpu"))
        assert computed_by() == {"exact"}
    finally:
        engine.restore()
    assert computed_by() == {"prefill"}


def test_keys_of_a_sequence_without_queries_are_its_own() -> None:
    """In a piece that ends between two sequences, the second has keys and no row."""
    plans = [(Place(0, 0, 5, 5, None), causal(5, 0)), (Place(5, 5, 0, 3, None), causal(0, 3))]
    (call,) = joined(plans, 5, 8)
    assert call.segments is not None
    assert (call.segments.queries, call.segments.keys) == ((0, 5, 5), (0, 5, 8))
