"""The CPU kernels of the attention engine against naive float64 evaluations of every pair of positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hf_posenc.attention import engine, prefill, softmax, toeplitz
from hf_posenc.attention import exact as general
from hf_posenc.attention import toeplitz as table_gradient
from hf_posenc.attention.call import Beside, Call, CausalMask, Mask, RotatedKeys, Run
from hf_posenc.attention.checks.comparison import encoding_of
from hf_posenc.attention.decode import decode, moving
from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.exact import exact
from hf_posenc.attention.rotation import Layout, Rotation
from hf_posenc.attention.toeplitz import provable_windows
from hf_posenc.methods import DynamicYaRN, LogN, get_method
from hf_posenc.model.masks import WrittenMask
from hf_posenc.rope import RopeSpec
from tests.support import references
from tests.support.attention_cases import (
    CASES,
    EXAMPLE,
    SCALING,
    SIZES,
    TOLERANCE,
    Sizes,
    attend_naively,
    bands_case,
    bias_case,
    causal_case,
    check,
    check_forward,
    chunks_case,
    leaf,
    scores_of,
)
from tests.support.emulated import EmulatedFlash


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    """Block sizes that put several borders into short texts; `test_blocks_of_the_real_size` has the real ones."""
    patch = pytest.MonkeyPatch()
    patch.setattr(prefill, "NEAR_ROWS", (8, 16))
    patch.setattr(toeplitz, "BLOCK", 32)
    patch.setattr(toeplitz, "STEP", 16)
    patch.setattr(toeplitz, "TILE_ROWS", 8)
    patch.setattr(table_gradient, "TILE_ROWS", 8)
    patch.setattr(table_gradient, "TILE_KEYS", 24)
    yield
    patch.undo()


@given(SIZES)
def test_causal(sizes: Sizes) -> None:
    check(*causal_case(sizes))


@given(SIZES, st.integers(1, 130), st.one_of(st.none(), st.integers(0, 180)), st.booleans())
def test_two_bands(sizes: Sizes, window: int, far_keys: int | None, shared_key: bool) -> None:
    check(*bands_case(sizes, window, far_keys, shared_key=shared_key))


@given(SIZES, st.integers(1, 130))
def test_three_chunks(sizes: Sizes, chunk: int) -> None:
    check(*chunks_case(sizes, chunk))


LIKE_AND_UNLIKE = st.sampled_from([20, 22, 25]) | st.integers(0, 190)  # like windows share calls
REACHES = st.none() | st.lists(LIKE_AND_UNLIKE, min_size=1, max_size=6)


@given(SIZES, st.booleans(), REACHES, st.booleans())
def test_toeplitz(sizes: Sizes, trained: bool, reaches: list[int] | None, hint: bool) -> None:
    check(*bias_case(sizes, trained=trained, reaches=reaches, hint=hint))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_halves(name: str, dtype: torch.dtype) -> None:
    kernel, naive, inputs = CASES[name](EXAMPLE)
    check_forward(kernel, naive, inputs, dtype)
    rounded = [x.detach().to(dtype if x.dim() == 4 else x.dtype) for x in inputs]  # not the table
    rounded = [x.requires_grad_() for x in rounded]
    exact = [x.detach().double().requires_grad_() for x in rounded]
    grad = torch.randn_like(naive(*exact)).to(dtype)
    mine = torch.autograd.grad(kernel(*rounded), rounded, grad)
    theirs = torch.autograd.grad(naive(*exact), exact, grad.double())
    for actual, expected in zip(mine, theirs, strict=True):
        size = TOLERANCE[dtype] * float(expected.abs().max())
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=size)


@pytest.mark.parametrize("name", CASES)
def test_blocks_of_the_real_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, constant, size in (
        (prefill, "NEAR_ROWS", (64, 256)),
        (toeplitz, "BLOCK", 1024),
        (toeplitz, "STEP", 256),
        (toeplitz, "TILE_ROWS", 128),
        (table_gradient, "TILE_ROWS", 128),
        (table_gradient, "TILE_KEYS", 1024),
    ):
        monkeypatch.setattr(module, constant, size)
    check(*CASES[name](Sizes(1, 1, 1, rows=1100, offset=1000, features=8, value_features=8)))


@pytest.mark.parametrize("name", CASES)
def test_any_strides_and_a_cache_that_is_longer_than_the_text(name: str) -> None:
    kernel, naive, inputs = CASES[name](EXAMPLE)
    kernels_own = [x.detach().transpose(-1, -2).contiguous().transpose(-1, -2) for x in inputs]
    for i, x in enumerate(kernels_own):
        if x.dim() == 4 and x.shape[2] == EXAMPLE.known:
            kernels_own[i] = torch.cat((x, torch.full_like(x[:, :, :5], math.nan)), 2)
    torch.testing.assert_close(kernel(*kernels_own), naive(*inputs), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "heads", [[20, 25], [25, 20], [25, 22, 20, 25], [25, 21, 25, 90], [90, 25, 21, 25]]
)
def test_heads_that_share_calls_have_the_widest_window(heads: list[int]) -> None:
    for group in (1, 2):
        sizes = Sizes(1, group, len(heads) // group, 90, 0, features=8, value_features=8)
        check(*bias_case(sizes, trained=False, reaches=heads, hint=True))


def horizon_of(table: Tensor) -> Callable[[Tensor], Tensor]:
    """The distance beyond which a table, shape (heads, distances), lies below its start by a drop."""

    def horizon(drop: Tensor) -> Tensor:
        needed = table >= table[:, :1] - drop[:, None]
        return torch.where(needed, torch.arange(table.shape[1]), 0).amax(-1)

    return horizon


@given(
    SIZES,
    st.sampled_from([0.3, 1.0, 3.0]),
    st.sampled_from([1e-2, 1e-8]),
    st.booleans(),
    st.integers(0, 50),
)
def test_windows_leave_out_nothing_that_counts(
    sizes: Sizes, size: float, eps: float, as_table: bool, sink: int
) -> None:
    slopes = 2.0 ** -torch.arange(sizes.heads, dtype=torch.float64)
    table = -4 * slopes[:, None] * torch.arange(sizes.known)
    q, k = sizes.query().detach() * size, sizes.key().detach()
    if sink < sizes.known:  # a key far behind that queries look for, as models have
        k[:, -1, sink] = 20
        q[:] = q.abs()
    horizon = horizon_of(table) if as_table else lambda drop: drop / (4 * slopes)
    windows = provable_windows(q, k, horizon, SCALING, eps)
    m, n = sizes.positions()
    scores = scores_of(q, k) + table[:, (m - n).clamp_min(0)]
    shares = scores.masked_fill(n > m, -math.inf).softmax(-1)
    dropped = (shares * (m - n > windows[:, None, None])).sum(-1)
    assert windows.dtype == torch.int64
    assert float(dropped.max()) <= eps


def test_many_keys_with_a_little_each_are_not_left_out() -> None:
    table = torch.full((1, 200), math.log(1e-4) - 0.1)
    table[:, 0] = 0
    q = k = torch.zeros(1, 1, 200, 4)
    assert int(provable_windows(q, k, horizon_of(table), SCALING, 1e-4)) == 199


def test_a_far_key_that_queries_prefer_to_their_own_is_not_left_out() -> None:
    q, k = torch.ones(1, 1, 64, 4), torch.full((1, 1, 64, 4), -5.0)
    q[:, :, 0], k[:, :, 0] = 0, 5
    assert int(provable_windows(q, k, lambda drop: 2 * drop, 1.0, 1e-2)) == 64


def test_windows_are_narrow_where_the_bias_is_steep() -> None:
    q, k = torch.randn(1, 2, 500, 16), torch.randn(1, 1, 500, 16)
    windows = provable_windows(q, k, lambda drop: drop / torch.tensor([1.0, 1e-4]), SCALING, 1e-8)
    assert windows[0] < 100
    assert windows[1] == 500


def test_a_penalty_leaves_out_far_keys_without_a_visible_error(monkeypatch: Any) -> None:
    told: list[Tensor | None] = []

    def noted(*given: Any, windows: Tensor | None, **more: Any) -> Tensor:
        told.append(windows)
        return toeplitz.toeplitz(*given, windows=windows, **more)

    monkeypatch.setattr(prefill, "toeplitz", noted)
    value, n = leaf(1, 2, 400, FEATURES).detach(), torch.arange(400)[None]
    equal = value.new_zeros(1, 4, 400, FEATURES)  # scores, of which the penalty alone decides
    call = Call(equal, equal[:, :2], value, n, n, CausalMask(400, 400, value.device), SCALING)
    encoding = encoding_of(get_method("alibi")(), FEATURES, value.device, heads=(4, 2))
    got = prefill.prefill(call, encoding)[0]
    torch.testing.assert_close(got, exact(call, encoding)[0], rtol=0, atol=1e-8)
    assert told[0] is not None
    # Of the slopes 2^-2, 2^-4, ...: ln(400 / 1e-8) = 24.4.
    assert told[0].tolist() == [98, 391, 400, 400]


@pytest.mark.parametrize("name", CASES)
def test_a_gradient_without_memory_of_its_own(name: str) -> None:
    """`out.sum().backward()` hands over one number, expanded."""
    kernel, naive, inputs = CASES[name](EXAMPLE)
    mine, theirs = (torch.autograd.grad(run(*inputs).sum(), inputs) for run in (kernel, naive))
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


# The decode kernel, row by row


def _naive_decode(
    scores: Tensor, value: Tensor, mask: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    heads, (rows, known) = scores.shape[1], scores.shape[2:]
    weights = torch.zeros_like(scores)
    for head in range(heads):
        for row in range(rows):
            for batch in range(scores.shape[0]):
                seen = mask.expand(scores.shape[0], 1, rows, known)[batch, 0, row]
                logits = scores[batch, head, row][seen]
                if sinks is not None:
                    logits = torch.cat((logits, sinks[head : head + 1]))
                weights[batch, head, row, seen] = logits.softmax(-1)[: int(seen.sum())]
    return weights @ value.repeat_interleave(heads // value.shape[1], 1), weights


@given(SIZES.filter(lambda sizes: sizes.known > 3), st.integers(1, 4), st.data())
def test_decode(sizes: Sizes, rows: int, data: st.DataObject) -> None:
    names = ("near", "bias", "mask", "softcap", "sinks")
    wanted = {name: data.draw(st.booleans(), name) for name in names}
    width = data.draw(st.integers(1, sizes.known), "width")
    batch = data.draw(st.sampled_from([1, sizes.batch]), "mask rows")
    q, q_near = (leaf(sizes.batch, sizes.heads, rows, sizes.features) for _ in range(2))
    k, v = sizes.key(), sizes.value()
    tail = leaf(sizes.batch, sizes.key_heads, width, sizes.features)
    bias = torch.randn(1, sizes.heads, rows, sizes.known, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(sizes.heads, dtype=torch.float64, requires_grad=True)
    is_near = torch.rand(batch, 1, rows, width) < 0.6
    mask = torch.rand(batch, 1, rows, sizes.known) < 0.7
    mask[0, :, 0] = False  # a row that sees nothing

    def kernel(*inputs: Tensor) -> Tensor:
        q, q_near, k, tail, v, bias, sinks = inputs
        given: dict[str, Any] = {"near": (q_near, tail, is_near), "bias": bias, "mask": mask}
        given |= {"softcap": 2.0, "sinks": sinks}
        chosen = {name: value for name, value in given.items() if wanted[name]}
        out, weights = decode(q, k, v, SCALING, **chosen)
        return torch.cat((out, weights.to(out.dtype)), -1)

    def naive(*inputs: Tensor) -> Tensor:
        q, q_near, k, tail, v, bias, sinks = inputs
        scores = scores_of(q, k)
        if wanted["near"]:
            last = torch.where(is_near, scores_of(q_near, tail), scores[..., -width:])
            scores = torch.cat((scores[..., :-width], last), -1)
        scores = 2.0 * (scores / 2.0).tanh() if wanted["softcap"] else scores
        scores = scores + bias if wanted["bias"] else scores
        seen = mask if wanted["mask"] else torch.ones_like(mask)
        return torch.cat(_naive_decode(scores, v, seen, sinks if wanted["sinks"] else None), -1)

    check(kernel, naive, [q, q_near, k, tail, v, bias, sinks])


def test_decode_in_halves_keeps_the_bias_in_float32() -> None:
    """A bias in the thousands, as ALiBi has at the far end of 16k tokens, has a step of 8 in bfloat16."""
    q, k, v = (torch.randn(1, 2, length, 16).bfloat16() for length in (1, 64, 64))
    bias = torch.randn(1, 2, 1, 64) - 2000
    expected = attend_naively(
        scores_of(q.double(), k.double()) + bias, torch.tensor(True), v.double()
    )
    actual = decode(q, k, v, SCALING, bias=bias)[0].double()
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE[torch.bfloat16])


def test_the_softmax_of_halves_is_taken_in_float32() -> None:
    q, k, v = (torch.randn(1, 2, length, 16).bfloat16() for length in (1, 300, 300))
    out, weights = decode(q, k, v, SCALING)
    assert out.dtype == torch.bfloat16
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 1), rtol=0, atol=1e-6)


def test_decode_compiles_in_one_graph() -> None:
    q, k, v, tail = (torch.randn(2, heads, n, 8) for heads, n in ((4, 1), (2, 40), (2, 40), (2, 9)))
    is_near, mask = torch.rand(1, 1, 1, 9) < 0.5, torch.rand(2, 1, 1, 40) < 0.7
    bias, sinks = torch.randn(4, 1, 40), torch.randn(4)

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        near = (q.flip(-1), tail, is_near)
        given: dict[str, Any] = {"near": near, "bias": bias, "mask": mask, "sinks": sinks}
        return decode(q, k, v, SCALING, softcap=3.0, **given)[0]

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), step(q, k, v))


def test_many_features_of_few_keys_are_converted_one_by_one(monkeypatch: Any) -> None:
    monkeypatch.setattr(softmax, "CONVERTED", 1)
    q, k, v = (torch.randn(1, 2, length, 64).bfloat16() for length in (1, 5, 5))
    expected = attend_naively(scores_of(q.double(), k.double()), torch.tensor(True), v.double())
    actual = decode(q, k, v, SCALING)[0].double()
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE[torch.bfloat16])


def test_halves_under_transforms_of_torch_func() -> None:
    """They differentiate PyTorch's own operations alone."""
    q, k, v = (torch.randn(1, heads, n, 16).bfloat16() for heads, n in ((4, 2), (2, 60), (2, 60)))

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return decode(q, k, v, SCALING)[0].double().square().sum()

    wide = tuple(x.double() for x in (q, k, v))
    got, want = (torch.func.grad(loss, (0, 1, 2))(*each) for each in ((q, k, v), wide))
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == torch.bfloat16
        assert float((mine.double() - theirs).norm() / theirs.norm()) < 1e-2


# Single calls of the engine

KEYS, FEATURES = 30, 8
THETA, ORIGINAL = 10_000.0, 16


class Written(Mask):
    """Causal rows with padding on the left, written out, and numbers that are added to their scores."""

    def __init__(self, queries: int, padding: tuple[int, ...], numbers: Tensor | None) -> None:
        last, key = torch.arange(KEYS - queries, KEYS)[:, None], torch.arange(KEYS)
        self.padding, self.numbers = padding, numbers
        self.shown = torch.stack([(key <= last) & (key >= count) for count in padding])[:, None]

    def rows(self, start: int, stop: int) -> Tensor:
        return self.shown[:, :, start:stop]

    def added(self, start: int, stop: int) -> Tensor | None:
        return None if self.numbers is None else self.numbers[:, :, start:stop]

    def runs(self, positions: Tensor) -> tuple[Run, ...] | None:
        if self.numbers is not None:
            return None
        offset, whole = KEYS - positions.shape[1], slice(None)
        if not any(self.padding):
            return (Run(whole, whole, whole, offset),)
        return tuple(
            Run(slice(row, row + 1), whole, slice(count, None), offset - count)
            for row, count in enumerate(self.padding)
        )


def turned(x: Tensor, positions: Tensor, frequencies: Tensor, layout: Layout) -> Tensor:
    """Rotate pairs of features as complex numbers, by frequencies (rows or 1, pairs)."""
    before, part, after = x.tensor_split((layout.start, layout.start + layout.dim), -1)
    pairs = part.unflatten(-1, (-1, 2)) if layout.interleaved else part.unflatten(-1, (2, -1)).mT
    angle = layout.sign * (positions[:, :, None] * frequencies[:, None].double())[:, None]
    both = torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle)
    pairs = torch.view_as_real(both)
    part = pairs.flatten(-2) if layout.interleaved else pairs.mT.flatten(-2)
    return torch.cat((before, part, after), -1)


LAYOUTS = pytest.mark.parametrize(
    "layout",
    [Layout(0, 8, interleaved=False), Layout(2, 4, interleaved=True), Layout(4, 4, False, -1)],
)


@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("normed", [False, True])
def test_pairs_are_turned_as_complex_numbers(
    layout: Layout, dtype: torch.dtype, normed: bool
) -> None:
    """By both ways to turn: one by one, and by tables."""
    norm = nn.RMSNorm(FEATURES) if normed else None
    weight = torch.ones(FEATURES).double()
    if norm is not None:
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        weight = norm.weight.detach().double()
    x, n = leaf(2, 2, KEYS, FEATURES).detach().to(dtype), torch.arange(KEYS)[None] - 7
    table = torch.rand(layout.dim // 2)
    rotation = Rotation(table, layout, norm=norm)
    want = turned(x.double() / weight, n, table[None], layout) * weight
    tolerance = 1e-12 if dtype == torch.float64 else 0.03
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled):
            x.requires_grad_(enabled)
            ways = rotation.turn(x, n), rotation.turned(x, rotation.tables(n[None], dtype))[0]
        for got in ways:
            assert got.dtype == dtype
            assert got.requires_grad == enabled
            torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance)


@LAYOUTS
@pytest.mark.parametrize(
    ("lengths", "padding"), [((40, 40), (0, 4)), ((40, 72), (0, 4)), ((40, 72), (0, 0))]
)
@pytest.mark.parametrize(
    ("backend", "queries"),
    [("moving", 3), ("exact", 3), ("exact", 20), ("prefill", 20), (EmulatedFlash.name, 20)],
)
def test_rows_with_a_length_a_mask_and_positions_of_their_own(
    backend: str,
    queries: int,
    lengths: tuple[int, int],
    padding: tuple[int, int],
    layout: Layout,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without padding, both rows have one row of positions.

    With norms behind the rotation, and with soft caps, sinks, numbers that a mask adds and keys of another text, where
    a backend takes them.
    """
    torch.manual_seed(0)
    monkeypatch.setattr(prefill, "ROWS", 1)
    monkeypatch.setattr(general, "SCRATCH", 1)
    order = torch.arange(layout.dim // 2).flip(0)  # of the pairs in the model's table
    spec = replace(RopeSpec(layout.dim, THETA, ORIGINAL), order=order)
    native = spec.default_inv_freq().float()[order]
    norms = [nn.RMSNorm(FEATURES), nn.RMSNorm(FEATURES)]
    for norm in norms:
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    of_query, of_key = (norm.weight.detach().double() for norm in norms)
    turn = Rotation(native, layout, norm=norms[0], keys=Rotation(native, layout, norm=norms[1]))
    encoding = Encoding(ORIGINAL, 4, turn, DynamicYaRN(update="request"), query=LogN(), spec=spec)
    sizes = ((4, queries), (2, KEYS), (2, KEYS))
    q, k, v = (torch.randn(2, h, n, FEATURES).double() for h, n in sizes)
    n = torch.stack([(torch.arange(KEYS) - count).clamp(min=0) for count in padding])
    n = n if any(padding) else n[:1]
    m = n[:, KEYS - queries :]
    more: dict[str, Any] = {}
    numbers = None
    if backend in ("moving", "exact"):
        more = {"softcap": 3.0, "sinks": torch.randn(4)}
        numbers = torch.randn(2, 1, queries, KEYS)
    beside: list[Tensor] = []
    if backend == "exact":  # keys of another text
        beside = [torch.randn(2, 2, 6, FEATURES).double(), torch.randn(2, 1, queries, 6)]
        shown = torch.rand(2, 1, queries, 6) < 0.5
        more["beside"] = Beside(beside[0], WrittenMask(shown, beside[1]))
        v = torch.cat((v, torch.randn(2, 2, 6, FEATURES)), 2)
    mask = Written(queries, padding, numbers)
    query = turned(q, m, native[None], layout) * of_query
    key = turned(k, n, native[None], layout) * of_key
    call = Call(query, key, v, m, n, mask, SCALING, lengths=torch.tensor(lengths), **more)
    tables = [references.dynamic_yarn(layout.dim, THETA, ORIGINAL, length) for length in lengths]
    moved = torch.tensor([x for x, _ in tables])[:, order]
    factor = torch.tensor([x for _, x in tables])
    # The factor is on cos and sin: of the rotated features alone.
    mine, theirs = (turned(x, at, moved, layout) for x, at in ((q, m), (k, n)))
    rotated = slice(layout.start, layout.start + layout.dim)
    mine[..., rotated] *= factor.double().square()[:, None, None, None]
    by_length = (torch.log(m.double() + 1) / math.log(ORIGINAL)).clamp(min=1)[:, None, :, None]
    scores = scores_of(mine * of_query * by_length, theirs * of_key)
    if numbers is not None:
        scores = 3.0 * (scores / 3.0).tanh() + numbers
    scores = scores.masked_fill(~mask.shown, -math.inf)
    if beside:
        others = 3.0 * (scores_of(query, beside[0]) / 3.0).tanh() + beside[1]
        scores = torch.cat((scores, others.masked_fill(~shown, -math.inf)), -1)
    if more:
        sink = more["sinks"].double()[None, :, None, None].expand(2, 4, queries, 1)
        scores = torch.cat((scores, sink), -1)
    want = scores.softmax(-1)[..., : v.shape[2]] @ v.repeat_interleave(2, 1)
    with engine.forced(backend):
        assert engine.choose(call, encoding).name == backend
        got = engine.attend(call, encoding)[0]
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5)
    assert float((want[0] - want[1]).abs().max()) > 0.1


def plain_call(queries: int, heads: tuple[int, int] = (4, 2), **more: Any) -> Call:
    torch.manual_seed(0)
    sizes = ((heads[0], queries), (heads[1], KEYS), (heads[1], KEYS))
    q, k, v = (leaf(1, h, n, FEATURES).detach() for h, n in sizes)
    n = torch.arange(KEYS)[None]
    return Call(q, k, v, n[:, -queries:], n, CausalMask(queries, KEYS, q.device), SCALING, **more)


@pytest.mark.parametrize("queries", [3, 20])
def test_dropout_leaves_out_its_share_of_the_weights(queries: int) -> None:
    call, encoding = plain_call(queries, (40, 2), weights=True), Encoding(1, 40)
    _, whole = engine.attend(call, encoding)
    out, weights = engine.attend(replace(call, dropout=0.25), encoding)
    assert whole is not None
    assert weights is not None
    kept, visible = weights > 0, whole > 0
    torch.testing.assert_close(weights[kept], whole[kept] / 0.75)
    assert 0.7 < float(kept.sum() / visible.sum()) < 0.8
    torch.testing.assert_close(out, weights @ call.value.repeat_interleave(20, 1))


SHARED_OUT = ("alibi", "kerple_log", "shaw", "transformer_xl", "rope_bias")


@pytest.mark.parametrize("name", SHARED_OUT)
@pytest.mark.parametrize("backend", ["exact", "prefill", "few"])
def test_each_process_computes_its_own_heads(name: str, backend: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(prefill, "ROWS", 1)
    call = plain_call(5)
    method = get_method(name).from_options()
    encoding = encoding_of(method, FEATURES, call.query.device, heads=(4, 2))
    whole = exact(call, encoding)[0]
    parts = ((slice(0, 2), slice(1)), (slice(2, 4), slice(1, 2)))
    for number, (heads, key_head) in enumerate(parts):
        key, value = call.key[:, key_head], call.value[:, key_head]
        part: dict[str, Any] = {"query": call.query[:, heads], "key": key, "value": value}
        own = replace(call, **part, mask=CausalMask(5, KEYS, key.device))
        with engine.forced(backend):
            got = engine.attend(own, replace(encoding, heads=2, share=(number, 2)))[0]
        torch.testing.assert_close(got, whole[:, heads], rtol=0, atol=1e-6)


@pytest.mark.parametrize("queries", [2, 20])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rerope", {"window": 4}),
        ("dual_chunk", {"chunk": 8, "window": 2}),
        ("attention_sinks", {"window": 4, "sinks": 2}),  # of which the second row has none
        ("xpos", {"scale_base": 13}),
        *((name, {"bucket": 13}) for name in ("dynamic_ntk", "dynamic_yarn")),
        ("jet_long", {"window": 4, "bucket": 13, "update": "row"}),
    ],
)
def test_a_query_is_as_alone(
    name: str, options: dict[str, Any], queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a batch whose rows have other positions, where a bucket ends before the last query."""
    monkeypatch.setattr(prefill, "ROWS", 1)
    one = plain_call(queries)
    rows: dict[str, Any] = {
        x: getattr(one, x).expand(4, -1, -1, -1) for x in ("query", "key", "value")
    }
    n = torch.arange(KEYS).repeat(4, 1)
    n[1] += 39
    n[2, 12:] += 30  # a gap
    n[3, 5:8] = n[3, 5:8].flip(0)
    call = replace(one, **rows, query_position=n[:, -queries:], key_position=n)
    method = get_method(name).from_options(**options)
    encoding = encoding_of(method, FEATURES, n.device, ORIGINAL, (4, 2))
    got = engine.attend(call, encoding)[0]
    for row in range(4):
        own: dict[str, Any] = {
            "query_position": n[row, None, -queries:],
            "key_position": n[row, None],
        }
        mask = CausalMask(queries, KEYS, n.device)
        by_itself = engine.attend(replace(one, **own, mask=mask), encoding)[0][0]
        for query in range(queries):
            keys = KEYS - queries + query + 1
            at = n[row : row + 1, :keys]
            alone = replace(
                one,
                query=one.query[:, :, query : query + 1],
                key=one.key[:, :, :keys],
                value=one.value[:, :, :keys],
                query_position=at[:, -1:],
                key_position=at,
                mask=CausalMask(1, keys, n.device),
            )
            want = exact(alone, encoding)[0][0, :, 0]
            for found in (got[row], by_itself):
                torch.testing.assert_close(found[:, query], want, rtol=0, atol=1e-5)


NATIVE = RopeSpec(FEATURES, THETA, ORIGINAL).default_inv_freq().float()[None]
WHOLE = Layout(0, FEATURES, interleaved=False)


@pytest.mark.parametrize(("backend", "queries"), [("exact", 20), ("prefill", 20), ("few", 3)])
def test_a_layer_without_a_method_reads_keys_that_others_place(
    backend: str, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer whose rotary table is shared with patched layers, beside another text too."""
    monkeypatch.setattr(prefill, "ROWS", 1)
    call = plain_call(queries)
    extended = get_method("self_extend").from_options(window=6, group=2)
    by = encoding_of(extended, FEATURES, call.query.device, ORIGINAL, (4, 2))
    encoding = encoding_of(None, FEATURES, call.query.device, ORIGINAL, (4, 2))
    encoding = replace(encoding, cached_by=by)
    m, n = call.query_position, call.key_position
    assert not torch.equal(by.cached_position(n), n)
    query, key = turned(call.query, m, NATIVE, WHOLE), turned(call.key, n, NATIVE, WHOLE)
    given: dict[str, Any] = {
        "query": turned(call.query, by.cached_position(m), NATIVE, WHOLE),
        "key": turned(call.key, by.cached_position(n), NATIVE, WHOLE),
    }
    visible = n[:, None] <= m[:, :, None]
    want = attend_naively(scores_of(query, key), visible, call.value)
    with engine.forced(backend):
        got = engine.attend(replace(call, **given), encoding)[0]
    torch.testing.assert_close(got, want, rtol=0, atol=2e-6)
    both = torch.cat((key, call.key[:, :, :4]), 2), torch.cat((call.value, call.value[:, :, :4]), 2)
    given |= {"value": both[1], "beside": Beside(call.key[:, :, :4], Mask())}
    shown = torch.cat((visible, torch.ones(1, queries, 4, dtype=torch.bool)), -1)
    want = attend_naively(scores_of(query, both[0]), shown, both[1])
    got = engine.attend(replace(call, **given), encoding)[0]
    torch.testing.assert_close(got, want, rtol=0, atol=2e-6)


@torch.no_grad()
def test_kept_keys_are_those_of_the_cache() -> None:
    """Written in place, or exchanged, they are rotated again."""
    kept = RotatedKeys()
    call = replace(plain_call(1), rotated=kept)
    method = get_method("dynamic_ntk").from_options(bucket=4)
    encoding = encoding_of(method, FEATURES, call.query.device, ORIGINAL, (4, 2))

    def step(key: Tensor) -> Tensor:
        kept.check(call.key)
        got = moving(replace(call, key=key), encoding)[0]
        torch.testing.assert_close(got, exact(replace(call, key=key), encoding)[0])
        return got

    first = step(call.key)
    kept.check(call.key)
    assert kept._kept is not None
    call.key[:, :, 3] = 1.0
    assert not torch.equal(step(call.key), first)
    other = call.key.clone().zero_()
    assert other._version == call.key._version
    kept.check(other)
    assert kept._kept is None
    step(call.key)
    kept.check(None)
    assert kept._kept is None


def test_blocks_under_transforms_of_torch_func(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no hooks of saved tensors, by which blocks are computed again in a backward."""
    monkeypatch.setattr(general, "SCRATCH", 1)
    call = plain_call(20)

    def loss(query: Tensor) -> Tensor:
        return exact(replace(call, query=query), Encoding(1, 4))[0].square().sum()

    query = call.query.clone().requires_grad_()
    want = torch.autograd.grad(loss(query), query)[0]
    torch.testing.assert_close(torch.func.grad(loss)(call.query), want)


@pytest.mark.parametrize("queries", [3, 20])
@pytest.mark.parametrize("name", ["alibi", "shaw", "transformer_xl", "xpos", "rope_bias"])
def test_halves_of_a_model(name: str, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and weights have its dtype, also where they are computed in blocks."""
    monkeypatch.setattr(general, "SCRATCH", 1)
    call = plain_call(queries, weights=True)
    encoding = encoding_of(get_method(name)(), FEATURES, call.query.device, ORIGINAL, (4, 2))
    want = engine.attend(call, encoding)
    halves = {name: getattr(call, name).bfloat16() for name in ("query", "key", "value")}
    for got, expected in zip(engine.attend(replace(call, **halves), encoding), want, strict=True):
        assert got is not None
        assert expected is not None
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=5e-2)


@pytest.mark.parametrize("name", ["shaw", "transformer_xl"])
def test_embeddings_of_distances_meet_queries_without_the_factor_of_the_rotation(name: str) -> None:
    """Of YaRN, say: the factor is on the scores of the rotation alone, with its square."""
    call = plain_call(5)
    method = get_method(name).from_options(keep_rope=True)
    encoding = encoding_of(method, FEATURES, call.query.device, ORIGINAL, (4, 2))
    assert encoding.rotation is not None
    scaled = replace(encoding, rotation=replace(encoding.rotation, factor=1.5))
    more = replace(call, query=call.query * 1.5, key=call.key * 1.5)
    plain = general.score_bias(call, encoding, call.query)
    got = general.score_bias(more, scaled, more.query)
    parameters = dict(encoding.parameters or {})
    if "u" in parameters:
        parameters["u"] = torch.zeros_like(parameters["u"])
    by_distance = general.score_bias(call, replace(encoding, parameters=parameters), call.query)
    want = by_distance + 1.5**2 * (plain - by_distance)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def test_other_parameters_make_another_plan() -> None:
    call = plain_call(5)
    encoding = encoding_of(get_method("rope_bias")(), FEATURES, call.query.device, heads=(4, 2))
    other = {name: x + 1.0 for name, x in (encoding.parameters or {}).items()}
    got = engine.attend(call, encoding.with_parameters(other))[0]
    assert torch.equal(got, engine.attend(call, replace(encoding, parameters=other))[0])
    assert not torch.equal(got, engine.attend(call, encoding)[0])


HOLE = torch.arange(KEYS) != KEYS - 2


@pytest.mark.parametrize(
    ("name", "options", "queries", "hidden", "more", "backend"),
    [
        ("rerope", {"window": 4}, 1, None, {}, "few"),
        ("rerope", {"window": 4}, 8, None, {}, "few"),
        ("rerope", {"window": 4}, 9, None, {}, "exact"),
        ("rerope", {"window": 4}, 1, None, {"dropout": 0.1}, "exact"),
        ("rerope", {"window": 4}, 1, HOLE, {}, "exact"),  # not the last tokens
        ("rerope", {"window": 4}, 1, torch.arange(KEYS) < KEYS - 1, {}, "exact"),
        ("rerope", {"window": 4}, 1, torch.arange(KEYS) > 9, {}, "few"),
        ("rerope", {"window": 4}, 1, torch.arange(KEYS) > KEYS - 3, {}, "few"),
        ("alibi", {}, 3, HOLE, {}, "few"),
        ("dual_chunk", {"chunk": 8, "window": 2}, 3, None, {}, "exact"),
        ("dynamic_ntk", {"bucket": 4}, 1, HOLE, {}, "moving"),
        ("dynamic_ntk", {"bucket": 4}, 2, None, {}, "moving"),  # positions 28 and 29
        ("dynamic_ntk", {"bucket": 4}, 3, None, {}, "exact"),
        ("dynamic_ntk", {"bucket": 4}, 1, None, {"dropout": 0.1}, "exact"),
        ("dynamic_ntk", {"bucket": 40}, 9, HOLE, {}, "exact"),
        ("fire", {}, 20, None, {}, "exact"),
        ("alibi", {}, 20, None, {}, "prefill"),
        ("alibi", {}, 20, None, {"softcap": 2.0}, "exact"),
        ("rerope", {"window": 4}, 20, None, {}, "prefill"),
        ("rerope", {"window": 4}, 20, None, {"sinks": torch.zeros(4)}, "exact"),
        ("rerope", {"window": 4}, 20, HOLE, {}, "exact"),
        ("jet_long", {"window": 4, "bucket": 14}, 20, None, {}, "prefill"),  # of its last part
    ],
)
def test_the_backend_of_a_call(
    name: str,
    options: dict[str, Any],
    queries: int,
    hidden: Tensor | None,
    more: dict[str, Any],
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill, "ROWS", 10)
    call, method = plain_call(queries, **more), get_method(name).from_options(**options)
    if hidden is not None:
        mask = Written(queries, (0,), torch.zeros(1, 1, queries, KEYS))
        mask.shown = mask.shown & hidden
        call = replace(call, mask=mask)
    encoding = encoding_of(method, FEATURES, call.query.device, ORIGINAL, (4, 2))
    assert engine.choose(call, encoding).name == backend
    assert engine.candidate(call, encoding) == (engine.backend_of(backend), True)
