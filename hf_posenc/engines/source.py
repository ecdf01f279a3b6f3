"""What is exported: a saved model's config, its patch, and the rotary tables in force; no weights are read."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
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
        table: Where the model holds it.
        wrapper: What patches it; `None` where it is as the checkpoint has it.
        dim: The rotary dimension d.
    """

    table: RotaryTable
    wrapper: PosencRotary | None
    dim: int

    @property
    def label(self) -> str:
        """The layer type; `""` where one table serves all layers."""
        return self.table.label

    def in_force(self, length: int) -> Table:
        """What the model computes for a text of so many tokens."""
        if self.wrapper is None and self.table.rope_type in _BY_LENGTH:
            rope, config = self.table.parameters, vars(self.table.config)
            told = of_transformers(rope, config, float(rope["rope_theta"]), self.dim, length)
            assert isinstance(told, Table)
            return told
        if self.wrapper is None:
            inv_freq, factor = self.table.live()
            return Table(inv_freq.detach().double(), factor)
        inv_freq, live_factor = self.wrapper.table(self.label, length)
        return Table(inv_freq.double(), float(live_factor))


@dataclass(frozen=True, eq=False)
class Source:
    """A model to export.

    Attributes:
        path: The folder, or the hub name, that it was read from.
        base: Where its weights are: the same, or the base model of an adapter.
        stored: The config as it is stored there.
        config: The same without the patch.
        methods: The methods in force; empty for a model as it is.
        model: The model on the meta device; `None` where a method computes attention itself.
        patch: What is in force in it.
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
        """Whether the patch reaches as far as a text needs, however long."""
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
        """The context length to serve, in tokens: what the patch reaches, or else the config's."""
        extended = None if self.patch is None else self.patch.extended_length
        return extended or int(self.text_config.max_position_embeddings)

    @property
    def length_dependent(self) -> bool:
        """Whether the tables follow the length of the text."""
        own = any(one.wrapper is None and one.table.rope_type in _BY_LENGTH for one in self.tables)
        return own or any(method.length_dependent for method in self.methods)

    @property
    def text_path(self) -> str:
        """The dotted path, in the config, of the part that the tables are built from."""
        wanted = self.tables[0].table.config if self.tables else None
        parts = () if wanted is None else config_parts(self.model.config)
        return next((path for path, part in parts if part is wanted), "")

    @property
    def text_config(self) -> Any:
        """That part, without the patch."""
        return dict(config_parts(self.config))[self.text_path]

    @property
    def adapter(self) -> ArchAdapter:
        """What is known of the model's family."""
        return adapter_of(self.model)

    def forms(self) -> dict[str, dict[str, Any]]:
        """The ways to say the tables in `rope_parameters`, by name, best first."""
        patched = [
            PatchedTable(entry.table, entry.wrapper) for entry in self.tables if entry.wrapper
        ]
        if not patched:
            own = copy.deepcopy(getattr(self.text_config, "rope_parameters", None))
            return {"rope_parameters": own} if own else {}
        (method,) = self.methods
        assert isinstance(method, RopeScaling)
        found: dict[str, dict[str, Any]] = {}
        for name, rope_parameters in rope_forms(self.text_config, patched, method):
            found.setdefault(name, rope_parameters)
        return found

    def saved(self) -> dict[str, Any]:
        """What `save_pretrained` writes as `rope_parameters`."""
        text = dict(config_parts(self.model.config))[self.text_path]
        return copy.deepcopy(getattr(text, "rope_parameters", None) or {})

    def lengths(self) -> dict[str, Any]:
        """The config's attributes that say how long a text may be, with the patch."""
        if self.patch is None:
            return {}
        patched = [
            PatchedTable(entry.table, entry.wrapper) for entry in self.tables if entry.wrapper
        ]
        return lengths_of(self.text_config, patched, self.patch.extended_length)


def clean_json(config: Any, *, whole: bool = False) -> dict[str, Any]:
    """A config as `config.json` has it, without the block of hf_posenc.

    Args:
        config: The config.
        whole: With the attributes that are at their defaults, which are others in another version of transformers.
    """
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=not whole))
    values.pop(BLOCK, None)
    return values


# Opens what is to be exported: a saved model or adapter, with its patch or with another.


def open_source(path: str | Path, method: MethodLike | None = None, **options: Any) -> Source:
    """Reads a saved model, patched or not, or a saved adapter.

    Args:
        path: A folder or a hub name.
        method: What to patch it with, as for `patch_model`.
        **options: As for `patch_model`.

    Raises:
        PosencError: There is no config, it is patched already and a method is given, or it cannot be patched so.
    """
    base, stored, config, saved = _opened(path)
    if saved is None:
        return _source(path, base, stored, config, method, options)
    if method is not None:
        raise PosencError(
            f"{path} is already patched with {saved.method}. Leave the patch out, or give the model from before."
        )
    plain, methods = copy.deepcopy(config), saved.build()
    if any(seam_of(part) != "rotary" for part in methods):
        return Source(str(path), base, stored, plain, methods, None, None, ())
    return _read(str(path), base, stored, plain, apply_config(_empty_model(config), saved))


def open_plain(path: str | Path, method: MethodLike | None = None, **options: Any) -> Source:
    """As `open_source`, without the patch that the model was saved with.

    Raises:
        PosencError: There is no config, or it cannot be patched so.
    """
    base, stored, config, _ = _opened(path)
    return _source(path, base, stored, config, method, options)


def _opened(path: str | Path) -> tuple[str, Any, Any, PatchConfig | None]:
    """Where the weights are, the stored config, the config without the patch, and the patch."""
    base, saved = _of_adapter(path)
    stored = _config_of(base)
    config = copy.deepcopy(stored)
    return base, stored, config, take_patch(config, base) or saved


def _source(
    path: str | Path,
    base: str,
    stored: Any,
    config: Any,
    method: MethodLike | None,
    options: Mapping[str, Any],
) -> Source:
    """A model that is not patched, with a patch or without."""
    plain, methods = copy.deepcopy(config), _built(method, options)
    if any(seam_of(part) != "rotary" for part in methods):
        return Source(str(path), base, stored, plain, methods, None, None, ())
    model = _empty_model(config)
    if method is not None:
        patch_model(model, method, **options)
    return _read(str(path), base, stored, plain, model)


def _read(path: str, base: str, stored: Any, config: Any, model: Any) -> Source:
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
    return Source(path, base, stored, config, methods, model, patch, tuple(tables.values()))


def _of_adapter(path: str | Path) -> tuple[str, PatchConfig | None]:
    """The base model of a saved adapter and the patch that it carries; of a model, its own path."""
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
    """The model on the meta device: its rotary tables are real."""
    from transformers import AutoModel, AutoModelForCausalLM

    auto: Any = (
        AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModel
    )
    with torch.device("meta"):
        return auto.from_config(copy.deepcopy(config))


def _built(method: MethodLike | None, options: Mapping[str, Any]) -> tuple[Method, ...]:
    """The methods of a request, as far as their seams need them."""
    if method is None:
        return ()
    if isinstance(method, Method):
        return (method,)
    if isinstance(method, Sequence) and not isinstance(method, str):
        return tuple(part for one in method for part in _built(one, options))
    kind = get_method(method)
    knobs = {knob: value for knob, value in options.items() if knob in kind.knobs()}
    if kind.takes_scale() and "target_length" in options:
        knobs.setdefault("scale", 1.0)
    return (kind.from_options(**knobs),)
