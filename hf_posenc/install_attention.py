"""Puts a patch into the attention of a model, makes sure of it, and takes it out again."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.attention.encoding import Encoding
from hf_posenc.errors import PosencError, UnsupportedModelError, VerificationError
from hf_posenc.export import config_parts, quiet
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
from hf_posenc.seams.attention import (
    LAYER,
    Layer,
    catch_positions,
    recording,
    register,
    unknown_arguments,
)
from hf_posenc.seams.calibration import (
    Recorder,
    Seen,
    rotation_of,
    trial,
    trial_tokens,
)
from hf_posenc.seams.discovery import RotaryTable, read_spec, rotary_tables
from hf_posenc.seams.layers import attends_locally, layer_index, layer_type
from hf_posenc.seams.parameters import MethodParameters
from hf_posenc.seams.pinned import PinnedLengths
from hf_posenc.seams.repositioned import ENGINE, RepositionedRotary
from hf_posenc.seams.rotary import PosencRotary
from hf_posenc.seams.wrapper import RotaryWrapper

PARAMETERS = "posenc"
"""The child of an attention module that holds what a method trains."""
_TOLERANCE = {torch.float64: 5e-3, torch.float32: 5e-3}
_TOLERANCE_HALF = 0.1


@dataclass(frozen=True)
class AttentionSeam:
    """What was changed in the attention of a model.

    Attributes:
        owner: The path of the transformers model that holds the text decoder.
        before: The attention implementations that its config and the configs inside it named, by path.
    """

    owner: str
    before: Mapping[str, Any]

    @property
    def replaced(self) -> str:
        """The attention implementation in whose place the engine computes."""
        return str(self.before[""])


@dataclass(frozen=True, eq=False)
class _Found:
    """One attention module, as calibration saw it.

    Attributes:
        name: Its path in the model.
        module: The module.
        seen: What it handed over.
        rotation: What it rotates by; `None`: it does not, or that need not be known.
        table: Which of the model's tables that is of; `None`: it does not rotate.
        rotary: The rotary module inside it.
    """

    name: str
    module: nn.Module
    seen: Seen
    rotation: Any
    table: RotaryTable | None
    rotary: RepositionedRotary | None


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
        VerificationError: The model, patched with what should change nothing, computes something else.
    """
    owner_path, owner = _owner(model, tables[0])
    _refuse(model, owner, tables)
    with trial(model):
        ids = trial_tokens(owner)
        expected = _tried(owner, ids)
    seam = AttentionSeam(owner_path, _implementations(owner.config))
    try:
        _choose_engine(owner, seam)
        every = rotary_tables(model)
        wrappers = _reposition(model, owner, every)
        with trial(model):
            found = _calibrated(model, owner, ids, every, wrappers, methods)
            _verify(owner, ids, expected, found, wrappers)
            _give_encodings(found, tables, wrappers, methods, original, layers, compose)
            _pin_lengths(owner, found, original)
            _hidden(owner, ids)  # it runs
    except BaseException:
        remove_attention(model, seam)
        raise
    for method in methods:
        if getattr(method, "trainable", False):
            warnings.warn(
                f"{method.name} starts untrained: the model must be trained with it before its output means anything. "
                f"Its parameters are among model.parameters(), named ...{PARAMETERS}.*",
                stacklevel=4,
            )
    return seam


def remove_attention(model: nn.Module, seam: AttentionSeam) -> None:
    """Takes everything out again: layers, hooks, parameters, wrappers, and the attention implementation."""
    for module in model.modules():
        module.__dict__.pop(LAYER, None)
        module._modules.pop(PARAMETERS, None)
        for number, hook in list(module._forward_pre_hooks.items()):
            if hook is catch_positions or isinstance(hook, PinnedLengths):
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
            f"{type(owner).__name__} computes attention in its own code, where no other function can be put in its "
            "place. Frequency methods (yarn, ntk_by_parts, ...) work on this model."
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
    if any(parameter.is_meta for parameter in model.parameters()):
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
            f"{type(owner).__name__} chooses by a {sparse} which keys a query sees, from rotated queries and keys of its "
            "own, so a method that computes attention itself has no meaning there. Frequency methods (yarn, ...) work."
        )
    if any(getattr(config, "is_prompt_learning", False) for config in _peft_configs(model)):
        raise UnsupportedModelError(
            "Prefix tuning puts keys into the cache that stand at no position. Merge or remove the adapter first."
        )


def _peft_configs(model: nn.Module) -> list[Any]:
    return list((getattr(model, "peft_config", None) or {}).values())


def _tried(owner: Any, ids: Tensor) -> Tensor:
    try:
        return _hidden(owner, ids)
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(owner).__name__} cannot be run on a few tokens alone ({error}), on which a method that computes "
            "attention itself is tried. Frequency methods (yarn, ntk_by_parts, ...) work on this model."
        ) from error


def _hidden(owner: Any, ids: Tensor) -> Tensor:
    output = owner(input_ids=ids, use_cache=False)
    logits = getattr(output, "logits", None)
    found: Tensor = output[0] if logits is None else logits
    return found.float()


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


def _calibrated(
    model: nn.Module,
    owner: Any,
    ids: Tensor,
    tables: Sequence[RotaryTable],
    wrappers: dict[int, RepositionedRotary],
    methods: Sequence[Method],
) -> list[_Found]:
    native, still = Recorder(), Recorder()
    with recording(native):
        owner(input_ids=ids, use_cache=False)
    with _everything_at_zero(wrappers), recording(still):
        owner(input_ids=ids, use_cache=False)
    if not native.seen:
        raise UnsupportedModelError(
            f"No layer of {type(owner).__name__} calls the attention function that was set."
        )
    names = {module: name for name, module in model.named_modules()}
    needed = any(not _without_rotation(method) for method in methods)
    for table in tables:
        rotary = wrappers[id(table.module)].base
        dynamic = isinstance(rotary, PosencRotary) and rotary.method.length_dependent
        if needed and (dynamic or table.rope_type in ("dynamic", "longrope")):
            raise PosencError(
                f"The frequencies of {table.name} move with the length of the text, so no rotation can be added to "
                "them. Replace them by a static method in a list, as in [YaRN(scale=4), ReRoPE()] with replace=True, or "
                'use a dynamic method with update="row" alone.'
            )
    found = []
    for module, calls in native.seen.items():
        for seen in calls:
            unknown = unknown_arguments(dict(seen.kwargs))
            if unknown:
                raise UnsupportedModelError(
                    f"{names[module]} hands {', '.join(unknown)} to attention, of which hf_posenc does not know what it "
                    "means. Frequency methods (yarn, ntk_by_parts, ...) work on this model."
                )
        # Tables of two layer types may hold the same frequencies: the layer's own comes first.
        candidates = sorted(
            tables, key=lambda table: table.label != layer_type(module, table.config)
        )
        rotation, index = None, None
        if needed or _moves(calls[0], still.seen[module][0]):
            frequencies = [_in_force(table, wrappers) for table in candidates]
            try:
                rotation, index = rotation_of(
                    calls[0], still.seen[module][0], frequencies, names[module]
                )
            except UnsupportedModelError:
                if needed:
                    raise
                index = 0  # it rotates, in a way that nobody needs to know
        inner = next((m for m in module.modules() if isinstance(m, RepositionedRotary)), None)
        if inner is not None:
            inner.inside_attention = True
        elif calls[0].kwargs.get("position_ids") is None:
            module.register_forward_pre_hook(catch_positions, with_kwargs=True)
        table = None if index is None else candidates[index]
        found.append(_Found(names[module], module, calls[0], rotation, table, inner))
    return found


def _moves(native: Seen, still: Seen) -> bool:
    return not torch.equal(native.query, still.query)


def _without_rotation(method: Method) -> bool:
    """Whether a method needs no knowledge of how a layer rotates."""
    if isinstance(method, RelativeKeys):
        return not method.keep_rope
    return isinstance(method, LogN | DistanceBias)


def _in_force(
    table: RotaryTable, wrappers: dict[int, RepositionedRotary]
) -> tuple[Tensor, float]:
    rotary: Any = wrappers[id(table.module)].base
    if isinstance(rotary, PosencRotary) and table.label in rotary.specs:
        inv_freq, factor = rotary.table(table.label)
    else:
        inv_freq, factor = table.live()
    return inv_freq.detach().float(), float(factor)


@contextlib.contextmanager
def _everything_at_zero(wrappers: dict[int, RepositionedRotary]) -> Iterator[None]:
    for wrapper in wrappers.values():
        wrapper.encoding = _UNROTATED
    try:
        yield
    finally:
        for wrapper in wrappers.values():
            wrapper.encoding = None


_UNROTATED = Encoding(original=1, heads=1, rotates=False)


def _verify(
    owner: Any,
    ids: Tensor,
    expected: Tensor,
    found: Sequence[_Found],
    wrappers: dict[int, RepositionedRotary],
) -> None:
    """Makes sure that the model computes what it did, with plain RoPE by way of the engine."""
    known = all(entry.rotation is not None or entry.table is None for entry in found)
    for entry in found:
        encoding = Encoding(original=1, heads=entry.seen.query.shape[1], rotation=entry.rotation)
        if known and entry.rotation is not None:
            encoding = replace(encoding, cached_by=_UNROTATED)
        setattr(entry.module, LAYER, Layer(encoding, rotary=entry.rotary))
    with _everything_at_zero(wrappers) if known else contextlib.nullcontext():
        computed = _hidden(owner, ids)
    tolerance = _TOLERANCE.get(next(owner.parameters()).dtype, _TOLERANCE_HALF)
    error = float((computed - expected).abs().max() / expected.abs().max())
    if not error <= tolerance:
        raise VerificationError(
            f"With its own rotation computed by hf_posenc's attention, {type(owner).__name__} gives other hidden states "
            f"than before (relative difference {error:.1e}): something besides attention reads the rotation. The model "
            "was restored. Frequency methods (yarn, ntk_by_parts, ...) work on it."
        )


def _give_encodings(
    found: Sequence[_Found],
    tables: Sequence[RotaryTable],
    wrappers: dict[int, RepositionedRotary],
    methods: Sequence[Method],
    original: int,
    layers: str | Sequence[int],
    compose: bool,
) -> None:
    base = _encoding(methods, original)
    chosen_tables = {(id(table.module), table.label) for table in tables}
    chosen = [entry for entry in found if _is_chosen(entry, chosen_tables, layers)]
    if not chosen:
        raise UnsupportedModelError(f"No layer that rotates is among layers={layers!r}.")
    for entry in found:
        heads, key_heads = entry.seen.query.shape[1], entry.seen.key.shape[1]
        layer = Layer(
            Encoding(original=original, heads=heads, rotation=entry.rotation), rotary=entry.rotary
        )
        repositioned = (
            entry.table is not None
            and (
                id(entry.table.module),
                entry.table.label,
            )
            in chosen_tables
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
            encoding = replace(
                base, heads=heads, rotation=entry.rotation, spec=spec, parameters=parameters
            )
            layer = Layer(encoding, patched=True, rotary=entry.rotary)
        elif repositioned:
            layer = replace(layer, encoding=replace(layer.encoding, cached_by=base))
        setattr(entry.module, LAYER, layer)
    for wrapper in wrappers.values():
        labels = {table.label for table in tables if table.module is _own(wrapper)}
        wrapper.labels = frozenset(labels)
        wrapper.encoding = base if labels else None


def _pin_lengths(owner: nn.Module, found: Sequence[_Found], original: int) -> None:
    layers: list[Layer] = [getattr(entry.module, LAYER) for entry in found]
    moving = next((m for layer in layers if (m := layer.encoding.moving) is not None), None)
    if moving is not None and moving.update == "request":
        lengths = PinnedLengths(original, moving.bucket)
        owner.register_forward_pre_hook(lengths, with_kwargs=True)
        for layer in layers:
            layer.lengths = lengths if layer.encoding.moving is not None else None


def _own(wrapper: RepositionedRotary) -> nn.Module:
    inner: nn.Module = wrapper
    while isinstance(inner, RotaryWrapper):
        inner = inner.base
    return inner


def _is_chosen(entry: _Found, tables: set[tuple[int, str]], layers: str | Sequence[int]) -> bool:
    if entry.table is None or (id(entry.table.module), entry.table.label) not in tables:
        return False
    if layers == "all":
        return True
    if isinstance(layers, str):
        return not attends_locally(entry.module, entry.table.config)
    return layer_index(entry.name, entry.module) in layers


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
                f"{bias.name} drops the rotation that {', '.join(others)} changes. Pass keep_rope=True to {bias.name} to have both."
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
