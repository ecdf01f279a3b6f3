"""The mask side of the attention seam: the visible keys, kept in a form of size O(length).

A registered attention function without a registered mask function gets no mask at all: causality and padding are lost
in silence. The usual masks are matrices of queries times keys, 1 GB at 16k tokens in eager mode.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import (
    causal_mask_function,
    find_packed_sequence_indices,
    prepare_padding_mask,
)

from hf_posenc.attention.call import Mask, Run
from hf_posenc.errors import PosencError
from hf_posenc.model.lazy import LazyTensor, UnwrittenMask

DENSE = 1 << 18
"""Up to so many pairs of a query and a key, a mask is written as a tensor."""

HANDLE = torch.uint8
"""The dtype of a mask's handle, which no mask has."""


def sdpa_mask(
    q_length: int, q_offset: Any = 0, device: Any = "cpu", **kwargs: Any
) -> Tensor | None:
    """Compute transformers' `sdpa_mask`, which before 5.4 takes the positions of the queries."""
    if _POSITIONS:
        kwargs["cache_position"] = torch.arange(q_length, device=device) + q_offset
    else:
        kwargs |= {"q_length": q_length, "q_offset": q_offset, "device": device}
    mask: Tensor | None = masking_utils.sdpa_mask(**kwargs)
    return mask


_POSITIONS = "cache_position" in inspect.signature(masking_utils.sdpa_mask).parameters


@dataclass(frozen=True, eq=False)
class LazyMask(Mask):
    """A mask as the arguments of `sdpa_mask`, from which transformers would compute it."""

    arguments: Mapping[str, Any]

    @classmethod
    def of_window(cls, queries: int, keys: int, window: int, device: torch.device) -> LazyMask:
        """Return the mask of the last queries of a text, each of which sees the latest keys in a window."""
        function = masking_utils.sliding_window_causal_mask_function(window)
        of_queries = {"batch_size": 1, "q_length": queries, "q_offset": keys - queries}
        return cls(of_queries | {"kv_length": keys, "mask_function": function, "device": device})

    @property
    def shape(self) -> tuple[int, int, int]:
        """Batch, queries and keys."""
        arguments = self.arguments
        return arguments["batch_size"], arguments["q_length"], arguments["kv_length"]

    def rows(self, start: int, stop: int) -> Tensor | None:
        offset = self.arguments["q_offset"] + start
        values = {**self.arguments, "q_length": stop - start, "q_offset": offset}
        return sdpa_mask(**{**values, "allow_is_causal_skip": False})

    def seen(self) -> Tensor:
        return self._seen  # once for all layers

    @functools.cached_property
    def _seen(self) -> Tensor:
        batch, queries, keys = self.shape
        device = self.arguments["device"]
        causal, window = self._causal
        if causal:
            first, padding = self._offset, self._padding
            key = torch.arange(keys, device=device)
            seen = (key < first + queries).expand(batch, keys)
            if window is not None:
                seen = seen & (key > first - window)
            return seen if padding is None else seen & padding.bool()
        seen = torch.zeros(batch, keys, dtype=torch.bool, device=device)
        step = max(1, DENSE // keys)
        for start in range(0, queries, step):
            visible = self.rows(start, min(start + step, queries))
            seen |= True if visible is None else visible[:, 0].any(-2)
        return seen

    def runs(self, positions: Tensor) -> tuple[Run, ...] | None:
        """Return one for each row without its padding, or for each packed document, which positions separate."""
        batch, queries, keys = self.shape
        if self._offset + queries != keys:
            return None
        causal, window = self._causal
        if causal:
            runs = _unpadded(self._padding, queries, keys)
            return runs and tuple(replace(run, window=window) for run in runs)
        parts = _enclosed(self.arguments["mask_function"], "mask_functions")
        if parts is None or len(parts) != 2:
            return None
        documents = [_enclosed(each, "packed_sequence_mask") is not None for each in parts]
        inside = parts[documents[0]]  # last before transformers 5.24, first since
        if not any(documents) or _enclosed(inside, "mask_function") is not causal_mask_function:
            return None
        return None if self._offset else _documents(positions.expand(batch, -1))

    @property
    def _causal(self) -> tuple[bool, int | None]:
        """True if a query sees all keys before it but padding, or of these the latest in a window of so many tokens."""
        function = self.arguments.get("mask_function", causal_mask_function)
        if function is causal_mask_function:
            return True, None
        parts = _enclosed(function, "mask_functions")
        if parts is None or len(parts) != 2 or parts[1] is not causal_mask_function:
            return False, None
        window = _enclosed(parts[0], "sliding_window")
        return window is not None, window

    @property
    def _offset(self) -> int:
        """The place of the first query among the keys."""
        first_key: int = self.arguments.get("kv_offset", 0)
        return int(self.arguments["q_offset"]) - first_key

    @property
    def _padding(self) -> Tensor | None:
        """The tokens of a batch among the keys, shape (batch, keys); `None`: all."""
        first: int = self.arguments.get("kv_offset", 0)
        keys = self.arguments["kv_length"]
        tokens = prepare_padding_mask(self.arguments.get("attention_mask"), keys, first)
        return None if tokens is None else tokens[:, first : first + keys]


class WithWrittenMasks(str):
    """The name of an attention implementation in a config whose modules join or change masks, and need them written."""

    __slots__ = ()


def posenc_mask(**kwargs: Any) -> Tensor | None:
    """Return a mask in the form of the engine, from the arguments of transformers' `sdpa_mask`.

    That is `None` for plain causal attention, as sdpa has it; a bool mask of shape (batch, 1, queries, keys) where that
    is small or while compiling; else a handle of that shape with the memory of one byte, which `described` reads.
    """
    kwargs.pop("dtype", None)
    implementation = getattr(kwargs.pop("config", None), "_attn_implementation", None)
    if (positions := kwargs.pop("cache_position", None)) is not None:  # transformers before 5.4
        kwargs |= {"q_length": len(positions), "q_offset": positions[0], "device": positions.device}
    # Traced graphs first: an exported one would hold for lengths on one side of `DENSE` alone.
    written = torch.compiler.is_compiling() or isinstance(implementation, WithWrittenMasks)
    if written or kwargs.get("use_vmap") or kwargs["q_length"] * kwargs["kv_length"] <= DENSE:
        return sdpa_mask(**kwargs)
    # A static cache counts in a tensor, which it increments before the layers read the mask.
    kwargs["q_offset"] = int(kwargs.get("q_offset", 0))
    if kwargs.get("allow_is_causal_skip", True) or kwargs.get("allow_is_bidirectional_skip"):
        with contextlib.suppress(_NeedsMaskError):
            return sdpa_mask(**{**kwargs, "mask_function": _refuse})
    return Handle.of(LazyMask(kwargs))


class Handle(LazyTensor):
    """A tensor with the shape of a mask and no memory, which the engine reads instead of it."""

    mask: LazyMask

    @classmethod
    def of(cls, mask: LazyMask) -> Handle:
        batch, queries, keys = mask.shape
        device = torch.device(mask.arguments.get("device", "cpu"))
        handle: Handle = cls.outline(cls, (batch, 1, queries, keys), HANDLE, device)
        handle.mask = mask
        return handle

    @classmethod
    def applied(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        # transformers clones the mask that generate() passes to a compileable cache; accelerate's hooks move it, and
        # reentrant checkpointing detaches it and says that it needs no gradient.
        if func.__name__ in ("clone", "contiguous", "detach", "to", "requires_grad_"):
            return args[0]
        if func.__name__ == "__set__":
            return None
        if func.__name__ == "__get__":
            with torch._C.DisableTorchFunction():
                return func(*args)
        return cls.__torch_dispatch__(func, ())

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise PosencError(
            f"The model changed the attention mask ({func.__name__}) on its way to the attention layers in a way that "
            "hf_posenc cannot follow. Please report it, with the model type."
        )


def described(handle: Tensor) -> LazyMask:
    """Return the mask of a handle."""
    assert isinstance(handle, Handle)
    return handle.mask


def scores_mask(**kwargs: Any) -> Tensor | None:
    """Return a mask for attention in code of a model's own: what transformers' `eager_mask` returns, written or not.

    A long one is written where that code does something to it that is not known.
    """
    skips = bool(kwargs.get("allow_is_bidirectional_skip"))
    positions = kwargs.get("cache_position")  # transformers before 5.4
    queries = len(positions) if positions is not None else kwargs["q_length"]
    written = torch.compiler.is_compiling() or kwargs.get("use_vmap")
    if written or queries * kwargs["kv_length"] <= DENSE:
        return masking_utils.eager_mask(**kwargs)
    if isinstance(offset := kwargs.get("q_offset"), Tensor):  # as in `posenc_mask`
        kwargs["q_offset"] = int(offset)
    handle = posenc_mask(**kwargs)
    if handle is None and skips:
        return None
    size = kwargs["batch_size"], 1, queries, kwargs["kv_length"]
    device = torch.device(kwargs["device"]) if positions is None else positions.device
    like = torch.Size(size), kwargs.get("dtype", torch.float32), device
    return UnwrittenMask.of(handle, lambda: masking_utils.eager_mask(**kwargs), like)


class _NeedsMaskError(Exception):
    """transformers has no shortcut and evaluates the mask function."""


def _refuse(*indices: Tensor) -> Tensor:
    raise _NeedsMaskError


def _enclosed(function: Any, name: str) -> Any:
    """A part of a mask function that transformers has composed; `None` where it has no such part."""
    return inspect.getclosurevars(function).nonlocals.get(name)


# The masks of one attention call: from nothing, a tensor, or a handle.


def seen_keys(mask: Tensor | None) -> Tensor | None:
    """Return the keys that some query sees, bool, (batch, keys), by a mask of any form; `None`: all."""
    if isinstance(mask, UnwrittenMask) and mask.written is None:
        mask = mask.handle
    if mask is None:
        return None
    if mask.dtype == HANDLE:
        return described(mask).seen()
    return mask != 0 if mask.dim() == 2 else visible(mask).any(1).any(-2)


def visible(mask: Tensor) -> Tensor:
    """Return the pairs that a mask shows, bool; those of an additive one are above half the least finite number."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


@dataclass(frozen=True, eq=False)
class WrittenMask(Mask):
    """A mask as a bool tensor, (batch or 1, heads or 1, queries, keys), and what it adds to visible scores (Doge)."""

    visible: Tensor
    addition: Tensor | None = None

    @classmethod
    def read(cls, mask: Tensor) -> WrittenMask:
        """Read a bool mask, or an additive one, whose hidden pairs are the least finite number or less."""
        if mask.dtype == torch.bool:
            return cls(mask)
        shown = visible(mask)
        return cls(shown, mask.masked_fill(~shown, 0.0))

    @classmethod
    def copied(cls, mask: Tensor) -> WrittenMask:
        """Read a mask without a view of it, so that it may be kept as long as the mask lives, and no longer."""
        return cls.read(mask.clone() if mask.dtype == torch.bool else mask)

    def rows(self, start: int, stop: int) -> Tensor | None:
        return self.visible[:, :, start:stop]

    def seen(self) -> Tensor | None:
        return self.visible.any(1).any(-2)

    def added(self, start: int, stop: int) -> Tensor | None:
        return None if self.addition is None else self.addition[:, :, start:stop]


@dataclass(frozen=True, eq=False)
class ChosenMask(Mask):
    """A mask, and the keys that an indexer has chosen for each query."""

    mask: Mask  # the keys that a query may see
    indices: Tensor  # places of the chosen keys, shape (batch, queries, chosen)
    keys: int

    def rows(self, start: int, stop: int) -> Tensor | None:
        shown = self.mask.rows(start, stop)
        chosen = chosen_keys(self.indices[:, start:stop], self.keys)
        return chosen if shown is None else shown & chosen

    def added(self, start: int, stop: int) -> Tensor | None:
        return self.mask.added(start, stop)

    def seen(self) -> Tensor | None:
        return self.mask.seen()


def chosen_keys(indices: Tensor, keys: int) -> Tensor:
    """Return the chosen keys of each query, bool, (batch, 1, queries, keys), of indices (batch, queries, chosen)."""
    none = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool, device=indices.device)
    return none.scatter(-1, indices.long(), True)[:, None]


def _unpadded(padding: Tensor | None, queries: int, keys: int) -> tuple[Run, ...] | None:
    """One run for each row without its padding; `None` if there is padding inside a row."""
    past = keys - queries
    if padding is None:
        everything = slice(None)
        return (Run(everything, everything, everything, past),)
    first = padding.long().argmax(-1)
    last = keys - padding.flip(-1).long().argmax(-1)
    if bool((last - first != padding.sum(-1)).any()):
        return None
    runs = []
    for row, (start, stop) in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
        begin, end = max(0, start - past), stop - past  # from the first query that is a token
        if end > begin:
            tokens = slice(begin, end), slice(start, stop)
            runs.append(Run(slice(row, row + 1), *tokens, begin + past - start))
    return tuple(runs)


def _documents(position_ids: Tensor) -> tuple[Run, ...] | None:
    numbers = find_packed_sequence_indices(position_ids)
    if numbers is None:
        return None
    runs = []
    for row, of_row in enumerate(numbers.expand(len(position_ids), -1)):
        start = 0
        for size in of_row.unique_consecutive(return_counts=True)[1].tolist():
            part = slice(start, start + size)
            runs.append(Run(slice(row, row + 1), part, part, 0))
            start += size
    return tuple(runs)
