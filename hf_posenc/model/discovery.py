"""Finds the rotary tables of a live model and reads what they say, with no model family known by name."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import PosencError, UnsupportedModelError
from hf_posenc.model.rotary import FREQUENCIES, RotaryWrapper, attribute, table_labels, unwrapped
from hf_posenc.rope import RopeSpec

# rope_type values whose table is plain `theta ** (-2i/d)`, `proportional` with zeros at its end
UNSCALED = ("default", "proportional")
_LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
)
_EXACT = 2e-6  # two ways of evaluating theta ** (-2i/d) in float32
_ROUNDED = 1e-2  # a table that was cast to bfloat16


@dataclass(frozen=True, eq=False)
class RotaryTable:
    """One rotary table of a live model.

    Attributes:
        name: The module's path in the model.
        label: The layer type that the table belongs to; `""` where one table serves all layers.
        module: The rotary module (the original one, where the model is patched).
        config: The config that the module was built from.
        rope_type: What scaling the live module has, in transformers' word.
        parameters: The entry of `config.rope_parameters` for this table, copied.
    """

    name: str
    label: str
    module: nn.Module
    config: Any
    rope_type: str
    parameters: Mapping[str, Any]

    @property
    def scaled(self) -> bool:
        """Whether the checkpoint itself is already scaled."""
        return self.rope_type not in UNSCALED or self.parameters.get("factor", 1.0) not in (
            None,
            1,
            1.0,
        )

    def live(self) -> tuple[Tensor, float]:
        """The module's own table, shape (d/2,), and its factor on cos and sin."""
        inv_freq: Tensor = getattr(self.module, attribute(self.label, FREQUENCIES))
        if inv_freq.is_meta:
            inv_freq = getattr(self._rebuilt(), attribute(self.label, FREQUENCIES))
        factor = getattr(self.module, attribute(self.label, "attention_scaling"), None)
        if factor is None:  # some classes keep one factor for all labels
            factor = getattr(self.module, "attention_scaling", None)
        return inv_freq, 1.0 if factor is None else float(factor)

    def _rebuilt(self) -> nn.Module:
        """The module as its class makes it from the config, for a model on the meta device."""
        make: Any = type(self.module)
        try:
            with torch.device("cpu"):
                module: nn.Module = make(self.config)
        except Exception as error:
            raise UnsupportedModelError(
                f"{self.name} is on the meta device and {make.__name__} cannot be built from its config "
                f"alone ({error}). Load the model first, then patch it."
            ) from error
        return module


def rotary_tables(model: nn.Module) -> tuple[RotaryTable, ...]:
    """Every rotary table of the text decoder, in the order of the modules; empty where there is none."""
    found = [
        RotaryTable(name, label, module, config, *_described(module, config, label))
        for name, module, config in _text_rotaries(model)
        for label in table_labels(module)
    ]
    return tuple(found)


def read_spec(table: RotaryTable, original: int, *, compose: bool) -> RopeSpec:
    """What a method starts from.

    Args:
        table: The table to read.
        original: The original context length, in tokens.
        compose: Start from the table in force, scaled as it is, instead of from `rope_theta`.

    Raises:
        UnsupportedModelError: A table that is not `theta ** (-2i/d)` for any theta.
    """
    known = table.live()[0].detach().to("cpu", torch.float32).clone()
    dim = 2 * len(known)
    theta = table.parameters.get("rope_theta") or getattr(table.config, "rope_theta", None)
    if compose:
        return RopeSpec(dim, _required(theta, table), original, known)
    rotated = len(known)
    if table.rope_type == "proportional":
        rotated = int(float(table.parameters.get("partial_rotary_factor") or 1.0) * dim // 2)
    if table.scaled:
        spec = RopeSpec(dim, _required(theta, table), original)
        return spec if rotated == len(known) else replace(spec, frequencies=_plain(spec, rotated))

    by_speed = known.argsort(descending=True, stable=True)
    order = None if bool((by_speed == torch.arange(len(known))).all()) else by_speed.argsort()
    known = known[by_speed]
    for base in (theta, _geometric_base(known[:rotated], dim)):
        if base is None:
            continue
        spec = RopeSpec(dim, float(base), original, order=order)
        plain = _plain(spec, rotated)
        if torch.allclose(known.double(), plain, rtol=_ROUNDED, atol=0):
            exact = torch.allclose(known.double(), plain, rtol=_EXACT, atol=0)
            return replace(
                spec, frequencies=known if exact else plain
            )  # exact: the very bits of the model
    raise UnsupportedModelError(
        f"{table.name} ({type(table.module).__name__}) holds frequencies that are not theta ** (-2i/d) "
        "for any theta, so no method says what they should become. Use compose=True to scale them as they are."
    )


def original_length(table: RotaryTable, *, compose: bool) -> int:
    """The context length `L` that a method starts from, in tokens.

    The rule: for `compose`, what the scaled checkpoint reaches (`max_position_embeddings`). Else
    the first of `config.original_max_position_embeddings` (Phi-3), the same key of
    `rope_parameters`, and `max_position_embeddings`.

    Raises:
        PosencError: The config names none of them.
    """
    config = table.config
    candidates = [getattr(config, key, None) for key in _LENGTH_KEYS]
    if not compose:
        key = "original_max_position_embeddings"
        candidates = [getattr(config, key, None), table.parameters.get(key), *candidates]
    for candidate in candidates:
        if isinstance(candidate, int) and candidate > 0:
            return candidate
    raise PosencError(
        f"The config of {table.name} names no context length ({', '.join(_LENGTH_KEYS)}). "
        "Give original_max_position_embeddings=, the number of tokens that the model was trained on."
    )


def _text_rotaries(model: nn.Module) -> list[tuple[str, nn.Module, Any]]:
    """Path, module and config of every rotary module of the text decoder, wrappers unwrapped.

    Those whose config is the text decoder's own, where there are such (a protein encoder reads text
    too); else all, if one config covers the whole model (BLT has one more for each of its parts).
    """
    found = list(_rotaries_of_text(model))
    config: Any = getattr(model, "config", None)
    text = config.get_text_config(decoder=True)
    own = [entry for entry in found if getattr(entry[2], "model_type", None) == text.model_type]
    return own or (found if text is config else [])


def _rotaries_of_text(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    owners: dict[str, Any] = {}  # the transformers models inside, by path
    wrapped: list[str] = []
    for name, module in model.named_modules():
        if hasattr(module, "config") and hasattr(module, "get_input_embeddings"):
            owners[name] = module
        if any(name.startswith(f"{outer}.") for outer in wrapped):
            continue
        if isinstance(module, RotaryWrapper):
            wrapped.append(name)
            module = unwrapped(module)
        if not table_labels(module):
            continue
        around = [path for path in owners if not path or name.startswith(f"{path}.")]
        owner = owners[max(around, key=len)] if around else None
        if "text" in getattr(owner, "input_modalities", "text"):
            config = vars(module).get("config")
            yield name, module, config or (owner and owner.config.get_text_config())


def _described(module: nn.Module, config: Any, label: str) -> tuple[str, Mapping[str, Any]]:
    parameters = getattr(config, "rope_parameters", None) or {}
    if label and isinstance(parameters.get(label), Mapping):
        parameters = parameters[label]
    rope_type = getattr(module, "rope_type", None)
    if isinstance(rope_type, Mapping):
        rope_type = rope_type.get(label)
    return rope_type or "default", dict(parameters)


def _required(theta: Any, table: RotaryTable) -> float:
    if theta is None:
        raise UnsupportedModelError(
            f"The config of {table.name} has no rope_theta, and its table cannot be read."
        )
    return float(theta)


def _plain(spec: RopeSpec, rotated: int) -> Tensor:
    """`theta ** (-2i/d)` for the rotated pairs, and zeros after them."""
    table = spec.theta ** -spec.exponents()
    table[rotated:] = 0
    return table


def _geometric_base(rotated: Tensor, dim: int) -> float | None:
    """The base of a geometric table, read off its last rotated pair; `None` where it has none."""
    last = len(rotated) - 1
    if last < 1 or not 0 < float(rotated[last]) < 1:
        return None
    return math.exp(-math.log(float(rotated[last])) * dim / (2 * last))


# Which rotary tables a choice of layers means.


_LOCAL = ("sliding", "chunked", "local")
_LAYER_INDEX = re.compile(r"\blayers?\.(\d+)\.")


def select(
    tables: Sequence[RotaryTable], layers: str | Sequence[int], *, whole: bool
) -> tuple[RotaryTable, ...]:
    """The tables that serve the chosen layers.

    Args:
        tables: Every table of the model.
        layers: `"full"`: every table but those of sliding-window and chunked layers; `"all"`; or
            layer indices.
        whole: The table itself is to be changed, so layer indices must be exactly those of one or more tables.

    Raises:
        PosencError: A choice that is no choice, or that cuts through a table.
        UnsupportedModelError: A model whose full-attention layers do not rotate.
    """
    if layers == "all":
        return tuple(tables)
    if layers == "full":
        chosen = tuple(table for table in tables if not table.label.startswith(_LOCAL))
        if not chosen:
            raise UnsupportedModelError(
                f"Only the layers of type {', '.join(table.label for table in tables)} of this model "
                'rotate, and they never look past their window. Pass layers="all" to patch them all the same.'
            )
        return chosen
    if (
        isinstance(layers, str)
        or not isinstance(layers, Iterable)
        or not all(isinstance(layer, int) for layer in layers)
    ):
        raise PosencError(f'layers is "full", "all" or a list of layer indices, not {layers!r}.')
    wanted = set(layers)
    groups = {index: _layers_of(table) for index, table in enumerate(tables)}
    if not whole and wanted and wanted <= set().union(*groups.values()):
        return tuple(tables[index] for index, served in groups.items() if served & wanted)
    chosen = tuple(tables[index] for index, served in groups.items() if served and served <= wanted)
    covered = set().union(*(_layers_of(table) for table in chosen)) if chosen else set()
    if not wanted or covered != wanted:
        listing = "; ".join(
            f"{table.label or table.name}: {_span(groups[index])}"
            for index, table in enumerate(tables)
        )
        raise PosencError(
            f"layers={sorted(wanted)} cuts through a rotary table. The tables of this model serve these "
            f"layers: {listing}. Choose all layers of one or more tables."
        )
    return chosen


def _layers_of(table: RotaryTable) -> frozenset[int]:
    own = _LAYER_INDEX.search(f"{table.name}.")
    if own:
        return frozenset({int(own[1])})
    count = range(getattr(table.config, "num_hidden_layers", 0))
    if not table.label:
        return frozenset(count)
    types = getattr(table.config, "layer_types", None) or []
    return frozenset(layer for layer in count if layer < len(types) and types[layer] == table.label)


def _span(layers: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(layers))) or "unknown"


def attends_locally(module: nn.Module, config: Any) -> bool:
    """Whether an attention module is of a sliding-window or chunked layer in a model that has others too."""
    kinds = {*(getattr(config, "layer_types", None) or [])}
    return len(kinds) > 1 and layer_type(module, config).startswith(_LOCAL)


def layer_type(module: nn.Module, config: Any) -> str:
    """The type of the layer that an attention module is of, as the config names it; `""` where it does not."""
    kinds = getattr(config, "layer_types", None) or []
    index = layer_index("", module)
    own = getattr(module, "layer_type", None)
    return str(own or (kinds[index] if index is not None and index < len(kinds) else ""))


def layer_index(name: str, module: nn.Module) -> int | None:
    """Which layer an attention module belongs to."""
    own = getattr(module, "layer_idx", None)
    if isinstance(own, int):
        return own
    found = _LAYER_INDEX.search(f"{name}.")
    return int(found[1]) if found else None
