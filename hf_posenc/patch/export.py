"""The config of a patched model, with which a saved model loads in plain transformers.

Every form is proven before it is written: the config is saved to its own JSON and loaded, the
rotary class is built from it, and its output is compared with the patch.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.adapters import LegacyKeys
from hf_posenc.methods import RopeScaling
from hf_posenc.model.discovery import RotaryTable
from hf_posenc.model.rotary import PosencRotary, computes, probed_length, rotary_output
from hf_posenc.rope import RopeSpec

BLOCK = "hf_posenc"
"""The config attribute that holds the patch and the config's values from before it."""

# Keys of `rope_parameters` that belong to a scaling; every other key (mrope_section,
# partial_rotary_factor, ...) stays.
_SCALING_KEYS = frozenset(
    {"rope_type", "type", "factor", "attention_factor", "original_max_position_embeddings"}
    | {"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
    | {"low_freq_factor", "high_freq_factor"}
    | {"short_factor", "long_factor", "short_mscale", "long_mscale"}
)
# The divisor that stands for a frequency of 0 in a longrope list, where an infinity would not pass
# through JSON.
_STANDSTILL = 1e30
_ABSENT = "<absent>"


@dataclass(frozen=True)
class PatchedTable:
    """A table and the wrapper that patches it."""

    table: RotaryTable
    wrapper: PosencRotary

    @property
    def spec(self) -> RopeSpec:
        """The frequencies that the method starts from."""
        return self.wrapper.specs[self.table.label]

    def in_force(self) -> tuple[Tensor, float]:
        """Return the patched frequencies, shape (d/2,), and factor, at the length of the probe."""
        length = probed_length(self.spec.original_max_position_embeddings)
        inv_freq, factor = self.wrapper.table(self.table.label, length)
        return inv_freq, float(factor)

    def computed_by(self, rotary: nn.Module) -> bool:
        """Return whether another module computes the same."""
        length = probed_length(self.spec.original_max_position_embeddings)
        output = rotary_output(rotary, self.table.label, torch.device("cpu"), length=length)
        return computes(output, *self.in_force())


@dataclass(frozen=True)
class ConfigEdit:
    """The changes of one config.

    Attributes:
        values: Attributes to set; those that plain transformers 4 reads are among them where the
            proof shows them harmless.
        form: The form in which plain transformers computes the patch, `"rope_parameters"` or
            `"longrope"`; `None` where it cannot.
    """

    values: Mapping[str, Any]
    form: str | None


def plan_edit(
    config: Any,
    tables: list[PatchedTable],
    method: RopeScaling,
    extended: int | None,
    legacy: LegacyKeys,
) -> ConfigEdit:
    """Return the first form in which plain transformers computes the same as the patch.

    Args:
        config: The config that the tables' modules were built from.
        tables: The patched tables of that config.
        method: The method in force.
        extended: The context length that the model now reaches, in tokens; `None`: as before.
        legacy: The attributes that transformers 4.57 reads for this model type.
    """
    lengths = lengths_of(config, tables, extended)
    forms = list(rope_forms(config, tables, method))
    # First what transformers 4.57 computes too, in whatever form, then what only 5 does.
    trials = [
        *((form, rope, legacy.values(rope)) for form, rope in forms if legacy.expresses(rope)),
        *((form, rope, old) for form, rope in forms for old in legacy.variants(rope)),
    ]
    for form, rope_parameters, old in trials:
        for head_dim in ({}, _readable_head_dim(config)):
            values = {**lengths, "rope_parameters": rope_parameters, **head_dim, **old}
            if _proven(config, values, rope_parameters, tables):
                return ConfigEdit(values, form)
    return ConfigEdit({} if method.length_dependent else lengths, None)


def write(config: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Set attributes of a config and return their old values, for `restore`."""
    mapping = getattr(config, "attribute_map", {})
    before: dict[str, Any] = {}
    for key, value in values.items():
        key = mapping.get(key, key)
        before[key] = copy.deepcopy(vars(config).get(key, _ABSENT))
        # Not by setattr: `rope_scaling` is a property there that would replace the whole block.
        vars(config)[key] = copy.deepcopy(value)
    return before


def restore(config: Any, before: Mapping[str, Any]) -> None:
    """Undo `write`."""
    for key, value in before.items():
        if isinstance(value, str) and value == _ABSENT:
            vars(config).pop(key, None)
        else:
            vars(config)[key] = copy.deepcopy(value)


def config_parts(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield a config and every config inside it, by dotted path; the outermost is `""`."""
    yield "", config
    for key, value in vars(config).items():
        if hasattr(value, "get_text_config"):
            for path, part in config_parts(value):
                yield f"{key}.{path}".rstrip("."), part


def lengths_of(config: Any, tables: list[PatchedTable], extended: int | None) -> dict[str, Any]:
    """Return the config's attributes for the length of a text."""
    values: dict[str, Any] = {}
    if extended is not None:
        values["max_position_embeddings"] = extended
    if getattr(config, "original_max_position_embeddings", None) is not None:
        # Phi-3's own attribute wins over the key of rope_parameters.
        original = tables[0].spec.original_max_position_embeddings
        values["original_max_position_embeddings"] = original
    return values


def rope_forms(
    config: Any, tables: list[PatchedTable], method: RopeScaling
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the forms of a patch in `rope_parameters`, each with its name; the first that is proven is written."""
    makers = [("rope_parameters", _native)]
    if not method.length_dependent:
        makers.append(("longrope", _longrope))
    for (form, make), mscale in itertools.product(makers, (False, True)):
        entries = {patched.table.label: make(patched, method) for patched in tables}
        if any(entry is None for entry in entries.values()):
            continue
        if mscale:  # Phi-3.5-MoE reads the factor from keys of its own
            for patched in tables:
                factor = patched.in_force()[1]
                entry = entries[patched.table.label]
                assert entry is not None
                entries[patched.table.label] = {
                    "short_mscale": factor,
                    "long_mscale": factor,
                    **entry,
                }
        yield form, _merged(config, entries)


def _merged(config: Any, entries: Mapping[str, dict[str, Any] | None]) -> dict[str, Any]:
    """The whole `rope_parameters`: flat, or nested by layer type with the other types' entries as they were."""
    if list(entries) == [""]:
        return dict(entries[""] or {})
    current = getattr(config, "rope_parameters", None) or {}
    return {**copy.deepcopy(dict(current)), **entries}


def _native(patched: PatchedTable, method: RopeScaling) -> dict[str, Any] | None:
    """The method by transformers' own `rope_type`, for a table that starts from `rope_theta`."""
    spec = patched.spec
    entry = None if patched.wrapper.base_factors else method.rope_parameters(spec)
    if entry is None:
        return None
    if patched.table.rope_type == "proportional" and entry["rope_type"] in ("default", "linear"):
        entry = {**entry, "rope_type": "proportional"}
    return {**_kept(patched, dropped=()), **entry}


def _longrope(patched: PatchedTable, method: RopeScaling) -> dict[str, Any]:
    """Any static table as a longrope list, short = long = `f_i / f'_i`."""
    spec = patched.spec
    inv_freq, factor = patched.in_force()
    plain = spec.theta ** -spec.exponents()
    divisors = torch.where(inv_freq > 0, plain / inv_freq.double(), _STANDSTILL).tolist()
    # A proportional table covers the whole head; longrope would shorten it by the partial factor.
    dropped = ("partial_rotary_factor",) if patched.table.rope_type == "proportional" else ()
    return {
        **_kept(patched, dropped),
        "rope_type": "longrope",
        "short_factor": divisors,
        "long_factor": divisors,
        "factor": float(getattr(method, "scale", 1.0)),
        "attention_factor": factor,
        "original_max_position_embeddings": spec.original_max_position_embeddings,
    }


def _kept(patched: PatchedTable, dropped: Iterable[str]) -> dict[str, Any]:
    spec = patched.spec
    old = patched.table.parameters
    kept = {
        key: copy.deepcopy(value)
        for key, value in old.items()
        if key not in _SCALING_KEYS and key not in dropped
    }
    if (
        old.get("original_max_position_embeddings") is not None
    ):  # Ministral's attention reads it, whatever the rope_type
        kept["original_max_position_embeddings"] = spec.original_max_position_embeddings
    if patched.wrapper.base_factors and old.get(
        "mscale_all_dim"
    ):  # DeepSeek's attention reads it, whatever the rope_type
        kept["mscale_all_dim"], kept["factor"] = old["mscale_all_dim"], old.get("factor")
    return {**kept, "rope_theta": spec.theta}


def _proven(
    config: Any, values: Mapping[str, Any], expected: Mapping[str, Any], tables: list[PatchedTable]
) -> bool:
    """True if a config with these values, saved and loaded, builds rotary modules that compute the patch."""
    try:
        trial = copy.deepcopy(config)
        write(trial, values)
        with quiet():
            loaded = type(trial).from_dict(trial.to_dict())
            if any(loaded.rope_parameters.get(key) != value for key, value in expected.items()):
                return False
            fresh = {
                id(patched.table.module): type(patched.table.module)(loaded) for patched in tables
            }
    except Exception:
        return False
    return all(patched.computed_by(fresh[id(patched.table.module)]) for patched in tables)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the log and the warnings of transformers about configs that are only tried."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _readable_head_dim(config: Any) -> dict[str, Any]:
    """Attributes with which transformers' own yarn, dynamic and longrope can read `head_dim`, where they cannot."""
    if getattr(config, "is_heterogeneous", False):  # one size for each layer type (Gemma 4)
        return {"allow_global_per_layer_attribute_access": True}
    if "head_dim" in vars(config) and vars(config)["head_dim"] is None:  # Mixtral's default
        return {"head_dim": config.hidden_size // config.num_attention_heads}
    return {}
