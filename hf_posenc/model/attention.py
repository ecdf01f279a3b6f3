"""The attention seam: registered functions, which read from the layer that calls them what to compute.

`posenc_attention` computes attention in the engine. `scaled_attention` multiplies queries and leaves the rest to the
attention function that the model had.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_posenc.attention.call import Beside, Call, CausalMask, Mask, shared
from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.engine import attend
from hf_posenc.errors import PosencError
from hf_posenc.model.forward import KEYWORD, Forward, carried, named_arguments, running
from hf_posenc.model.masks import (
    HANDLE,
    ChosenMask,
    LazyMask,
    WrittenMask,
    chosen_keys,
    described,
    posenc_mask,
    scores_mask,
    visible,
)
from hf_posenc.model.parameters import parameters_in_force
from hf_posenc.model.positions import LAYER
from hf_posenc.model.rotary import ENGINE, SCORES, text_positions
from hf_posenc.model.unwrapping import swapped
from hf_posenc.model.weights import sharded_weights

_SCALED = f"{ENGINE}_"
IMPLEMENTATION = "_attn_implementation_internal"
"""The attribute of a config that holds the name of its attention implementation."""
KNOWN = frozenset(
    {
        "position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states",
        "return_dict", "is_causal", "num_items_in_batch", "logits_to_keep", "softcap", "s_aux",
        "sliding_window", "output_router_logits", "past_key_values", "cache",
        "encoder_hidden_states", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx",
        "deterministic", "indices", KEYWORD,
    }
)  # fmt: skip
"""Arguments of attention functions beside the tensors that this one understands or may ignore."""


@dataclass(eq=False)
class Layer:
    """The patch of one attention module, which no forward changes.

    A layer that is not `patched` computes what it did before.
    """

    encoding: Encoding
    patched: bool = False
    causal: Any = None  # the module's `is_causal`
    request: tuple[int, int] | None = None  # bucket and original length, with update="request"
    index: int | None = None  # in the cache, of a layer that keeps rotated keys
    native: str | None = None  # the implementation that computes attention with scaled queries
    turn: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    """Turns queries and keys, at positions m and n, from the model's rotation to that of the encoding."""
    beside: str | None = None  # the argument with the states of another text, whose keys come last

    @property
    def untouched(self) -> bool:
        """True if it computes what the model's own attention does."""
        return self.encoding.bidirectional and self.encoding.plain and self.turn is None

    def attach(self, module: nn.Module) -> None:
        """Let a module compute attention so."""
        self.causal = getattr(module, "is_causal", None)
        setattr(module, LAYER, self)

    def encoding_of(self, module: nn.Module) -> Encoding:
        """Return the encoding with the parameters in force: another adapter of PEFT's may be active, or merged."""
        trained: Any = parameters_in_force(module)
        same = trained is self.encoding.parameters
        return self.encoding if same else self.encoding.with_parameters(trained)

    def check_heads(self, heads: int) -> None:
        """Raise where another number of heads is computed than before, and the method has numbers for each."""
        encoding = self.encoding
        if heads != encoding.heads and (encoding.bias is not None or encoding.parameters):
            raise PosencError(
                f"A layer computes {heads} heads and computed {encoding.heads} when it was patched with a method that "
                "has numbers for each head. Call unpatch_model(model), distribute the model over processes (tp_plan), "
                "and patch again."
            )

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


@contextlib.contextmanager
def named(configs: Iterable[Any], name: str) -> Iterator[None]:
    """Call the attention implementation in some configs by another name, in a `with` block."""
    with contextlib.ExitStack() as stack:
        for each in configs:
            if IMPLEMENTATION in vars(each):
                stack.enter_context(swapped(vars(each), IMPLEMENTATION, name))
        yield


def hand_positions(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Hand the positions of a call on: a forward pre-hook for modules that do not pass `position_ids` to attention.

    They are an argument of the module, or its rotation carries them.
    """
    layer: Layer | None = module.__dict__.get(LAYER)
    if layer is None:
        return None
    found, positions = carried((*args, *kwargs.values())), kwargs.get("position_ids")
    if found is not None:
        positions = found.positions
    elif positions is None:
        positions = named_arguments(module, args, kwargs).get("position_ids")
    forward = replace(kwargs.get(KEYWORD) or Forward(), positions=positions)
    if layer.beside is not None:
        others: Tensor = named_arguments(module, args, kwargs)[layer.beside]
        forward = replace(forward, others=others.shape[1])
    return args, {**kwargs, KEYWORD: forward}


def hand_mask(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Replace the handle of a mask by the mask: a forward pre-hook for modules with an indexer, which reads it.

    The mask is handed on too, since a module may leave in it the chosen keys alone.
    """
    layer: Layer | None = module.__dict__.get(LAYER)
    shown: list[Mask] = []

    def written(value: Any) -> Any:
        mask: Mask
        if not isinstance(value, Tensor) or value.dim() != 4:
            return value
        if value.dtype == HANDLE:
            lazy = mask = described(value)
            value = lazy.decided("written", lambda: lazy.rows(0, value.shape[2]))
        elif value.is_complex():
            return value
        else:
            mask = shared(value, value.shape[2:], lambda: WrittenMask.copied(value))
        shown.append(mask)
        return value

    args = tuple(map(written, args))
    kwargs = {name: written(value) for name, value in kwargs.items()}
    if layer is not None and shown:
        kwargs[KEYWORD] = replace(kwargs.get(KEYWORD) or Forward(), mask=shown[-1])
    return args, kwargs


@dataclass(frozen=True, eq=False)
class Recorded:
    """One call of attention."""

    query: Tensor  # shape (1, heads, tokens, head_dim)
    # Shape (1, key heads, tokens, head_dim): of as many keys as there are queries, the first ones.
    key: Tensor
    keys: int  # number of all keys
    kwargs: Mapping[str, Any]  # further arguments
    # True if the mask shows a query a later key; `None` without a mask that says so.
    sees_later: bool | None
    # True if the mask is added to scores, as none of the engine's is: the module has made it of one (Doge).
    adds: bool
    features: int  # width of the output, that of all heads
    sharded: tuple[Tensor, ...]  # the module's weights of which this process computes a part


# The attention function is global. Other threads may run other models meanwhile, which must not notice.
_recordings: dict[int, dict[nn.Module, list[Recorded]]] = {}


@contextlib.contextmanager
def recording() -> Iterator[dict[nn.Module, list[Recorded]]]:
    """Yield the recorded calls of each module; in this thread every token attends to itself alone meanwhile."""
    thread = threading.get_ident()
    calls = _recordings[thread] = {}
    try:
        yield calls
    finally:
        del _recordings[thread]


def is_recording() -> bool:
    """Return whether the calls of this thread are recorded, and every token attends to itself."""
    # torch.compile cannot trace get_ident, which an empty dictionary spares it.
    return bool(_recordings) and threading.get_ident() in _recordings


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
    if is_recording():
        return _recorded(module, query, key, value, attention_mask, kwargs)
    forward: Forward = kwargs.pop(KEYWORD, None) or _running()
    layer: Layer | None = module.__dict__.get(LAYER)
    kwargs |= {"scaling": scaling, "dropout": dropout}
    if kwargs.get("write_index") is not None:
        return _packed(module, forward, query, key, value, kwargs)  # type: ignore[no-any-return]
    # Another model with the same config, one in pieces, a local layer of an encoder.
    if layer is None or layer.untouched:
        return _unpatched(module, query, key, value, attention_mask, **kwargs)
    if getattr(module, "is_causal", None) != layer.causal:
        raise PosencError(
            f"{type(module).__name__}.is_causal was {layer.causal} when the model was patched, and is "
            f"{module.is_causal} now. Call unpatch_model(model), set it, and patch again."
        )
    layer.check_heads(query.shape[1])
    query_position = _query_position(module, forward, kwargs, query)
    encoding = layer.encoding_of(module)
    queries, keys, beside = query.shape[2], key.shape[2], None
    if layer.beside is not None and attention_mask is not None:
        keys -= forward.others
        beside = Beside(key[:, :, keys:], WrittenMask.read(attention_mask[..., keys:]))
        key = key[:, :, :keys]
    if attention_mask is None and queries > 1 and not encoding.bidirectional:
        key, value, keys = key[:, :, :queries], value[:, :, :queries], queries
    size, given = (queries, keys), attention_mask
    mask: Mask
    if given is None and encoding.bidirectional:
        mask = shared(query_position, "all", Mask)
    elif given is None:
        mask = shared(query_position, size, lambda: CausalMask(*size, query.device))
    elif given.dtype == HANDLE:
        mask = described(given)
    else:
        mask = shared(given, size, lambda: WrittenMask.copied(given[..., :keys]))
    indices = kwargs.get("indices")  # of the keys that an indexer has chosen
    key_position = query_position  # without a past, the keys are the queries
    if forward.key_positions is not None:
        key_position = forward.key_positions[:, :keys]
    elif keys != queries:
        text = forward.mask or mask
        key_position = text.decided("keys", lambda: _key_position(query_position, text, keys))
    lengths = None
    if layer.request is not None:
        lengths = forward.lengths.get(layer.request)
        if lengths is None:
            lengths = (query_position.amax(-1) + 1).clamp(min=layer.request[1]).expand(len(query))
    if layer.turn is not None:
        query, key = layer.turn(query, key, query_position, key_position)
    mask = mask if indices is None else ChosenMask(mask, indices, keys)
    rotated = None if layer.index is None else forward.rotated.get(layer.index)
    options = _options(module, query, kwargs)
    options |= {"lengths": lengths, "rotated": rotated, "beside": beside}
    call = Call(query, key, value, query_position, key_position, mask, **options)
    return _attended(call, encoding)


def _options(module: nn.Module, query: Tensor, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a call that transformers' arguments name."""
    scaling = kwargs["scaling"]
    return {
        "scaling": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "softcap": kwargs.get("softcap"),
        "sinks": kwargs.get("s_aux"),
        "dropout": kwargs["dropout"] if module.training else 0.0,
        "weights": bool(kwargs.get("output_attentions")),
    }


def _attended(call: Call, encoding: Encoding) -> tuple[Tensor, Tensor | None]:
    out, weights = attend(call, encoding)
    return out.transpose(1, 2).contiguous(), weights


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _packed(
    module: Any, forward: Forward, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]
) -> tuple[Tensor, None]:
    """Compute attention where continuous batching has packed the new tokens of several requests into one row.

    transformers' cache writes their keys into its pages, and gathers all keys of each request in order. Since 5.24 the
    layer has called it, before that it is an argument.
    """
    layer: Layer | None = module.__dict__.get(LAYER)
    encoding, turn = _PLAIN, None
    if layer is not None:
        layer.check_heads(query.shape[1])
        encoding, turn = layer.encoding_of(module), layer.turn
    positions = _query_position(module, forward, kwargs, query)
    options, config, index = _options(module, query, kwargs), module.config, module.layer_idx
    if kwargs.get("cache") is not None:
        key, value = kwargs["cache"].update(key, value, index, kwargs)
    kinds = getattr(config, "layer_types", None)  # from which the cache takes the window
    local = kinds is None or kinds[index] == "sliding_attention"
    window = getattr(config, "sliding_window", None) if local else None
    ends = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]
    requests = shared(ends[1], "requests", lambda: _requests(*ends, positions.long(), window))
    out = value.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])  # padding stays zero
    for queries, keys, m, n, mask in requests:
        rotated = query[:, :, queries], key[:, :, keys]
        if turn is not None:
            rotated = turn(*rotated, m, n)
        call = Call(*rotated, value[:, :, keys], m, n, mask, **options)
        out[:, queries], _ = _attended(call, encoding)
    return out, None


def _requests(
    query_ends: Tensor, key_ends: Tensor, positions: Tensor, window: int | None
) -> list[tuple[slice, slice, Tensor, Tensor, Mask]]:
    """Return where each request's queries and keys are in a row, their positions, and the mask.

    The last key is that of the last query. A cache of a window holds the latest keys alone.
    """
    pairs = [itertools.pairwise(ends.tolist()) for ends in (query_ends, key_ends)]
    requests = list[tuple[slice, slice, Tensor, Tensor, Mask]]()
    for queries, keys in zip(*(itertools.starmap(slice, each) for each in pairs), strict=True):
        size = queries.stop - queries.start, keys.stop - keys.start
        if not size[0]:
            continue  # padding
        m = positions[:, queries]
        n = m[:, -1:] - torch.arange(size[1] - 1, -1, -1, device=m.device)
        mask: Mask = CausalMask(*size, m.device)
        if window is not None:
            mask = LazyMask.of_window(*size, window, m.device)
        requests.append((queries, keys, m, n, mask))
    return requests


def _unpatched(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
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
        options = _options(module, query, kwargs)
        call = Call(query, key, value, text_positions(positions), place, read, **options)
        return _attended(call, _PLAIN)
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
    if is_recording():
        return _recorded(module, query, key, value, attention_mask, kwargs)
    forward: Forward = kwargs.pop(KEYWORD, None) or _running()
    layer: Layer | None = module.__dict__.get(LAYER)
    if kwargs.get("write_index") is not None:
        kwargs |= {"scaling": scaling, "dropout": dropout}
        return _packed(module, forward, query, key, value, kwargs)  # type: ignore[no-any-return]
    if layer is not None and layer.patched:
        layer.check_heads(query.shape[1])
        positions = _query_position(module, forward, kwargs, query)
        query = layer.encoding_of(module).scaled(query, positions)
    indices = kwargs.get("indices")
    if indices is not None and native in ("eager", "sdpa"):
        # Under these two names the module writes the choice of its indexer into the mask, and under others it does not.
        chosen = chosen_keys(indices, key.shape[2])
        if attention_mask.dtype == torch.bool:
            attention_mask = attention_mask & chosen
        else:
            attention_mask = attention_mask.masked_fill(~chosen, torch.finfo(query.dtype).min)
    if native == "eager":  # the one in the file of the module
        function = inspect.unwrap(type(module).forward).__globals__.get("eager_attention_forward")
        if function is None:
            way = 'whose file has no eager_attention_forward: load it with attn_implementation="sdpa".'
            raise PosencError(f"Queries cannot be scaled in {type(module).__name__}, {way}")
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
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, kwargs: dict[str, Any]
) -> tuple[Tensor, None]:
    later, queries, groups = None, query.shape[2], query.shape[1] // value.shape[1]
    adds = isinstance(mask, Tensor) and mask.is_floating_point()
    if isinstance(mask, Tensor) and mask.dim() == 4 and mask.dtype != HANDLE:
        later = bool(visible(mask)[..., :queries].triu(1).any())
    own = key[:, :, :queries].clone()
    features = query.shape[1] * value.shape[-1]
    weights = sharded_weights(module)
    call = Recorded(query.clone(), own, key.shape[2], kwargs, later, adds, features, weights)
    _recordings[threading.get_ident()].setdefault(module, []).append(call)
    if value.shape[2] >= queries:  # its own come first
        value = value[:, :, :queries]
    else:
        value = value.mean(2, keepdim=True).expand(-1, -1, queries, -1)
    return value.repeat_interleave(groups, 1).transpose(1, 2).contiguous(), None


_NOTHING = Forward()


def _running() -> Forward:
    """Return the record of the running forward, for layers that get no keyword."""
    if torch.compiler.is_compiling():
        return _NOTHING
    return running() or _NOTHING


def _query_position(
    module: nn.Module, forward: Forward, kwargs: Mapping[str, Any], query: Tensor
) -> Tensor:
    if forward.key_positions is not None and forward.positions is not None:
        return forward.positions  # of a seam, which counted both
    positions, queries = forward.positions, query.shape[2]
    if positions is None:
        positions = kwargs.get("position_ids")
    if positions is None:
        raise PosencError(
            f"{type(module).__name__} was called without positions, which {ENGINE} needs. Call the whole model, and "
            "checkpoint its layers by model.gradient_checkpointing_enable()."
        )
    positions = positions.to(query.device)
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
    return last - (visible.flip(-1).cumsum(-1).flip(-1) - visible.long())
