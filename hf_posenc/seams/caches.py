"""What frequencies that move with the length need to know of a cache, which the attention function does not see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.attention.moving import RotatedKeys
from hf_posenc.methods import LengthDependent

_PINNED = "_hf_posenc_lengths"


class CacheWatch:
    """A forward pre-hook of the decoder, which sees the cache before the layers write to it.

    With `update="request"` it pins the length in force for each row of the batch while its cache lives: a request keeps
    the length that its first forward had, and where generation outgrows it, it moves on by whole buckets. In both modes
    it says which layers' rotated keys are still those of the cache.

    Args:
        method: The method in force.
        original: The original context length, in tokens: the least length.
    """

    def __init__(self, method: LengthDependent, original: int) -> None:
        self.method = method
        self.original = original
        self.current: Tensor | None = None
        self.kept: list[tuple[int, RotatedKeys]] = []

    def keep(self, index: int) -> RotatedKeys:
        """The place for the rotated keys of one layer.

        Args:
            index: Which layer of the cache it writes to.
        """
        keys = RotatedKeys()
        self.kept.append((index, keys))
        return keys

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Reads the decoder's arguments."""
        cache = kwargs.get("past_key_values")
        if torch.compiler.is_compiling():
            return
        layers = getattr(cache, "layers", [])
        for index, keys in self.kept:
            keys.check(getattr(layers[index], "keys", None) if index < len(layers) else None)
        if self.method.update == "request":
            self._pin(cache, args, kwargs)

    def _pin(self, cache: Any, args: Any, kwargs: Any) -> None:
        self.current = None
        if cache is None:
            return
        seen = int(cache.get_seq_length())
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
        bucket = self.method.bucket
        beyond = (needed - pinned).clamp(min=0)
        self.current = pinned + (beyond + bucket - 1) // bucket * bucket
        setattr(cache, _PINNED, self.current)

    def lengths(self, positions: Tensor, batch: int) -> Tensor | None:
        """The length for each row of the batch; without a cache, that of the row itself.

        Args:
            positions: Those of the queries, shape (batch or 1, queries).
            batch: Rows.

        Returns:
            Shape (batch,); `None` with `update="row"`, where it is each query's own.
        """
        if self.method.update != "request":
            return None
        if self.current is not None and len(self.current) == batch:
            return self.current
        return (positions.amax(-1) + 1).clamp(min=self.original).expand(batch)
