"""A request to patch a model, resolved once: from names, objects and options to the state to be installed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hf_posenc.errors import PosencError
from hf_posenc.lengths import plain, read_length
from hf_posenc.methods import Growing, Method, RopeScaling, TableFilter, needs_no_rotation, seam_of
from hf_posenc.methods.contract import called
from hf_posenc.model.context import context_of, readings
from hf_posenc.model.discovery import CutTableError, RotaryTable, layers_of_type, select
from hf_posenc.patch.config import (
    Layers,
    PatchConfig,
    check_option,
    check_seams,
    named_method,
    of_kind,
)
from hf_posenc.patch.scaled import (
    check_shared,
    composes,
    dropped_of,
    own_knobs,
    own_original,
    own_reach,
    refuse_moving,
)
from hf_posenc.patch.state import LayerPart, State
from hf_posenc.seams.native import NativeSeam

_LONGEST = 1e15  # tokens
MethodLike = str | Method | Sequence["str | Method"] | Mapping[Any, Any]
"""A name or alias, a Method object, a list of them on different seams, filters after the table that they change; or a
dictionary of layers, each with such a value or `None`: `"full"`, `"sliding"`, `"all"`, a layer type, a number, a range.
"""


def resolve_request(
    source: Sequence[RotaryTable] | NativeSeam,
    method: MethodLike,
    *,
    scale: float | None = None,
    target_length: int | str | None = None,
    original_max_position_embeddings: int | str | None = None,
    layers: Layers | Sequence[int] = "full",
    compose: bool = False,
    replace: bool = False,
    **options: Any,
) -> State:
    """Return the state of a patch to be installed in a model's rotary tables or another seam.

    The other arguments are those of `patch_model`.
    """
    for switch, value in (("compose", compose), ("replace", replace)):
        if not isinstance(value, bool):
            raise PosencError(f"{switch} is True or False, not {value!r}.")
    scale = plain(scale)
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float)):
        raise PosencError(f"scale is a number of at least 1, not {scale!r}.")
    target = None if target_length is None else read_length(target_length, "target_length")
    if compose and replace:
        raise PosencError(
            "compose=True and replace=True exclude each other: scale what is there, or drop it first."
        )
    if isinstance(method, Mapping):
        shared: dict[str, Any] = {"compose": compose, "replace": replace, "scale": scale}
        shared["original_max_position_embeddings"] = original_max_position_embeddings
        shared["target_length"] = target
        return _by_layers(source, method, layers, options, shared)
    if len(parts := named(method)) > 1:
        _check_list(parts, scale, target, options)
    if isinstance(layers, Iterable) and not isinstance(layers, str):
        layers = tuple(plain(layers))
    given: int | None = None
    if original_max_position_embeddings is not None:
        given = read_length(original_max_position_embeddings, "original_max_position_embeddings")
    own: list[dict[str, Any]] = [{} for _ in parts]
    dropped: dict[str, Any] = {}
    if isinstance(source, NativeSeam):
        _check_native(layers, compose=compose)
        original = source.length or 0 if given is None else given
        if not original and target is not None and not parts[0].follows_text:
            raise PosencError(
                "The model names no context length that target_length= could be divided by. Give scale=, or "
                "original_max_position_embeddings=, the number of tokens that it was trained on."
            )
    else:
        tables, cut = _tables(source, parts, layers)
        own = [{} if compose else own_knobs(part, tables, options) for part in parts]
        asked = compose
        numbers = [scale, target, given if len(readings(tables[0])) == 1 else None]
        if any(own) and not any(numbers) and not {*options} - {"update", "bucket"}:
            replace = True  # of the checkpoint's own scaling by the same one
            given = given or own_original(tables)
        lengths = {"original": given, "scale": scale, "target": target}
        log_n = options.get("log_n") is True
        compose = composes(tables, parts, lengths, compose=compose, replace=replace, log_n=log_n)
        optional = target is None and not any(part.reads_length for part in parts)
        original = given or _common_length(tables, compose=compose, optional=optional)
    native, cut = (source, False) if isinstance(source, NativeSeam) else (None, cut)
    has_length = native is not None and native.has_length
    methods: list[Method] = []
    extended: int | None = None
    # In a list, a number is that of the one method that takes it; a target also of a list without such a method.
    ending = [part for part in parts if not part.follows_text] or parts
    aimed = [part for part in ending if part.takes_scale()] or ending
    for part, knobs in zip(parts, own, strict=True):
        takes_scale = len(parts) == 1 or part.takes_scale()
        sized = scale if takes_scale else None, target if part in aimed else None
        built, reach = _build(part, *sized, original, options, knobs, has_length=has_length)
        methods.append(built)
        extended = max(extended or 0, reach or 0) or None
    if len(methods) > 1:
        check_seams(methods)  # the seam of a dynamic method depends on its `update`
    for built in methods:
        others = [other for other in methods if other is not built]
        called(built, "check_beside", built.check_beside, others)
    if native is None:
        rotary = any(part.seam == "rotary" for part in parts)  # else replace= is of queries alone
        if compose and not rotary:
            refuse_moving(tables, methods, asked=asked)
            if asked:
                check_shared(tables, methods, layers)
        dropped = dropped_of(tables, methods, original) if replace and rotary else {}
        if replace and rotary and extended is not None and not dropped:
            extended = own_reach(tables, original) or extended
    first, *others = methods
    implied = math.ceil(original * max(getattr(each, "scale", None) or 1 for each in methods))
    config = PatchConfig(
        method=first.name,
        options={knob: value for knob, value in first.options().items() if knob != "scale"},
        scale=getattr(first, "scale", None),
        target_length=target if target == extended != implied else None,
        original_max_position_embeddings=original or None,
        layers=layers if isinstance(layers, str) else tuple(layers),
        compose=compose,
        replace=replace,
        others=tuple((other.name, other.options()) for other in others),
    )
    whole, alone = tuple(_filtered(methods)), tuple[LayerPart, ...]()
    if cut:
        assert isinstance(layers, tuple)
        _check_in_attention(whole)
        alone = (LayerPart(layers, whole, original, compose, strict=True),)
    return State(
        config=config,
        original=original,
        extended=extended,
        methods=whole,
        parts=alone,
        native=native,
        dropped=dropped,
    )


def _tables(
    tables: Sequence[RotaryTable], parts: Sequence[Method | type[Method]], layers: Layers
) -> tuple[Sequence[RotaryTable], bool]:
    """Return the tables of the chosen layers, and whether these cut through a table."""
    if others := [part for part in parts if not part.for_rotary]:
        raise PosencError(
            f"{others[0].name} is not for a rotary embedding: {others[0].summary}. Frequency methods (yarn, "
            "ntk_by_parts, ...) are."
        )
    whole = any(part.seam == "rotary" for part in parts)
    if isinstance(layers, tuple):
        _check_layers(tables, layers)
    if isinstance(layers, str) and layers in {table.label for table in tables} - {""}:
        moving = [p.name for p in parts if not of_kind(p, RopeScaling) or of_kind(p, Growing)]
        if moving:
            raise PosencError(
                f"layers={layers!r} names a table, which {', '.join(moving)} would not change. Name the layers, or "
                "give a frequency method that does not depend on the length."
            )
    rotated = not needs_no_rotation(parts)
    try:
        return select(tables, layers, whole=whole, rotated=rotated), False
    except CutTableError:
        return select(tables, layers, whole=False, rotated=rotated), True


def _by_layers(
    source: Sequence[RotaryTable] | NativeSeam,
    method: Mapping[Any, Any],
    layers: Any,
    options: Mapping[str, Any],
    shared: Mapping[str, Any],
) -> State:
    """Return the state of a dictionary from layers to methods; `shared` are arguments for all of them."""
    if isinstance(source, NativeSeam):
        raise PosencError(
            "A dictionary gives methods to layers that rotate, and this model has none: positions enter it for all "
            "layers at once. Give one method."
        )
    if options or layers != "full":
        given = ", ".join((*options, *(("layers",) if layers != "full" else ())))
        raise PosencError(
            f"Beside a dictionary of layers, {given} belongs into it: give method objects, as in "
            "{range(0, 16): YaRN(scale=4), range(16, 32): ReRoPE(window=512)}."
        )
    config, numbered = source[0].config, dict[int, Any]()
    parts: list[tuple[Layers, tuple[int, ...], MethodLike]] = []
    for key, value in method.items():
        numbers = _numbers(source, config, key)
        if twice := [number for number in numbers if number in numbered]:
            raise PosencError(
                f"Layer {twice[0]} is in two keys of the dictionary: {numbered[twice[0]]!r} and {key!r}."
            )
        numbered |= dict.fromkeys(numbers, key)
        if value is not None:
            parts.append((key if isinstance(key, str) else numbers, numbers, value))
    if not parts:
        raise PosencError("Every layer of the dictionary has the method None: nothing to patch.")
    if len(parts) == 1:
        (key, numbers, value) = parts[0]
        whole = set(numbers) == set(layers_of_type(config, "all"))
        frequencies = any(of_kind(part, RopeScaling) for part in named(value))
        by_name = key in ("full", "all") and (whole or not frequencies)
        return resolve_request(source, value, layers=key if by_name else numbers, **shared)
    states, configs, every = list[State](), list[PatchConfig](), list[LayerPart]()
    for key, numbers, value in parts:
        state = _part(source, value, shared)
        _check_in_attention(state.methods)
        states.append(state)
        configs.append(dataclasses.replace(state.config, layers=key))
        own, strict = state.config, not isinstance(key, str)
        every.append(LayerPart(numbers, state.methods, state.original, own.compose, strict))
    first, *others = configs
    reached = [state.extended for state in states if state.extended is not None]
    target = None if reached else shared["target_length"]
    return State(
        config=dataclasses.replace(first, elsewhere=tuple(others), target_length=target),
        original=states[0].original,
        extended=max(reached, default=target),
        methods=tuple(method for state in states for method in state.methods),
        parts=tuple(every),
        dropped={key: value for state in states for key, value in state.dropped.items()},
    )


def _part(source: Sequence[RotaryTable], value: Any, shared: Mapping[str, Any]) -> State:
    """Return the state of the methods of some layers, as if they were those of all."""
    parts, own = named(value), dict(shared)
    scaled = [part for part in parts if part.takes_scale()]
    if all(isinstance(part, Method) for part in scaled):
        own["scale"] = None
    if all(part.follows_text for part in scaled):
        own["target_length"] = None
    if not any(part.seam in ("rotary", "query") for part in parts):
        own["replace"] = False
    return resolve_request(source, value, layers="all", **own)


def _numbers(tables: Sequence[RotaryTable], config: Any, key: Any) -> tuple[int, ...]:
    """Return the layers of a key: a name, a number, or several numbers."""
    if key in ("encoder", "decoder"):
        raise PosencError(
            f"{key!r} is no key of a dictionary: a key chooses layers in both parts of an encoder-decoder model. One "
            f"part alone takes one method or list, with layers={key!r}."
        )
    if isinstance(key, str):
        return layers_of_type(config, key)
    numbers = tuple(key) if isinstance(key, range | tuple | frozenset) else (key,)
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
        raise PosencError(
            f'A key of the dictionary is "full", "sliding", "all", a layer type, a number or a range, not {key!r}.'
        )
    _check_layers(tables, numbers)
    return numbers


def _check_native(layers: Layers, *, compose: bool) -> None:
    """Refuse what has no meaning in a model without rotary embedding."""
    if layers not in ("full", "all"):
        raise PosencError(
            f"layers={layers if isinstance(layers, str) else list(layers)!r} chooses among rotary layers, and this "
            "model has none: positions enter it for all layers at once. Leave it out."
        )
    if compose:
        raise PosencError(
            "compose=True scales the rotary frequencies of a checkpoint once more, and this model has none. Leave it "
            "out."
        )


def named(method: Any) -> list[Method | type[Method]]:
    """Return the methods that a request names, as objects or classes; refuse whatever is no method."""
    if isinstance(method, Mapping) and {"rope_type", "type", "factor"} & {*method}:
        raise PosencError(
            "A dictionary gives methods to layers, and this is a rope_scaling: write "
            "patch_model(model, 'yarn', scale=4), with its type and its factor."
        )
    if isinstance(method, Mapping):
        return [part for value in method.values() if value is not None for part in named(value)]
    given = list(method) if isinstance(method, list | tuple) else [method]
    if not given:
        raise PosencError("An empty list of methods: name at least one.")
    for part in given:
        if isinstance(part, type) and issubclass(part, Method):
            raise PosencError(
                f"{part.__name__} is a class: give an object, as in {part.__name__}(...), or the name {part.name!r}."
            )
        if not isinstance(part, str | Method):
            raise PosencError(
                f"A method is a name such as 'yarn' (available_methods() lists them), a Method object, or a list of "
                f"them, not {part!r}."
            )
        if isinstance(part, str) and {*":+="} & {*part}:
            raise PosencError(
                f"{part!r} is the form of the command line. In Python, options are arguments, as in "
                "patch_model(model, 'yarn', scale=8), and several methods are a list, as in [YaRN(scale=8), LogN()]."
            )
    return [named_method(part) if isinstance(part, str) else part for part in given]


def _check_layers(tables: Sequence[RotaryTable], layers: tuple[Any, ...]) -> None:
    if not layers:
        raise PosencError("layers is empty: name at least one layer, or leave it out.")
    count = max(getattr(table.config, "num_hidden_layers", None) or 0 for table in tables)
    numbers = [layer for layer in layers if isinstance(layer, int)]
    if count and any(isinstance(layer, bool) or not 0 <= layer < count for layer in numbers):
        raise PosencError(
            f"layers={list(layers)}: this model has {count} layers, numbered from 0 to {count - 1}."
        )


def _common_length(tables: Sequence[RotaryTable], *, compose: bool, optional: bool) -> int:
    """Return the length that a method starts from; 0 where the tables do not name one and it is optional."""
    if optional and any(len(readings(table)) != 1 for table in tables):
        return 0
    lengths = {
        table.name: context_of(table, compose=compose).start(compose=compose) for table in tables
    }
    if len({*lengths.values()}) > 1:
        listing = "; ".join(f"{name}: {length}" for name, length in lengths.items())
        raise PosencError(
            f"The parts of this model have different context lengths ({listing}), and a patch has one. Give "
            "original_max_position_embeddings=, the number of tokens that it starts from in all of them."
        )
    return next(iter(lengths.values()))


def _check_list(
    parts: Sequence[Method | type[Method]],
    scale: float | None,
    target: int | None,
    options: Mapping[str, Any],
) -> None:
    if options:
        raise PosencError(
            f"Options ({', '.join(options)}) belong to one method: list method objects, as in [YaRN(scale=4), LogN()]."
        )
    check_seams(parts)
    for argument, value in (("scale", scale), ("target_length", target)):
        taking = [part for part in parts if part.takes_scale()]
        if argument == "target_length":  # an object may have its scale
            taking = [part for part in taking if not part.follows_text and isinstance(part, type)]
        if len(taking) > 1 and value is not None:
            raise PosencError(
                f"{argument}= could be that of {' or '.join(part.name for part in taking)}: give method objects, as "
                "in [YaRN(scale=4), LogN()]."
            )


def _check_in_attention(methods: Sequence[Method]) -> None:
    """Refuse methods that cannot be computed in some layers alone."""
    for method in methods:
        if seam_of(method) == "rotary" and method.length_dependent:
            raise PosencError(
                f'{method.name} with update="sequence" changes a rotary table that other layers read too. Use '
                'update="row" or "request", or choose all layers.'
            )


def _filtered(methods: Sequence[Method]) -> list[Method]:
    """Return the methods, the first of the frequencies with all later ones as its filters."""
    scaling = next((method for method in methods if isinstance(method, RopeScaling)), None)
    if scaling is None:
        return [*methods]
    others = [method for method in methods if method is not scaling]
    filters = tuple(method for method in others if isinstance(method, TableFilter))
    rest = [method for method in others if not isinstance(method, TableFilter)]
    return [dataclasses.replace(scaling, filters=filters), *rest]


def _build(
    part: Method | type[Method],
    scale: float | None,
    target: int | None,
    original: int,
    options: Mapping[str, Any],
    own: Mapping[str, Any],
    *,
    has_length: bool,
) -> tuple[Method, int | None]:
    """Return a method object, and the context length in tokens that it reaches by its scale or target, if any.

    `own` are the knobs of the checkpoint's own scaling, in place of defaults.

    Where the seam has a length (`has_length`), every method takes a target, also one that its own scale does not give.
    """
    if target is not None and target < original:
        raise PosencError(
            f"target_length={target} is below the original {original}: nothing to extend."
        )
    follows_text = part.follows_text and not has_length
    if target is not None and follows_text:
        raise PosencError(f"{part.name} follows the length of the text: no target_length.")
    if isinstance(part, Method):
        if scale is not None or options:
            raise PosencError(f"Give the knobs to {type(part).__name__}(...), not beside it.")
        scale = part.options().get("scale")
    implied = None
    if target is not None and part.takes_scale() and not part.follows_text:
        implied = target / original
    if implied and scale is not None and not has_length and not math.isclose(scale, implied):
        raise PosencError(
            f"scale={scale:g} and target_length={target} disagree: {original} tokens times "
            f"{scale:g} is {original * scale:g}. Give one of them."
        )
    if not isinstance(part, Method):
        for option in options:
            check_option(part, option)
        scale = implied if scale is None else scale
        scale = own.get("scale") if scale is None else scale
        if scale is not None and not part.takes_scale():
            knobs = ", ".join(part.knobs()) or "none"
            raise PosencError(f"{part.name} takes no scale: {part.summary}. Its knobs: {knobs}.")
        sized = {} if scale is None else {"scale": scale}
        part = part.from_options(**{**own, **sized, **options})
    if scale is not None and not original * scale < _LONGEST:
        raise PosencError(
            f"scale={scale:g} extends {original} tokens to {original * scale:g}: give a smaller one."
        )
    if target is None and scale is not None and original and not follows_text:
        target = math.ceil(original * scale)
    return part, target
