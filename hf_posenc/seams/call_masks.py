"""The masks of one attention call, read from what arrived there: nothing, a tensor, or a handle."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers.masking_utils import find_packed_sequence_indices

from hf_posenc.attention.call import Run
from hf_posenc.seams.masks import LazyMask


@dataclass(frozen=True, eq=False)
class WrittenMask:
    """A mask that is there as a tensor.

    Attributes:
        visible: Bool, shape (batch or 1, heads or 1, queries, keys).
        addition: What is added to visible scores, of the same shape (Doge); `None`: nothing.
    """

    visible: Tensor
    addition: Tensor | None = None

    @classmethod
    def read(cls, mask: Tensor) -> WrittenMask:
        """A bool mask, or an additive one, whose hidden pairs are the least finite number or less."""
        if mask.dtype == torch.bool:
            return cls(mask)
        visible = mask > torch.finfo(mask.dtype).min / 2
        return cls(visible, mask.masked_fill(~visible, 0.0))

    def rows(self, start: int, stop: int) -> Tensor | None:
        """Visible keys of some queries."""
        return self.visible[:, :, start:stop]

    def seen(self) -> Tensor | None:
        """Keys that any query sees."""
        return self.visible.any(1).any(-2)

    def added(self, start: int, stop: int) -> Tensor | None:
        """What is added to visible scores."""
        return None if self.addition is None else self.addition[:, :, start:stop]

    def runs(self) -> tuple[Run, ...] | None:
        """Not looked for."""
        return None


@dataclass(frozen=True, eq=False)
class CausalMask:
    """No mask, as sdpa reads it: a single query sees all keys, of several the first sees the first key.

    Attributes:
        queries: Number of queries.
        keys: Number of keys; more than queries only for a single query.
        device: Where they are.
    """

    queries: int
    keys: int
    device: torch.device

    def rows(self, start: int, stop: int) -> Tensor | None:
        """Visible keys of some queries."""
        if self.queries == 1:
            return None
        index = torch.arange(self.keys, device=self.device)
        return (index <= index[start:stop, None])[None, None]

    def seen(self) -> Tensor | None:
        """Keys that any query sees."""
        return None

    def added(self, start: int, stop: int) -> Tensor | None:
        """Nothing."""
        return None

    def runs(self) -> tuple[Run, ...] | None:
        """One, over everything."""
        everything = slice(None)
        return (Run(everything, everything, everything, self.keys - self.queries),)


@dataclass(frozen=True, eq=False)
class PositionedMask:
    """A lazy mask together with the positions of one call, which tell packed documents apart.

    Attributes:
        mask: The lazy mask.
        position_ids: Shape (batch or 1, queries).
    """

    mask: LazyMask
    position_ids: Tensor

    def rows(self, start: int, stop: int) -> Tensor | None:
        """Visible keys of some queries."""
        return self.mask.rows(start, stop)

    def seen(self) -> Tensor | None:
        """Keys that any query sees."""
        return self.mask.seen()

    def added(self, start: int, stop: int) -> Tensor | None:
        """Nothing."""
        return None

    def runs(self) -> tuple[Run, ...] | None:
        """One for each row without its padding, or for each packed document."""
        batch, queries, keys = self.mask.shape
        offset = self.mask.arguments["q_offset"] - self.mask.arguments.get("kv_offset", 0)
        if offset + queries != keys:
            return None
        window = None if self.mask.causal else self.mask.window
        if self.mask.causal or window is not None:
            runs = _unpadded(self.mask.padding(), batch, queries, keys)
            return runs and tuple(replace(run, window=window) for run in runs)
        if self.mask.packed and not offset:
            return _documents(self.position_ids.expand(batch, -1))
        return None


def _unpadded(
    padding: Tensor | None, batch: int, queries: int, keys: int
) -> tuple[Run, ...] | None:
    everything = slice(None)
    if padding is None:
        return (Run(everything, everything, everything, keys - queries),)
    tokens = padding.sum(-1).tolist()
    first = padding.long().argmax(-1).tolist()
    last = keys - padding.flip(-1).long().argmax(-1)
    if any(
        stop - start != count
        for start, stop, count in zip(first, last.tolist(), tokens, strict=True)
    ):
        return None  # padding in the midst of a row
    found = []
    for row, (start, stop) in enumerate(zip(first, last.tolist(), strict=True)):
        begin = max(0, start - (keys - queries))  # the first query that is a token
        end = stop - (keys - queries)
        if end > begin:
            offset = begin + keys - queries - start
            found.append(Run(slice(row, row + 1), slice(begin, end), slice(start, stop), offset))
    return tuple(found)


def _documents(position_ids: Tensor) -> tuple[Run, ...] | None:
    numbers = find_packed_sequence_indices(position_ids)
    if numbers is None:
        return None
    found = []
    for row, of_row in enumerate(numbers.expand(len(position_ids), -1)):
        sizes = of_row.unique_consecutive(return_counts=True)[1].tolist()
        start = 0
        for size in sizes:
            part = slice(start, start + size)
            found.append(Run(slice(row, row + 1), part, part, 0))
            start += size
    return tuple(found)
