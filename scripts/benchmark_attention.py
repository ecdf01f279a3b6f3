"""Cases of `benchmark.py attention`: the engine's CPU kernels, plain attention and the usual implementations.

Every group is one situation. Its first case is plain causal `F.scaled_dot_product_attention` of the same shape.
Inputs are standard normal and float32, batch 1, head dimension 64 unless the group says otherwise.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_posenc.attention.decode import decode
from hf_posenc.attention.prefill import two_bands
from hf_posenc.attention.toeplitz import provable_windows, toeplitz
from hf_posenc.evaluation.device import Clock
from scripts.peers import two_matrices

WINDOW = 512
EPS = 1e-8
STEPS = 20
"""Decode steps of one measurement."""
MEBIBYTE = 2**20
PLAIN, AGAIN = "plain causal", "plain causal again"
TWO_MATRICES = "two score matrices (as bojone/rerope)"
MATERIALISED = "materialised bias"

Run = Callable[[], object]


@dataclass(frozen=True)
class Group:
    """Cases that are measured in the same rounds.

    Attributes:
        title: The situation.
        cases: By name; the others are compared with the first.
        share: Fraction of the requested rounds, for groups that take long.
        repeats: Calls of one measurement.
    """

    title: str
    cases: dict[str, Run]
    share: float = 1.0
    repeats: int = 1

    def timed(self) -> dict[str, Callable[[], float]]:
        """Each case as a function that returns its CPU seconds per call."""
        return {name: partial(_seconds, run, self.repeats) for name, run in self.cases.items()}


def _seconds(run: Run, repeats: int) -> float:
    start = time.process_time()
    for _ in range(repeats):
        run()
    return (time.process_time() - start) / repeats


def groups() -> Iterator[Group]:
    """Yield all situations one after the other, so that only the inputs of one are in memory."""
    torch.manual_seed(0)
    yield _prefill(4096, share=0.6, others=True)
    yield _prefill(8192)
    yield _prefill(16384, share=0.4)
    yield _prefill(4096, key_heads=2)
    for known in (8192, 32768):
        for heads, key_heads, features in ((8, 8, 64), (8, 2, 64), (32, 8, 128)):
            yield _decode(known, heads, key_heads, features)
    yield _training(2048, others=True)
    yield _training(4096)


def peak_mebibytes(run: Run) -> float | None:
    """Return the rise of resident memory in MiB, the result included; None where /proc is missing."""
    gc.collect()
    with suppress(OSError, AttributeError):  # freed pages of the previous run would be reused
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    clock = Clock(torch.nn.Module())  # that of the CPU
    (_, before), (_, peak) = clock.time(lambda: None), clock.time(run)
    return None if before is None or peak is None else (peak - before) / MEBIBYTE


def _normal(heads: int, length: int, features: int = 64, *, grad: bool = False) -> Tensor:
    return torch.randn(1, heads, length, features, requires_grad=grad)


def _kerple_table(heads: int, length: int) -> Tensor:
    """KERPLE's logarithmic bias by distance with parameters drawn at random (arXiv 2205.09921)."""
    first, second = torch.rand(2, heads, 1)
    table: Tensor = -first * torch.log1p(second * torch.arange(length))
    return table


def _plain(query: Tensor, key: Tensor, value: Tensor, *, causal: bool = True) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    out: Tensor = F.scaled_dot_product_attention(
        query, key, value, is_causal=causal, enable_gqa=grouped
    )
    return out


def _prefill(length: int, *, key_heads: int = 8, share: float = 1.0, others: bool = False) -> Group:
    heads, scaling = 8, 0.125
    q, q_far = _normal(heads, length), _normal(heads, length)
    k, k_far, v = (_normal(key_heads, length) for _ in range(3))
    table = _kerple_table(heads, length)
    slopes = 2.0 ** (-8 * torch.arange(1, heads + 1) / heads)
    alibi = -slopes[:, None] * torch.arange(length)

    def alibi_with_windows() -> Tensor:
        windows = provable_windows(q, k, lambda drop: drop / slopes, scaling, EPS)
        return toeplitz(q, k, v, alibi, scaling, windows=windows)

    cases: dict[str, Run] = {
        PLAIN: lambda: _plain(q, k, v),
        AGAIN: lambda: _plain(q, k, v),
        "two bands": lambda: two_bands((q, k), (q_far, k_far), v, WINDOW, scaling),
        "distance bias (KERPLE)": lambda: toeplitz(q, k, v, table, scaling),
        "ALiBi, provable windows": alibi_with_windows,
    }
    if others:
        cases[TWO_MATRICES] = lambda: _two_matrices((q, k), (q_far, k_far), v, scaling)
        cases[MATERIALISED] = lambda: _materialised(q, k, v, table)
    return Group(f"prefill {length}, heads {heads}/{key_heads}", cases, share)


def _decode(known: int, heads: int, key_heads: int, features: int) -> Group:
    scaling = features**-0.5
    q, q_near = _normal(heads, 1, features), _normal(heads, 1, features)
    k, v = _normal(key_heads, known, features), _normal(key_heads, known, features)
    cos, sin = torch.randn(2, WINDOW, features)
    is_near = torch.ones(1, 1, 1, WINDOW, dtype=torch.bool)
    bias = _kerple_table(heads, known)[:, None]

    def bands() -> Tensor:
        tail = _rotated(k[:, :, -WINDOW:], cos, sin)
        return decode(q, k, v, scaling, near=(q_near, tail, is_near))[0]

    cases: dict[str, Run] = {
        PLAIN: lambda: _plain(q, k, v, causal=False),
        AGAIN: lambda: _plain(q, k, v, causal=False),
        "two bands": bands,
        "distance bias (KERPLE)": lambda: decode(q, k, v, scaling, bias=bias)[0],
    }
    title = f"decode {known}, heads {heads}/{key_heads}, head dim {features}"
    return Group(title, cases, repeats=STEPS)


def _training(length: int, *, others: bool = False) -> Group:
    heads, scaling = 8, 0.125
    q, q_far, k, k_far, v = (_normal(heads, length, grad=True) for _ in range(5))
    table = _kerple_table(heads, length)
    trained = table.clone().requires_grad_()
    grad = torch.randn(1, heads, length, 64)

    def step(forward: Callable[[], Tensor], *inputs: Tensor) -> Run:
        def run() -> object:
            with torch.enable_grad():
                return torch.autograd.grad(forward(), inputs, grad)

        return run

    bands = (q, k), (q_far, k_far)
    cases: dict[str, Run] = {
        PLAIN: step(lambda: _plain(q, k, v), q, k, v),
        AGAIN: step(lambda: _plain(q, k, v), q, k, v),
        "two bands": step(lambda: two_bands(*bands, v, WINDOW, scaling), q, q_far, k, k_far, v),
        "distance bias, frozen": step(lambda: toeplitz(q, k, v, table, scaling), q, k, v),
        "distance bias, trainable": step(
            lambda: toeplitz(q, k, v, trained, scaling), q, k, v, trained
        ),
    }
    if others:
        cases[TWO_MATRICES] = step(lambda: _two_matrices(*bands, v, scaling), q, q_far, k, k_far, v)
        cases[MATERIALISED] = step(lambda: _materialised(q, k, v, trained), q, k, v, trained)
    return Group(f"forward + backward {length}, heads {heads}/{heads}", cases)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[:, :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[:, half:])
    return out


def _two_matrices(
    near: tuple[Tensor, Tensor], far: tuple[Tensor, Tensor], value: Tensor, scaling: float
) -> Tensor:
    position = torch.arange(value.shape[2])
    inside = position[:, None] - position < WINDOW
    return two_matrices([(*far, None), (*near, inside)], value, scaling)


def _materialised(query: Tensor, key: Tensor, value: Tensor, table: Tensor) -> Tensor:
    """Materialise the bias of all pairs and heads and pass it to PyTorch's attention as the mask."""
    position = torch.arange(value.shape[2])
    distance = position[:, None] - position
    bias = table[:, distance.clamp_min(0)].masked_fill(distance < 0, -torch.inf)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias[None])
