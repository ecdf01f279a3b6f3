"""Naive float64 attention over every pair of positions, and the kernels' cases to be compared with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from hf_posenc.attention.prefill import causal, three_chunks, two_bands
from hf_posenc.attention.toeplitz import toeplitz

SCALING = 0.4
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Sizes:
    batch: int
    group: int
    key_heads: int
    rows: int
    offset: int
    features: int
    value_features: int

    @property
    def heads(self) -> int:
        return self.group * self.key_heads

    @property
    def known(self) -> int:
        return self.offset + self.rows

    def query(self) -> Tensor:
        return leaf(self.batch, self.heads, self.rows, self.features)

    def key(self) -> Tensor:
        return leaf(self.batch, self.key_heads, self.known, self.features)

    def value(self) -> Tensor:
        return leaf(self.batch, self.key_heads, self.known, self.value_features)

    def positions(self) -> tuple[Tensor, Tensor]:
        return torch.arange(self.offset, self.known)[:, None], torch.arange(self.known)


def leaf(batch: int, heads: int, length: int, features: int) -> Tensor:
    """Float64, in the memory layout (batch, length, heads, features) that transformers hands over."""
    x = torch.randn(batch, length, heads, features, dtype=torch.float64)
    return x.transpose(1, 2).requires_grad_()


SIZES = st.builds(
    Sizes,
    batch=st.integers(1, 2),
    group=st.integers(1, 3),
    key_heads=st.integers(1, 2),
    rows=st.integers(1, 90),
    offset=st.one_of(st.just(0), st.integers(1, 90)),
    features=st.sampled_from([4, 16]),
    value_features=st.sampled_from([4, 16]),
)
EXAMPLE = Sizes(2, 2, 2, rows=70, offset=21, features=16, value_features=16)


def scores_of(query: Tensor, key: Tensor) -> Tensor:
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return query @ key.transpose(-1, -2) * SCALING


def attend_naively(scores: Tensor, visible: Tensor, value: Tensor) -> Tensor:
    value = value.repeat_interleave(scores.shape[1] // value.shape[1], 1)
    return scores.masked_fill(~visible, -math.inf).softmax(-1) @ value


def check(
    kernel: Callable[..., Tensor], naive: Callable[..., Tensor], inputs: list[Tensor]
) -> None:
    """Values in float64 and float32, gradients in float64."""
    expected, actual = naive(*inputs), kernel(*inputs)
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE[torch.float64])
    grad = torch.randn_like(expected)
    every = {"materialize_grads": True, "allow_unused": True}
    mine, theirs = (torch.autograd.grad(out, inputs, grad, **every) for out in (actual, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    check_forward(kernel, naive, inputs, torch.float32)


def check_forward(
    kernel: Callable[..., Tensor],
    naive: Callable[..., Tensor],
    inputs: list[Tensor],
    dtype: torch.dtype,
) -> None:
    rounded = [x.detach().to(dtype) for x in inputs]
    with torch.no_grad():
        actual, expected = kernel(*rounded), naive(*(x.double() for x in rounded))
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=TOLERANCE[dtype])


Case = tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]


def causal_case(sizes: Sizes) -> Case:
    m, n = sizes.positions()
    return (
        lambda q, k, v: causal(q, k, v, SCALING, offset=sizes.offset),
        lambda q, k, v: attend_naively(scores_of(q, k), n <= m, v),
        [sizes.query(), sizes.key(), sizes.value()],
    )


def bands_case(sizes: Sizes, window: int, far_keys: int | None, *, shared_key: bool) -> Case:
    m, n = sizes.positions()
    near = m - n < window
    visible = (n <= m) & (near | (n < (sizes.known if far_keys is None else far_keys)))

    def kernel(q: Tensor, q_far: Tensor, k: Tensor, k_far: Tensor, v: Tensor) -> Tensor:
        far = (q_far, k if shared_key else k_far)
        return two_bands((q, k), far, v, window, SCALING, offset=sizes.offset, far_keys=far_keys)

    def naive(q: Tensor, q_far: Tensor, k: Tensor, k_far: Tensor, v: Tensor) -> Tensor:
        far = scores_of(q_far, k if shared_key else k_far)
        return attend_naively(torch.where(near, scores_of(q, k), far), visible, v)

    return kernel, naive, [sizes.query(), sizes.query(), sizes.key(), sizes.key(), sizes.value()]


def chunks_case(sizes: Sizes, chunk: int) -> Case:
    m, n = sizes.positions()
    between = m // chunk - n // chunk

    def naive(same: Tensor, previous: Tensor, older: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.where(between == 1, scores_of(previous, k), scores_of(older, k))
        scores = torch.where(between < 1, scores_of(same, k), scores)
        return attend_naively(scores, n <= m, v)

    return (
        lambda a, b, c, k, v: three_chunks((a, b, c), k, v, chunk, SCALING, offset=sizes.offset),
        naive,
        [sizes.query(), sizes.query(), sizes.query(), sizes.key(), sizes.value()],
    )


def bias_case(sizes: Sizes, *, trained: bool, reaches: list[int] | None, hint: bool) -> Case:
    """With `reaches`, the bias is -inf beyond a distance per head; with `hint`, the kernel is told so."""
    m, n = sizes.positions()
    table = torch.randn(sizes.heads, sizes.known + 3, dtype=torch.float64)
    windows = None
    if reaches is not None:
        windows = torch.tensor((reaches * sizes.heads)[: sizes.heads])
        table[torch.arange(sizes.known + 3) > windows[:, None]] = -math.inf

    def kernel(q: Tensor, k: Tensor, v: Tensor, bias: Tensor = table) -> Tensor:
        told = windows if hint else None
        return toeplitz(q, k, v, bias, SCALING, offset=sizes.offset, windows=told)

    def naive(q: Tensor, k: Tensor, v: Tensor, bias: Tensor = table) -> Tensor:
        return attend_naively(scores_of(q, k) + bias[:, (m - n).clamp_min(0)], n <= m, v)

    inputs = [sizes.query(), sizes.key(), sizes.value()]
    return kernel, naive, [*inputs, table.requires_grad_()] if trained else inputs


CASES: dict[str, Callable[[Sizes], Case]] = {
    "causal": causal_case,
    "two_bands": lambda sizes: bands_case(sizes, 33, None, shared_key=False),
    "sinks": lambda sizes: bands_case(sizes, 33, 4, shared_key=False),
    "three_chunks": lambda sizes: chunks_case(sizes, 24),
    "toeplitz": lambda sizes: bias_case(sizes, trained=False, reaches=None, hint=False),
    "trained": lambda sizes: bias_case(sizes, trained=True, reaches=[7, 99], hint=True),
}
