"""The scaling that a config puts in force: its tables, and the same as a patch."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_posenc.engines.engine import SourceTable, empty_model, source_tables
from hf_posenc.errors import PosencError
from hf_posenc.methods import METHODS, LengthDependent, Method, RopeScaling
from hf_posenc.patch.config import PatchConfig
from hf_posenc.patch.patching import patch_model
from hf_posenc.patch.scaled import entry_knobs

OWN_KEYS = (
    *("partial_rotary_factor", "mrope_section", "mrope_interleaved", "xdrope_section"),
    "llama_4_scaling_beta",
)
"""Keys of `rope_parameters` that belong to the model and not to a scaling."""
_ORIGINAL = "original_max_position_embeddings"
_LENGTH = "max_position_embeddings"


def tables_in_force(config: Any) -> tuple[SourceTable, ...]:
    """Return the rotary tables that transformers makes of a config; none where they lie in the weights."""
    return source_tables(empty_model(config))


def same_tables(one: Any, other: Any) -> bool:
    """Return whether two configs make the same tables for every length of a text."""
    tables, others = tables_in_force(one), tables_in_force(other)
    if [table.label for table in tables] != [table.label for table in others]:
        return False
    return all(
        torch.equal(mine.inv_freq, theirs.inv_freq) and mine.factor == theirs.factor
        for table, counterpart in zip(tables, others, strict=True)
        for length in _lengths(one, other)
        for mine, theirs in [(table.in_force(length), counterpart.in_force(length))]
    )


def _lengths(*configs: Any) -> tuple[int, int, int]:
    """Return lengths within the reach of configs, at it and far beyond it."""
    reach = max(int(getattr(c.get_text_config(decoder=True), _LENGTH, 0) or 4096) for c in configs)
    return 1, reach, 8 * reach


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
    plain, wanted = unscaled(config), tables_in_force(config)
    for kind in (each for each in METHODS if issubclass(each, RopeScaling) and each.for_rotary):
        if (patch := _with_values_of(kind, entry, text)) is None:
            continue
        model, original = empty_model(plain), patch.original_max_position_embeddings
        try:
            patch_model(model, patch.build(), original_max_position_embeddings=original)
        except PosencError:
            continue
        if _computes(model, wanted, _lengths(config)):
            return patch
    return None


def _with_values_of(
    kind: type[Method], entry: Mapping[str, Any], config: Any
) -> PatchConfig | None:
    """Return a method with the values of an entry of `rope_parameters` of its own `rope_type`; `None` for others."""
    if not (found := entry_knobs(kind, {"rope_type": "default", **entry}, config)):
        return None
    scale = float(found.pop("scale", 1.0)) if kind.takes_scale() else None
    # transformers' `dynamic` does not read it
    original = None if entry.get("rope_type") == "dynamic" else entry.get(_ORIGINAL)
    given = {
        knob: float(value) if type(value) is int else value
        for knob, value in found.items()
        if value != kind.knobs()[knob]
    }
    if issubclass(kind, LengthDependent):
        given["update"] = "sequence"
    try:
        kind.from_options(**given, **({} if scale is None else {"scale": scale}))
    except PosencError:
        return None
    return PatchConfig(
        method=kind.name, options=given, scale=scale, original_max_position_embeddings=original
    )


def _computes(model: Any, wanted: Sequence[SourceTable], lengths: Sequence[int]) -> bool:
    """Return whether a patched model has these tables for texts of these lengths, up to rounding."""
    mine = {table.label: table for table in source_tables(model)}
    for table, length in itertools.product(wanted, lengths):
        if table.label not in mine:
            return False
        one, other = mine[table.label].in_force(length), table.in_force(length)
        same = one.inv_freq.shape == other.inv_freq.shape and torch.allclose(
            one.inv_freq, other.inv_freq, rtol=1e-5, atol=0
        )
        if not same or abs(one.factor / other.factor - 1) > 1e-6:
            return False
    return True


@dataclass(frozen=True)
class Scaling:
    """The scaling that a config puts in force.

    Attributes:
        scaled: True if a table differs from the plain one of the same base.
        patch: The patch with the same tables on the unscaled model; `None` if none is known, or none is needed.
    """

    scaled: bool
    patch: PatchConfig | None = None

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


def scaling_of(config: Any) -> Scaling:
    """Return the scaling that a config puts in force."""
    if same_tables(config, unscaled(config)):
        return Scaling(False)
    return Scaling(True, as_patch(config))
