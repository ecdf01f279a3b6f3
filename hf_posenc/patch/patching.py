"""`patch_model` and its companions: request, discovery, installation, read-back, undo."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from hf_posenc.errors import FREQUENCY_METHODS_WORK, PosencError, UnsupportedModelError
from hf_posenc.methods import RopeScaling
from hf_posenc.model.discovery import RotaryTable, SinCosTable, select, tables_of
from hf_posenc.model.parameters import damaged_weights
from hf_posenc.model.repositioned import RepositionedRotary
from hf_posenc.model.rotary import PosencRotary, native_rotary
from hf_posenc.model.unwrapping import unwrap
from hf_posenc.patch import export
from hf_posenc.patch.config import Layers
from hf_posenc.patch.frequencies import install_rotary, install_sincos
from hf_posenc.patch.report import EffectiveTable, Patch
from hf_posenc.patch.request import MethodLike, resolve_request
from hf_posenc.patch.saving import unwrap_saving, wrap_saving
from hf_posenc.patch.state import STATE, State, own_config, replace_modules, state_of

ModelT = TypeVar("ModelT", bound=nn.Module)


def patch_model(
    model: ModelT,
    method: MethodLike,
    *,
    scale: float | None = None,
    target_length: int | str | None = None,
    original_max_position_embeddings: int | str | None = None,
    layers: Layers | Sequence[int] = "full",
    compose: bool = False,
    replace: bool = False,
    **options: Any,
) -> ModelT:
    """Change how a live model encodes position, in place and reversibly.

    The call ends by reading back the frequencies in force; where anything fails, the model is left as it was.

    Args:
        model: A transformers model, also wrapped by PEFT, DDP or `torch.compile`, also on the meta device.
        method: A name or alias (`available_methods()`), a Method object, or a list of them on different seams.
        scale: Target context as a multiple of the original one.
        target_length: Target context in tokens, instead of `scale`; text such as `"32k"` is read too.
        original_max_position_embeddings: The context that the model was trained on, in tokens. By default the first of
            `config.original_max_position_embeddings`, the key of that name in `rope_parameters`, and
            `config.max_position_embeddings`.
        layers: `"full"` (all but sliding-window layers, where these have a rotary table of their own), `"all"`, or a
            list of layer indices.
        compose: On a checkpoint that is scaled already: start from its scaled frequencies.
        replace: On a checkpoint that is scaled already: drop its scaling, start from `rope_theta`.
        **options: The method's own knobs (`get_method(name).knobs()`).

    Returns:
        The same object.

    Raises:
        UnsupportedModelError: A model that cannot be patched, with the reason.
        VerificationError: The model does not compute the requested patch; it was restored.
        PosencError: Any other request that cannot be met.
    """
    state = state_of(model)
    if state is not None:
        raise PosencError(
            f"This model is already patched with {state.config.method}. Call unpatch_model(model) first."
        )
    inner: Any = unwrap(model)
    with torch.device("cpu"):  # inside `with torch.device("meta")` too, tables and probes are real
        tables = tables_of(inner)
        state = resolve_request(
            tables,
            method,
            scale=scale,
            target_length=target_length,
            original_max_position_embeddings=original_max_position_embeddings,
            layers=layers,
            compose=compose,
            replace=replace,
            **options,
        )
        if state.in_attention:
            _refuse_prompts(model)
        _refuse_damaged(inner, state, sampled=True)
        setattr(inner, STATE, state)
        try:
            _install(inner, state, own_config(model, tables))
        except BaseException as error:
            _undo(inner, state)
            if isinstance(error, UnsupportedModelError) and state.in_attention:
                _refuse_damaged(inner, state, sampled=False)
            raise
    wrap_saving(inner)
    return model


def _refuse_damaged(model: nn.Module, state: State, *, sampled: bool) -> None:
    """Raise for weights that are not finite or all zero, on which attention cannot be tried; warn where it is not."""
    damage = damaged_weights(model.named_parameters(), sampled=sampled)
    if damage is not None and state.in_attention:
        raise UnsupportedModelError(damage)
    if damage is not None:
        warnings.warn(damage, stacklevel=3)


def _refuse_prompts(model: Any) -> None:
    """Refuse a model whose cache PEFT fills with keys that have no position: prefix tuning and its like."""
    for config in (getattr(model, "peft_config", None) or {}).values():
        if getattr(config, "is_prompt_learning", False):
            raise UnsupportedModelError(
                f"{config.peft_type} puts learned keys or tokens before the text, which have no position. Patch "
                "the model without that adapter."
            )


def _install(model: nn.Module, state: State, every: Sequence[RotaryTable]) -> None:
    """Install every method: frequencies first, since attention rotates by them."""
    others = state.in_attention
    scalings = [method for method in state.methods if isinstance(method, RopeScaling)]
    tables = select(every, state.config.layers, whole=bool(scalings))
    sincos = [table for table in tables if isinstance(table, SinCosTable)]
    if sincos and others:
        raise UnsupportedModelError(
            f"{others[0].name} computes attention itself, but {type(model).__name__} rotates and attends "
            f"in code of its own. {FREQUENCY_METHODS_WORK}"
        )
    for method in scalings:
        if sincos:
            install_sincos(model, state, sincos, method)
        elif method not in others:
            install_rotary(model, state, tables, method)
    if others:
        from hf_posenc.patch.attention import install_attention  # imports transformers

        install_attention(model, state, every, tables)
        state.export = None
        if len(others) == len(state.methods):
            state.write_config(model, [])


def _undo(model: nn.Module, state: State) -> None:
    """Undo a patch, whole or half done: modules, tensors, attributes and config as before."""
    if state.in_attention:
        from hf_posenc.patch.attention import remove_attention

        remove_attention(model)
    wrappers = [module for module in model.modules() if isinstance(module, PosencRotary)]
    replace_modules(model, {id(wrapper): wrapper.base for wrapper in wrappers})
    for table, tensor in state.tensors:
        table.swap(tensor)
    for target, before in reversed(state.changes):
        export.restore(target, before)
    unwrap_saving(model)
    delattr(model, STATE)


def unpatch_model(model: ModelT) -> ModelT:
    """Undo a patch: modules, attributes and config are as before, bit for bit.

    Args:
        model: A model that `patch_model` has patched.

    Returns:
        The same object.

    Raises:
        PosencError: The model is not patched.
    """
    state = state_of(model)
    if state is None:
        raise PosencError("This model is not patched; there is nothing to undo.")
    _undo(unwrap(model), state)
    return model


@contextlib.contextmanager
def patched(model: ModelT, method: MethodLike, **kwargs: Any) -> Iterator[ModelT]:
    """Patch a model for the length of a `with` block; undone on exit, also by an exception.

    The arguments are those of `patch_model`.
    """
    patch_model(model, method, **kwargs)
    try:
        yield model
    finally:
        if state_of(model) is not None:  # else it was unpatched in the block
            unpatch_model(model)


def get_patch(model: nn.Module) -> Patch | None:
    """Return the patch in force, read back from the model's modules; `None` where it is not patched."""
    state = state_of(model)
    if state is None:
        return None
    layers: tuple[str, ...] = ()
    if state.in_attention:
        from hf_posenc.patch.attention import patched_layers

        layers = tuple(patched_layers(unwrap(model)))
    tables, lengths = inspect_rope(model), (state.original, state.extended)
    return Patch(state.config, tables, *lengths, state.export, layers, state.attention)


def inspect_rope(model: nn.Module) -> tuple[EffectiveTable, ...]:
    """Return every rotary table of a model's text decoder as it is in force, patched or not.

    Equal tables are listed once; length-dependent ones as for a text within the original length.

    Raises:
        UnsupportedModelError: A model without rotary embedding.
    """
    inner, state = unwrap(model), state_of(model)
    wrappers = {id(m.base): m for m in inner.modules() if isinstance(m, PosencRotary)}
    dropped = {
        (id(native_rotary(rotary)), label)
        for rotary in inner.modules()
        if isinstance(rotary, RepositionedRotary) and rotary.drops_rotation
        for label in rotary.labels
    }
    effective: dict[tuple[Any, ...], EffectiveTable] = {}
    for table in tables_of(inner):
        wrapper = wrappers.get(id(table.module))
        (inv_freq, factor), kind = table.live(), table.rope_type
        theta = table.parameters.get("rope_theta")
        if wrapper is not None and table.label in wrapper.specs:
            inv_freq, live_factor = wrapper.table(table.label)
            factor, kind = float(live_factor), wrapper.method.name
            theta = wrapper.specs[table.label].theta
        elif state is not None and isinstance(table, SinCosTable):
            kind = state.config.method
        if (id(table.module), table.label) in dropped:
            inv_freq, kind = torch.zeros_like(inv_freq), "dropped"
        label, inv_freq = table.label or None, inv_freq.detach()
        values = inv_freq.shape if inv_freq.is_meta else tuple(inv_freq.tolist())
        key = label, kind, theta, factor, inv_freq.device, values
        before = effective[key].modules if key in effective else ()
        entry = EffectiveTable(label, (*before, table.name), kind, theta, inv_freq, factor)
        effective[key] = entry
    return tuple(effective.values())
