"""Around a fused operator, in one launch each: queries and keys turned, and parts of a softmax merged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_posenc.attention.call import Call
from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.kernels import available, padded, strided, unwatched
from hf_posenc.attention.parts import Part
from hf_posenc.attention.windowed import Turn

_ROWS = 32
_HEADS = 8
"""Heads of one program, which reads cos and sin once for them."""
_PARTS = 5
"""Parts of one launch, which is compiled for their number."""


def _turn(given: Sequence[Tensor], start: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Turn pairs of features of two tensors x, in one launch.

    `given` are x, cos and sin twice: x (turns, batch, heads, rows, features), float32 or halves, features dense; cos
    and sin (turns, batch, rows, pairs), float32. The second x may have other heads, rows, and turns, or no turn.
    `start` and `interleaved` are those of `Layout`. A result has the shape and dtype of its x, and the memory layout
    (turns, batch, rows, heads, features).
    """
    from hf_posenc.attention.kernels import parts_triton

    first, cos, _, second, *_ = given
    outs: tuple[Tensor, Tensor] = _likes(given)
    (turns, batch, heads, rows, features), pairs = first.shape, cos.shape[-1]
    operands = [
        each
        for x, cos, sin, out in ((*given[:3], outs[0]), (*given[3:], outs[1]))
        for each in (*strided(x), *strided(cos), *strided(sin), *strided(out), *x.shape[2:4])
    ]
    rows, heads = max(rows, second.shape[3]), max(heads, second.shape[2])
    grid = -(-rows // _ROWS), -(-heads // _HEADS), (turns + len(second)) * batch
    with torch.cuda.device_of(first):
        parts_triton.turn_pairs[grid](
            *operands, batch, turns * batch, START=start, PAIRS=pairs, INTERLEAVED=interleaved,
            D=features, HALF=padded(pairs), REST=padded(features - 2 * pairs), BM=_ROWS,
        )  # fmt: skip
    return outs


turn = torch.library.custom_op(
    "hf_posenc::turn",
    _turn,
    mutates_args=(),
    schema="(Tensor[] given, int start, bool interleaved) -> (Tensor, Tensor)",
)


@turn.register_fake
def _likes(given: Sequence[Tensor], *arguments: Any) -> tuple[Tensor, Tensor]:
    pair = (x.transpose(2, 3) for x in (given[0], given[3]))
    first, second = (x.new_empty(x.shape).transpose(2, 3) for x in pair)
    return first, second


def _keep(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
    (_, *tables, _, cos, sin), *ctx.layout = inputs
    ctx.save_for_backward(*tables, cos, sin)


def _turned_back(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    cos, sin, *other = ctx.saved_tensors
    first, second = (grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads)
    backs = turn([first, cos, -sin, second, other[0], -other[1]], *ctx.layout)
    return [backs[0], None, None, backs[1], None, None], None, None


turn.register_autograd(_turned_back, setup_context=_keep)


def accepts(call: Call, encoding: Encoding) -> bool:
    """True if the operator turns what a call has to turn, which may be nothing."""
    query, rotation = call.query, encoding.plan.rotation
    if not available(query.device) or query.dtype == torch.float64:
        return False
    if rotation is not None and (rotation.norm is not None or rotation.keys is not None):
        return False  # D R D^-1
    return all(x.stride(-1) == 1 and x.dtype == query.dtype for x in (query, call.key))


def turned(turns: Sequence[Turn]) -> list[Tensor]:
    """Turn tensors of one layer as `windowed.turned`, two in a launch of the operator."""
    outs = list[Tensor]()
    for first in range(0, len(turns), 2):
        given = list[Tensor]()
        for rotation, x, tables in turns[first : first + 2]:
            layout, axis = rotation.layout, -1 if rotation.layout.interleaved else -2
            cos, sin = (table.select(axis, -1).squeeze(2) for table in tables)
            given.append(x.expand(len(cos), *x.shape))
            given += (table.expand(-1, len(x), -1, -1) for table in (cos, sin))
        two = [*given, *(each[:0] for each in given)][:6]  # beside the last of an odd number, none
        watched = not (unwatched(two[0]) and unwatched(two[3]))
        outs += (turn if watched else _turn)(two, layout.start, layout.interleaved)
    return outs[: len(turns)]


def _merge(out: Tensor, lse: Tensor, parts: Sequence[Tensor], places: Sequence[int]) -> None:
    """Merge parts of a softmax into `out`, (1, H, R, D), and its log-sum-exp `lse`, (1, H, R), in place.

    `parts` are outputs (chunks, H, rows, D) and log-sum-exps in turn, features dense. `places` is 1 if `out` holds
    nothing yet, else 0, and then five numbers for each part, as the kernel has them.
    """
    from hf_posenc.attention.kernels import parts_triton

    fresh, *places = places
    given = [
        each
        for index, (x, y) in enumerate(zip(parts[::2], parts[1::2], strict=True))
        for each in (x, *x.stride()[:3], y, *y.stride(), *places[5 * index : 5 * index + 5])
    ]
    _, heads, rows, features = out.shape
    with torch.cuda.device_of(out):
        parts_triton.merge_parts[(-(-rows // _ROWS), heads)](
            *strided(out), *strided(lse), tuple(given), rows,
            COUNT=len(parts) // 2, FRESH=bool(fresh), D=features, PADDED=padded(features), BM=_ROWS,
        )  # fmt: skip


_merge_operator = torch.library.custom_op(
    "hf_posenc::merge",
    _merge,
    mutates_args=("out", "lse"),
    schema="(Tensor(a!) out, Tensor(b!) lse, Tensor[] parts, int[] places) -> ()",
)


def merge(out: Tensor, lse: Tensor, parts: Sequence[tuple[Part, Tensor, Tensor]]) -> None:
    """Merge parts, of which those that come first are of new rows, five in a launch; see `fused.Merge`."""
    compute: Callable[..., None] = _merge if unwatched(out) else _merge_operator
    for first in range(0, len(parts), _PARTS):
        tensors, places = list[Tensor](), [int(not parts[first][0].merge)]
        for part, *pair in parts[first : first + _PARTS]:
            count, reverse = part.length[0], part.reverse or part.mirrored
            tensors += pair
            places += part.rows[0], count, part.chunk or count, pair[0].shape[2], int(reverse)
        compute(out, lse, tensors, places)
