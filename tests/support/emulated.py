"""The contract of the CUDA operator in plain PyTorch, so that all code around it runs on any device, in any dtype.

Two custom operators, which count as one launch each where launches are counted. A matrix of rows times keys is
written out. An import adds the backends to the engine's table, behind the one that takes every call: they compute only
where `engine.forced` names them.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from hf_posenc.attention import engine
from hf_posenc.attention.fused import Attended, Gradients, Merge, Saved, Shape
from hf_posenc.attention.fused.pytorch import CudaFlash, CudnnAttention
from hf_posenc.attention.kernels import parts
from hf_posenc.attention.softmax import accumulation_dtype


class EmulatedFlash(CudaFlash):
    """`Fused` by the emulated operator; all else is the code that CUDA runs."""

    name = "emulated flash"
    softcaps = True

    def serves(self, device: torch.device, dtype: torch.dtype, features: int) -> bool:
        return True

    def attend(self, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Attended:
        segments, form = (
            shape.sequences(query, key),
            (shape.scaling, *shape.limits, shape.softcap or 0.0),
        )
        assert len(segments.queries) == 2 or segments.longest[0] > 1  # else heads become rows
        starts = (*segments.on(query.device), None)[:3]
        return *_attend(query, key, value, *starts, *form), None

    def attend_backward(self, grad: Tensor, saved: Saved, shape: Shape, state: Any) -> Gradients:
        starts = shape.sequences(saved.query, saved.key).on(grad.device)
        assert len(starts) == 2  # keys that are shared have no backward
        form = shape.scaling, *shape.limits, shape.softcap or 0.0
        every: Gradients = _attend_backward(grad, *saved, *starts, None, *form)
        return every


class EmulatedCudnn(CudnnAttention):
    """`Fused` by an emulation of cuDNN, beside the emulated flash operator; windows are taken in squares from 3 on."""

    squares = 3
    least = 2

    def __init__(self, merge: Merge | None = None) -> None:
        super().__init__(EmulatedFlash(merge), "emulated cudnn")

    def square(self, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Attended:
        (q, k, v), starts = _in_segments(query, key, value), _ends(query, key)
        out, lse = _attend(q, k, v, *starts, None, shape.scaling, *shape.limits, 0.0)
        batch = len(query)
        lse = lse.unflatten(1, (batch, -1)).transpose(0, 1).contiguous()
        return _in_batch(out, batch), lse, None

    def square_backward(self, grad: Tensor, saved: Saved, shape: Shape, state: Any) -> Gradients:
        given = _in_segments(grad, *saved[:4])
        lse, starts = saved.lse.transpose(0, 1).flatten(1), _ends(saved.query, saved.key)
        every = _attend_backward(*given, lse, *starts, None, shape.scaling, *shape.limits, 0.0)
        of_query, of_key, of_value = (_in_batch(x, len(grad)) for x in every)
        return of_query, of_key, of_value


engine.BACKENDS += (
    engine.windowed_backend("emulated cudnn, triton", EmulatedCudnn(parts.merge), kernel=True),
    engine.windowed_backend("emulated cudnn", EmulatedCudnn()),
    engine.windowed_backend("emulated flash, triton", EmulatedFlash(parts.merge), kernel=True),
    engine.windowed_backend("emulated flash", EmulatedFlash()),
)


def _in_segments(*tensors: Tensor) -> tuple[Tensor, ...]:
    """From (B, H, length, D) to (B * length, H, D)."""
    return tuple(x.transpose(1, 2).flatten(0, 1) for x in tensors)


def _in_batch(x: Tensor, batch: int) -> Tensor:
    in_batch: Tensor = x.unflatten(0, (batch, -1)).transpose(1, 2)
    return in_batch


def _ends(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(_chunks(len(x), x.shape[2], x.device) for x in (query, key))  # type: ignore[return-value]


@functools.lru_cache(maxsize=64)
def _chunks(batch: int, length: int, device: torch.device) -> Tensor:
    """Return the starts of a batch's sequences in one row, and the end."""
    starts = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=device)
    return starts[: batch + 1]


def _visible(
    rows: int, keys: int, starts: tuple[Tensor, Tensor, Tensor | None], left: int, right: int
) -> Tensor:
    """The visible pairs, bool, (rows, keys): of one sequence, and aligned to its bottom right."""
    queries, first, counts = starts
    row, column = (torch.arange(count, device=queries.device) for count in (rows, keys))
    own = torch.searchsorted(queries, row, right=True) - 1
    ends = first[1:] if counts is None else first[:-1] + counts
    begin, end = first[own][:, None], ends[own][:, None]
    # Both from the end of its sequence.
    distance = (row - queries[own + 1])[:, None] - (column - end)
    visible = (column >= begin) & (column < end)
    if right >= 0:
        visible &= distance >= -right
    if left >= 0:
        visible &= distance <= left
    return visible


_FORM = "Tensor query_starts, Tensor key_starts, Tensor? counts, float scaling, int left, int right, float softcap"


def _scores(query: Tensor, key: Tensor, *form: Any) -> Tensor:
    """Scores (heads, rows, keys) in the dtype of sums, -inf where a pair is hidden; the arguments `_FORM`."""
    *starts, scaling, left, right, softcap = form
    dtype, group = accumulation_dtype(query.dtype), query.shape[1] // key.shape[1]
    every = key.to(dtype).repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query.to(dtype), every) * scaling
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    visible = _visible(len(query), len(key), (starts[0], starts[1], starts[2]), left, right)
    return scores.masked_fill_(~visible, -math.inf)


@torch.library.custom_op(
    "hf_posenc::emulated_flash",
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, {_FORM}) -> (Tensor, Tensor)",
)
def _attend(query: Tensor, key: Tensor, value: Tensor, *form: Any) -> tuple[Tensor, Tensor]:
    """Return the output (rows, heads, features) and its log-sum-exp (heads, rows); +inf for a row without keys."""
    assert query.shape[-1] % 8 == 0  # as CUDA's operator demands
    assert min(len(query), len(key)) > 0
    scores = _scores(query, key, *form)
    lse = scores.logsumexp(-1)
    lse = lse.masked_fill(lse == -math.inf, math.inf)
    every = value.to(scores.dtype).repeat_interleave(query.shape[1] // key.shape[1], 1)
    out = torch.einsum("hqk,khd->qhd", torch.exp(scores - lse[..., None]), every)
    return out.to(query.dtype), lse


@_attend.register_fake
def _(query: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    dtype = accumulation_dtype(query.dtype)
    return query.new_empty(query.shape), query.new_empty(*query.shape[1::-1], dtype=dtype)


@torch.library.custom_op(
    "hf_posenc::emulated_flash_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
    f"{_FORM}) -> (Tensor, Tensor, Tensor)",
)
def _attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *form: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, given the output and log-sum-exp of a whole softmax."""
    scores = _scores(query, key, *form)
    dtype, group = scores.dtype, query.shape[1] // key.shape[1]
    *_, scaling, _, _, softcap = form
    weights = torch.exp(scores - lse[..., None])
    grad, out = grad.to(dtype), out.to(dtype)
    keys, values = (x.to(dtype).repeat_interleave(group, 1) for x in (key, value))
    of_weights = torch.einsum("qhd,khd->hqk", grad, values)
    of_weights -= torch.einsum("qhd,qhd->hq", grad, out)[..., None]
    of_scores = weights * of_weights * scaling
    if softcap:
        of_scores *= 1 - (scores.clamp(min=-softcap) / softcap) ** 2
    of_query = torch.einsum("hqk,khd->qhd", of_scores, keys)
    of_key = torch.einsum("hqk,qhd->khd", of_scores, query.to(dtype))
    of_value = torch.einsum("hqk,qhd->khd", weights, grad)
    of_key, of_value = (x.unflatten(1, (-1, group)).sum(2) for x in (of_key, of_value))
    return of_query.to(query.dtype), of_key.to(query.dtype), of_value.to(query.dtype)


@_attend_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *given: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (query, key, value))
