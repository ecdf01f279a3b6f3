"""From methods to what each attention layer does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from hf_posenc.attention.encoding import Encoding
from hf_posenc.errors import PosencError, UnsupportedModelError
from hf_posenc.install.trial import Found
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
)
from hf_posenc.seams.discovery import RotaryTable, read_spec
from hf_posenc.seams.layers import attends_locally, layer_index
from hf_posenc.seams.parameters import PARAMETERS, MethodParameters
from hf_posenc.seams.repositioned import RepositionedRotary
from hf_posenc.seams.wrapper import unwrapped


def give_encodings(
    found: Sequence[Found],
    tables: Sequence[RotaryTable],
    wrappers: dict[int, RepositionedRotary],
    methods: Sequence[Method],
    original: int,
    layers: str | Sequence[int],
    compose: bool,
) -> None:
    """Gives every layer its encoding, and tells the rotary modules where keys are cached.

    Args:
        found: The attention modules, as they were tried.
        tables: The rotary tables of the chosen layers.
        wrappers: The repositioned rotary modules, by `id` of the model's own.
        methods: On different seams.
        original: The original context length L, in tokens.
        layers: The choice of layers.
        compose: On a checkpoint that is scaled already: start from its scaled frequencies.

    Raises:
        PosencError: Methods that have no meaning together.
        UnsupportedModelError: No chosen layer rotates.
    """
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
        labels = {table.label for table in tables if table.module is unwrapped(wrapper)}
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
