"""The config of a patched model, with which a saved model loads in plain transformers.

Every form is proven before it is written: the config is saved to its own JSON and loaded, the rotary class is built
from it, and its output is compared with the patch.
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

from hf_posenc.adapters import ArchAdapter
from hf_posenc.methods import RopeScaling, YaRN
from hf_posenc.methods.yarn import mscale
from hf_posenc.model.discovery import RotaryTable
from hf_posenc.model.rotary import (
    PosencRotary,
    computes,
    moves_with_length,
    native_rotary,
    probed_length,
    rotary_output,
)
from hf_posenc.model.unwrapping import config_parts as config_parts
from hf_posenc.rope import RopeSpec
from hf_posenc.seams.held import write

BLOCK = "hf_posenc"
"""The config attribute that holds the patch and the config's values from before it."""
IN_WEIGHTS = "in_weights"
"""The key of that block which is true if the saved weights hold the patch."""

SCALING_KEYS = frozenset(
    {"rope_type", "type", "factor", "attention_factor", "original_max_position_embeddings"}
    | {"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
    | {"low_freq_factor", "high_freq_factor"}
    | {"short_factor", "long_factor", "short_mscale", "long_mscale"}
)
"""Keys of `rope_parameters` that belong to a scaling; every other key (mrope_section, ...) stays."""
# The divisor for a frequency of 0 in a longrope list: an infinity would not pass through JSON.
_STANDSTILL = 1e30
_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True)
class PatchedTable:
    """A table, the wrapper that patches it, and the buffer of the logarithms of its learned gain, where it has one."""

    table: RotaryTable
    wrapper: PosencRotary
    log_gain: str | None = None

    @property
    def spec(self) -> RopeSpec:
        """The frequencies that the method starts from."""
        return self.wrapper.specs[self.table.label]

    @property
    def probe(self) -> int:
        """The length of the text whose rotation is compared, in tokens."""
        return probed_length(self.spec.original_max_position_embeddings)

    def in_force(self) -> tuple[Tensor, float]:
        """Return the patched frequencies, shape (d/2,), and factor, at the length of the probe."""
        inv_freq, factor = self.wrapper.table(self.table.label, self.probe)
        return inv_freq, float(factor)

    def output_of(self, rotary: nn.Module) -> tuple[Tensor, Tensor] | None:
        """Return the (cos, sin) of the probe by a module: the wrapper on its own device, any other on the CPU."""
        device = rotary.device if isinstance(rotary, PosencRotary) else torch.device("cpu")
        return rotary_output(rotary, self.table.label, device, length=self.probe)

    def computed_by(self, rotary: nn.Module) -> bool:
        """Return whether a module, the wrapper itself or another, gives the patched rotation."""
        inv_freq, factor = self.in_force()
        gain = getattr(native_rotary(rotary), self.log_gain, None) if self.log_gain else None
        if isinstance(gain, Tensor) and not gain.is_meta:
            inv_freq = inv_freq * gain.detach().to(inv_freq).exp()
        return computes(self.output_of(rotary), inv_freq, factor)

    def proven_by(self, rotary: nn.Module) -> bool:
        """Return whether a module of transformers gives the patched rotation for text after text.

        Before 5.13 its dynamic table keeps the longest length; before 5.15 a longrope table of one layer type raises at
        the second long text.
        """
        label, device = self.table.label, self.wrapper.device
        moves = moves_with_length(rotary, label, torch.device("cpu"))
        return moves == moves_with_length(self.wrapper, label, device) and self.computed_by(rotary)


def plan_edit(
    config: Any,
    tables: list[PatchedTable],
    method: RopeScaling,
    extended: int | None,
    adapter: ArchAdapter,
) -> tuple[dict[str, Any], str | None]:
    """Return a config's new values, and the form in which plain transformers computes the patch from them.

    The values that transformers 4.57 reads are among them where the proof shows them harmless. The form
    is `"rope_parameters"`, `"longrope"`, or `None` where plain transformers cannot compute the patch.
    """
    lengths, legacy = lengths_of(config, tables, extended), adapter.legacy(config)
    forms = list(rope_forms(config, tables, method))
    # First what transformers 4.57 computes too, in whatever form, then what only 5 does.
    trials = [
        *((form, rope, legacy.values(rope)) for form, rope in forms if legacy.expresses(rope)),
        *((form, rope, old) for form, rope in forms for old in legacy.variants(rope)),
    ]
    if (method.rope_parameters(tables[0].spec) or {}).get("rope_type") == "proportional":
        trials.sort(key=lambda trial: trial[0] == "longrope")  # engines read the native type
    for form, rope_parameters, old in trials:
        for head_dim in ({}, _readable_head_dim(config)):
            values = {**lengths, "rope_parameters": rope_parameters, **head_dim, **old}
            if (loaded := _proven(config, values, tables)) is not None:
                if _ORIGINAL in vars(loaded):  # set by the class of Phi-3.5-MoE
                    values.setdefault(_ORIGINAL, vars(loaded)[_ORIGINAL])
                return values, form
    return {} if method.length_dependent else lengths, None


def lengths_of(config: Any, tables: list[PatchedTable], extended: int | None) -> dict[str, Any]:
    """Return the config's attributes for the length of a text."""
    values: dict[str, Any] = {} if extended is None else {"max_position_embeddings": extended}
    if getattr(config, _ORIGINAL, None) is not None:
        # Phi-3's own attribute wins over the key of rope_parameters.
        values[_ORIGINAL] = tables[0].spec.original_max_position_embeddings
    return values


def rope_forms(
    config: Any, tables: list[PatchedTable], method: RopeScaling
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the forms of a patch in `rope_parameters`, each with its name; the first that is proven is written."""
    makers = [("rope_parameters", _native)]
    if not method.length_dependent:
        makers.append(("longrope", _longrope))
    for (form, make), own_keys in itertools.product(makers, (False, True)):
        entries: dict[str, Any] = {}
        for patched in tables:
            entry = make(patched, method)
            if entry is not None and own_keys:  # Phi-3.5-MoE reads the factor from keys of its own
                factor = patched.in_force()[1]
                entry = {"short_mscale": factor, "long_mscale": factor, **entry}
            entries[patched.table.label] = entry
        if None in entries.values():
            continue
        if list(entries) != [""]:  # nested by layer type; the other types' entries stay
            current = getattr(config, "rope_parameters", None) or {}
            entries = {"": {**copy.deepcopy(dict(current)), **entries}}
        yield form, entries[""]


def _native(patched: PatchedTable, method: RopeScaling) -> dict[str, Any] | None:
    """The method by transformers' own `rope_type`, for a table that starts from `rope_theta`."""
    scaled = patched.wrapper.base_factors or method.filters
    entry = None if scaled else method.rope_parameters(patched.spec)
    own = _own_length(patched.table)
    if entry is None or (own and entry.get(_ORIGINAL, own) != own):
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
        "factor": float(getattr(method, "scale", 1.0)),
        _ORIGINAL: spec.original_max_position_embeddings,
        **_kept(patched, dropped),
        **temperature_keys(patched.table, method, compose=bool(patched.wrapper.base_factors)),
        "rope_type": "longrope",
        "short_factor": divisors,
        "long_factor": divisors,
        "attention_factor": factor,
    }


def temperature_keys(table: RotaryTable, method: RopeScaling, *, compose: bool) -> dict[str, float]:
    """Return the keys from which DeepSeek's attention computes YaRN's second temperature in force, whatever the type.

    None where it is 1. The temperatures of a composed YaRN and of its checkpoint are multiplied.
    """
    keys: dict[str, float] = {}
    old = table.parameters if table.scaled and compose else {}
    if old.get("mscale_all_dim"):
        keys = {key: float(old.get(key) or 1) for key in ("factor", "mscale_all_dim")}
    if isinstance(method, YaRN) and method.mscale_all_dim and method.scale > 1:
        weight = method.mscale_all_dim
        if keys:
            own, unit = (float(mscale(method.scale, each)) for each in (weight, 1.0))
            weight = (temperature(keys) * own - 1) / (unit - 1)
        keys = {"factor": method.scale, "mscale_all_dim": weight}
    return keys


def temperature(entry: Mapping[str, Any]) -> float:
    """Return YaRN's second temperature by `rope_parameters`; DeepSeek's attention has its square in its `scaling`."""
    weight = entry.get("mscale_all_dim")
    return float(mscale(float(entry.get("factor") or 1), float(weight))) if weight else 1.0


def _kept(patched: PatchedTable, dropped: Iterable[str]) -> dict[str, Any]:
    spec, old = patched.spec, patched.table.parameters
    left_out = SCALING_KEYS | set(dropped)
    kept = {key: copy.deepcopy(value) for key, value in old.items() if key not in left_out}
    # The attention of Ministral reads it, whatever the rope_type.
    if old.get(_ORIGINAL) is not None:
        kept[_ORIGINAL] = _own_length(patched.table) or spec.original_max_position_embeddings
    return {**kept, "rope_theta": spec.theta}


def _own_length(table: RotaryTable) -> int | None:
    """Return the length in the config from which the attention of Ministral computes its factor on queries."""
    old = table.parameters
    return old.get(_ORIGINAL) if old.get("llama_4_scaling_beta") else None


def _proven(config: Any, values: Mapping[str, Any], tables: list[PatchedTable]) -> Any:
    """Return a config with these values, saved and loaded; `None` if its rotary modules do not compute the patch."""
    trial = copy.deepcopy(config)
    write(trial, values)
    loaded: Any = reloaded(trial)
    kinds = {type(patched.table.module) for patched in tables}
    try:
        with quiet():
            fresh = {kind: kind(loaded) for kind in kinds} if loaded is not None else {}
        proven = bool(fresh) and all(x.proven_by(fresh[type(x.table.module)]) for x in tables)
        return loaded if proven else None
    except Exception:
        return None


def reloaded(config: Any) -> Any:
    """Return a config as transformers loads it from its JSON; `None` where it does not take its `rope_parameters`."""
    try:
        with quiet():
            loaded = type(config).from_dict(config.to_dict())
        for (_, part), (_, again) in zip(config_parts(config), config_parts(loaded), strict=True):
            written = getattr(part, "rope_parameters", None) or {}
            kept = getattr(again, "rope_parameters", None) or {}
            if any(kept.get(key) != value for key, value in written.items()):
                return None
    except Exception:
        return None
    return loaded


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
