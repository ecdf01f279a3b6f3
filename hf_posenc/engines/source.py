"""The model to export: its saved config, its patch, and the rotary tables in force; no weights are read."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hf_posenc.adapters import ArchAdapter
from hf_posenc.engines.formulas import Table, of_transformers
from hf_posenc.errors import PosencError
from hf_posenc.methods import Method, RopeScaling, get_method, seam_of
from hf_posenc.model.discovery import (
    RotaryTable,
    SinCosTable,
    adapter_of,
    original_length,
    tables_of,
)
from hf_posenc.model.rotary import PosencRotary
from hf_posenc.patch.config import PatchConfig
from hf_posenc.patch.export import BLOCK, PatchedTable, config_parts, lengths_of, rope_forms
from hf_posenc.patch.patching import get_patch, patch_model
from hf_posenc.patch.report import Patch
from hf_posenc.patch.request import MethodLike
from hf_posenc.saving import apply_config, take_patch

_BY_LENGTH = ("dynamic", "longrope")
"""The rope types of transformers whose table follows the length of the text."""


@dataclass(frozen=True, eq=False)
class SourceTable:
    """One rotary table to export.

    Attributes:
        table: The table in the model.
        wrapper: The module that patches it; `None` if it is the checkpoint's own.
        dim: The rotary dimension d.
    """

    table: RotaryTable
    wrapper: PosencRotary | None
    dim: int

    @property
    def label(self) -> str:
        """The layer type; `""` where one table serves all layers."""
        return self.table.label

    @property
    def moves(self) -> bool:
        """True for a checkpoint's own table that follows the length of the text."""
        return self.wrapper is None and self.table.rope_type in _BY_LENGTH

    def in_force(self, length: int) -> Table:
        """Return the model's table for a text of so many tokens."""
        if self.moves:
            rope, config = self.table.parameters, vars(self.table.config)
            table = of_transformers(rope, config, float(rope["rope_theta"]), self.dim, length)
            assert isinstance(table, Table)
            return table
        live = self.table.live() if self.wrapper is None else self.wrapper.table(self.label, length)
        return Table(live[0].detach().double(), float(live[1]))


@dataclass(frozen=True, eq=False)
class Source:
    """A model to export.

    Attributes:
        path: The folder, or the hub name, that it was read from.
        base: The same, or the base model of an adapter: the place of the weights.
        stored: The config as it is stored there.
        config: The same without the patch.
        methods: The methods in force; empty for a model without a patch.
        model: The model on the meta device; `None` if a method computes attention itself.
        patch: The patch in force in it.
        tables: Its rotary tables; none for a family that has them in its weights.
    """

    path: str
    base: str
    stored: Any
    config: Any
    methods: tuple[Method, ...]
    model: Any
    patch: Patch | None
    tables: tuple[SourceTable, ...]

    @property
    def follows_text(self) -> bool:
        """True if the patch reaches as far as a text needs."""
        return self.patch is not None and self.patch.extended_length is None

    @property
    def original(self) -> int:
        """The context length that the patch starts from, in tokens; without a patch, the config's."""
        if self.patch is not None:
            return self.patch.original_max_position_embeddings
        if self.tables:
            return original_length(self.tables[0].table, compose=False)
        return self.reach

    @property
    def reach(self) -> int:
        """The context length to serve, in tokens: the patch's, or else the config's."""
        extended = None if self.patch is None else self.patch.extended_length
        return extended or int(self.text_config.max_position_embeddings)

    @property
    def length_dependent(self) -> bool:
        """True if the tables follow the length of the text."""
        return any(table.moves for table in self.tables) or any(
            method.length_dependent for method in self.methods
        )

    @property
    def main_table(self) -> SourceTable | None:
        """The table of full attention, if there is one."""
        tables = {table.label: table for table in self.tables}
        return tables.get("full_attention", tables.get(""))

    @property
    def patched(self) -> list[PatchedTable]:
        """The tables that are patched."""
        return [PatchedTable(one.table, one.wrapper) for one in self.tables if one.wrapper]

    @property
    def text_path(self) -> str:
        """The dotted path, in the config, of the part that the tables are built from."""
        if not self.tables:
            return ""
        config = self.tables[0].table.config
        parts = config_parts(self.model.config)
        return next((path for path, part in parts if part is config), "")

    @property
    def text_config(self) -> Any:
        """The part of the config at `text_path`, without the patch."""
        return dict(config_parts(self.config))[self.text_path]

    @property
    def adapter(self) -> ArchAdapter:
        """The adapter of the model's family."""
        return adapter_of(self.model)

    def forms(self) -> dict[str, dict[str, Any]]:
        """Return the forms of the tables in `rope_parameters`, by name, best first."""
        if not self.patched:
            own = copy.deepcopy(getattr(self.text_config, "rope_parameters", None))
            return {"rope_parameters": own} if own else {}
        (method,) = self.methods
        assert isinstance(method, RopeScaling)
        forms: dict[str, dict[str, Any]] = {}
        for name, rope_parameters in rope_forms(self.text_config, self.patched, method):
            forms.setdefault(name, rope_parameters)
        return forms

    def saved(self) -> dict[str, Any]:
        """Return the `rope_parameters` that `save_pretrained` writes."""
        text = dict(config_parts(self.model.config))[self.text_path]
        return copy.deepcopy(getattr(text, "rope_parameters", None) or {})

    def lengths(self) -> dict[str, Any]:
        """Return the config's attributes for the length of a text, with the patch."""
        if self.patch is None:
            return {}
        return lengths_of(self.text_config, self.patched, self.patch.extended_length)


def clean_json(config: Any, *, whole: bool = False) -> dict[str, Any]:
    """Return a config as `config.json` has it, without the block of hf_posenc.

    Args:
        config: The config.
        whole: Include attributes at their defaults, which differ between versions of transformers.
    """
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=not whole))
    values.pop(BLOCK, None)
    return values


def open_source(
    path: str | Path,
    method: MethodLike | None = None,
    *,
    unpatched: bool = False,
    **options: Any,
) -> Source:
    """Read a saved model, patched or not, or a saved adapter.

    Args:
        path: A folder or a hub name.
        method: A patch, as for `patch_model`.
        unpatched: Leave out the patch that the model was saved with.
        **options: As for `patch_model`.

    Raises:
        PosencError: There is no config, the model is patched already and a method is given, or it cannot be
            patched so.
    """
    base, of_adapter = _of_adapter(path)
    stored = _config_of(base)
    config = copy.deepcopy(stored)
    saved = take_patch(config, base) or of_adapter
    saved = None if unpatched else saved
    if saved is not None and method is not None:
        raise PosencError(
            f"{path} is already patched with {saved.method}. Leave the patch out, or give the model from before."
        )
    methods = _methods(method, options) if saved is None else saved.build()
    plain = copy.deepcopy(config)
    if any(seam_of(part) != "rotary" for part in methods):
        return Source(str(path), base, stored, plain, methods, None, None, ())
    model = _empty_model(config)
    if saved is not None:
        apply_config(model, saved)
    elif method is not None:
        patch_model(model, method, **options)
    patch = get_patch(model)
    wrappers = {id(m.base): m for m in model.modules() if isinstance(m, PosencRotary)}
    tables: dict[str, SourceTable] = {}
    for table in tables_of(model):
        if isinstance(table, SinCosTable):
            continue  # in the weights, which are not here
        wrapper = wrappers.get(id(table.module))
        if wrapper is not None and table.label not in wrapper.specs:
            wrapper = None
        dim = 2 * table.live()[0].shape[0]
        tables.setdefault(table.label, SourceTable(table, wrapper, dim))
    methods = () if patch is None else patch.config.build()
    return Source(str(path), base, stored, plain, methods, model, patch, tuple(tables.values()))


def _of_adapter(path: str | Path) -> tuple[str, PatchConfig | None]:
    """Return the base model of a saved adapter and the adapter's patch; of a model, its own path."""
    file = Path(path) / "adapter_config.json"
    if not file.is_file():
        return str(path), None
    from hf_posenc.lora import PosencLoraConfig, read_adapter

    config = read_adapter(file)
    base = config.base_model_name_or_path
    if not base:  # PEFT 0.18 writes "" for a model made from a config
        raise PosencError(f"{file} names no base model. Merge the adapter, save, and export that.")
    return str(base), config.patch() if isinstance(config, PosencLoraConfig) else None


def _config_of(base: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(base)
    except Exception as error:  # no such name, no config.json, an unknown model type
        line = " ".join(str(error).split())
        raise PosencError(f"The config of {base} cannot be loaded: {line[:200]}") from error


def _empty_model(config: Any) -> Any:
    """Build the model on the meta device; its rotary tables are real."""
    from transformers import AutoModel, AutoModelForCausalLM

    causal = type(config) in AutoModelForCausalLM._model_mapping
    auto: Any = AutoModelForCausalLM if causal else AutoModel
    with torch.device("meta"):
        return auto.from_config(copy.deepcopy(config))


def _methods(method: MethodLike | None, options: Mapping[str, Any]) -> tuple[Method, ...]:
    """Build the methods of a request as far as their seams need them; the scale may be any."""
    if method is None:
        return ()
    if isinstance(method, Method):
        return (method,)
    if not isinstance(method, str):
        return tuple(part for one in method for part in _methods(one, options))
    kind = get_method(method)
    knobs = {knob: value for knob, value in options.items() if knob in kind.knobs()}
    if kind.takes_scale() and "target_length" in options:
        knobs.setdefault("scale", 1.0)
    return (kind.from_options(**knobs),)
