"""Parts of the score matrix: which rows see which keys in one call of an operator."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from hf_posenc.attention.fused.protocol import Segments, Shape


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

    def shape(self, scaling: float) -> Shape:
        """Return the pairs that it sees, with the factor on their scores."""
        return Shape(self.causal, self.window, self.mask, self.segments, scaling)

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


def in_squares(part: Part, least: int) -> list[Part]:
    """Return the same pairs as rectangles and causal squares, for an operator without windows and alignment.

    A band of w keys: rows are cut into chunks of w. In its own chunk, a row sees a causal square. In the chunk before,
    row a sees the keys b > a: with both orders reversed, a causal square of w - 1. What is left, a last shorter chunk
    and windows below `least` tokens, keeps its window.
    """
    (rows, keys), window = part.length, part.window
    past = keys - rows
    if not part.causal or part.segments is not None or rows == 1:
        return [part]
    if window is None or window >= keys:
        if past == 0:
            return [replace(part, window=None)]
        seen = part.cut((0, rows), (0, past), causal=False, window=None)
        return [seen, part.cut((0, rows), (past, keys), window=None, merge=True)]
    whole = rows // window * window
    if window < least or not whole or past not in (0, window - 1):
        return [part]
    pieces = [part.cut((0, whole), (past, past + whole), window=None, chunk=window)]
    if whole < rows:
        pieces.append(part.cut((whole, rows), (past + whole - window + 1, keys)))
    mirrored = functools.partial(part.cut, window=None, merge=True, mirrored=True)
    if past:
        pieces.append(mirrored((0, past), (0, past)))
    if whole > window:
        behind = past + whole - window
        pieces.append(mirrored((window, whole), (past, behind), chunk=window))
    return pieces
