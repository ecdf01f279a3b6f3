"""The state of a patched model, which undoes the patch and is kept in the model itself."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from hf_posenc.methods import Method
from hf_posenc.model.unwrapping import unwrap
from hf_posenc.patch import export
from hf_posenc.patch.config import PatchConfig

STATE = "_hf_posenc"
"""The attribute of a patched model that holds its `State`."""


@dataclass(frozen=True)
class AttentionSeam:
    """The changes in the attention of a model.

    Attributes:
        owner: The path of the transformers model that holds the text decoder.
        before: The attention implementations that its config and the configs inside it named, by path.
    """

    owner: str
    before: Mapping[str, Any]

    @property
    def replaced(self) -> str:
        """The attention implementation that the engine replaces."""
        return str(self.before[""])


@dataclass
class State:
    """The record that undoes a patch; kept in the model, so that a deepcopied one carries its own.

    Attributes:
        config: The request, with everything resolved.
        original: The original context length, in tokens.
        extended: The context length that the patch reaches; `None` where it follows the text.
        methods: The methods, the first of which is `config.method`.
        export: How plain transformers computes the patch (`export.ConfigEdit.form`).
        configs: Every config that was written to, with its values from before.
        scalings: The attention modules whose `scaling` was changed, by path, with the old value.
        tensors: The sin-cos tables that were swapped, by path and attribute.
        attention: The changes in attention.
    """

    config: PatchConfig
    original: int
    extended: int | None
    methods: tuple[Method, ...]
    export: str | None = None
    configs: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    scalings: dict[str, float] = field(default_factory=dict)
    tensors: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    attention: AttentionSeam | None = None


def state_of(model: nn.Module) -> State | None:
    """Return the state of a patched model, wrapped or not; `None` where it is not patched."""
    return getattr(unwrap(model), STATE, None)


def own_config(model: nn.Module) -> Mapping[int, Any]:
    """Give a model, wrappers around it included, configs of its own.

    Two models built from one config object share it, and only one of them is to be patched.

    Returns:
        The copies, by `id` of the originals.
    """
    copies: dict[int, Any] = {}
    for module in model.modules():
        config = vars(module).get("config")
        if hasattr(config, "get_text_config"):
            vars(module)["config"] = copy.deepcopy(config, copies)
    return copies


def replace_modules(model: nn.Module, replacements: Mapping[int, nn.Module]) -> None:
    """Replace modules (by `id`) at every path where the model holds them."""
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if id(module) in replacements:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, replacements[id(module)])


def write_config(
    model: nn.Module, state: State, edits: Sequence[tuple[Any, Mapping[str, Any]]]
) -> None:
    """Write to configs, and to the outermost one the block that `from_pretrained` reads."""
    outer: Any = model.config
    paths = {id(part): path for path, part in export.config_parts(outer)}
    before = {}
    for config, values in edits:
        state.configs.append((config, export.write(config, values)))
        if id(config) in paths:
            before[paths[id(config)]] = state.configs[-1][1]
    block = {**state.config.to_dict(), "before": before}
    state.configs.append((outer, export.write(outer, {export.BLOCK: block})))
