"""Attention as parts of one softmax, each by a fused operator and merged by log-sum-exp, with gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hf_posenc.attention.fused import Fused, Saved, Segments, Shape
from hf_posenc.attention.fused.pytorch import CpuFlash
from hf_posenc.attention.softmax import accumulation_dtype

CPU = CpuFlash()


@dataclass(frozen=True)
class Part:
    """A rectangle of the score matrix, in which every row has at least one visible key, or segments of it.

    Attributes:
        rows: First row and end.
        keys: First key and end.
        query: Index of its tensor among the queries.
        key: Index of its tensor among the keys.
        causal: A row sees the rectangle's keys up to its own, aligned as the operator aligns.
        window: Of those, the last so many; `None`: all.
        segments: The sequences that lie in it one behind the other; `None`: it is one.
        first_key: The key with which its tensor of keys starts; that of values starts with key 0.
        mask: Added to its scores, of `accumulation_dtype`; broadcasts to (B, heads, rows, keys).
        merge: The rows have a result already, from parts before.
        reverse: The rows are taken from last to first, by the mask too.
        chunk: Rows and keys are as many chunks of that size, and each chunk of rows sees its own chunk of keys alone.
        mirrored: Rows and keys are both taken from last to first; of chunks, without the last row and the first key.
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
    window: int | None = None
    segments: Segments | None = None
    first_key: int = 0
    chunk: int | None = None
    mirrored: bool = False

    def shape(self, scaling: float, softcap: float | None) -> Shape:
        """Return the pairs that it sees, with the factor on their scores and their soft cap."""
        return Shape(self.causal, self.window, self.mask, self.segments, scaling, softcap)

    def of_rows(self, x: Tensor) -> Tensor:
        """Return the part of a tensor of queries, outputs or log-sum-exps; a view, of chunks as a batch."""
        x = x[:, :, self.rows[0] : self.rows[1]]
        x = x if self.heads is None else x[:, self.heads[0] : self.heads[1]]
        x = self._in_chunks(x)
        return x[:, :, :-1] if self.chunk and self.mirrored else x

    def of_keys(self, x: Tensor, group: int, start: int = 0) -> Tensor:
        """Return the part of a tensor of keys or values from `start` on, of which each serves `group` query heads."""
        x = x[:, :, self.keys[0] - start : self.keys[1] - start]
        if self.heads is not None:
            x = x[:, self.heads[0] // group : (self.heads[1] - 1) // group + 1]
        x = self._in_chunks(x)
        return x[:, :, 1:] if self.chunk and self.mirrored else x

    def _in_chunks(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, self.chunk))[0].transpose(0, 1) if self.chunk else x

    def in_a_row(self, x: Tensor) -> Tensor:
        """Return an output or log-sum-exp of all chunks in one row again."""
        return x.transpose(0, 1).flatten(1, 2)[None] if self.chunk else x

    def ordered(self, x: Tensor) -> Tensor:
        """Turn rows into the order of the part, and back."""
        return x.flip(2) if self.reverse or self.mirrored else x

    def ordered_keys(self, x: Tensor) -> Tensor:
        """Turn keys and values into the order of the part, and back."""
        return x.flip(2) if self.mirrored else x

    @property
    def length(self) -> tuple[int, int]:
        """The numbers of rows and of keys."""
        return self.rows[1] - self.rows[0], self.keys[1] - self.keys[0]

    def cut(self, rows: tuple[int, int], keys: tuple[int, int], **changes: Any) -> Part:
        """Return a smaller part, of rows and keys that are counted from the own first ones."""
        (row, _), (key, _) = self.rows, self.keys
        placed = (row + rows[0], row + rows[1]), (key + keys[0], key + keys[1])
        return replace(self, rows=placed[0], keys=placed[1], **changes)


def apart(part: Part) -> list[Part]:
    """Return the sequences of a part that share keys, each as a part of its own; other parts as they are."""
    if part.segments is None or part.segments.counts is None:
        return [part]
    pairs = part.segments.pairs
    return [part.cut(rows, keys, segments=None) for rows, keys in pairs if keys[0] < keys[1]]


def in_squares(part: Part, least: int) -> list[Part]:
    """Return the same pairs as rectangles and causal squares, for an operator without windows and alignment.

    A band of w keys: rows are cut into chunks of w. In its own chunk, a row sees a causal square. In the chunk before,
    row a sees the keys b > a: with both orders reversed, a causal square of w - 1. What is left, a last shorter chunk
    and windows below `least` tokens, keeps its window.
    """
    (rows, keys), window = part.length, part.window
    past = keys - rows
    if not part.causal or part.segments is not None or rows == 1:
        return apart(part)
    if window is None or window >= keys:
        if past == 0:
            return [replace(part, window=None)]
        seen = part.cut((0, rows), (0, past), causal=False, window=None)
        return [seen, part.cut((0, rows), (past, keys), window=None, merge=True)]
    whole = rows // window * window
    if window < least or not whole or past not in (0, window):
        return [part]
    pieces = [part.cut((0, whole), (past, past + whole), window=None, chunk=window)]
    if whole < rows:
        pieces.append(part.cut((whole, rows), (past + whole - window + 1, keys)))
    first = window - past  # of the rows whose chunk has one before it
    if first < whole:
        before = (0, whole - first)
        mirrored = {"window": None, "merge": True, "mirrored": True, "chunk": window}
        pieces.append(part.cut((first, whole), before, **mirrored))
    return pieces


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
    softcap: float | None = None,
    sinks: Tensor | None = None,
    trained: tuple[Tensor, Gradients] | None = None,
    fused: Fused = CPU,
) -> Tensor:
    """Compute attention whose softmax runs over all parts together, differentiable in every tensor.

    Every row is in at least one part, and the rows of a part are either all new or all to be merged. Shapes: queries
    (B, H, Q, D), keys (B, HK, KV, D), the value (B, HK, KV, DV), and the result (B, H, Q, DV) in the memory layout
    (B, Q, H, DV). Queries and keys are rounded to the dtype of the value, which the result has. `softcap` and `sinks`
    are those of `Call`. `trained` is a table from which the masks come and which gets a gradient too, and the backward.
    `fused` computes the parts, which must be of its form.
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
        fused, tuple(parts), len(queries), (scaling, softcap), gradients, table, sinks, *tensors
    )
    return out if size == features else out[..., :features]


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        fused: Fused,
        parts: tuple[Part, ...],
        count: int,
        form: tuple[float, float | None],
        gradients: Gradients | None,
        table: Tensor | None,
        sinks: Tensor | None,
        *tensors: Tensor,
    ) -> Tensor:
        queries, keys, value = tensors[:count], tensors[count:-1], tensors[-1]
        batch, heads, length, features = queries[0].shape
        group = heads // value.shape[1]
        out = value.new_empty(batch, length, heads, features).transpose(1, 2)
        lse_dtype = accumulation_dtype(value.dtype)
        lse = value.new_empty(batch, length, heads, dtype=lse_dtype).transpose(1, 2)
        states, apart = [], []
        for part in parts:
            part_out, part_lse, state = fused.forward(
                part.ordered(part.of_rows(queries[part.query])),
                part.ordered_keys(part.of_keys(keys[part.key], group, part.first_key)),
                part.ordered_keys(part.of_keys(value, group)),
                part.shape(*form),
            )
            states.append(state)
            whole = part.rows == (0, length) and part.heads is None
            if whole and not part.merge and not part.reverse:
                out, lse = part.in_a_row(part_out), part.in_a_row(part_lse)
            elif fused.merge is not None:
                apart.append((part, part_out, part_lse))
            else:
                out_rows, lse_rows = part.of_rows(out), part.of_rows(lse)
                part_out, part_lse = part.ordered(part_out), part.ordered(part_lse)
                if part.merge:
                    share = torch.empty_like(part_lse, dtype=out.dtype)
                    torch.sigmoid(part_lse - lse_rows, out=share)
                    out_rows.lerp_(part_out, share.unsqueeze(-1))
                    torch.logaddexp(part_lse, lse_rows, out=lse_rows)
                else:
                    out_rows.copy_(part_out)
                    lse_rows.copy_(part_lse)
        if fused.merge is not None:
            fused.merge(out, lse, apart)
        if sinks is not None:  # one more key, without a value
            sink = sinks.to(lse.dtype)[:, None]
            out.mul_(torch.sigmoid(lse - sink).unsqueeze(-1))
            torch.logaddexp(lse, sink, out=lse)
        ctx.save_for_backward(*tensors, sinks, table, out, lse)
        ctx.parts, ctx.count, ctx.form, ctx.gradients = parts, count, form, gradients
        ctx.fused, ctx.states = fused, states
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # With the output and log-sum-exp of the whole softmax, `exp(s - lse)` are the weights and `rowsum(grad * out)`
        # the correction of the whole. So the gradients of the parts sum to the whole's, and none is needed through a
        # log-sum-exp (as in ring attention, Liu et al. 2023, arXiv 2310.01889).
        *tensors, sinks, table, out, lse = ctx.saved_tensors
        if ctx.gradients is not None:
            *of_tensors, of_table = ctx.gradients(grad, *tensors, table, out, lse)
            return None, None, None, None, None, of_table, None, *of_tensors
        of_sinks = None
        if sinks is not None:
            weights = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
            of_sinks = (weights * (grad.to(lse.dtype) * out).sum(-1)).sum((0, 2)).neg()
        queries, keys, value = tensors[: ctx.count], tensors[ctx.count : -1], tensors[-1]
        group = queries[0].shape[1] // value.shape[1]
        # Many parts add to one key, so halves are summed in float32.
        dtype = accumulation_dtype(value.dtype)
        every = zip(ctx.parts, ctx.states, strict=True)
        parts = [(piece, state) for part, state in every for piece in apart(part)]
        of_query, of_key = ([getattr(p, name) for p, _ in parts] for name in ("query", "key"))

        def zeros(x: Tensor, parts: int) -> Tensor:
            return torch.zeros_like(x, dtype=dtype if parts > 1 else x.dtype)

        grad_queries = [zeros(x, of_query.count(index)) for index, x in enumerate(queries)]
        grad_keys = [zeros(x, of_key.count(index)) for index, x in enumerate(keys)]
        grad_value = zeros(value, len(parts))
        for part, state in parts:
            saved = Saved(
                part.ordered(part.of_rows(queries[part.query])),
                part.ordered_keys(part.of_keys(keys[part.key], group, part.first_key)),
                part.ordered_keys(part.of_keys(value, group)),
                part.ordered(part.of_rows(out)),
                part.ordered(part.of_rows(lse)),
            )
            rows = part.ordered(part.of_rows(grad))
            gradients = ctx.fused.backward(rows, saved, part.shape(*ctx.form), state)
            own, seen = part.of_rows(grad_queries[part.query]), grad_keys[part.key]
            own.add_(part.ordered(gradients[0]))
            part.of_keys(seen, group, part.first_key).add_(part.ordered_keys(gradients[1]))
            part.of_keys(grad_value, group).add_(part.ordered_keys(gradients[2]))
        grads = [x.to(value.dtype) for x in (*grad_queries, *grad_keys, grad_value)]
        return None, None, None, None, None, None, of_sinks, *grads
