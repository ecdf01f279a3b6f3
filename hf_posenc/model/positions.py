"""Positions and lengths of a batch, read from the decoder's arguments by hooks before its layers run."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_posenc.attention.call import RotatedKeys, forget
from hf_posenc.attention.softmax import is_exporting
from hf_posenc.errors import PosencError
from hf_posenc.model.forward import (
    KEYWORD,
    Again,
    Entering,
    Forward,
    cache_name,
    cache_of,
    named_arguments,
    text_of,
)
from hf_posenc.model.masks import HANDLE, described, seen_keys
from hf_posenc.model.rotary import ENGINE, refuse_another
from hf_posenc.model.weights import refuse_parts_of_texts

LAYER = "_hf_posenc_layer"
"""The attribute of a patched attention module that holds its `Layer`."""
# Attributes of a cache, or of the part of an encoder-decoder's that has the decoder's own keys. A copy has them too.
_PINNED = "_hf_posenc_lengths"
_ROTATED = "_hf_posenc_rotated"
_FILLED = "_hf_posenc_filled_by"
_LAST = "_hf_posenc_last_positions"
_MADE = "_hf_posenc_made_by"


# Positions of a padded batch, which a model that gets none counts with the padding.


def count_positions(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Add the positions that a mask shows to a call without `position_ids`: a forward pre-hook."""
    if len(args) > 1:  # by their names
        args, kwargs = (), named_arguments(module, args, kwargs)
    inputs = text_of(args, kwargs)
    if inputs is None or kwargs.get("position_ids") is not None:
        return None
    cache = cache_of(kwargs)
    seen = 0 if cache is None else cache.get_seq_length()
    positions = _shown_positions(kwargs.get("attention_mask"), seen, inputs.shape[1])
    if positions is None:
        return None
    return args, {**kwargs, "position_ids": positions.to(inputs.device)}


def refuse_drafts(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Refuse what may be drafts behind the text of a request, whose length they would change: a forward pre-hook.

    Assisted generation asks for the logits of all drafts, and nothing else tells of them.
    """
    if len(args) > 1:
        kwargs = named_arguments(module, args, kwargs)
    kept, cache = kwargs.get("logits_to_keep"), cache_of(kwargs)
    if not isinstance(kept, int) or kept < 2 or cache is None or torch.compiler.is_compiling():
        return
    if not cache.get_seq_length():
        raise PosencError(
            f'logits_to_keep={kept} in the first forward of a text: with update="request" its length is in force, and '
            "the drafts behind it, which assisted generation and prompt lookup add there, would count. Patch with "
            "another update, generate without drafts, or leave out logits_to_keep."
        )


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


def _of_all_keys(mask: Any) -> tuple[Any, bool]:
    """Return the mask of the layers without a window, and whether the model around the decoder has made it."""
    by_type = isinstance(mask, Mapping)
    if by_type:
        mask = mask.get("full_attention")
    if isinstance(mask, Tensor) and mask.dtype == HANDLE and mask.dim() == 4:
        return described(mask).arguments.get("attention_mask"), True
    return mask, by_type


def _shown_positions(mask: Any, seen: int | Tensor, queries: int) -> Tensor | None:
    """The positions of the queries, counted over the tokens that a mask shows; `None` where it hides none."""
    mask, by_type = _of_all_keys(mask)
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
        return None
    if (shown := seen_keys(mask)) is None:
        return None
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


class DecoderWatch(Entering):
    """Hooks of a decoder, which make the `Forward` of each call before the layers run and write to the cache.

    Positions that leave gaps are refused, since the position of a key is its place in the cache. So is a cache that
    another patch has filled, or none: its keys are at other positions.
    """

    def __init__(
        self,
        owner: nn.Module,
        filled_by: object,
        counts: Literal["", "tokens", "places"] = "",
        *,
        computes: bool = True,
    ) -> None:
        # The patch, which is another one if it compares as such, and in words as a string.
        self.filled_by = filled_by
        # Of a model whose layers get no positions: "tokens", which a mask shows, or "places", padding too.
        self.counts = counts
        self.computes = computes  # attention, from the place of a key in the cache
        self.config: Any = None  # of which another attention implementation is refused
        # Bucket and original length of the layers with `update="request"`.
        self.lengths: set[tuple[int, int]] = set()
        self.rotated: set[int] = set()  # layers that keep rotated keys, by their index in the cache
        # The layers hand keywords on to the attention function.
        parameters = inspect.signature(owner.forward).parameters.values()
        self.passes = any(each.kind is each.VAR_KEYWORD for each in parameters)

    @property
    def breaks(self) -> bool:  # type: ignore[override]
        """True if even a compiled forward enters its record, which no keyword carries."""
        return bool(self.counts) and not self.passes

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Read the decoder's arguments, and add the record to them."""
        if self.config is not None:
            refuse_another(self.config, ENGINE)
        if len(args) > 1:  # by their names
            args, kwargs = (), named_arguments(module, args, kwargs)
        cache, positions = _own_part(cache_of(kwargs)), kwargs.get("position_ids")
        if not self.computes:
            self._check_filled(cache)
            return None
        refuse_parts_of_texts("a method that computes attention itself")
        inputs = text_of(args, kwargs)
        if inputs is None:
            return None
        if self.counts:
            seen = 0 if cache is None else cache.get_seq_length()
            if positions is None and self.counts == "tokens":
                positions = _shown_positions(kwargs.get("attention_mask"), seen, inputs.shape[1])
            if positions is None:
                positions = (torch.arange(inputs.shape[1], device=inputs.device) + seen)[None]
            positions = positions.to(inputs.device)
        forward = Forward(positions if self.counts else None)
        if not torch.compiler.is_compiling():
            forward = self._watched(forward, inputs, positions, cache, kwargs)
        elif self.lengths and not is_exporting():
            # They are read from the cache, which a graph would keep as it was.
            forward = self._watched_outside(forward, inputs, positions, cache, kwargs)
        if not self.counts and not self.lengths and not self.rotated:
            return None
        if not self.passes and torch.is_grad_enabled():
            Again.install(module)
        self.enter(forward)
        return (args, {**kwargs, KEYWORD: forward}) if self.passes else None

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Note in the cache by which patch it was filled, and of one that the forward has made at which positions."""
        super().after(module, args, kwargs, output)
        if len(args) > 1:
            args, kwargs = (), named_arguments(module, args, kwargs)
        inputs, mask = text_of(args, kwargs), kwargs.get("attention_mask")
        for cache in map(_own_part, output if isinstance(output, tuple) else (cache_of(output),)):
            if not hasattr(cache, "get_seq_length"):
                continue
            setattr(cache, _FILLED, self.filled_by)
            plain = mask is None or (isinstance(mask, Tensor) and mask.dim() == 2)
            noted = self.computes and plain and not torch.compiler.is_compiling()
            if noted and cache_of(kwargs) is None and inputs is not None:
                # Copies, since the caller may write the next positions into the same tensor.
                positions = kwargs.get("position_ids")
                if positions is None and self.counts == "tokens":
                    positions = _shown_positions(mask, 0, inputs.shape[1])
                read = _of_rows(positions, inputs, 0).clone()
                setattr(cache, _MADE, (read, None if mask is None else mask.clone()))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _watched_outside(self, *arguments: Any) -> Forward:
        """Leave the graph that is being compiled, and watch."""
        return self._watched(*arguments)

    def _watched(
        self, forward: Forward, inputs: Tensor, positions: Tensor | None, cache: Any, kwargs: Any
    ) -> Forward:
        """Return the record with what the cache holds, or raise for a cache or positions that cannot be."""
        masks = kwargs.get("attention_mask")
        forget(positions, *(masks.values() if isinstance(masks, Mapping) else (masks,)))
        seen = 0 if cache is None else int(cache.get_seq_length())
        if self.lengths and not seen:
            refuse_packed(positions, masks)
        if cache is None:
            return forward
        self._check_filled(cache)
        positions = _of_rows(positions, inputs, seen)
        _refuse_gaps(cache, seen, positions, masks)
        if not self.lengths and not self.rotated:
            return forward
        rotated: dict[int, RotatedKeys] = getattr(cache, _ROTATED, {})
        layers = getattr(cache, "layers", [])
        for index in self.rotated:
            keys = getattr(layers[index], "keys", None) if index < len(layers) else None
            rotated.setdefault(index, RotatedKeys()).check(keys)
        setattr(cache, _ROTATED, rotated)
        lengths = self._lengths(cache, seen, positions) if self.lengths else {}
        return Forward(forward.positions, lengths=lengths, rotated=rotated)

    def _check_filled(self, cache: Any) -> None:
        """Refuse a cache that something else than this patch has filled; mark an empty one as its own.

        Learned keys have no rotation, and so suit a patch that computes no attention.
        """
        by = getattr(cache, _FILLED, None)
        if cache is None or by == self.filled_by or torch.compiler.is_compiling():
            return
        if not (seen := int(cache.get_seq_length())):
            setattr(cache, _FILLED, self.filled_by)
            return
        what = f"The cache holds {seen} tokens that were computed"
        if by is not None:
            same = str(by) == str(self.filled_by)
            other = "other layers, or another original length" if same else str(by)
            raise PosencError(
                f"{what} with {other}, and the model is now patched with {self.filled_by}. Start with an empty cache."
            )
        what += f" before the model was patched with {self.filled_by}"
        if self.computes:
            raise PosencError(
                f"{what}, or by hand, or are learned keys without a position, as those of PEFT's prefix tuning. Start "
                "with an empty cache. To change keys that this patch has computed, change those of a copy of their "
                "cache (copy.deepcopy). With prefix tuning, use a frequency method (yarn, ntk_by_parts, ...)."
            )
        warnings.warn(
            f"{what}, and are read wrong, unless they are learned keys, as those of PEFT's prefix tuning. Start with "
            "an empty cache.",
            stacklevel=4,
        )

    def _lengths(self, cache: Any, seen: int, positions: Tensor) -> dict[tuple[int, int], Tensor]:
        """Return the length in force for each row: that of its first forward, or the original one if that is longer.

        Where generation outgrows it, it grows by whole buckets. The first length stays with the cache.
        """
        needed, queries = positions.amax(-1) + 1, positions.shape[1]
        # Without one, the forward before made the cache. The tokens of a cache are known without a wait for the device.
        first, tokens = (
            getattr(cache, _PINNED, (positions[:, 0].clone(), seen)) if seen else (needed, queries)
        )
        if len(first) != len(needed) and bool((first == first[0]).all()):
            first = first[:1].expand(len(needed))  # rows of one length were repeated, or some left
        if len(first) != len(needed) or 0 < seen < tokens:
            raise PosencError(
                'update="request" pins the length of each row at its first forward, and this cache was cropped into '
                "the text of that forward, or has other rows since. Run the text again with an empty cache, or patch "
                'with update="row".'
            )
        setattr(cache, _PINNED, (first, tokens))
        lengths = {}
        for bucket, original in self.lengths:
            pinned = first.clamp(min=original)
            beyond = (needed - pinned).clamp(min=0)
            lengths[bucket, original] = pinned + (beyond + bucket - 1) // bucket * bucket
        return lengths


def _own_part(cache: Any) -> Any:
    """Return the part of an encoder-decoder's cache that has the decoder's own keys; any other cache as it is."""
    return getattr(cache, "self_attention_cache", cache)


def watch_caches(model: nn.Module, filled_by: object) -> list[RemovableHandle]:
    """Hook the decoders of a model whose own attention stays, so that each cache is of one patch."""
    takers = [
        module
        for module in model.modules()
        if hasattr(module, "set_attn_implementation") and cache_name(module) is not None
    ]
    outer = {each for each in takers if not {*takers}.isdisjoint([*each.modules()][1:])}
    watches = ((each, DecoderWatch(each, filled_by, computes=False)) for each in takers)
    return [hook for each, watch in watches if each not in outer for hook in watch.around(each)]


def _shown(mask: Any, positions: Tensor, start: int) -> Tensor | None:
    """Return which tokens, (rows, tokens) from token `start`, are no padding, bool; `None` if there is no telling."""
    if mask is None:
        return torch.ones_like(positions, dtype=torch.bool)
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4) or mask.dtype == HANDLE:
        return None
    if (shown := seen_keys(mask)) is None or shown.shape[1] < start + positions.shape[1]:
        return None
    return shown[:, start : start + positions.shape[1]].expand_as(positions)


def _steps(positions: Tensor, shown: Tensor) -> Tensor:
    """Return by how much tokens but the first are past the shown one before them; padding is 1 past."""
    places = torch.arange(shown.shape[1], device=shown.device)
    before = places.expand_as(positions).where(shown, -1).cummax(1).values[:, :-1]
    steps = positions[:, 1:] - positions.gather(1, before.clamp(min=0))
    return steps.where(shown[:, 1:] & (before >= 0), 1)


def _of_rows(positions: Tensor | None, inputs: Tensor, seen: int) -> Tensor:
    """Return positions (rows, tokens), by default those behind `seen` tokens."""
    rows, queries = inputs.shape[:2]
    if positions is None:
        positions = torch.arange(seen, seen + queries, device=inputs.device)
    positions = torch.atleast_2d(positions)
    return (positions if positions.dim() == 2 else positions[0]).expand(rows, -1)  # of several axes


def refuse_packed(positions: Tensor | None, mask: Any) -> None:
    """Raise for several texts in one row with `update="request"`; padding may have any position."""
    if positions is None:
        return
    shown = _shown(_of_all_keys(mask)[0], positions, 0)
    if shown is not None and bool((_steps(positions, shown) < 0).any()):
        raise PosencError(
            'position_ids has several texts in one row, which with update="request" would get the length of '
            "the longest. Patch with another update, or run one text a row."
        )


def _refuse_gaps(cache: Any, seen: int, positions: Tensor, mask: Any) -> None:
    """Raise for positions that do not continue those of a cache."""
    rows, queries = positions.shape
    first, first_mask = vars(cache).pop(_MADE, (positions, None))
    if seen and first is not positions:
        _refuse_gaps(cache, 0, first, first_mask)
    length, last, last_shown = getattr(cache, _LAST, (0, positions, None))  # `None`: it is shown
    known = seen > 0 and length == seen and len(last) == rows  # not cropped or repeated since
    if seen and not known:
        last, last_shown = positions.new_full((rows, 1), seen - 1), None
    told, new = _shown(mask, positions, seen), positions
    positions = torch.cat((last, new), 1) if seen else new
    unusual = (positions.diff(dim=1) != 1).any()
    for shown in (told, last_shown):
        unusual = unusual if shown is None else unusual | ~shown.all()
    setattr(cache, _LAST, (seen + queries, new[:, -1:].clone(), None))
    if not bool(unusual):
        return
    shown = torch.ones_like(new, dtype=torch.bool) if told is None else told
    if seen:
        first_shown = torch.ones_like(shown[:, :1]) if last_shown is None else last_shown
        shown = torch.cat((first_shown, shown), 1)
    steps = _steps(positions, shown)
    setattr(cache, _LAST, (seen + queries, new[:, -1:].clone(), shown[:, -1:]))
    if not bool(((steps > 1) | (positions.diff(dim=1) > 1)).any()):  # of padding too
        unknown = int(seen and not known)  # the first step
        if told is None or not bool((steps[:, unknown:] < 1).any()):
            return
        if not seen:  # several texts, behind which every position is a gap
            setattr(cache, _LAST, (queries, positions[:, -1:] * 0 - 2, None))
            return
    raise PosencError(
        "position_ids leaves a gap, or restarts or repeats behind cached tokens, and there is a cache, from whose "
        "order the methods that compute attention themselves derive the position of a key. Pass contiguous "
        "positions, or use_cache=False."
    )
