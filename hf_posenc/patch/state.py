"""The state of a patched model, which undoes the patch and is kept in the model itself."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import nn

from hf_posenc.methods import Method, seam_of
from hf_posenc.model.discovery import RotaryTable
from hf_posenc.model.unwrapping import configs_of, unwrap
from hf_posenc.patch import export
from hf_posenc.patch.config import PatchConfig
from hf_posenc.seams.held import Edits, Record
from hf_posenc.seams.native import NativeSeam

STATE = "_hf_posenc"
"""The attribute of a patched model that holds its `State`."""

BESIDE = "_posenc_beside"
"""The attribute of an adapter's config that holds the parameters of the patch which are saved beside it."""

_SeamT = TypeVar("_SeamT", RotaryTable, NativeSeam)


@dataclass(frozen=True)
class LayerPart:
    """The methods of some layers, where layers differ."""

    layers: tuple[int, ...]
    methods: tuple[Method, ...]
    original: int  # the context length that they start from, in tokens
    compose: bool  # start from the scaled frequencies of a checkpoint
    strict: bool  # refuse layers in which the methods have nothing to change


@dataclass(kw_only=True)
class State(Record):
    """A patch, and the record of what it has changed."""

    config: PatchConfig
    methods: tuple[Method, ...]
    # The methods by layers, where layers differ or share a rotary table with layers that are not chosen. All of them
    # are then computed in attention.
    parts: tuple[LayerPart, ...] = ()
    # The seam of a model without rotary embedding; `None` where rotation is patched.
    native: NativeSeam | None = None
    # The attention implementation that the engine replaces, as in `Patch`.
    attention: str | None = None
    # "model", "adapter" or "part" once saving has warned that the patch is not loaded with it by everyone.
    warned: set[str] = field(default_factory=set)
    # The PEFT configs that saving has made carry the patch.
    adapters: list[Any] = field(default_factory=list)
    # True if the patch starts from frequencies in force that are not those of the config.
    foreign: bool = False
    # What the checkpoint's own scaling had and the methods which replace it have not, as in `Patch`.
    dropped: Mapping[str, Any] = field(default_factory=dict)

    @property
    def in_attention(self) -> list[Method]:
        """The methods that compute attention themselves."""
        if self.native is not None and not self.native.in_attention:
            return []
        if self.parts:
            return [*self.methods]
        return [method for method in self.methods if seam_of(method) != "rotary"]

    def write_config(self, model: nn.Module, edits: Edits) -> None:
        """Write to configs, and to the outermost one the block that `from_pretrained` reads.

        The block of a patch that is in the weights is marked: loading these is all that the patch needs.
        """
        outer: Any = model.config
        paths = {id(part): path for path, part in export.config_parts(outer)}
        before = {}
        for config, values in edits:
            old = self.set(config, values)
            if id(config) in paths:
                before[paths[id(config)]] = old
        marks = {"before": before} | ({export.IN_WEIGHTS: True} if self.export == "weights" else {})
        self.set(outer, {export.BLOCK: {**self.config.to_dict(), **marks}})


def state_of(model: nn.Module) -> State | None:
    """Return the state of a patched model, wrapped or not; `None` where it is not patched."""
    return getattr(unwrap(model), STATE, None)


def own_config(model: nn.Module, seams: Sequence[_SeamT]) -> tuple[_SeamT, ...]:
    """Give a model, wrappers around it included, configs of its own, and return its tables or seam with them.

    Two models built from one config object share it, and only one of them is to be patched.
    """
    copies: dict[int, Any] = {}
    for module in model.modules():
        if hasattr(config := vars(module).get("config"), "get_text_config"):
            vars(module)["config"] = copy.deepcopy(config, copies)
    return tuple(replace(each, config=copies.get(id(each.config), each.config)) for each in seams)


def config_values(model: nn.Module) -> dict[tuple[str, str], dict[str, Any]]:
    """Return copies of the values of every config, without the configs inside."""
    return {
        place: {
            key: copy.deepcopy(value)
            for key, value in vars(config).items()
            if not hasattr(value, "get_text_config")
        }
        for place, config in configs_of(model).items()
    }


def replace_modules(model: nn.Module, replacements: Mapping[int, nn.Module]) -> None:
    """Replace modules (by `id`) at every path where the model holds them."""
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if id(module) in replacements:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, replacements[id(module)])
