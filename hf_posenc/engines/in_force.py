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
from hf_posenc.patch.export import config_parts
from hf_posenc.patch.patching import patch_model
from hf_posenc.patch.scaled import entry_knobs
from hf_posenc.saving import take_patch

OWN_KEYS = (
    *("partial_rotary_factor", "mrope_section", "mrope_interleaved", "xdrope_section"),
    "llama_4_scaling_beta",
)
"""Keys of `rope_parameters` that belong to the model and not to a scaling."""
_ORIGINAL = "original_max_position_embeddings"


def unscaled(config: Any) -> Any:
    """Return a copy of a config whose tables are plain, of the same base."""
    copied = copy.deepcopy(config)
    kept = (*OWN_KEYS, "rope_theta")

    def plain(entry: Any) -> Any:
        if not isinstance(entry, dict) or entry.get("rope_type") in ("default", "proportional"):
            return entry
        return {"rope_type": "default", **{key: entry[key] for key in kept if key in entry}}

    for _, part in config_parts(copied):
        if rope := getattr(part, "rope_parameters", None):
            nested = any(isinstance(value, dict) for value in rope.values())
            part.rope_parameters = {k: plain(v) for k, v in rope.items()} if nested else plain(rope)
    return copied


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
    """Return whether a model has these tables for texts of these lengths, up to rounding."""
    mine = {(table.table.part, table.label): table for table in source_tables(model)}
    for table, length in itertools.product(wanted, lengths):
        if (place := (table.table.part, table.label)) not in mine:
            return False
        one, other = mine[place].in_force(length), table.in_force(length)
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
        given = ",".join(f"{key}={value}".removesuffix(".0") for key, value in options.items())
        return f"{method}:{given}" if given else method


def scaling_of(config: Any) -> Scaling:
    """Return the scaling that a config puts in force; raise for one that was saved with a patch.

    A patch is returned only if it was tried, and the tables are the same.
    """
    if (saved := take_patch(copy.deepcopy(config), "the model")) is not None:
        raise PosencError(
            f"This config was saved with the patch {saved}, which is in force: hf-posenc inspect FOLDER prints it, and "
            "hf_posenc.get_patch(model) returns it."
        )
    text, plain = config.get_text_config(decoder=True), unscaled(config)
    wanted = source_tables(empty_model(config))
    reach = int(getattr(text, "max_position_embeddings", 0) or 4096)
    lengths = 1, reach, 8 * reach  # within its reach, at it and far beyond it
    if _computes(empty_model(plain), wanted, lengths):
        return Scaling(False)
    rope = getattr(text, "rope_parameters", None) or {}
    entry = rope.get("full_attention", rope)
    for kind in (each for each in METHODS if issubclass(each, RopeScaling) and each.for_rotary):
        if (patch := _with_values_of(kind, entry, text)) is None:
            continue
        model, original = empty_model(plain), patch.original_max_position_embeddings
        try:
            patch_model(model, patch.build(), original_max_position_embeddings=original)
        except PosencError:
            continue
        if _computes(model, wanted, lengths):
            return Scaling(True, patch)
    return Scaling(True)
