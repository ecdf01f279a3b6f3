"""The attention seam: registered functions, which read from the layer that calls them what to compute.

`posenc_attention` computes attention in the engine. `scaled_attention` multiplies queries and leaves the rest to the
attention function that the model had.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_posenc.attention.call import Beside, Call, Mask, RotatedKeys, forget, shared
from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.engine import attend
from hf_posenc.errors import PosencError
from hf_posenc.methods import LaMPE, LengthDependent
from hf_posenc.model.masks import (
    HANDLE,
    CausalMask,
    ChosenMask,
    WrittenMask,
    chosen_keys,
    described,
    posenc_mask,
    scores_mask,
    visible,
)
from hf_posenc.model.parameters import parameters_in_force
from hf_posenc.model.repositioned import (
    ENGINE,
    SCORES,
    RepositionedRotary,
    carried_positions,
    text_positions,
)

_SCALED = f"{ENGINE}_"
IMPLEMENTATION = "_attn_implementation_internal"
"""The attribute of a config that holds the name of its attention implementation."""
LAYER = "_hf_posenc_layer"
"""The attribute of a patched attention module that holds its `Layer`."""
KNOWN = frozenset(
    {
        "position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states",
        "return_dict", "is_causal", "num_items_in_batch", "logits_to_keep", "softcap", "s_aux",
        "sliding_window", "output_router_logits", "past_key_values", "cache",
        "encoder_hidden_states", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx",
        "deterministic", "indices",
    }
)  # fmt: skip
"""Arguments of attention functions beside the tensors that this one understands or may ignore."""
_PINNED = "_hf_posenc_lengths"
_LAST = "_hf_posenc_last_positions"

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
    """A forward pre-hook of a model without rotation: counts positions and hands them to its attention modules."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = list(modules)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Read the decoder's arguments: `position_ids`, or else the mask and the cache."""
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
            layer: Layer = attention.__dict__[LAYER]
            layer.positions = positions.to(inputs.device)


# The cache, which the attention function does not see.


class CacheWatch:
    """A forward pre-hook of the decoder, which sees the cache before the layers write to it.

    It refuses positions that leave gaps, since the position of a key is its place in the cache. Where frequencies move
    with the length, it drops rotated keys that are no longer those of the cache. With `update="request"` it pins the
    length in force for each row of the batch while its cache lives: that of its first forward, or the original one if
    that is longer. Where generation outgrows it, the length grows by whole buckets.
    """

    def __init__(self, method: LengthDependent | LaMPE | None, original: int) -> None:
        self.method, self.original = method, original
        self.current: Tensor | None = None
        self.kept: list[tuple[int, RotatedKeys]] = []

    def keep(self, index: int) -> RotatedKeys:
        """Return a store for the rotated keys of one layer, by its index in the cache."""
        keys = RotatedKeys()
        self.kept.append((index, keys))
        return keys

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Read the decoder's arguments, and refuse positions that leave a gap."""
        if torch.compiler.is_compiling():
            return
        cache, positions = kwargs.get("past_key_values"), kwargs.get("position_ids")
        masks = kwargs.get("attention_mask")
        forget(positions, *(masks.values() if isinstance(masks, Mapping) else (masks,)))
        layers = getattr(cache, "layers", [])
        for index, keys in self.kept:
            keys.check(getattr(layers[index], "keys", None) if index < len(layers) else None)
        self.current = None
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
        _refuse_gaps(cache, seen, positions)
        if self.method is not None and self.method.update == "request":
            bucket = self.method.bucket_size(self.original)
            self.current = self._pinned(cache, seen, positions.expand(batch, -1), bucket)

    def _pinned(self, cache: Any, seen: int, positions: Tensor, bucket: int) -> Tensor:
        needed = positions.amax(-1) + 1
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
        """Return the length in force for each row, shape (batch,); without a cache, that of the row itself.

        `None` with `update="row"`, where it is each query's own.
        """
        if self.method is None or self.method.update != "request":
            return None
        if self.current is not None and len(self.current) == batch:
            return self.current
        return (positions.amax(-1) + 1).clamp(min=self.original).expand(batch)


def _refuse_gaps(cache: Any, seen: int, positions: Tensor) -> None:
    counted = positions.new_full((len(positions), 1), seen - 1)
    length, last = getattr(cache, _LAST, (seen, counted))
    if length != seen or len(last) != len(positions):  # cropped or repeated since
        last = counted
    setattr(cache, _LAST, (seen + positions.shape[1], positions[:, -1:]))
    text = torch.cat((last, positions), 1) if seen else positions
    if bool((text.diff(dim=1) > 1).any()):
        raise PosencError(
            "position_ids leaves a gap and there is a cache, from whose order the methods that compute attention "
            "themselves derive the position of a key. Pass contiguous positions, or use_cache=False."
        )


# The attention function


@dataclass(eq=False)
class Layer:
    """The patch of one attention module; a layer that is not `patched` computes what it did before."""

    encoding: Encoding
    patched: bool = False
    rotary: RepositionedRotary | None = None  # inside the attention module
    watch: CacheWatch | None = None  # where frequencies move with the length
    rotated: RotatedKeys | None = None
    native: str | None = None  # the implementation that computes attention with scaled queries
    turn: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    """What brings queries and keys, at positions m and n, from the model's rotation to that of the encoding."""
    beside: str | None = None  # the argument with the states of another text, whose keys come last
    # Of the current call, where the module does not pass them to attention itself.
    positions: Tensor | None = field(default=None, repr=False)
    # Of the queries and the keys of the current call, where a seam has counted them.
    counted: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    shown: Mask | None = field(default=None, repr=False)
    others: int = 0  # keys of the other text

    def follow_adapter(self, module: nn.Module) -> None:
        """Read the trained parameters in force: another adapter of PEFT's may be active by now, or merged."""
        trained: Any = parameters_in_force(module)
        if trained is not self.encoding.parameters:
            self.encoding = self.encoding.with_parameters(trained)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "positions": None, "counted": None, "shown": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        register()  # a model that was unpickled in another process
        if self.native is not None:
            register_scaled(self.native)


_PLAIN = Encoding(original=1)  # of a layer without a patch, whose length it does not read


def register() -> None:
    """Register the attention function in transformers; models that do not choose it are as before."""
    AttentionInterface.register(ENGINE, posenc_attention)
    AttentionMaskInterface.register(ENGINE, posenc_mask)
    AttentionMaskInterface.register(SCORES, scores_mask)


def register_scaled(native: str) -> str:
    """Register an attention implementation a second time, with scaled queries; return its name there."""
    name = _SCALED + native
    AttentionInterface.register(name, functools.partial(scaled_attention, native))
    masks: Mapping[str, Any] = AttentionMaskInterface._global_mapping
    if native in masks:
        AttentionMaskInterface.register(name, masks[native])
    return name


def native_implementation(name: str) -> str:
    """Return the attention implementation that computes under a name of `register_scaled`, or under its own."""
    return name.removeprefix(_SCALED)


def catch_positions(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Store the positions of a call: a forward pre-hook for modules that do not pass `position_ids` to attention."""
    layer: Layer | None = module.__dict__.get(LAYER)
    if layer is None:
        return
    given = [*args, *kwargs.values()]
    # By the name of a rotation, where a module gets several.
    given += (each for value in given if isinstance(value, dict) for each in value.values())
    carried = map(carried_positions, given)
    layer.positions = next((positions for positions in carried if positions is not None), None)
    if layer.beside is not None:
        layer.others = named_arguments(module, args, kwargs)[layer.beside].shape[1]


def catch_mask(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Replace the handle of a mask by the mask: a forward pre-hook for modules with an indexer, which reads it.

    The mask is stored too, since a module may leave in it the chosen keys alone.
    """
    layer: Layer | None = module.__dict__.get(LAYER)

    def written(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() != 4 or value.is_complex():
            return value
        mask: Mask
        if value.dtype == HANDLE:
            lazy = mask = described(value)
            value = lazy.decided("written", lambda: lazy.rows(0, value.shape[2]))
        else:
            mask = shared(value, value.shape[2:], lambda: WrittenMask.copied(value))
        if layer is not None:
            layer.shown = mask
        return value

    return tuple(map(written, args)), {name: written(value) for name, value in kwargs.items()}


def named_arguments(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a module's forward by their names."""
    names = inspect.signature(module.forward).parameters
    return {**dict(zip(names, args, strict=False)), **kwargs}


@dataclass(frozen=True, eq=False)
class Recorded:
    """One call of attention.

    Attributes:
        query: Shape (1, heads, tokens, head_dim).
        key: Shape (1, key heads, tokens, head_dim): of as many keys as there are queries, the first ones.
        keys: Number of all keys.
        kwargs: Further arguments.
        sees_later: True if the mask shows a query a later key; `None` without a mask that says so.
    """

    query: Tensor
    key: Tensor
    keys: int
    kwargs: Mapping[str, Any]
    sees_later: bool | None


_calls: dict[nn.Module, list[Recorded]] | None = None


@contextlib.contextmanager
def recording() -> Iterator[dict[nn.Module, list[Recorded]]]:
    """Yield the recorded calls of each module, while every token attends to itself alone."""
    global _calls  # the attention function is global too
    calls: dict[nn.Module, list[Recorded]] = {}
    _calls = calls
    try:
        yield calls
    finally:
        _calls = None


def is_recording() -> bool:
    """Return whether calls are recorded, and every token attends to itself."""
    return _calls is not None


def posenc_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention for transformers, instead of its own attention functions.

    Shapes are those of `Call`, but for the output: (batch, queries, heads, value_dim). The mask is `None`, bool,
    additive, or a handle of `posenc_mask`.
    """
    if _calls is not None:
        return _recorded(module, query, key, value, attention_mask, kwargs)
    layer: Layer | None = module.__dict__.get(LAYER)
    untouched = layer is not None and layer.encoding.bidirectional and layer.encoding.plain
    untouched = untouched and layer is not None and layer.turn is None
    if (
        layer is None or untouched
    ):  # another model with the same config, one in pieces, a local layer of an encoder
        rest = {"scaling": scaling, "dropout": dropout, **kwargs}
        return _unpatched(module, query, key, value, attention_mask, **rest)
    query_position = _query_position(module, layer, kwargs, query.shape[2])
    layer.follow_adapter(module)
    if kwargs.get("cache") is not None:
        raise PosencError(
            "Continuous batching keeps keys in pages of its own, in an order from which positions cannot be derived. "
            "Use generate() with an ordinary cache, or a frequency method."
        )
    queries, keys, beside = query.shape[2], key.shape[2], None
    if layer.beside is not None and attention_mask is not None:
        keys -= layer.others
        beside = Beside(key[:, :, keys:], WrittenMask.read(attention_mask[..., keys:]))
        key = key[:, :, :keys]
    if attention_mask is None and queries > 1 and not layer.encoding.bidirectional:
        key, value, keys = key[:, :, :queries], value[:, :, :queries], queries
    size, given = (queries, keys), attention_mask
    mask: Mask
    if given is None and layer.encoding.bidirectional:
        mask = shared(query_position, "all", Mask)
    elif given is None:
        mask = shared(query_position, size, lambda: CausalMask(*size, query.device))
    elif given.dtype == HANDLE:
        mask = described(given)
    else:
        mask = shared(given, size, lambda: WrittenMask.copied(given[..., :keys]))
    indices = kwargs.get("indices")  # of the keys that an indexer has chosen
    key_position = query_position  # without a past, the keys are the queries
    if layer.counted is not None:
        key_position = layer.counted[1][:, :keys]
    elif keys != queries:
        text = layer.shown or mask
        layer.shown = None
        key_position = text.decided("keys", lambda: _key_position(query_position, text, keys))
    if layer.turn is not None:
        query, key = layer.turn(query, key, query_position, key_position)
    call = Call(
        query=query,
        key=key,
        value=value,
        query_position=query_position,
        key_position=key_position,
        mask=mask if indices is None else ChosenMask(mask, indices, keys),
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
        dropout=dropout if module.training else 0.0,
        weights=bool(kwargs.get("output_attentions")),
        lengths=None if layer.watch is None else layer.watch.lengths(query_position, len(query)),
        rotated=layer.rotated,
        beside=beside,
    )
    out, weights = attend(call, layer.encoding)
    return out.transpose(1, 2).contiguous(), weights


def _unpatched(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute what transformers' sdpa computes; a handle becomes a matrix only where the engine cannot read it.

    The engine also computes soft caps, which sdpa does not have.
    """
    positions, capped = kwargs.get("position_ids"), kwargs.get("softcap") is not None
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    queries, keys, given = query.shape[2], key.shape[2], mask
    lazy = described(mask) if mask is not None and mask.dtype == HANDLE else None
    plain = not (kwargs["dropout"] and module.training) and kwargs.get("s_aux") is None
    plain = plain and getattr(module, "is_causal", True) and positions is not None
    if capped or (lazy is not None and plain):
        read: Mask = Mask()
        if lazy is not None:
            read = lazy
        elif given is not None:
            read = shared(given, (queries, keys), lambda: WrittenMask.copied(given[..., :keys]))
        elif causal and queries > 1:
            read = CausalMask(queries, keys, query.device)
        place = torch.arange(keys, device=key.device)[None]
        if capped or positions is None:
            positions = place[:, -1:] - torch.arange(queries, device=key.device).flip(0)
        call = Call(
            query=query,
            key=key,
            value=value,
            query_position=text_positions(positions),
            key_position=place,
            mask=read,
            scaling=kwargs["scaling"] or query.shape[-1] ** -0.5,
            softcap=kwargs.get("softcap"),
            sinks=kwargs.get("s_aux"),
            dropout=kwargs["dropout"] if module.training else 0.0,
            weights=bool(kwargs.get("output_attentions")),
        )
        out, weights = attend(call, _PLAIN)
        return out.transpose(1, 2).contiguous(), weights
    if lazy is not None:
        mask = lazy.rows(0, queries)
    native: tuple[Tensor, Tensor | None] = ALL_ATTENTION_FUNCTIONS["sdpa"](
        module, query, key, value, mask, **kwargs
    )
    return native


def scaled_attention(
    native: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Scale queries and call the attention implementation `native`; arguments and mask are that one's."""
    if _calls is not None:
        return _recorded(module, query, key, value, attention_mask, kwargs)
    layer: Layer | None = module.__dict__.get(LAYER)
    if layer is not None and layer.patched:
        layer.follow_adapter(module)
        query = layer.encoding.scaled(query, _query_position(module, layer, kwargs, query.shape[2]))
    indices = kwargs.get("indices")
    if indices is not None and native in ("eager", "sdpa"):
        # Under these two names the module writes the choice of its indexer into the mask, and under others it does not.
        chosen = chosen_keys(indices, key.shape[2])
        if attention_mask.dtype == torch.bool:
            attention_mask = attention_mask & chosen
        else:
            least = torch.finfo(query.dtype).min
            attention_mask = attention_mask.masked_fill(~chosen, least)
    if native == "eager":  # the one in the file of the module
        function = inspect.unwrap(type(module).forward).__globals__["eager_attention_forward"]
    else:
        function = ALL_ATTENTION_FUNCTIONS[native]
    caller = _Named(module, native) if "flash" in native else module
    result: tuple[Tensor, Tensor | None] = function(
        caller, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
    )
    return result


class _Named:
    """A module or a config whose attention implementation has another name, which flash attention reads there."""

    def __init__(self, original: Any, name: str) -> None:
        self._original, self._name = original, name

    @property
    def config(self) -> _Named:
        return _Named(self._original.config, self._name)

    @property
    def _attn_implementation(self) -> str:
        return self._name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.__dict__["_original"], attribute)


def _recorded(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    kwargs: Mapping[str, Any],
) -> tuple[Tensor, None]:
    assert _calls is not None
    later, queries, groups = None, query.shape[2], query.shape[1] // value.shape[1]
    if isinstance(mask, Tensor) and mask.dim() == 4 and mask.dtype != HANDLE:
        later = bool(visible(mask)[..., :queries].triu(1).any())
    own = key[:, :, :queries].clone()
    call = Recorded(query.clone(), own, key.shape[2], kwargs, later)
    _calls.setdefault(module, []).append(call)
    if value.shape[2] >= queries:  # its own come first
        value = value[:, :, :queries]
    else:
        value = value.mean(2, keepdim=True).expand(-1, -1, queries, -1)
    return value.repeat_interleave(groups, 1).transpose(1, 2).contiguous(), None


def _query_position(
    module: nn.Module, layer: Layer, kwargs: Mapping[str, Any], queries: int
) -> Tensor:
    if layer.counted is not None:
        return layer.counted[0]
    positions = kwargs.get("position_ids")
    if positions is None:
        positions = layer.positions if layer.rotary is None else layer.rotary.latest
    if positions is None:
        raise PosencError(
            f"{type(module).__name__} was called without positions, which {ENGINE} needs. Call the whole model."
        )
    if positions.shape[-1] > queries:  # of the cached tokens too, for an indexer
        positions = positions[..., -queries:]
    if positions.dim() < 3:
        return text_positions(positions)
    # Axes are compared once for all layers, which share masks by the result.
    return shared(positions, "text", lambda: text_positions(positions).clone())


def _key_position(query_position: Tensor, mask: Mask, keys: int) -> Tensor:
    """The position of every key where there is a past; arbitrary for keys that no query sees.

    The past is contiguous: a key is as many positions before the last query as there are visible keys between the two.
    This is right for dynamic, static and sliding caches, padding, chunks, beams and crops, and needs no state.
    """
    last = query_position.amax(-1, keepdim=True)
    visible = mask.seen()
    if visible is None:
        return last - torch.arange(keys - 1, -1, -1, device=last.device)
    after = visible.flip(-1).cumsum(-1).flip(-1) - visible.long()
    return last - after
