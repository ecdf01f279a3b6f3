"""The context lengths of a checkpoint: what its table was scaled from, how far it reads, and what it was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_posenc.adapters import get_recipe, recipes_of
from hf_posenc.errors import PosencError, UnsupportedModelError
from hf_posenc.model.discovery import LENGTH_KEYS, RotaryTable, is_scaled, tables_of
from hf_posenc.model.unwrapping import unwrap

_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True)
class Context:
    """Context lengths in tokens; all three are one for a checkpoint without a scaling of its own."""

    # The length that the table was scaled from. A method that replaces the scaling starts here.
    original: int
    # The length that the checkpoint reads with its scaling. A method that scales it once more starts here.
    reach: int
    # `reach` where the config counts the scaling in its maximum, or a recipe says that the weights were trained with
    # it; else `original`: the scaling was added to weights that have not met it.
    trained: int

    def __str__(self) -> str:
        return f"from {self.original:,} to {self.reach:,}"

    def start(self, *, compose: bool) -> int:
        """Return the length that a method starts from."""
        return self.reach if compose else self.original


def context_of(
    table: RotaryTable,
    original: int | None = None,
    *,
    compose: bool = False,
    argument: str = f"{_ORIGINAL}=",
) -> Context:
    """Return the context lengths of the checkpoint that a table belongs to.

    `original` is the length that the table was scaled from, where the config may not say. The message of an error
    depends on `compose` (the method scales the scaled table once more), and names the `argument` that a user gives.
    """
    read = readings(table, original)
    if len(read) == 1:
        return read[0]
    if not read:
        raise PosencError(
            f"The config of {table.name} names no context length ({', '.join(LENGTH_KEYS)}). Give {argument}, the "
            "number of tokens that the model was trained on."
        )
    (before, after), (kind, entry) = read, _scaling(table)
    meant = "reaches" if compose else "was scaled from"
    raise PosencError(
        f"{table.name} has rope_type={kind!r} (factor={entry['factor']:g}), and its config does not say whether its "
        f"length of {after.reach:,} tokens is that before the scaling ({before}) or after it ({after}). Give "
        f"{argument}, the length that the checkpoint {meant}: {before.start(compose=compose)} or "
        f"{after.start(compose=compose)}."
    )


def readings(table: RotaryTable, original: int | None = None) -> tuple[Context, ...]:
    """Return the ways in which the lengths of a checkpoint can be read: one, two (`linear`, `dynamic`), or none.

    They follow from the table's type, factor and original length, and from facts of known checkpoints. The config's own
    length decides only where nothing else names the reach: of `llama3`, and of `longrope` without a factor.
    """
    kind, entry = _scaling(table)
    config = table.config
    maximum = config_length(config)
    own = _first(getattr(config, _ORIGINAL, None), entry.get(_ORIGINAL))
    if not kind:
        # transformers does not compute it, so the checkpoint reads as far as without it.
        chunks = getattr(config, "dual_chunk_attention_config", None) or {}
        advised = (get_recipe(name)[_ORIGINAL] for name in recipes_of(config, "unscaled"))
        length = original or _first(chunks.get(_ORIGINAL), *advised, own, maximum)
        return (Context(length, length, length),) if length else ()
    for name in () if original else recipes_of(config, "scaled"):
        recipe = get_recipe(name)
        known = recipe[_ORIGINAL], recipe["recipe"].get("reach")
        reach = known[1] or round(known[0] * recipe["scale"])
        return (Context(known[0], reach, reach),)
    factor = float(entry.get("factor") or 0)
    if original or own:
        start = original or own
        reach = round(start * factor)
        # llama3's factor is that of the slowest pairs, and longrope's sets the factor on cos and sin.
        if not factor or kind == "llama3" or (kind == "longrope" and maximum > start):
            reach = max(start, maximum)
        counted = maximum >= reach or entry.get("finetuned")
        return (Context(start, reach, reach if counted else start),)
    if not maximum or not factor:
        return (Context(maximum, maximum, maximum),) if maximum else ()
    before = Context(maximum, round(maximum * factor), maximum)
    after = Context(round(maximum / factor), maximum, maximum)
    return tuple(dict.fromkeys((before, after)))


def length_of(model: Any, *, original: int | None = None, replaced: bool = False) -> int | None:
    """Return the length in tokens that an unpatched model reads, or reads without its own scaling if that is replaced.

    `original` is the length that it was scaled from, where the config may not say. `None` if the config names no
    length, or can be read in two ways.
    """
    try:
        tables = tables_of(unwrap(model))
    except UnsupportedModelError:  # no rotary embedding, which a config could scale
        return config_length(model.config.get_text_config(decoder=True)) or None
    read = [readings(table, original) for table in tables]
    if any(len(each) != 1 for each in read):
        return None
    return max(each.start(compose=not replaced) for (each,) in read)


def _scaling(table: RotaryTable) -> tuple[str, Mapping[str, Any]]:
    """Return the type and the parameters of the scaling that a checkpoint has, in this table or another; `""`: none."""
    if table.scaled:
        return table.rope_type, table.parameters
    for entry in (getattr(table.config, "rope_parameters", None) or {}).values():
        if isinstance(entry, Mapping) and is_scaled(str(entry.get("rope_type")), entry):
            return str(entry["rope_type"]), entry
    return "", table.parameters


def config_length(config: Any) -> int:
    """Return the context length that a config names; 0 if it names none."""
    return _first(*(getattr(config, key, None) for key in LENGTH_KEYS))


def _first(*values: Any) -> int:
    return next((each for each in values if isinstance(each, int) and each > 0), 0)
