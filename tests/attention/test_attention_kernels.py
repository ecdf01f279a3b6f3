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
from hf_posenc.attention.toeplitz import provable_windows
from hf_posenc.errors import PosencError
from tests.support.attention_cases import (
    CASES,
    EXAMPLE,
    SCALING,
    SIZES,
    TOLERANCE,
    Sizes,
    bands_case,
    bias_case,
    causal_case,
    check,
    check_forward,
    chunks_case,
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


def test_a_table_of_another_shape_is_refused() -> None:
    q, k, v = EXAMPLE.query(), EXAMPLE.key(), EXAMPLE.value()
    table = torch.zeros(EXAMPLE.heads, EXAMPLE.known - 1)
    with pytest.raises(PosencError, match=r"shape \(4, 90\) does not serve 4 heads and 91 keys"):
        toeplitz.toeplitz(q, k, v, table, SCALING, offset=21)
