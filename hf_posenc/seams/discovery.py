"""Finds the rotary tables of a live model and reads what they say, with no model family known by name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import PosencError, UnsupportedModelError
from hf_posenc.rope import RopeSpec
from hf_posenc.seams.rotary import FREQUENCIES, attribute, table_labels
from hf_posenc.seams.wrapper import RotaryWrapper, unwrapped

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
