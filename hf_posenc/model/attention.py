"""The attention seam: one registered function, which reads from the layer that calls it what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_posenc.attention.call import Call, Mask, RotatedKeys
from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.engine import attend
from hf_posenc.errors import PosencError
from hf_posenc.model.caches import CacheWatch
from hf_posenc.model.calibration import Recorder
from hf_posenc.model.masks import (
    HANDLE,
    CausalMask,
    PositionedMask,
    WrittenMask,
    described,
    posenc_mask,
)
from hf_posenc.model.parameters import parameters_in_force
from hf_posenc.model.repositioned import (
    ENGINE,
    RepositionedRotary,
    carried_positions,
    text_positions,
)

LAYER = "_hf_posenc_layer"
"""The attribute of a patched attention module that holds its `Layer`."""
_KNOWN = frozenset(
    {
        "position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states",
        "return_dict", "is_causal", "num_items_in_batch", "logits_to_keep", "softcap", "s_aux",
        "sliding_window", "output_router_logits", "past_key_values", "cache",
        "encoder_hidden_states", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx",
    }
)  # fmt: skip
"""What attention functions are given beside the tensors, and what this one understands or may ignore."""


@dataclass(eq=False)
class Layer:
    """What one attention module of a patched model does.

    Attributes:
        encoding: The methods in force.
        patched: Whether a method is in force here; else the layer computes what it did before.
        rotary: The rotary module inside the attention module, where it has one of its own.
        watch: What sees the cache, where frequencies move with the length.
        rotated: What is kept of the layer's cache.
        positions: Those of the current call, where the module does not hand them on itself.
    """

    encoding: Encoding
    patched: bool = False
    rotary: RepositionedRotary | None = None
    watch: CacheWatch | None = None
    rotated: RotatedKeys | None = None
    positions: Tensor | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "positions": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        register()  # a model that was unpickled in another process
        self.__dict__.update(state)


def register() -> None:
    """Makes the attention function known to transformers; other models are as before unless they choose it."""
    AttentionInterface.register(ENGINE, posenc_attention)
    AttentionMaskInterface.register(ENGINE, posenc_mask)


def catch_positions(module: nn.Module, args: Any, kwargs: Any) -> None:
    """A forward pre-hook for attention modules that do not hand `position_ids` to the attention function."""
    layer: Layer | None = module.__dict__.get(LAYER)
    if layer is None:
        return
    found = (carried_positions(value) for value in (*args, *kwargs.values()))
    layer.positions = next((positions for positions in found if positions is not None), None)


_recorder: Recorder | None = None


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Has a recorder called in the place of attention."""
    global _recorder  # the attention function is global too
    _recorder = recorder
    try:
        yield
    finally:
        _recorder = None


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
    """What transformers calls in the place of its own attention functions.

    Args:
        module: The attention module; carries a `Layer` if it is patched.
        query: Shape (batch, heads, queries, head_dim).
        key: Shape (batch, key heads, keys, head_dim), the cached ones included.
        value: Shape (batch, key heads, keys, value_dim).
        attention_mask: `None`, bool, additive, or a handle of `posenc_mask`.
        scaling: The factor on q.k; `head_dim ** -0.5` by default.
        dropout: Probability of leaving out a weight.
        **kwargs: What else the model says; `position_ids`, `softcap` and `s_aux` are used.

    Returns:
        The output, shape (batch, queries, heads, value_dim), and the weights where they are asked for.
    """
    if _recorder is not None:
        return _recorder(module, query, key, value, **kwargs)
    layer: Layer | None = module.__dict__.get(LAYER)
    if layer is None:  # another model with the same config, or a layer that is left alone
        return _unpatched(module, query, key, value, attention_mask, scaling, dropout, **kwargs)
    positions = kwargs.get("position_ids")
    if positions is None:
        positions = layer.positions if layer.rotary is None else layer.rotary.latest
    if positions is None:
        raise PosencError(
            f"{type(module).__name__} was called without positions, which {ENGINE} needs. Call the whole model."
        )
    trained: Any = parameters_in_force(module)
    # Another adapter of PEFT's may be active by now, or merged.
    if trained is not layer.encoding.parameters:
        layer.encoding = layer.encoding.with_parameters(trained)
    if kwargs.get("cache") is not None:
        raise PosencError(
            "Continuous batching keeps keys in pages of its own, in an order that positions cannot be told from. "
            "Use generate() with an ordinary cache, or a frequency method."
        )
    query_position = text_positions(positions)
    queries, keys = query.shape[2], key.shape[2]
    if attention_mask is None and queries > 1:
        key, value, keys = key[:, :, :queries], value[:, :, :queries], queries
    mask = _mask(attention_mask, query_position, queries, keys, query.device)
    call = Call(
        query=query,
        key=key,
        value=value,
        query_position=query_position,
        key_position=_key_position(query_position, mask, queries, keys),
        mask=mask,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
        dropout=dropout if module.training else 0.0,
        weights=bool(kwargs.get("output_attentions")),
        lengths=None if layer.watch is None else layer.watch.lengths(query_position, len(query)),
        rotated=layer.rotated,
    )
    out, weights = attend(call, layer.encoding)
    return out.transpose(1, 2).contiguous(), weights


def unknown_arguments(kwargs: dict[str, Any]) -> list[str]:
    """Arguments of an attention call that change its result in a way that this function does not know."""
    return sorted(
        name for name, value in kwargs.items() if name not in _KNOWN and value is not None
    )


def _mask(
    attention_mask: Tensor | None, positions: Tensor, queries: int, keys: int, device: torch.device
) -> Mask:
    if attention_mask is None:
        return CausalMask(queries, keys, device)
    if attention_mask.dtype == HANDLE:
        return PositionedMask(described(attention_mask), positions)
    return WrittenMask.read(attention_mask[..., :keys])


def _key_position(query_position: Tensor, mask: Mask, queries: int, keys: int) -> Tensor:
    """Where every key stands; arbitrary for keys that nobody sees.

    Without a past the keys are the queries. With one, the past is contiguous: a key stands as many
    positions before the last query as there are visible keys between the two. So it is right for dynamic, static and
    sliding caches, padding, chunks, beams and crops without any state.
    """
    if keys == queries:
        return query_position
    last = query_position.amax(-1, keepdim=True)
    visible = mask.seen()
    if visible is None:
        return last - torch.arange(keys - 1, -1, -1, device=last.device)
    after = visible.flip(-1).cumsum(-1).flip(-1) - visible.long()
    return last - after


def _unpatched(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    if attention_mask is not None and attention_mask.dtype == HANDLE:
        attention_mask = described(attention_mask).rows(0, query.shape[2])
    found: tuple[Tensor, Tensor | None] = ALL_ATTENTION_FUNCTIONS["sdpa"](
        module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
    )
    return found
