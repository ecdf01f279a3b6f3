"""One softmax in parts: rectangles of the score matrix, each with its own query and key, merged by log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_posenc.attention.flash_cpu import (
    accumulation_dtype,
    attend,
    attend_backward,
    pad_features,
)
from hf_posenc.errors import PosencError


@dataclass(frozen=True)
class Part:
    """A rectangle of the score matrix, in which every row has at least one visible key.

    Attributes:
        rows: First row and end.
        keys: First key and end.
        query: Which of the queries.
        key: Which of the keys.
        causal: The rectangle's row t sees its keys up to t.
        mask: Added to its scores; broadcasts to (B, heads, rows, keys).
        merge: The rows have a result already, from parts before; otherwise this part is their first.
        reverse: The rows are taken from last to first, and the mask is meant so.
        heads: First query head and end, within one group of grouped-query heads or all of whole groups; `None`: all.
    """

    rows: tuple[int, int]
    keys: tuple[int, int]
    query: int = 0
    key: int = 0
    causal: bool = False
    mask: Tensor | None = None
    merge: bool = False
    reverse: bool = False
    heads: tuple[int, int] | None = None

    def of_rows(self, x: Tensor) -> Tensor:
        """The part of a tensor of queries, outputs or log-sum-exps; a view."""
        x = x[:, :, self.rows[0] : self.rows[1]]
        return x if self.heads is None else x[:, self.heads[0] : self.heads[1]]

    def of_keys(self, x: Tensor, group: int) -> Tensor:
        """The part of a tensor of keys or values, each of which serves `group` query heads; a view."""
        x = x[:, :, self.keys[0] : self.keys[1]]
        if self.heads is None:
            return x
        return x[:, self.heads[0] // group : (self.heads[1] - 1) // group + 1]

    def ordered(self, x: Tensor) -> Tensor:
        """Turns rows into the order that the part wants, and back."""
        return x.flip(2) if self.reverse else x


def check_shapes(query: Tensor, key: Tensor, value: Tensor, offset: int) -> None:
    """Refuses tensors that do not belong together.

    Raises:
        PosencError: Too few keys for the queries' positions, or heads that do not form groups.
    """
    needed = offset + query.shape[2]
    if min(key.shape[2], value.shape[2]) < needed:
        raise PosencError(
            f"{query.shape[2]} queries after {offset} cached tokens need {needed} keys and values; there are "
            f"{key.shape[2]} and {value.shape[2]}. Hand over the whole cache, or the right offset."
        )
    if key.shape[1] != value.shape[1] or query.shape[1] % key.shape[1]:
        raise PosencError(
            f"{query.shape[1]} query heads do not share {key.shape[1]} key and {value.shape[1]} value heads "
            "evenly; every key head serves the same number of query heads."
        )


def attend_parts(
    parts: Sequence[Part],
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    value: Tensor,
    scaling: float,
) -> Tensor:
    """Attention whose softmax runs over all parts together, differentiable in every tensor.

    Args:
        parts: Every row is in at least one, and each part's rows are either all new or all to be merged.
        queries: Each of shape (B, H, Q, D).
        keys: Each of shape (B, HK, KV, D).
        value: Shape (B, HK, KV, DV).
        scaling: Factor on the scores.

    Returns:
        Shape (B, H, Q, DV), in the memory layout (B, Q, H, DV).
    """
    features, wanted = queries[0].shape[-1], value.shape[-1]
    size = max(features, wanted)
    tensors = [pad_features(x, size) for x in (*queries, *keys, value)]
    out: Tensor = _Parts.apply(tuple(parts), len(queries), scaling, *tensors)  # type: ignore[no-untyped-call]
    return out if size == wanted else out[..., :wanted]


def forward_parts(
    parts: Sequence[Part],
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    value: Tensor,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """The output (B, H, Q, D) and the log-sum-exp (B, H, Q) of the whole softmax; no gradients."""
    batch, heads, length, features = queries[0].shape
    group = heads // value.shape[1]
    out = value.new_empty(batch, length, heads, features).transpose(1, 2)
    lse_dtype = accumulation_dtype(value.dtype)
    lse = value.new_empty(batch, length, heads, dtype=lse_dtype).transpose(1, 2)
    for part in parts:
        part_out, part_lse = attend(
            part.ordered(part.of_rows(queries[part.query])),
            part.of_keys(keys[part.key], group),
            part.of_keys(value, group),
            scaling,
            causal=part.causal,
            mask=part.mask,
        )
        if part.rows == (0, length) and part.heads is None and not part.merge and not part.reverse:
            out, lse = part_out, part_lse
            continue
        part_out, part_lse = part.ordered(part_out), part.ordered(part_lse)
        out_rows, lse_rows = part.of_rows(out), part.of_rows(lse)
        if part.merge:
            share = torch.sigmoid(part_lse - lse_rows).unsqueeze(-1)
            out_rows.lerp_(part_out, share.to(out.dtype))
            lse_rows.copy_(torch.logaddexp(part_lse, lse_rows))
        else:
            out_rows.copy_(part_out)
            lse_rows.copy_(part_lse)
    return out, lse


def backward_parts(
    parts: Sequence[Part],
    grad: Tensor,
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scaling: float,
) -> list[Tensor]:
    """The gradients of the queries, of the keys and of the value, in this order."""
    group = queries[0].shape[1] // value.shape[1]
    # Many parts add to one key, so halves are summed in float32.
    dtype = accumulation_dtype(value.dtype)
    grad_queries = [torch.zeros_like(query, dtype=dtype) for query in queries]
    grad_keys = [torch.zeros_like(key, dtype=dtype) for key in keys]
    grad_value = torch.zeros_like(value, dtype=dtype)
    for part in parts:
        of_query, of_key, of_value = attend_backward(
            part.ordered(part.of_rows(grad)),
            part.ordered(part.of_rows(queries[part.query])),
            part.of_keys(keys[part.key], group),
            part.of_keys(value, group),
            part.ordered(part.of_rows(out)),
            part.ordered(part.of_rows(lse)),
            scaling,
            causal=part.causal,
            mask=part.mask,
        )
        part.of_rows(grad_queries[part.query]).add_(part.ordered(of_query))
        part.of_keys(grad_keys[part.key], group).add_(of_key)
        part.of_keys(grad_value, group).add_(of_value)
    return [x.to(value.dtype) for x in (*grad_queries, *grad_keys, grad_value)]


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, parts: tuple[Part, ...], count: int, scaling: float, *tensors: Tensor
    ) -> Tensor:
        queries, keys, value = tensors[:count], tensors[count:-1], tensors[-1]
        out, lse = forward_parts(parts, queries, keys, value, scaling)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.parts, ctx.count, ctx.scaling = parts, count, scaling
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors
        queries, keys, value = tensors[: ctx.count], tensors[ctx.count : -1], tensors[-1]
        grads = backward_parts(ctx.parts, grad, queries, keys, value, out, lse, ctx.scaling)
        return None, None, None, *grads
