"""Around a fused operator, in one launch each: queries and keys turned, and two parts of a softmax merged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_posenc.attention.call import Call
from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.kernels import available, padded, strided, unwatched
from hf_posenc.attention.rotation import Rotation

_ROWS = 32
_HEADS = 8
"""Heads of one program, which reads cos and sin once for them."""


def _turn(x: Tensor, cos: Tensor, sin: Tensor, start: int, interleaved: bool) -> Tensor:
    """Turn pairs of features, in one launch.

    Shapes: x (turns, batch, heads, rows, features), float32 or halves, its features dense; cos and sin (turns, batch,
    rows, pairs), float32. `start` and `interleaved` are those of `Layout`. The result has x's shape and dtype, and the
    memory layout (turns, batch, rows, heads, features).
    """
    from hf_posenc.attention.kernels import parts_triton

    turns, batch, heads, rows, features = x.shape
    pairs, out = cos.shape[-1], _like(x)
    with torch.cuda.device_of(x):
        parts_triton.turn_pairs[(-(-rows // _ROWS), -(-heads // _HEADS), turns * batch)](
            *strided(x), *strided(cos), *strided(sin), *strided(out), heads, rows, batch,
            START=start, PAIRS=pairs, INTERLEAVED=interleaved, D=features, HALF=padded(pairs),
            REST=padded(features - 2 * pairs), BM=_ROWS,
        )  # fmt: skip
    return out


turn = torch.library.custom_op(
    "hf_posenc::turn",
    _turn,
    mutates_args=(),
    schema="(Tensor x, Tensor cos, Tensor sin, int start, bool interleaved) -> Tensor",
)


@turn.register_fake
def _(x: Tensor, *arguments: Any) -> Tensor:
    return _like(x)


def _like(x: Tensor) -> Tensor:
    turns, batch, heads, rows, features = x.shape
    return x.new_empty(turns, batch, rows, heads, features).transpose(2, 3)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, *ctx.layout = inputs
    ctx.save_for_backward(cos, sin)


def _turned_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    cos, sin = ctx.saved_tensors
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    back: Tensor = turn(grad, cos, -sin, *ctx.layout)
    return back, None, None, None, None


turn.register_autograd(_turned_back, setup_context=_keep)


def accepts(call: Call, encoding: Encoding) -> bool:
    """True if the operator turns what a call has to turn, which may be nothing."""
    query, plan = call.query, encoding.plan
    if not available(query.device) or query.dtype == torch.float64:
        return False
    if plan.rotation is not None and plan.rotation.norm is not None:
        return False  # D R D^-1
    return all(x.stride(-1) == 1 and x.dtype == query.dtype for x in (query, call.key))


def turned(rotation: Rotation, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate x as `Rotation.turned`, by the operator."""
    layout, axis = rotation.layout, -1 if rotation.layout.interleaved else -2
    cos, sin = (table.select(axis, -1).squeeze(2) for table in tables)
    turns, batch = len(cos), len(x)
    cos, sin = (table.expand(-1, batch, -1, -1) for table in (cos, sin))
    every = x.expand(turns, *x.shape)
    compute: Callable[..., Tensor] = _turn if unwatched(x) else turn
    return compute(every, cos, sin, layout.start, layout.interleaved)


def _merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor, reverse: bool) -> None:
    """Merge outputs (B, H, R, D), whose features are dense, and log-sum-exps (B, H, R), float32."""
    from hf_posenc.attention.kernels import parts_triton

    batch, heads, rows, features = out.shape
    with torch.cuda.device_of(out):
        parts_triton.merge_rows[(-(-rows // _ROWS), batch * heads)](
            *strided(out), *strided(lse), *strided(part_out), *strided(part_lse), heads, rows,
            REVERSE=reverse, D=features, PADDED=padded(features), BM=_ROWS,
        )  # fmt: skip


_merge_operator = torch.library.custom_op(
    "hf_posenc::merge",
    _merge,
    mutates_args=("out", "lse"),
    schema="(Tensor(a!) out, Tensor(b!) lse, Tensor part_out, Tensor part_lse, bool reverse) -> ()",
)


@_merge_operator.register_fake
def _(*arguments: object) -> None:
    return None


def merge(
    out: Tensor,
    lse: Tensor,
    part_out: Tensor,
    part_lse: Tensor,
    *,
    reverse: bool = False,
    last: bool = False,
) -> None:
    """Merge by the operator, as `fused.merge`; the log-sum-exp is written in any case."""
    (_merge if unwatched(out) else _merge_operator)(out, lse, part_out, part_lse, reverse)
