"""A request on a checkpoint that has a scaling of its own: what is kept of that, dropped, or asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_posenc.errors import PosencError
from hf_posenc.methods import LengthDependent, LongRoPE, Method, get_method
from hf_posenc.model.context import config_length, readings
from hf_posenc.model.discovery import RotaryTable, layers_of_type, local_layers
from hf_posenc.patch.export import SCALING_KEYS

_ORIGINAL = "original_max_position_embeddings"


def own_knobs(
    part: Method | type[Method], tables: Sequence[RotaryTable], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the knobs of a checkpoint's own scaling for the named method that is of its type, in place of defaults.

    Empty for another method, for a Method object, which has its knobs, and where tables differ. A table that moves with
    the text gets `update="row"`, under which caches and batches are exact, unless lists are `given`.
    """
    if isinstance(part, Method):
        return {}
    found = [_knobs_of(part, table) for table in tables]
    if any(each != found[0] for each in found):
        return {}
    moving = found[0] and issubclass(part, LengthDependent) and tables[0].moves
    moving = moving and not {"short_factor", "long_factor"} & {*given}
    return {**found[0], "update": "row"} if moving else found[0]


def _knobs_of(kind: type[Method], table: RotaryTable) -> dict[str, Any]:
    entry = {**table.parameters, "rope_type": table.rope_type}
    return entry_knobs(kind, entry, table.config) if table.scaled else {}


def entry_knobs(kind: type[Method], entry: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return the knobs that an entry of `rope_parameters` has for a method, its factor as `scale`.

    Empty for a method that is not what transformers computes for the `rope_type`.
    """
    if not _is_of_type(kind, entry["rope_type"]):
        return {}
    values = {knob: entry.get("factor" if knob == "scale" else knob) for knob in kind.knobs()}
    original = entry.get(_ORIGINAL)
    if kind is LongRoPE and values["scale"] is None and original:  # as transformers has it
        values["scale"] = max(1.0, config.max_position_embeddings / original)
    return {knob: value for knob, value in values.items() if value is not None}


def _is_of_type(kind: type[Method], rope_type: str) -> bool:
    return rope_type in (kind.name, *kind.aliases)


def own_original(tables: Sequence[RotaryTable]) -> int | None:
    """Return the length in tokens from which transformers lets a `dynamic` table grow: that of the config."""
    lengths = {config_length(each.config) for each in tables if each.rope_type == "dynamic"}
    return lengths.pop() or None if len(lengths) == 1 else None


def moving_note(model: Any, table: RotaryTable) -> str:
    """Return what transformers computes wrongly with a table that moves with the text; empty for one that does not."""
    if not table.moves:
        return ""
    start = own_original([table]) or table.parameters.get(_ORIGINAL)
    length = "the original length" if start is None else f"{start:,} tokens"
    # Phi-3's generate() computes the text anew there.
    anew = "prepare_inputs_for_generation" in vars(type(model)) and hasattr(table.config, _ORIGINAL)
    but = " (but by generate() of this class)" if anew else ""
    return (
        f"The frequencies of {table.name} ({table.rope_type}) change past {length}, and cached keys keep those of "
        f"their own step: a text that grows past that length from a cache{but}, or that is in one batch with a longer "
        "one, is not computed as it is alone and at once."
    )


def own_reach(tables: Sequence[RotaryTable], original: int) -> int | None:
    """Return the length in tokens that the scaling of scaled tables reaches; `None` if there is none, or several."""
    reached = {each.reach for table in tables if table.scaled for each in readings(table, original)}
    return reached.pop() if len(reached) == 1 else None


def dropped_of(
    tables: Sequence[RotaryTable], methods: Sequence[Method], original: int
) -> dict[str, Any]:
    """Return the values of a checkpoint's own scaling that the methods which replace it do not have."""
    dropped: dict[str, Any] = {}
    for table in tables:
        if not table.scaled:
            continue
        heir = next((each for each in methods if _is_of_type(type(each), table.rope_type)), None)
        if heir is None:
            rest = {key: v for key, v in table.parameters.items() if key in SCALING_KEYS}
            if rest.get(_ORIGINAL) == original:
                del rest[_ORIGINAL]  # the methods start from it
            dropped |= {**rest, "rope_type": table.rope_type}
            continue
        for knob, value in _knobs_of(type(heir), table).items():
            kept = getattr(heir, knob)
            if (list(kept) if isinstance(kept, tuple) else kept) != value:
                dropped["factor" if knob == "scale" else knob] = value
        start = own_original([table]) or table.parameters.get(_ORIGINAL)
        if heir.reads_length and start not in (None, original):
            dropped[_ORIGINAL] = start
    return dropped


def check_shared(
    tables: Sequence[RotaryTable], methods: Sequence[Method], layers: str | Sequence[int]
) -> None:
    """Raise for `compose=True` on `longrope` in some of the layers that share a table, all of which it would change."""
    table = next((each for each in tables if each.rope_type == "longrope" and not each.label), None)
    if table is None or layers == "all" or not any(each.reads_rotation for each in methods):
        return
    every, some = layers_of_type(table.config, "all"), layers
    if layers in ("full", "encoder", "decoder"):
        some = sorted({*every} - local_layers(table.config))
    if isinstance(some, str) or {*some} >= {*every}:
        return
    raise PosencError(
        f"compose=True takes the long list of {table.name} for all layers that share it, and layers={layers!r} are "
        'some of them. Pass layers="all", or replace=True and a static method in a list.'
    )


def refuse_moving(tables: Sequence[RotaryTable], methods: Sequence[Method], *, asked: bool) -> None:
    """Raise for methods that add a rotation to frequencies which move with the length of the text.

    `asked`: with `compose=True`, which takes one list of `longrope`.
    """
    if not any(method.reads_rotation for method in methods):
        return
    for table in tables:
        static = table.rope_type == "longrope"
        if not table.moves or (static and asked):
            continue
        way = ""
        if static:
            named = "[...]"
            if len(methods) == 1:
                knobs = (f"{knob}={value!r}" for knob, value in methods[0].options().items())
                named = ", ".join((f'"{methods[0].name}"', *knobs))
            way = (
                f"patch_model(model, {named}, compose=True) takes its long list for texts of every length, short ones "
                "too, which were trained with the other list. "
            )
        raise PosencError(
            f"The frequencies of {table.name} move with the length of the text (rope_type={table.rope_type!r}), so no "
            f"rotation can be added to them. {way}A static method in a list replaces them, as in "
            '[YaRN(scale=4), ReRoPE()] with replace=True; a dynamic method with update="row" works alone.'
        )


def composes(
    tables: Sequence[RotaryTable],
    parts: Sequence[Method | type[Method]],
    given: Mapping[str, Any],
    *,
    compose: bool,
    replace: bool,
    log_n: bool = False,
) -> bool:
    """Return whether methods start from the frequencies in force; raise where a request leaves that open.

    `log_n`: the option of that name of bands, which are named and not yet built.
    """
    if any(part.seam == "rotary" for part in parts):
        if not replace:
            _check_scaled([table for table in tables if table.scaled], compose=compose, **given)
        return compose
    # Beside a factor on queries, replace= is of the model's own.
    multiplies = any(part.seam == "query" or getattr(part, "log_n", False) for part in parts)
    if replace and any(table.scaled for table in tables) and not (multiplies or log_n):
        raise PosencError(
            "replace=True drops a checkpoint's own scaling for a frequency method, and none is named. Name "
            "one in a list, as in [YaRN(scale=4), ReRoPE()], or leave replace out; unpatch_model(model) undoes a patch."
        )
    # attention starts from the frequencies in force
    return compose or any(table.scaled for table in tables)


def _check_scaled(
    tables: Sequence[RotaryTable],
    *,
    compose: bool,
    original: int | None,
    scale: float | None,
    target: int | None,
) -> None:
    """Refuse to scale scaled tables unless it is said how; the message has the lengths of both ways."""
    for table in tables:
        if compose and table.rope_type == "dynamic":
            raise PosencError(
                f"compose=True needs one table, but {table.name} has rope_type='dynamic', whose table depends on the "
                "length. Pass replace=True."
            )
        if compose:
            continue
        shown = {k: v for k, v in table.parameters.items() if not isinstance(v, list | dict)}
        summary = ", ".join(f"{k}={v}" for k, v in shown.items() if k not in ("rope_type", "type"))
        read = readings(table)
        replaced, composed = (
            [original] if original else [each.start(compose=way) for each in read]
            for way in (False, True)
        )
        ways = [f"replace=True starts from its rope_theta and {_start(replaced, scale, target)}"]
        force = "what is in force"
        if table.moves:
            force = "its long list (then of texts of every length)"
        if table.rope_type != "dynamic":
            ways.append(
                f"compose=True scales {force} once more, from {_start(composed, scale, target)}"
            )
        if table.moves and own_knobs(get_method(table.rope_type), tables, {}):
            name = get_method(table.rope_type).name
            ways.append(
                f'"{name}" without numbers makes its own scaling exact in caches and batches'
            )
        untrained = ""
        if len(read) == 1 and read[0].trained < read[0].reach:
            untrained = " (a length that its config does not count: added to weights that were not trained with it)"
        raise PosencError(
            f"This checkpoint is already scaled: {table.name} has rope_type={table.rope_type!r} ({summary}), "
            f"{' or '.join(map(str, read))} tokens{untrained}. {'; '.join(ways)}. Pass one of them."
        )


def _start(lengths: Sequence[int], scale: float | None, target: int | None) -> str:
    """Return the lengths that a method may start from, in words, and what it makes of them."""
    start = " or ".join(f"{length:,}" for length in lengths) or "an unknown number of"
    if scale is not None:
        return f"{start} tokens, to {' or '.join(f'{length * scale:,.0f}' for length in lengths)}"
    if target is not None:
        return f"{start} tokens, {' or '.join(f'x{target / length:.4g}' for length in lengths)}"
    return f"{start} tokens"
