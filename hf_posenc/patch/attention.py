"""Puts a method into the attention of a model, makes sure of it, and takes it out again."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from hf_posenc.attention.encoding import Encoding
from hf_posenc.errors import (
    FREQUENCY_METHODS_WORK,
    PosencError,
    UnsupportedModelError,
    UntrainedWarning,
)
from hf_posenc.methods import (
    DistanceBias,
    LengthDependent,
    LogN,
    Method,
    RelativeKeys,
    RopeBias,
    RotaryBands,
    XPos,
)
from hf_posenc.model.attention import (
    LAYER,
    Layer,
    catch_positions,
    register,
)
from hf_posenc.model.caches import CacheWatch
from hf_posenc.model.calibration import trial, trial_tokens
from hf_posenc.model.discovery import (
    RotaryTable,
    attends_locally,
    layer_index,
    read_spec,
)
from hf_posenc.model.parameters import PARAMETERS, MethodParameters
from hf_posenc.model.repositioned import ENGINE, RepositionedRotary
from hf_posenc.model.rotary import RotaryWrapper, native_rotary
from hf_posenc.patch.export import config_parts, quiet
from hf_posenc.patch.state import AttentionSeam, State
from hf_posenc.patch.trial import Found, calibrated, run, verify

# From methods to what each attention layer does.


def give_encodings(
    found: Sequence[Found],
    tables: Sequence[RotaryTable],
    wrappers: dict[int, RepositionedRotary],
    methods: Sequence[Method],
    state: State,
) -> None:
    """Gives every layer its encoding, and tells the rotary modules where keys are cached.

    Args:
        found: The attention modules, as they were tried.
        tables: The rotary tables of the chosen layers.
        wrappers: The repositioned rotary modules, by `id` of the model's own.
        methods: On different seams.
        state: The patch: its original context length, layers and `compose`.

    Raises:
        PosencError: Methods that have no meaning together.
        UnsupportedModelError: No chosen layer rotates.
    """
    original, layers, compose = state.original, state.config.layers, state.config.compose
    base = _encoding(methods, original)
    chosen_tables = {(id(table.module), table.label) for table in tables}
    chosen = [entry for entry in found if _is_chosen(entry, chosen_tables, layers)]
    if not chosen:
        raise UnsupportedModelError(
            f'No layer that rotates is among layers={layers!r}; layers="all" takes sliding-window layers too.'
        )
    for entry in found:
        heads, key_heads = entry.seen.query.shape[1], entry.seen.key.shape[1]
        layer = Layer(
            Encoding(original=original, heads=heads, rotation=entry.rotation), rotary=entry.rotary
        )
        if entry in chosen:
            assert entry.table is not None
            spec = None
            if base.moving is not None:
                spec = read_spec(entry.table, original, compose=compose)
            parameters = _parameters(
                methods, heads, key_heads, entry.seen.query.shape[-1], original
            )
            if parameters is not None:
                parameters = parameters.to(entry.seen.query.device)
                entry.module.register_module(PARAMETERS, parameters)
            trained: Any = parameters  # a ParameterDict is a mapping, which its type does not say
            encoding = replace(
                base, heads=heads, rotation=entry.rotation, spec=spec, parameters=trained
            )
            layer = Layer(encoding, patched=True, rotary=entry.rotary)
        elif _is_of(entry, chosen_tables):  # it shares its table with a chosen layer
            layer = replace(layer, encoding=replace(layer.encoding, cached_by=base))
        setattr(entry.module, LAYER, layer)
    for wrapper in wrappers.values():
        labels = {table.label for table in tables if table.module is native_rotary(wrapper)}
        wrapper.labels = frozenset(labels)
        wrapper.encoding = base if labels else None


def _is_chosen(entry: Found, tables: set[tuple[int, str]], layers: str | Sequence[int]) -> bool:
    if not _is_of(entry, tables):
        return False
    assert entry.table is not None
    if layers == "all":
        return True
    if isinstance(layers, str):
        return not attends_locally(entry.module, entry.table.config)
    return layer_index(entry.name, entry.module) in layers


def _is_of(entry: Found, tables: set[tuple[int, str]]) -> bool:
    return entry.table is not None and (id(entry.table.module), entry.table.label) in tables


def _encoding(methods: Sequence[Method], original: int) -> Encoding:
    values: dict[str, Any] = {}
    for method in methods:
        if isinstance(method, RotaryBands):
            values["bands"] = method
        elif isinstance(method, LengthDependent):
            values["moving"] = method
        elif isinstance(method, XPos | RopeBias):
            values["pairs"] = method
        elif isinstance(method, DistanceBias | RelativeKeys):
            values["bias"] = method
        elif isinstance(method, LogN):
            values["log_n"] = method
        else:
            raise PosencError(f"{method.name} has no place in the attention engine.")
    bias = values.get("bias")
    if isinstance(bias, RelativeKeys) and len(values) > 1 and bias.keep_rope:
        raise PosencError(
            f"{bias.name} is defined beside the model's own rotation or none, not beside another method's."
        )
    if bias is not None and not bias.keep_rope:
        others = [
            m.name
            for m in methods
            if isinstance(m, RotaryBands | LengthDependent | XPos | RopeBias)
        ]
        if others:
            raise PosencError(
                f"{bias.name} drops the rotation that {', '.join(others)} changes. Pass keep_rope=True to "
                f"{bias.name} to have both."
            )
        values["rotates"] = False
    return Encoding(original=original, heads=1, **values)


def _parameters(
    methods: Sequence[Method], heads: int, key_heads: int, head_dim: int, original: int
) -> MethodParameters | None:
    values: dict[str, Tensor] = {}
    for method in methods:
        if isinstance(method, DistanceBias):
            values |= method.initial(heads, original)
        elif isinstance(method, RelativeKeys):
            values |= method.initial(heads, head_dim, original)
        elif isinstance(method, RopeBias):
            values |= method.initial(heads, key_heads, head_dim)
    return MethodParameters(values) if values else None


def install_attention(
    model: nn.Module,
    state: State,
    every: Sequence[RotaryTable],
    tables: Sequence[RotaryTable],
    methods: Sequence[Method],
) -> AttentionSeam:
    """Repositions the rotary modules, calibrates every attention layer and gives it its encoding.

    Args:
        model: The transformers model, with frequency methods already in place.
        state: The patch: its original context length, layers and `compose`.
        every: All rotary tables of the text decoder.
        tables: Those of the chosen layers.
        methods: The methods that compute attention, on different seams.

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
        wrappers = _reposition(model, owner, every)
        with trial(model):
            found = calibrated(model, owner, ids, every, wrappers, methods)
            verify(subject, ids, expected, found, wrappers)
            give_encodings(found, tables, wrappers, methods, state)
            _watch_caches(owner, found, state.original)
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
