"""`patch_model` and its companions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace as replaced
from typing import Any, TypeVar

import torch
from torch import nn

from hf_posenc.adapters import ArchAdapter
from hf_posenc.errors import FREQUENCY_METHODS_WORK, PosencError, UnsupportedModelError
from hf_posenc.methods import RopeScaling, seam_of
from hf_posenc.model.discovery import RotaryTable, original_length, select
from hf_posenc.model.repositioned import RepositionedRotary
from hf_posenc.model.rotary import PosencRotary, unwrapped
from hf_posenc.model.sincos import SinCosTable
from hf_posenc.patch import export
from hf_posenc.patch.config import Layers, PatchConfig
from hf_posenc.patch.frequencies import install_rotary, install_sincos
from hf_posenc.patch.report import EffectiveTable, Patch
from hf_posenc.patch.request import (
    MethodLike,
    adapter_of,
    changes_frequencies,
    check_scaled,
    check_wrappers,
    resolve_methods,
    tables_of,
    unwrap,
)
from hf_posenc.patch.state import STATE, State, own_config, put_in_place, write_config

# Puts a patch into a model, makes sure of it, and takes it out again.


def install(
    model: nn.Module, state: State, adapter: ArchAdapter, tables: Sequence[RotaryTable]
) -> None:
    """Puts every method of a patch where it lands: frequencies first, since attention rotates by them.

    Raises:
        UnsupportedModelError: A model in which a method cannot land, with the reason.
        VerificationError: The patched model does not compute what was asked for.
    """
    config = state.config
    scaling = next((m for m in state.methods if seam_of(m) == "rotary"), None)
    others = [method for method in state.methods if method is not scaling]
    sincos = [table for table in tables if isinstance(table, SinCosTable)]
    if sincos and others:
        raise UnsupportedModelError(
            f"{others[0].name} computes attention itself, but {type(model).__name__} rotates and attends "
            f"in code of its own. {FREQUENCY_METHODS_WORK}"
        )
    dropping = next((m.name for m in others if not getattr(m, "keep_rope", True)), None)
    if scaling is not None and dropping is not None:
        raise PosencError(
            f"{dropping} drops the rotation that {scaling.name} changes. Pass keep_rope=True to {dropping} "
            "to have both."
        )
    if isinstance(scaling, RopeScaling):
        if sincos:
            install_sincos(model, state, sincos, scaling)
        else:
            install_rotary(model, state, adapter, tables, scaling)
    if others:
        from hf_posenc.patch.attention import install_attention  # needs transformers at once

        state.attention = install_attention(
            model,
            tables,
            others,
            original=state.original,
            layers=config.layers,
            compose=config.compose,
        )
        state.export = None
        if scaling is None:
            write_config(model, state, [])


def undo(model: nn.Module, state: State) -> None:
    """Takes a patch out, whole or half done: modules, tensors, attributes and config as before."""
    if state.attention is not None:
        from hf_posenc.patch.attention import remove_attention

        remove_attention(model, state.attention)
    put_in_place(
        model,
        {id(module): module.base for module in model.modules() if isinstance(module, PosencRotary)},
    )
    for (path, attribute), tensor in state.tensors.items():
        module = model.get_submodule(path)
        SinCosTable(path, "", module, None, "default", {}, attribute).swap(tensor)
    for path, scaling in state.scalings.items():
        vars(model.get_submodule(path))["scaling"] = scaling
    for config, before in reversed(state.configs):
        export.restore(config, before)
    delattr(model, STATE)


__all__ = ["STATE", "State", "install", "own_config", "undo"]


ModelT = TypeVar("ModelT", bound=nn.Module)


def patch_model(
    model: ModelT,
    method: MethodLike,
    *,
    scale: float | None = None,
    target_length: int | None = None,
    original_max_position_embeddings: int | None = None,
    layers: Layers | Sequence[int] = "full",
    compose: bool = False,
    replace: bool = False,
    **options: Any,
) -> ModelT:
    """Changes how a live model encodes position, in place and reversibly.

    The call ends by reading back what is in force; where anything fails, the model is left as it
    was.

    Args:
        model: A transformers model, also wrapped by PEFT, DDP or `torch.compile`, also on the meta
            device.
        method: A name or alias (`available_methods()`), a Method object, or a list of them on
            different seams.
        scale: Target context as a multiple of the original one.
        target_length: Target context in tokens, instead of `scale`.
        original_max_position_embeddings: The context that the model was trained on, in tokens. By
            default the first of `config.original_max_position_embeddings`, the key of that name in
            `rope_parameters`, and `config.max_position_embeddings`.
        layers: `"full"` (all but sliding-window layers, where these have a rotary table of their
            own), `"all"`, or a list of layer indices.
        compose: On a checkpoint that is scaled already: start from its scaled frequencies.
        replace: On a checkpoint that is scaled already: drop its scaling, start from `rope_theta`.
        **options: The method's own knobs (`get_method(name).knobs()`).

    Returns:
        The same object.

    Raises:
        UnsupportedModelError: A model that cannot be patched, with the reason.
        VerificationError: The model does not compute what was asked for; it was restored.
        PosencError: Any other request that cannot be met.
    """
    inner: Any = unwrap(model)
    if getattr(inner, STATE, None) is not None:
        raise PosencError(
            f"This model is already patched with {getattr(inner, STATE).config.method}. Call "
            "unpatch_model(model) first."
        )
    if compose and replace:
        raise PosencError(
            "compose=True and replace=True exclude each other: scale what is there, or drop it first."
        )
    with torch.device("cpu"):  # inside `with torch.device("meta")` too, tables and probes are real
        adapter = adapter_of(inner)
        as_is = not changes_frequencies(method)  # attention then goes on from what is there
        tables = select(tables_of(inner, adapter), layers, whole=not as_is)
        if as_is and replace:
            raise PosencError(
                "replace=True drops a checkpoint's own scaling for a frequency method, and none is named. Name "
                "one in a list, as in [YaRN(scale=4), ReRoPE()], or leave replace out."
            )
        compose = compose or (as_is and any(table.scaled for table in tables))
        check_scaled(tables, compose=compose, replace=replace, attention_only=as_is)
        original = original_max_position_embeddings
        if original is None:
            original = original_length(tables[0], compose=compose)
        methods, reach = resolve_methods(
            method, scale=scale, target_length=target_length, original=original, options=options
        )
        if any(seam_of(part) != "rotary" for part in methods):
            check_wrappers(model)
        config = PatchConfig(
            method=methods[0].name,
            options={
                knob: value for knob, value in methods[0].options().items() if knob != "scale"
            },
            scale=getattr(methods[0], "scale", None),
            original_max_position_embeddings=original,
            layers=layers if isinstance(layers, str) else tuple(layers),
            compose=compose,
            replace=replace,
            others=tuple((other.name, other.options()) for other in methods[1:]),
        )
        state = State(config, original, reach, methods)
        setattr(inner, STATE, state)
        try:
            own_config(model)
            tables = select(
                tables_of(inner, adapter), layers, whole=not as_is
            )  # with the model's own configs
            install(inner, state, adapter, tables)
        except BaseException:
            undo(inner, state)
            raise
    return model


def unpatch_model(model: ModelT) -> ModelT:
    """Takes a patch back: modules, attributes and config are what they were, bit for bit.

    Args:
        model: A model that `patch_model` has patched.

    Returns:
        The same object.

    Raises:
        PosencError: The model is not patched.
    """
    inner = unwrap(model)
    state: State | None = getattr(inner, STATE, None)
    if state is None:
        raise PosencError("This model is not patched; there is nothing to undo.")
    undo(inner, state)
    return model


@contextlib.contextmanager
def patched(model: ModelT, method: MethodLike, **kwargs: Any) -> Iterator[ModelT]:
    """Patches a model for the length of a `with` block; undone on exit, also by an exception.

    Args:
        model: As for `patch_model`.
        method: As for `patch_model`.
        **kwargs: As for `patch_model`.
    """
    patch_model(model, method, **kwargs)
    try:
        yield model
    finally:
        if getattr(unwrap(model), STATE, None) is not None:  # else it was unpatched in the block
            unpatch_model(model)


def get_patch(model: nn.Module) -> Patch | None:
    """What is in force in a model, read back from its modules; `None` where it is not patched."""
    inner = unwrap(model)
    state: State | None = getattr(inner, STATE, None)
    if state is None:
        return None
    layers: tuple[str, ...] = ()
    if state.attention is not None:
        from hf_posenc.patch.attention import patched_layers

        layers = tuple(name for name, _ in patched_layers(inner))
    return Patch(
        state.config,
        inspect_rope(inner),
        state.original,
        state.extended,
        state.export,
        layers=layers,
        attention=None if state.attention is None else state.attention.replaced,
    )


def inspect_rope(model: nn.Module) -> tuple[EffectiveTable, ...]:
    """Every rotary table of a model's text decoder as it is in force, patched or not.

    Equal tables are listed once; length-dependent ones as for a text within the original length.

    Raises:
        UnsupportedModelError: A model without rotary embedding.
    """
    inner = unwrap(model)
    state: State | None = getattr(inner, STATE, None)
    wrappers = {id(m.base): m for m in inner.modules() if isinstance(m, PosencRotary)}
    dropped = {
        (id(unwrapped(rotary)), label)
        for rotary in inner.modules()
        if isinstance(rotary, RepositionedRotary) and rotary.drops_rotation
        for label in rotary.labels
    }
    found: list[EffectiveTable] = []
    for table in tables_of(inner, adapter_of(inner)):
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
        label = table.label or None
        entry = EffectiveTable(label, (table.name,), kind, theta, inv_freq.detach(), factor)
        for index, other in enumerate(found):
            if entry.same_as(other):
                found[index] = replaced(other, modules=(*other.modules, table.name))
                break
        else:
            found.append(entry)
    return tuple(found)
