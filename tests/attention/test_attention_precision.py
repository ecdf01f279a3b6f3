"""The precision of halves: errors against float64 beside those of PyTorch's fused attention on the same numbers."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_posenc.attention import decode, exact, softmax
from hf_posenc.attention.call import Call, CausalMask, Mask
from hf_posenc.attention.checks.comparison import encoding_of
from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.toeplitz import toeplitz
from hf_posenc.methods import LogN, get_method
from tests.support.live_bytes import LiveBytes

HEADS, KEY_HEADS, FEATURES = 4, 2, 64
SCALING = FEATURES**-0.5
MOST = 1.2
"""The error of the engine as a multiple of that of fused attention, at most."""
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
SPREADS = pytest.mark.parametrize("spread", [1, 4, 9])

Inputs = tuple[Tensor, Tensor, Tensor]


def inputs(
    queries: int, keys: int, spread: float, dtype: torch.dtype, key_heads: int = KEY_HEADS
) -> Inputs:
    """Random numbers whose scores have this standard deviation."""
    generator = torch.Generator().manual_seed(0)

    def drawn(heads: int, length: int) -> Tensor:
        return torch.randn(1, heads, length, FEATURES, generator=generator)

    query, key = drawn(HEADS, queries) * spread**0.5, drawn(key_heads, keys) * spread**0.5
    return query.to(dtype), key.to(dtype), drawn(key_heads, keys).to(dtype)


def call_of(query: Tensor, key: Tensor, value: Tensor) -> Call:
    queries, keys = query.shape[2], key.shape[2]
    n = torch.arange(keys)[None]
    mask: Mask = CausalMask(queries, keys, query.device)
    return Call(query, key, value, n[:, keys - queries :], n, mask, SCALING)


def fused(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    causal = query.shape[2] > 1 and not options
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=causal, enable_gqa=True, scale=SCALING, **options
    )


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).square().mean().sqrt())


def assert_precise(run: Callable[..., Tensor], given: Inputs) -> None:
    want = fused(*(x.double() for x in given))
    mine, theirs = error(run(*given), want), error(fused(*given), want)
    assert mine <= MOST * theirs, f"{mine:.2e} beside {theirs:.2e}: {mine / theirs:.2f} times"


@SPREADS
@HALVES
@pytest.mark.parametrize("path", ["general", "a step", "moving frequencies"])
def test_scores_and_values(path: str, spread: float, dtype: torch.dtype) -> None:
    # Frequencies that follow the length, for a text that is still short: those of the model.
    method = get_method("dynamic_ntk").from_options(scale=2.0, update="row")
    run, encoding = {
        "general": (exact.exact, Encoding(1, HEADS)),
        "a step": (decode.few, Encoding(1, HEADS)),
        "moving frequencies": (
            decode.moving,
            encoding_of(method, FEATURES, torch.device("cpu"), 1 << 20, (HEADS, KEY_HEADS)),
        ),
    }[path]
    sizes = (512, 512) if path == "general" else (1, 4096)
    assert_precise(lambda *given: run(call_of(*given), encoding)[0], inputs(*sizes, spread, dtype))


@SPREADS
@HALVES
def test_scores_with_a_bias(spread: float, dtype: torch.dtype) -> None:
    encoding = Encoding(1, HEADS, bias=get_method("alibi")(), rotates=False)  # type: ignore[arg-type]
    given = inputs(1, 4096, spread, dtype)
    wide = call_of(*(x.double() for x in given))
    bias = exact.score_bias(wide, encoding, wide.query)
    want = fused(*(x.double() for x in given), attn_mask=bias)
    theirs = error(fused(*given, attn_mask=bias.float()), want)
    for run in (decode.few, exact.exact):
        assert error(run(call_of(*given), encoding)[0], want) <= MOST * theirs


def general(*given: Tensor) -> Tensor:
    return exact.exact(call_of(*given), Encoding(1, HEADS))[0]


def trained_bias(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return toeplitz(query, key, value, torch.zeros(HEADS, 256, requires_grad=True), SCALING)


@SPREADS
@HALVES
@pytest.mark.parametrize(("run", "most"), [(trained_bias, MOST), (general, 1.5)])
def test_gradients(
    run: Callable[..., Tensor], most: float, spread: float, dtype: torch.dtype
) -> None:
    given = inputs(256, 256, spread, dtype)
    grad = torch.randn(given[0].shape, generator=torch.Generator().manual_seed(1)).to(dtype)

    def gradients(run: Callable[..., Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [x.to(dtype).requires_grad_() for x in given]
        return torch.autograd.grad(run(*leaves), leaves, grad.to(dtype))

    mine, theirs, want = (
        gradients(run, dtype),
        gradients(fused, dtype),
        gradients(fused, torch.float64),
    )
    for own, other, right in zip(mine, theirs, want, strict=True):
        assert error(own, right) <= most * error(other, right)


@HALVES
def test_a_factor_on_queries_is_not_rounded(dtype: torch.dtype) -> None:
    """A factor that is rounded is an error of all scores of a query alike, which the softmax keeps."""
    query = torch.ones(1, 1, 100, 8, dtype=dtype)
    m = torch.arange(1000, 1100)[None]
    encoding = Encoding(16, 1, query=LogN())
    factor = LogN().query_factor(m, 16)
    assert torch.equal(encoding.scaled(query, m)[0, 0, :, 0], factor[0].float().to(dtype))
    third = query / 3
    got = encoding.scaled(third, m)[0, 0, :, 0]
    assert torch.equal(got, (third[0, 0, :, 0].float() * factor[0].float()).to(dtype))


# Memory


def rounded(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention whose products are halves, converted as a whole: the same without the precision."""
    scores = softmax.folded(query, key.shape[1]) @ key.transpose(-1, -2)
    return (scores.float().mul_(SCALING).softmax(-1).to(value.dtype) @ value).view(query.shape)


def precise(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return softmax.weighted_values(softmax.grouped_scores(query, key, SCALING), value)[0]


@pytest.mark.parametrize(("queries", "keys"), [(1, 32768), (600, 2000), (16, 32768)])
def test_float32_scores_need_no_more_memory(queries: int, keys: int, monkeypatch: Any) -> None:
    given = inputs(queries, keys, 1, torch.bfloat16)
    monkeypatch.setattr(softmax, "CONVERTED", 1)
    peaks = []
    for run in (precise, rounded):
        gc.collect()
        live: Any = LiveBytes(nn.ParameterList(given))
        with live, torch.no_grad():
            run(*given)
        peaks.append(live.peak)
    assert peaks[0] <= peaks[1]


@HALVES
def test_products_that_the_device_returns_in_float32(dtype: torch.dtype, monkeypatch: Any) -> None:
    """As CUDA multiplies halves, in training too; the weights are rounded as fused attention rounds them."""
    product = torch.bmm

    def bmm(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        assert a.dtype == b.dtype == dtype
        return product(a.to(out_dtype), b.to(out_dtype))

    monkeypatch.setattr(torch, "bmm", bmm)
    softmax._returns_float32.cache_clear()
    try:
        for spread in (1, 4, 9):
            assert_precise(precise, inputs(1, 4096, spread, dtype))
            test_gradients(general, 1.5, spread, dtype)
    finally:
        monkeypatch.undo()
        softmax._returns_float32.cache_clear()
