"""The scaling that a config puts in force: its tables, the same as a patch, and the blocks without effect."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_posenc.diagnosis import taken_warnings
from hf_posenc.engines.source import SourceTable, empty_model
from hf_posenc.errors import PosencError
from hf_posenc.methods import METHODS, LengthDependent, Method, RopeScaling
from hf_posenc.model.discovery import SinCosTable, tables_of
from hf_posenc.patch.config import PatchConfig
from hf_posenc.patch.export import config_parts
from hf_posenc.patch.patching import inspect_rope, patch_model
from hf_posenc.patch.scaled import entry_knobs

BLOCKS = ("rope_parameters", "rope_scaling")
"""The names under which a config has its rotary parameters."""
OWN_KEYS = (
    *("partial_rotary_factor", "mrope_section", "mrope_interleaved", "xdrope_section"),
    "llama_4_scaling_beta",
)
"""Keys of `rope_parameters` that belong to the model and not to a scaling."""
_ORIGINAL = "original_max_position_embeddings"
_LENGTH = "max_position_embeddings"


def tables_in_force(config: Any) -> tuple[SourceTable, ...]:
    """Return the rotary tables that transformers makes of a config; none where they lie in the weights."""
    model = empty_model(config)
    found = (table for table in tables_of(model) if not isinstance(table, SinCosTable))
    unique = {table.label: SourceTable(table, None) for table in found}
    return tuple(unique.values())


def same_tables(one: Any, other: Any) -> bool:
    """Return whether two configs make the same tables for every length of a text."""
    tables, others = tables_in_force(one), tables_in_force(other)
    if [table.label for table in tables] != [table.label for table in others]:
        return False
    reach = max(_reach(one), _reach(other))
    return all(
        torch.equal(mine.inv_freq, theirs.inv_freq) and mine.factor == theirs.factor
        for table, counterpart in zip(tables, others, strict=True)
        for length in (1, reach, 8 * reach)
        for mine, theirs in [(table.in_force(length), counterpart.in_force(length))]
    )


def _reach(config: Any) -> int:
    return int(getattr(config.get_text_config(decoder=True), _LENGTH, 0) or 4096)


def unscaled(config: Any) -> Any:
    """Return a copy of a config whose tables are plain, of the same base."""
    copied = copy.deepcopy(config)
    text = copied.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    kept = (*OWN_KEYS, "rope_theta")

    def plain(entry: Any) -> Any:
        if not isinstance(entry, dict) or entry.get("rope_type") in ("default", "proportional"):
            return entry
        return {"rope_type": "default", **{key: entry[key] for key in kept if key in entry}}

    nested = any(isinstance(value, dict) for value in rope.values())
    text.rope_parameters = {k: plain(v) for k, v in rope.items()} if nested else plain(rope)
    return copied


def as_patch(config: Any) -> PatchConfig | None:
    """Return the patch by which an unscaled model gets the tables of a config; `None` if none is known.

    It is returned only if it was tried, and the tables are the same.
    """
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    entry = rope.get("full_attention", rope)
    plain = unscaled(config)
    wanted = tables_in_force(config)
    for kind in METHODS:
        if not issubclass(kind, RopeScaling) or not kind.for_rotary:
            continue
        patch = _with_values_of(kind, entry, text)
        if patch is None:
            continue
        model = empty_model(plain)
        try:
            patch_model(
                model,
                patch.build(),
                original_max_position_embeddings=patch.original_max_position_embeddings,
            )
        except PosencError:
            continue
        if _computes(model, wanted):
            return patch
    return None


def _with_values_of(
    kind: type[Method], entry: Mapping[str, Any], config: Any
) -> PatchConfig | None:
    """Return a method with the values of an entry of `rope_parameters` of its own `rope_type`; `None` for others."""
    found = entry_knobs(kind, {"rope_type": "default", **entry}, config)
    if not found:
        return None
    scale = float(found.pop("scale", 1.0)) if kind.takes_scale() else None
    defaults = kind.knobs()
    given = {
        knob: float(value) if type(value) is int else value
        for knob, value in found.items()
        if value != defaults[knob]
    }
    if issubclass(kind, LengthDependent):
        given["update"] = "sequence"
    try:
        kind.from_options(**given, **({} if scale is None else {"scale": scale}))
    except PosencError:
        return None
    return PatchConfig(
        method=kind.name,
        options=given,
        scale=scale,
        original_max_position_embeddings=entry.get(_ORIGINAL),
    )


def _computes(model: Any, wanted: Sequence[SourceTable]) -> bool:
    """Return whether a patched model has these tables, up to rounding."""
    mine = {table.layer_type or "": table for table in inspect_rope(model)}
    for table in wanted:
        other, one = table.in_force(1), mine.get(table.label)
        if one is None or one.inv_freq.shape != other.inv_freq.shape:
            return False
        close = torch.allclose(one.inv_freq.double(), other.inv_freq, rtol=1e-5, atol=0)
        if not close or abs(float(one.attention_factor) / other.factor - 1) > 1e-6:
            return False
    return True


@dataclass(frozen=True)
class Scaling:
    """The scaling that a config puts in force.

    Attributes:
        scaled: True if a table differs from the plain one of the same base.
        patch: The patch with the same tables on the unscaled model; `None` if none is known, or none is needed.
        notes: Blocks of the file that change no table.
    """

    scaled: bool
    patch: PatchConfig | None = None
    notes: tuple[str, ...] = ()

    @property
    def option(self) -> str:
        """The patch as a value of `--patch`; empty where its knobs are lists."""
        if self.patch is None or any(
            isinstance(v, list | tuple) for v in self.patch.options.values()
        ):
            return ""
        ((method, options), *_) = self.patch.parts
        given = ",".join(f"{key}={_short(value)}" for key, value in options.items())
        return f"{method}:{given}" if given else method


def _short(value: Any) -> str:
    whole = isinstance(value, float) and value.is_integer()
    return str(int(value) if whole else value)


def scaling_of(config: Any, values: Mapping[str, Any] | None = None) -> Scaling:
    """Return the scaling that a config puts in force.

    Args:
        config: The config in force.
        values: The content of the folder's `config.json`, whose blocks are tried.
    """
    notes = () if values is None else tuple(idle_blocks(values))
    if same_tables(config, unscaled(config)):
        return Scaling(False, None, notes)
    return Scaling(True, as_patch(config), notes)


def idle_blocks(values: Mapping[str, Any]) -> list[str]:
    """Return the scaling blocks of a `config.json` that change no table, each with its reason.

    Every block is tried: the tables without it are compared with those of the whole config.

    Args:
        values: The file's content.
    """
    whole = _config_of(values)
    if whole is None:
        return []
    notes = []
    for path, block in _scaling_blocks(values):
        fewer: dict[str, Any] = copy.deepcopy(dict(values))
        place = fewer
        for key in path[:-1]:
            place = place[key]
        if "rope_theta" in block:
            place[path[-1]] = {"rope_type": "default", "rope_theta": block["rope_theta"]}
        else:
            del place[path[-1]]
        without = _config_of(fewer)
        if without is not None and same_tables(whole, without):
            notes.append(f"{'.'.join(path)} does nothing: {_reason(whole, values, path, block)}")
    return notes


def _config_of(values: Mapping[str, Any]) -> Any:
    """Return the config that transformers makes of a file's content; `None` for custom code and refused values."""
    from transformers import CONFIG_MAPPING

    try:
        with taken_warnings("modeling_rope_utils"), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of transformers, for rope_scaling
            kind = CONFIG_MAPPING[values["model_type"]]
            return kind.from_dict(copy.deepcopy(dict(values)))
    except Exception:
        return None


def _scaling_blocks(
    values: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """Yield every block that asks for a scaling, wherever it lies, with its path."""
    for key, value in values.items():
        if not isinstance(value, Mapping) or key in ("hf_posenc", "vision_config", "audio_config"):
            continue
        kind = value.get("rope_type", value.get("type"))
        scales = "factor" in value or any(isinstance(value.get(k), list) for k in _LISTS)
        of_rope = any("rope" in part or "scaling" in part for part in (*path, key))
        if of_rope and (scales or kind in ("linear", "dynamic", "yarn", "llama3", "longrope")):
            yield (*path, key), value
        else:
            yield from _scaling_blocks(value, (*path, key))


_LISTS = ("short_factor", "long_factor")


def _reason(
    config: Any, values: Mapping[str, Any], path: tuple[str, ...], block: Mapping[str, Any]
) -> str:
    """Return why a block changes no table."""
    text = config.get_text_config(decoder=True)
    text_path = tuple(next(p for p, part in config_parts(config) if part is text).split("."))
    owner = tuple(part for part in path if part not in BLOCKS)
    if text is not config and path[0] in BLOCKS:
        return f"this model reads it in {'.'.join(text_path)}. Move it there."
    if not {*path} & {*BLOCKS}:
        return f"no code reads {path[-1]}. Name it rope_parameters."
    place: Any = values
    for part in owner if text is not config else ():
        place = place.get(part, {})
    if path[-1] == "rope_parameters" and place.get("rope_scaling"):
        return "rope_scaling beside it is read in its place. Remove that."
    kind = block.get("rope_type", block.get("type", "default"))
    if kind == "default":
        return 'it names no method, and a factor alone is not read. Add "rope_type".'
    if float(block.get("factor") or 1) == 1:
        return "its factor is 1."
    return f"transformers makes the same table of a {config.model_type} model without it."
