"""What `update="request"` needs to know of a cache: the length that its requests started with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_PINNED = "_hf_posenc_lengths"


class PinnedLengths:
    """The length in force for each row of the batch, pinned while its cache lives.

    A request keeps the length that its first forward had. Where generation outgrows it, it moves on by whole buckets.
    A forward pre-hook of the decoder, since the attention function sees keys and no cache.

    Args:
        original: The original context length, in tokens: the least length.
        bucket: By how many tokens at once a length moves on.
    """

    def __init__(self, original: int, bucket: int) -> None:
        self.original = original
        self.bucket = bucket
        self.current: Tensor | None = None

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Reads from the decoder's arguments how long each row of the batch is, and what was pinned for it."""
        self.current = None
        cache = kwargs.get("past_key_values")
        seen = 0 if cache is None else int(cache.get_seq_length())
        if cache is None or torch.compiler.is_compiling():
            return
        inputs = next(
            value
            for value in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args)
            if value is not None
        )
        batch, queries = inputs.shape[:2]
        positions = kwargs.get("position_ids")
        if positions is None:
            positions = torch.arange(seen, seen + queries, device=inputs.device)[None]
        positions = positions.reshape(-1, *positions.shape[-2:])[0].expand(batch, -1)
        needed = positions.amax(-1) + 1
        pinned: Tensor | None = getattr(cache, _PINNED, None)
        if not seen:
            pinned = needed.clamp(min=self.original)
        elif (
            pinned is None or pinned.shape != needed.shape
        ):  # a cache that was filled before, or repeated
            pinned = positions[:, 0].clamp(min=self.original)
        beyond = (needed - pinned).clamp(min=0)
        self.current = pinned + (beyond + self.bucket - 1) // self.bucket * self.bucket
        setattr(cache, _PINNED, self.current)

    def of(self, positions: Tensor, batch: int) -> Tensor:
        """The length for each row of the batch; without a cache, that of the row itself.

        Args:
            positions: Those of the queries, shape (batch or 1, queries).
            batch: Rows.
        """
        if self.current is not None and len(self.current) == batch:
            return self.current
        return (positions.amax(-1) + 1).clamp(min=self.original).expand(batch)
