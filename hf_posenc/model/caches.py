"""What frequencies that move with the length need to know of a cache, which the attention function does not see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.attention.call import RotatedKeys
from hf_posenc.errors import PosencError
from hf_posenc.methods import LengthDependent

_PINNED = "_hf_posenc_lengths"
_LAST = "_hf_posenc_last_positions"


class CacheWatch:
    """A forward pre-hook of the decoder, which sees the cache before the layers write to it.

    It refuses positions that leave gaps, since keys stand where the order in the cache says. Where frequencies move
    with the length, it says which layers' rotated keys are still those of the cache; and with `update="request"` it
    pins the length in force for each row of the batch while its cache lives: a request keeps the length that its first
    forward had, and where generation outgrows it, it moves on by whole buckets.

    Args:
        method: The method whose frequencies move; `None`: none do.
        original: The original context length, in tokens: the least length.
    """

    def __init__(self, method: LengthDependent | None, original: int) -> None:
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
        """Reads the decoder's arguments.

        Raises:
            PosencError: Positions that leave a gap behind what is cached, or among themselves.
        """
        if torch.compiler.is_compiling():
            return
        cache, positions = kwargs.get("past_key_values"), kwargs.get("position_ids")
        layers = getattr(cache, "layers", [])
        for index, keys in self.kept:
            keys.check(getattr(layers[index], "keys", None) if index < len(layers) else None)
        self.current = None
        if cache is None:
            return
        seen = int(cache.get_seq_length())
        given = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args)
        inputs = next((value for value in given if isinstance(value, Tensor)), None)
        if inputs is None:
            return
        batch, queries = inputs.shape[:2]
        if positions is None:
            positions = torch.arange(seen, seen + queries, device=inputs.device)[None]
        positions = positions.reshape(-1, *positions.shape[-2:])[0]
        _refuse_gaps(cache, seen, positions)
        if self.method is not None and self.method.update == "request":
            self.current = self._pinned(cache, seen, positions.expand(batch, -1))

    def _pinned(self, cache: Any, seen: int, positions: Tensor) -> Tensor:
        assert self.method is not None
        needed, bucket = positions.amax(-1) + 1, self.method.bucket_size(self.original)
        pinned: Tensor | None = getattr(cache, _PINNED, None)
        if not seen:
            pinned = needed.clamp(min=self.original)
        elif pinned is None or pinned.shape != needed.shape:  # filled before, or repeated
            pinned = positions[:, 0].clamp(min=self.original)
        beyond = (needed - pinned).clamp(min=0)
        pinned = pinned + (beyond + bucket - 1) // bucket * bucket
        setattr(cache, _PINNED, pinned)
        return pinned

    def lengths(self, positions: Tensor, batch: int) -> Tensor | None:
        """The length for each row of the batch; without a cache, that of the row itself.

        Args:
            positions: Those of the queries, shape (batch or 1, queries).
            batch: Rows.

        Returns:
            Shape (batch,); `None` with `update="row"`, where it is each query's own.
        """
        if self.method is None or self.method.update != "request":
            return None
        if self.current is not None and len(self.current) == batch:
            return self.current
        return (positions.amax(-1) + 1).clamp(min=self.original).expand(batch)


def _refuse_gaps(cache: Any, seen: int, positions: Tensor) -> None:
    counted = positions.new_full((len(positions), 1), seen - 1)
    length, last = getattr(cache, _LAST, (seen, counted))
    if length != seen or len(last) != len(
        positions
    ):  # cropped or repeated: as if nobody had noted anything
        last = counted
    setattr(cache, _LAST, (seen + positions.shape[1], positions[:, -1:]))
    text = torch.cat((last, positions), 1) if seen else positions
    if bool((text.diff(dim=1) > 1).any()):
        raise PosencError(
            "position_ids leaves a gap and there is a cache, from whose order the methods that compute attention "
            "themselves tell where a key stands. Pass contiguous positions, or use_cache=False."
        )
