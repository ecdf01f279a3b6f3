"""Causal attention with a bias by distance, per head: any table, read in place as the mask of fused calls.

With the rows of a block from last to first, the bias of row t and key n depends on `t + n` alone (a Hankel matrix),
which a 1-D table viewed with strides (1, 1) is: O(length) memory, and exact for any function of the distance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_posenc.attention.flash_cpu import accumulation_dtype, pad_features
from hf_posenc.attention.parts import Part, attend_parts, check_shapes, forward_parts
from hf_posenc.attention.table_gradient import TILE_ROWS, backward_with_table
from hf_posenc.attention.windows import provable_windows, runs_of_like_heads
from hf_posenc.errors import PosencError

__all__ = ["provable_windows", "toeplitz"]

BLOCK = 1024
"""Rows that read the keys before them in one call."""
STEP = 256
"""Rows of a call on the diagonal, or in a narrow window: what a row computes in vain is half of it."""
LEAST = -1e30
"""Stands for a bias of -inf, with which a call could have rows without any visible key."""


def toeplitz(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    scaling: float,
    *,
    offset: int = 0,
    windows: Tensor | None = None,
) -> Tensor:
    """Causal attention over the scores `query . key * scaling + table[h, m - n]`, exact.

    Differentiable in the table too, where it requires a gradient.

    Args:
        query: Shape (B, H, Q, D).
        key: Shape (B, HK, offset + Q, D), H a multiple of HK.
        value: Shape (B, HK, offset + Q, DV).
        table: The bias by distance, shape (H, at least offset + Q), float32 or float64.
        scaling: Factor on the scores.
        offset: Tokens in the cache: row i has position offset + i.
        windows: Per head, the distance beyond which keys may be left out (not: must), shape (H,), integers.

    Returns:
        Shape (B, H, Q, DV).

    Raises:
        PosencError: The table is too short or has not a row per head, or the tensors do not belong together.
    """
    check_shapes(query, key, value, offset)
    heads, rows = query.shape[1:3]
    known = offset + rows
    key, value = key[:, :, :known], value[:, :, :known]
    if table.dim() != 2 or table.shape[0] != heads or table.shape[1] < known:
        raise PosencError(
            f"A bias table of shape {tuple(table.shape)} does not serve {heads} heads and {known} keys; "
            f"give one of shape ({heads}, {known}) or longer."
        )
    reaches = [known] * heads
    if windows is not None:
        reaches = [max(0, min(known, int(window))) for window in windows.tolist()]
    flipped = _reversed(table[:, :known].to(accumulation_dtype(query.dtype)))
    if not (torch.is_grad_enabled() and table.requires_grad):
        parts = list(_parts(flipped, reaches, heads // key.shape[1], rows, offset))
        return attend_parts(parts, (query,), (key,), value, scaling)
    wanted = value.shape[-1]
    size = max(query.shape[-1], wanted)
    tensors = [pad_features(x, size) for x in (query, key, value)]
    out: Tensor = _Trainable.apply(flipped, reaches, scaling, offset, *tensors)  # type: ignore[no-untyped-call]
    return out if size == wanted else out[..., :wanted]


class _Trainable(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        flipped: Tensor,
        reaches: list[int],
        scaling: float,
        offset: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> Tensor:
        group = query.shape[1] // key.shape[1]
        parts = list(_parts(flipped, reaches, group, query.shape[2], offset))
        out, lse = forward_parts(parts, (query,), (key,), value, scaling)
        ctx.save_for_backward(query, key, value, flipped, out, lse)
        ctx.reaches, ctx.scaling = reaches, scaling
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, flipped, out, lse = ctx.saved_tensors
        of_query, of_key, of_value, of_table = backward_with_table(
            grad, query, key, value, flipped, out, lse, ctx.scaling, key.shape[2], ctx.reaches
        )
        return of_table, None, None, None, of_query, of_key, of_value


def _reversed(table: Tensor) -> Tensor:
    """The table from the largest distance to 0, then hidden entries for the distances below zero."""
    rows = table.clamp_min(LEAST).flip(-1)
    return torch.cat((rows, rows.new_full((rows.shape[0], max(STEP, TILE_ROWS)), -torch.inf)), -1)


def _parts(
    flipped: Tensor, reaches: Sequence[int], group: int, rows: int, offset: int
) -> Iterator[Part]:
    """The parts of all heads; `flipped` is what `_reversed` made of a table of offset + rows distances."""
    for heads in runs_of_like_heads(reaches, group):
        reach = max(reaches[heads[0] : heads[1]])
        block = BLOCK if reach >= 2 * BLOCK else STEP
        for first in range(0, rows, block):
            last = min(rows, first + block)
            begin = max(0, offset + first - reach)
            # In a narrow window one call has it all: the keys before the block and those of the diagonal.
            before = offset + first if block > STEP else begin
            if before > begin:
                yield _part(flipped, heads, (first, last), (begin, before), rows)
            for step in range(first, last, STEP):
                end = min(last, step + STEP)
                keys = (before, offset + end)
                yield _part(flipped, heads, (step, end), keys, rows, merge=before > begin)


def _part(
    flipped: Tensor,
    heads: tuple[int, int],
    rows: tuple[int, int],
    keys: tuple[int, int],
    length: int,
    *,
    merge: bool = False,
) -> Part:
    """A part with its bias: row t (from the last on) and key n of the part read entry `start + t + n`."""
    start = length - rows[1] + keys[0] + heads[0] * flipped.stride(0)
    shape = (1, heads[1] - heads[0], rows[1] - rows[0], keys[1] - keys[0])
    mask = flipped.as_strided(shape, (0, flipped.stride(0), 1, 1), start)
    every = heads == (0, flipped.shape[0])
    return Part(rows, keys, mask=mask, merge=merge, reverse=True, heads=None if every else heads)
