"""Positions and lengths of a batch, read from the decoder's arguments by hooks before its layers run."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.attention.call import RotatedKeys, forget
from hf_posenc.attention.softmax import is_exporting
from hf_posenc.errors import PosencError
from hf_posenc.model.masks import HANDLE, described, visible
from hf_posenc.model.repositioned import ENGINE, refuse_another

LAYER = "_hf_posenc_layer"
"""The attribute of a patched attention module that holds its `Layer`."""
_PINNED = "_hf_posenc_lengths"
_LAST = "_hf_posenc_last_positions"


def named_arguments(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a module's forward by their names."""
    names = inspect.signature(module.forward).parameters
    return {**dict(zip(names, args, strict=False)), **kwargs}


# Positions of a padded batch, which a model that gets none counts with the padding.


def count_positions(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Add the positions that a mask shows to a call without `position_ids`: a forward pre-hook.

    Returns:
        The arguments of the forward; `None` where they stay.
    """
    if len(args) > 1:  # by their names
        args, kwargs = (), named_arguments(module, args, kwargs)
    tokens = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args)
    inputs = next((value for value in tokens if isinstance(value, Tensor)), None)
    if inputs is None or kwargs.get("position_ids") is not None:
        return None
    cache = kwargs.get("past_key_values")
    seen = 0 if cache is None else cache.get_seq_length()
    positions = _shown_positions(kwargs.get("attention_mask"), seen, inputs.shape[1])
    if positions is None:
        return None
    return args, {**kwargs, "position_ids": positions.to(inputs.device)}


def refuse_padding(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Refuse padding before a text: a forward pre-hook for an encoder that takes no positions."""
    mask = named_arguments(module, args, kwargs).get("attention_mask")
    if torch.compiler.is_compiling() or not isinstance(mask, Tensor) or mask.dim() != 2:
        return
    if not bool(mask[:, 0].all()):
        raise PosencError(
            f"{type(module).__name__} takes no positions and counts padding before a text as tokens. Pad texts behind "
            "their end."
        )


def _shown_positions(mask: Any, seen: int | Tensor, queries: int) -> Tensor | None:
    """The positions of the queries, counted over the tokens that a mask shows; `None` where it hides none."""
    by_type = isinstance(mask, Mapping)  # made by the model around the decoder
    if by_type:
        mask = mask.get("full_attention")
    if isinstance(mask, Tensor) and mask.dtype == HANDLE and mask.dim() == 4:
        mask, by_type = described(mask).arguments.get("attention_mask"), True
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
        return None
    shown = mask != 0 if mask.dim() == 2 else visible(mask).any(1).any(-2)
    if not torch.compiler.is_compiling():
        present = int(seen) + queries
        if shown.shape[1] < present or bool(shown[:, :present].all()):
            return None
        if mask.dim() == 4 and seen and not by_type:
            raise PosencError(
                "This 4-D attention_mask hides cached tokens, which may be padding or another document. Pass "
                "position_ids, or an attention_mask of shape (batch, tokens)."
            )
    positions = (shown.long().cumsum(-1) - 1).clamp(min=0)
    return positions.index_select(1, torch.arange(queries, device=shown.device) + seen)


class PositionCounter:
    """A forward pre-hook of a model without rotation: counts positions and hands them to its attention modules.

    With a `config`, whose attention implementation is the engine, another one is refused.
    """

    def __init__(self, modules: Sequence[nn.Module], config: Any = None) -> None:
        self.modules, self.config = list(modules), config

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Read the decoder's arguments: `position_ids`, or else the mask and the cache."""
        if self.config is not None:
            refuse_another(self.config, ENGINE)
        if len(args) > 1:  # by their names
            args, kwargs = (), named_arguments(module, args, kwargs)
        tokens = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args)
        inputs = next((value for value in tokens if isinstance(value, Tensor)), None)
        if inputs is None:
            return
        cache, positions = kwargs.get("past_key_values"), kwargs.get("position_ids")
        seen, queries = 0 if cache is None else cache.get_seq_length(), inputs.shape[1]
        if positions is None:
            positions = _shown_positions(kwargs.get("attention_mask"), seen, queries)
        if positions is None:
            positions = (torch.arange(queries, device=inputs.device) + seen)[None]
        for attention in self.modules:
            attention.__dict__[LAYER].positions = positions.to(inputs.device)


# The cache, which the attention function does not see.


class PinnedLength:
    """The length in force for each row of a batch with `update="request"`, pinned while its cache lives.

    It is that of the row's first forward, or the original one if that is longer. Where generation outgrows it, it
    grows by whole buckets.
    """

    def __init__(self, bucket: int, original: int) -> None:
        self.bucket, self.original = bucket, original
        self.current: Tensor | None = None

    def follow(self, cache: Any, seen: int, positions: Tensor) -> None:
        """Read the positions of a forward, (batch, queries), after as many cached tokens as were `seen`."""
        pins: Mapping[tuple[int, int], Tensor] = getattr(cache, _PINNED, {})
        key, needed = (self.bucket, self.original), positions.amax(-1) + 1
        pinned = pins.get(key)
        if not seen:
            pinned = needed.clamp(min=self.original)
        elif pinned is None or pinned.shape != needed.shape:  # filled before, or repeated
            pinned = positions[:, 0].clamp(min=self.original)
        beyond = (needed - pinned).clamp(min=0)
        self.current = pinned + (beyond + self.bucket - 1) // self.bucket * self.bucket
        setattr(cache, _PINNED, {**pins, key: self.current})

    def of(self, positions: Tensor, batch: int) -> Tensor:
        """Return the length in force for each row, shape (batch,); without a cache, that of the row itself."""
        if self.current is not None and len(self.current) == batch:
            return self.current
        return (positions.amax(-1) + 1).clamp(min=self.original).expand(batch)


class CacheWatch:
    """A forward pre-hook of the decoder, which sees the cache before the layers write to it.

    It refuses positions that leave gaps, since the position of a key is its place in the cache. Where frequencies move
    with the length, it drops rotated keys that are no longer those of the cache, and pins the lengths of the layers.
    """

    def __init__(self) -> None:
        self.kept: list[tuple[int, RotatedKeys]] = []
        self.lengths: dict[tuple[int, int], PinnedLength] = {}

    def keep(self, index: int) -> RotatedKeys:
        """Return a store for the rotated keys of one layer, by its index in the cache."""
        keys = RotatedKeys()
        self.kept.append((index, keys))
        return keys

    def pinned(self, bucket: int, original: int) -> PinnedLength:
        """Return the length of the layers whose methods have this bucket and original length, in tokens."""
        return self.lengths.setdefault((bucket, original), PinnedLength(bucket, original))

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Read the decoder's arguments, and refuse positions that leave a gap."""
        if not torch.compiler.is_compiling():
            self._watch(args, kwargs)
        elif is_exporting():
            for length in self.lengths.values():
                length.current = None
        elif self.lengths:  # they are read from the cache, which a graph would keep as it was
            self._watch_outside(args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _watch_outside(self, args: Any, kwargs: Any) -> None:
        """Leave the graph that is being compiled, and watch."""
        self._watch(args, kwargs)

    def _watch(self, args: Any, kwargs: Any) -> None:
        cache, positions = kwargs.get("past_key_values"), kwargs.get("position_ids")
        masks = kwargs.get("attention_mask")
        forget(positions, *(masks.values() if isinstance(masks, Mapping) else (masks,)))
        layers = getattr(cache, "layers", [])
        for index, keys in self.kept:
            keys.check(getattr(layers[index], "keys", None) if index < len(layers) else None)
        for length in self.lengths.values():
            length.current = None
        if cache is None:
            return
        seen = int(cache.get_seq_length())
        candidates = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args)
        inputs = next((value for value in candidates if isinstance(value, Tensor)), None)
        if inputs is None:
            return
        batch, queries = inputs.shape[:2]
        if positions is None:
            positions = torch.arange(seen, seen + queries, device=inputs.device)[None]
        positions = positions.reshape(-1, *positions.shape[-2:])[0]
        _refuse_gaps(cache, seen, positions, masks)
        for length in self.lengths.values():
            length.follow(cache, seen, positions.expand(batch, -1))


def _shown(mask: Any, seen: int, queries: int) -> Tensor | None:
    """Return whether no query of a forward is padding, as its mask says; `None`: there is no telling."""
    if mask is None:
        return torch.tensor(True)
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4) or mask.dtype == HANDLE:
        return None
    shown = mask != 0 if mask.dim() == 2 else visible(mask).any(1).any(-2)
    return shown[:, seen : seen + queries].all()


def _refuse_gaps(cache: Any, seen: int, positions: Tensor, mask: Any) -> None:
    counted = positions.new_full((len(positions), 1), seen - 1)
    length, last = getattr(cache, _LAST, (seen, counted))
    if length != seen or len(last) != len(positions):  # cropped or repeated since
        last = counted
    setattr(cache, _LAST, (seen + positions.shape[1], positions[:, -1:]))
    text = torch.cat((last, positions), 1) if seen else positions
    wrong = (text.diff(dim=1) > 1).any()
    branches = seen > 0 and positions.shape[1] > 1
    shown = _shown(mask, seen, positions.shape[1]) if branches else None
    if shown is not None:  # padding has any position
        wrong |= shown.to(wrong.device) & (positions.diff(dim=1) < 1).any()
    if bool(wrong):  # the one wait of a forward
        raise PosencError(
            "position_ids leaves a gap, or restarts or repeats behind cached tokens, and there is a cache, from whose "
            "order the methods that compute attention themselves derive the position of a key. Pass contiguous "
            "positions, or use_cache=False."
        )
