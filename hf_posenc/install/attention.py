"""Puts a method into the attention of a model, makes sure of it, and takes it out again."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from hf_posenc.attention.encoding import Encoding
from hf_posenc.errors import FREQUENCY_METHODS_WORK, UnsupportedModelError, UntrainedWarning
from hf_posenc.export import config_parts, quiet
from hf_posenc.install.encodings import give_encodings
from hf_posenc.install.state import AttentionSeam
from hf_posenc.install.trial import Found, calibrated, run, verify
from hf_posenc.methods import (
    Method,
)
from hf_posenc.seams.attention import (
    LAYER,
    Layer,
    catch_positions,
    register,
)
from hf_posenc.seams.caches import CacheWatch
from hf_posenc.seams.calibration import trial, trial_tokens
from hf_posenc.seams.discovery import RotaryTable, rotary_tables
from hf_posenc.seams.layers import layer_index
from hf_posenc.seams.parameters import PARAMETERS
from hf_posenc.seams.repositioned import ENGINE, RepositionedRotary
from hf_posenc.seams.wrapper import RotaryWrapper


def install_attention(
    model: nn.Module,
    tables: Sequence[RotaryTable],
    methods: Sequence[Method],
    *,
    original: int,
    layers: str | Sequence[int],
    compose: bool,
) -> AttentionSeam:
    """Repositions the rotary modules, calibrates every attention layer and gives it its encoding.

    Args:
        model: The transformers model, with frequency methods already in place.
        tables: The rotary tables of the chosen layers.
        methods: Those that land in attention, on different seams.
        original: The original context length L, in tokens.
        layers: The choice of layers.
        compose: On a checkpoint that is scaled already: start from its scaled frequencies.

    Raises:
        UnsupportedModelError: A model whose attention cannot be computed so, with the reason.
    """
    for method in methods:
        if getattr(method, "trainable", False):
            warnings.warn(
                f"{method.name} starts untrained: the model must be trained with it before its output means anything. "
                f"Its parameters are among model.parameters(), named ...{PARAMETERS}.*",
                UntrainedWarning,
                stacklevel=4,
            )
    owner_path, owner = _owner(model, tables[0])
    _refuse(model, owner, tables)
    with trial(model):
        ids = trial_tokens(owner)
        subject, expected = _tried(model, owner, ids)
    seam = AttentionSeam(owner_path, _implementations(owner.config))
    try:
        _choose_engine(owner, seam)
        every = rotary_tables(model)
        wrappers = _reposition(model, owner, every)
        with trial(model):
            found = calibrated(model, owner, ids, every, wrappers, methods)
            verify(subject, ids, expected, found, wrappers)
            give_encodings(found, tables, wrappers, methods, original, layers, compose)
            _watch_caches(owner, found, original)
            run(subject, ids)  # it runs
    except BaseException:
        remove_attention(model, seam)
        raise
    return seam


def remove_attention(model: nn.Module, seam: AttentionSeam) -> None:
    """Takes everything out again: layers, hooks, parameters, wrappers, and the attention implementation."""
    for module in model.modules():
        module.__dict__.pop(LAYER, None)
        module._modules.pop(PARAMETERS, None)
        for number, hook in list(module._forward_pre_hooks.items()):
            if hook is catch_positions or isinstance(hook, CacheWatch):
                del module._forward_pre_hooks[number]
                module._forward_pre_hooks_with_kwargs.pop(number, None)
        for name, child in list(module._modules.items()):
            if isinstance(child, RepositionedRotary):
                setattr(module, name, child.base)
    owner: Any = model.get_submodule(seam.owner)
    for path, config in config_parts(owner.config):
        vars(config)[_IMPLEMENTATION] = seam.before[path]


def patched_layers(model: nn.Module) -> Iterator[tuple[str, Encoding]]:
    """The attention layers in which a method is in force, by path."""
    for name, module in model.named_modules():
        layer: Layer | None = module.__dict__.get(LAYER)
        if layer is not None and layer.patched:
            yield name, layer.encoding


_IMPLEMENTATION = "_attn_implementation_internal"


def _implementations(config: Any) -> dict[str, Any]:
    return {path: vars(part).get(_IMPLEMENTATION) for path, part in config_parts(config)}


def _choose_engine(owner: Any, seam: AttentionSeam) -> None:
    """Sets the attention implementation of the decoder, and of nothing that it contains (an audio codec)."""
    register()
    with quiet():
        owner.set_attn_implementation(ENGINE)
    for path, config in config_parts(owner.config):
        if path and config is not owner.config.get_text_config(decoder=True):
            vars(config)[_IMPLEMENTATION] = seam.before[path]
    if owner.config._attn_implementation != ENGINE:
        raise UnsupportedModelError(
            f"{type(owner).__name__} computes attention in its own code, where no other function can be put in "
            f"its place. {FREQUENCY_METHODS_WORK}"
        )


def _owner(model: nn.Module, table: RotaryTable) -> tuple[str, Any]:
    """The innermost transformers model around a rotary module."""
    found: tuple[str, Any] = ("", model)
    for name, module in model.named_modules():
        inside = not name or table.name.startswith(f"{name}.")
        if inside and hasattr(module, "set_attn_implementation"):
            found = name, module
    return found


def _refuse(model: nn.Module, owner: nn.Module, tables: Sequence[RotaryTable]) -> None:
    if any(_has_no_weights(module) for module in model.modules()):
        raise UnsupportedModelError(
            "This model is on the meta device. A method that computes attention itself is tried on the model before it "
            "is trusted: load the model first, then patch it."
        )
    sparse = next(
        (
            type(m).__name__
            for m in owner.modules()
            if type(m).__name__.endswith(("Indexer", "Compressor"))
        ),
        None,
    )
    if sparse is not None:
        raise UnsupportedModelError(
            f"{type(owner).__name__} chooses by a {sparse} which keys a query sees, from rotated queries and "
            "keys of its own, so a method that computes attention itself has no meaning there. "
            f"{FREQUENCY_METHODS_WORK}"
        )


def _has_no_weights(module: nn.Module) -> bool:
    """Whether its parameters are on the meta device and accelerate does not bring them in for a forward."""
    offloaded = getattr(getattr(module, "_hf_hook", None), "offload", False)
    return not offloaded and any(p.is_meta for p in module.parameters(recurse=False))


def _tried(model: nn.Module, owner: nn.Module, ids: Tensor) -> tuple[nn.Module, Tensor]:
    """What can be run on a few tokens, the whole model or else its decoder alone, and what it gives."""
    try:
        of_owner = run(owner, ids)
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(owner).__name__} cannot be run on a few tokens alone ({error}), on which a method that "
            f"computes attention itself is tried. {FREQUENCY_METHODS_WORK}"
        ) from error
    try:
        return model, run(model, ids)
    except Exception:  # it wants an image beside the text
        return owner, of_owner


def _reposition(
    model: nn.Module, owner: Any, tables: Sequence[RotaryTable]
) -> dict[int, RepositionedRotary]:
    """Wraps every rotary module of the text decoder; by `id` of the model's own module."""
    wrappers: dict[int, RepositionedRotary] = {}
    modules = {id(table.module) for table in tables}
    for path, module in list(model.named_modules(remove_duplicate=False)):
        inner = module
        while isinstance(inner, RotaryWrapper):
            inner = inner.base
        if id(inner) not in modules or path.endswith(".base"):
            continue
        wrapper = wrappers.get(id(inner))
        if wrapper is None:
            labels = [table.label for table in tables if table.module is inner]
            wrapper = wrappers[id(inner)] = RepositionedRotary(module, owner.config, None, labels)
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, wrapper)
    return wrappers


def _watch_caches(owner: nn.Module, found: Sequence[Found], original: int) -> None:
    layers: dict[str, Layer] = {entry.name: getattr(entry.module, LAYER) for entry in found}
    moving = {name: layer for name, layer in layers.items() if layer.encoding.moving is not None}
    method = next((layer.encoding.moving for layer in moving.values()), None)
    watch = CacheWatch(method, original)
    owner.register_forward_pre_hook(watch, with_kwargs=True)
    for entry in found:
        index = layer_index(entry.name, entry.module)
        if entry.name in moving:
            moving[entry.name].watch = watch
            # A module that serves several layers (Zamba 2) writes to several places of the cache.
            own = index is not None and index >= 0 and entry.calls == 1
            moving[entry.name].rotated = watch.keep(index) if own and index is not None else None
