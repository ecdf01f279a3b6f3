"""The CPU kernels of the attention engine against naive float64 evaluations of every pair of positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_posenc.attention import prefill, toeplitz
from hf_posenc.attention import toeplitz as table_gradient
from hf_posenc.attention.decode import decode
from hf_posenc.attention.toeplitz import provable_windows
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
    sizes = Sizes(1, 1, 1, rows=1100, offset=1000, features=8, value_features=8)
    check(*CASES[name](sizes))


@pytest.mark.parametrize("name", CASES)
def test_any_strides_and_a_cache_that_is_longer_than_the_text(name: str) -> None:
    kernel, naive, inputs = CASES[name](EXAMPLE)
    kernels_own = [x.detach().transpose(-1, -2).contiguous().transpose(-1, -2) for x in inputs]
    for i, x in enumerate(kernels_own):
        if x.dim() == 4 and x.shape[2] == EXAMPLE.known:
            kernels_own[i] = torch.cat((x, torch.full_like(x[:, :, :5], math.nan)), 2)
    torch.testing.assert_close(kernel(*kernels_own), naive(*inputs), rtol=0, atol=1e-12)


@pytest.mark.parametrize("heads", [[20, 25], [25, 20], [25, 22, 20, 25], [25, 21, 25, 90]])
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


def test_windows_are_narrow_where_the_bias_is_steep() -> None:
    q, k = torch.randn(1, 2, 500, 16), torch.randn(1, 1, 500, 16)
    windows = provable_windows(q, k, lambda drop: drop / torch.tensor([1.0, 1e-4]), SCALING, 1e-8)
    assert windows[0] < 100
    assert windows[1] == 500


@pytest.mark.parametrize("name", CASES)
def test_a_gradient_without_memory_of_its_own(name: str) -> None:
    """`out.sum().backward()` hands over one number, expanded."""
    kernel, naive, inputs = CASES[name](EXAMPLE)
    for mine, theirs in zip(
        torch.autograd.grad(kernel(*inputs).sum(), inputs),
        torch.autograd.grad(naive(*inputs).sum(), inputs),
        strict=True,
    ):
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
    wanted = {
        name: data.draw(st.booleans(), name) for name in ("near", "bias", "mask", "cap", "sinks")
    }
    width = data.draw(st.integers(1, sizes.known), "width")
    batch = data.draw(st.sampled_from([1, sizes.batch]), "mask rows")
    q, q_near = (leaf(sizes.batch, sizes.heads, rows, sizes.features) for _ in range(2))
    k, v, tail = (
        sizes.key(),
        sizes.value(),
        leaf(sizes.batch, sizes.key_heads, width, sizes.features),
    )
    bias = torch.randn(1, sizes.heads, rows, sizes.known, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(sizes.heads, dtype=torch.float64, requires_grad=True)
    is_near = torch.rand(batch, 1, rows, width) < 0.6
    mask = torch.rand(batch, 1, rows, sizes.known) < 0.7
    mask[0, :, 0] = False  # a row that sees nothing

    def kernel(*inputs: Tensor) -> Tensor:
        q, q_near, k, tail, v, bias, sinks = inputs
        out, weights = decode(
            q,
            k,
            v,
            SCALING,
            near=(q_near, tail, is_near) if wanted["near"] else None,
            bias=bias if wanted["bias"] else None,
            mask=mask if wanted["mask"] else None,
            softcap=2.0 if wanted["cap"] else None,
            sinks=sinks if wanted["sinks"] else None,
        )
        return torch.cat((out, weights.to(out.dtype)), -1)

    def naive(*inputs: Tensor) -> Tensor:
        q, q_near, k, tail, v, bias, sinks = inputs
        scores = scores_of(q, k)
        if wanted["near"]:
            last = torch.where(is_near, scores_of(q_near, tail), scores[..., -width:])
            scores = torch.cat((scores[..., :-width], last), -1)
        scores = 2.0 * (scores / 2.0).tanh() if wanted["cap"] else scores
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
        return decode(q, k, v, SCALING, near=near, bias=bias, mask=mask, softcap=3.0, sinks=sinks)[
            0
        ]

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), step(q, k, v))
