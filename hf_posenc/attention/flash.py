"""Attention as parts of one softmax, each by a fused operator and merged by log-sum-exp, with gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_posenc.attention.fused.cpu import CpuFlash
from hf_posenc.attention.fused.protocol import Fused, Saved
from hf_posenc.attention.parts import Part, in_squares
from hf_posenc.attention.softmax import accumulation_dtype
from hf_posenc.errors import PosencError

CPU = CpuFlash()


def check_shapes(query: Tensor, key: Tensor, value: Tensor, offset: int) -> None:
    """Refuse too few keys for the queries' positions, and heads that do not form groups."""
    needed = offset + query.shape[2]
    if min(key.shape[2], value.shape[2]) < needed:
        raise PosencError(
            f"{query.shape[2]} queries after {offset} cached tokens need {needed} keys and values; there are "
            f"{key.shape[2]} and {value.shape[2]}. Pass the whole cache, or the right offset."
        )
    if key.shape[1] != value.shape[1] or query.shape[1] % key.shape[1]:
        raise PosencError(
            f"{query.shape[1]} query heads do not share {key.shape[1]} key and {value.shape[1]} value heads "
            "evenly; every key head serves the same number of query heads."
        )


Gradients = Callable[..., tuple[Tensor, ...]]
"""From the gradient of the output, all tensors, the table, the output and its log-sum-exp to the gradients of the
tensors and of the table."""


def attend_parts(
    parts: Sequence[Part],
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    value: Tensor,
    scaling: float,
    *,
    trained: tuple[Tensor, Gradients] | None = None,
    fused: Fused = CPU,
) -> Tensor:
    """Compute attention whose softmax runs over all parts together, differentiable in every tensor.

    Every row is in at least one part, and the rows of a part are either all new or all to be merged. Shapes: queries
    (B, H, Q, D), keys (B, HK, KV, D), the value (B, HK, KV, DV), and the result (B, H, Q, DV) in the memory layout
    (B, Q, H, DV). Queries and keys are rounded to the dtype of the value, which the result has. `trained` is a table
    from which the masks come and which gets a gradient too, and the backward. `fused` computes the parts, which must
    be of its form.
    """
    features = value.shape[-1]
    size = max(queries[0].shape[-1], features)
    size = -size // 8 * -8 if fused.windows else size
    tensors = [x.to(value.dtype) for x in (*queries, *keys, value)]
    # Zeros for the op, which has one head dimension; no gradient is lost.
    tensors = [x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1])) for x in tensors]
    table, gradients = trained or (None, None)
    if fused.squares is not None:
        parts = [piece for part in parts for piece in in_squares(part, fused.squares)]
    out: Tensor = _Parts.apply(  # type: ignore[no-untyped-call]
        fused, tuple(parts), len(queries), scaling, gradients, table, *tensors
    )
    return out if size == features else out[..., :features]


def _merges_again(part: Part, later: Sequence[Part], fused: Fused) -> bool:
    """True if a later part has rows of this one; the many parts of a CPU are not compared."""
    if not fused.windows:
        return bool(later)
    return any(other.rows[0] < part.rows[1] and part.rows[0] < other.rows[1] for other in later)


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        fused: Fused,
        parts: tuple[Part, ...],
        count: int,
        scaling: float,
        gradients: Gradients | None,
        table: Tensor | None,
        *tensors: Tensor,
    ) -> Tensor:
        queries, keys, value = tensors[:count], tensors[count:-1], tensors[-1]
        batch, heads, length, features = queries[0].shape
        group = heads // value.shape[1]
        out = value.new_empty(batch, length, heads, features).transpose(1, 2)
        lse_dtype = accumulation_dtype(value.dtype)
        lse = value.new_empty(batch, length, heads, dtype=lse_dtype).transpose(1, 2)
        needed = any(ctx.needs_input_grad)
        states = []
        for index, part in enumerate(parts):
            part_out, part_lse, state = fused.forward(
                part.ordered(part.of_rows(queries[part.query])),
                part.ordered_keys(part.of_keys(keys[part.key], group, part.first_key)),
                part.ordered_keys(part.of_keys(value, group)),
                part.shape(scaling),
            )
            states.append(state)
            whole = part.rows == (0, length) and part.heads is None
            if whole and not part.merge and not part.reverse:
                out, lse = part.in_a_row(part_out), part.in_a_row(part_lse)
                continue
            out_rows, lse_rows = part.of_rows(out), part.of_rows(lse)
            if part.merge:
                last = not (needed or _merges_again(part, parts[index + 1 :], fused))
                given = out_rows, lse_rows, part_out, part_lse
                fused.merge(*given, reverse=part.reverse or part.mirrored, last=last)
            else:
                out_rows.copy_(part.ordered(part_out))
                lse_rows.copy_(part.ordered(part_lse))
        ctx.save_for_backward(*tensors, table, out, lse)
        ctx.parts, ctx.count, ctx.scaling, ctx.gradients = parts, count, scaling, gradients
        ctx.fused, ctx.states = fused, states
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # With the output and log-sum-exp of the whole softmax, `exp(s - lse)` are the weights and `rowsum(grad * out)`
        # the correction of the whole. So the gradients of the parts sum to the whole's, and none is needed through a
        # log-sum-exp (as in ring attention, Liu et al. 2023, arXiv 2310.01889).
        *tensors, table, out, lse = ctx.saved_tensors
        if ctx.gradients is not None:
            *of_tensors, of_table = ctx.gradients(grad, *tensors, table, out, lse)
            return None, None, None, None, None, of_table, *of_tensors
        queries, keys, value = tensors[: ctx.count], tensors[ctx.count : -1], tensors[-1]
        group = queries[0].shape[1] // value.shape[1]
        # Many parts add to one key, so halves are summed in float32.
        dtype = accumulation_dtype(value.dtype)
        of_query, of_key = ([getattr(p, name) for p in ctx.parts] for name in ("query", "key"))

        def zeros(x: Tensor, parts: int) -> Tensor:
            return torch.zeros_like(x, dtype=dtype if parts > 1 else x.dtype)

        grad_queries = [zeros(x, of_query.count(index)) for index, x in enumerate(queries)]
        grad_keys = [zeros(x, of_key.count(index)) for index, x in enumerate(keys)]
        grad_value = zeros(value, len(ctx.parts))
        for part, state in zip(ctx.parts, ctx.states, strict=True):
            saved = Saved(
                part.ordered(part.of_rows(queries[part.query])),
                part.ordered_keys(part.of_keys(keys[part.key], group, part.first_key)),
                part.ordered_keys(part.of_keys(value, group)),
                part.ordered(part.of_rows(out)),
                part.ordered(part.of_rows(lse)),
            )
            rows = part.ordered(part.of_rows(grad))
            gradients = ctx.fused.backward(rows, saved, part.shape(ctx.scaling), state)
            own, seen = part.of_rows(grad_queries[part.query]), grad_keys[part.key]
            own.add_(part.ordered(gradients[0]))
            part.of_keys(seen, group, part.first_key).add_(part.ordered_keys(gradients[1]))
            part.of_keys(grad_value, group).add_(part.ordered_keys(gradients[2]))
        grads = [x.to(value.dtype) for x in (*grad_queries, *grad_keys, grad_value)]
        return None, None, None, None, None, None, *grads
