"""What `patches/` has: facts about model families that inspection cannot find, and known checkpoints.

A model type named there is a promise that the test matrix holds for it.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import json
import pkgutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from hf_posenc.errors import UnsupportedModelError, unknown

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
"""The rope types that transformers 4.57 computes (`ROPE_INIT_FUNCTIONS`)."""


@dataclass(frozen=True)
class LegacyKeys:
    """The config attributes from which transformers 4.57, and older servers, read one model type's rotary embedding.

    All methods take `rope_parameters` as transformers 5 has it: flat, or nested by layer type. The fields are those of
    `ArchAdapter`; the keys of `rope_scaling` must be `fields`, no more and no fewer, where these are given.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    rope_types: tuple[str, ...] = ROPE_TYPES
    fields: tuple[str, ...] | None = None

    def expresses(self, rope_parameters: Mapping[str, Any]) -> bool:
        """True if transformers 4.57 computes the rotation of `values(rope_parameters)`."""
        full = _full(rope_parameters)
        return bool(self.values(rope_parameters)) and full["rope_type"] in self.rope_types

    def values(self, rope_parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return the same in the config attributes of transformers 4.57; empty where it has no words for it.

        Also for a model type for which it does not compute them: most then refuse the config instead of ignoring it.
        """
        full = _full(rope_parameters)
        if "rope_theta" not in full or full["rope_type"] not in ROPE_TYPES:
            return {}
        legacy = {"rope_theta": full["rope_theta"]}
        outside = {"rope_type", "rope_theta", "partial_rotary_factor"}  # of `rope_scaling`
        beside = set(full) - outside if self.fields is None else ()
        if full["rope_type"] != "default" or beside:
            legacy["rope_scaling"] = dict(full)
            if self.fields is not None and full["rope_type"] in self.rope_types:
                with_type = {"type": full["rope_type"], **full}
                legacy["rope_scaling"] = {key: with_type[key] for key in self.fields}
        if full["rope_type"] == "longrope" and full["short_factor"] != full["long_factor"]:
            # There the switch from the one list to the other is at this attribute, else at max_position_embeddings.
            legacy["original_max_position_embeddings"] = full["original_max_position_embeddings"]
        if "partial_rotary_factor" in full:
            legacy["partial_rotary_factor"] = full["partial_rotary_factor"]
        named = {self.names.get(key, key): value for key, value in legacy.items()}
        if sliding := rope_parameters.get("sliding_attention"):
            name = self.names.get("rope_local_base_freq", "rope_local_base_freq")
            if named.setdefault(name, sliding["rope_theta"]) != sliding["rope_theta"]:
                return {}  # one theta for all layers (OLMo 3)
        return named

    def variants(self, rope_parameters: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield what to write beside `rope_parameters`, best first: transformers 5 does not accept every one."""
        values, full = self.values(rope_parameters), _full(rope_parameters)
        unknown = "rope_theta" in full and full["rope_type"] not in ROPE_TYPES
        if unknown:
            theta = self.names.get("rope_theta", "rope_theta")
            values = {theta: full["rope_theta"], "rope_scaling": dict(full)}  # refused by 4.57
        yield values
        if not unknown and self.fields is not None and "rope_scaling" in values:
            yield {**values, "rope_scaling": dict(full)}  # refused by 4.57
        yield {}


def _full(rope_parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entry of the layers with full attention: the only one that 4.57 can scale."""
    return rope_parameters.get("full_attention", rope_parameters) or {}


@dataclass(frozen=True, kw_only=True)
class ArchAdapter:
    """One family of model types and its quirks.

    Attributes:
        family: A name for tables.
        model_types: The `config.model_type` values of text decoders that the family covers.
        sincos_table: The attribute that holds a precomputed `[sin | cos]` table (GPT-J), instead of `inv_freq`.
        log_gain: A buffer of the rotary module with the logarithm of a learned factor on each frequency.
        legacy_keys: The names that transformers 4 gave `rope_theta` and its like in this family's config.
        legacy_rope_types: The rope types that transformers 4.57 computes, for model types where these are not all.
        legacy_fields: The keys that its `rope_scaling` must have, for model types where it takes no others.
        refused_if: Config attributes that, when true, mean that a model does not rotate, with the reason.
        beside: Kinds of sources beside the rotation, as `inspect_positions` names them, that model types have and
            that a patch leaves as they are. Recurrences, convolutions and attention sinks need no entry.
    """

    family: str
    model_types: tuple[str, ...]
    sincos_table: str | None = None
    log_gain: str | None = None
    legacy_keys: Mapping[str, str] = field(default_factory=dict)
    legacy_rope_types: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    legacy_fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    refused_if: Mapping[str, str] = field(default_factory=dict)
    beside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def legacy(self, config: Any) -> LegacyKeys:
        """Return the attributes in which transformers 4.57 reads a config's rotary embedding."""
        rope_types = self.legacy_rope_types.get(config.model_type, ROPE_TYPES)
        return LegacyKeys(self.legacy_keys, rope_types, self.legacy_fields.get(config.model_type))

    def check(self, config: Any) -> None:
        """Refuse a model that the family is known not to support, with the reason."""
        for key, reason in self.refused_if.items():
            if getattr(config, key, False):
                raise UnsupportedModelError(f"{config.model_type} cannot be patched: {reason}")


def get_adapter(model_type: str) -> ArchAdapter:
    """Return the adapter that names this model type, or one without quirks (inspection then decides)."""
    return _adapters().get(model_type) or ArchAdapter(family="found by inspection", model_types=())


def available_architectures() -> tuple[str, ...]:
    """Return the model types that `patches/` names, sorted: those that the test matrix covers."""
    return tuple(sorted(_adapters()))


def patches_folder() -> Path:
    """Return the folder of the adapters and recipes, installed or in a checkout."""
    return Path(_patches().__path__[0])


@functools.cache
def _adapters() -> Mapping[str, ArchAdapter]:
    package = _patches()
    adapters: dict[str, ArchAdapter] = {}
    for info in pkgutil.iter_modules(package.__path__):
        adapter: ArchAdapter = importlib.import_module(f"{package.__name__}.{info.name}").ADAPTER
        for model_type in adapter.model_types:
            if adapters.setdefault(model_type, adapter) is not adapter:
                raise RuntimeError(f"Two files in patches/ name the model type {model_type!r}.")
    return adapters


def _patches() -> ModuleType:
    """The `patches/` folder: `hf_posenc.patches` once installed, the sibling folder in a bare checkout."""
    name = f"{__package__}.patches"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
    folder = Path(__file__).resolve().parents[1] / "patches"
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Known checkpoints: the patches that they were published with (recipes), and the configs that they are known by


@functools.cache
def _recipes() -> Mapping[str, dict[str, Any]]:
    files = sorted((patches_folder() / "recipes").glob("*.json"))
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}


def available_recipes() -> tuple[str, ...]:
    """Return the names of the published patches that ship with the package, sorted."""
    return tuple(_recipes())


def get_recipe(name: str) -> dict[str, Any]:
    """Return a recipe: checkpoint, model types, source and description, and its patch.

    Args:
        name: One of `available_recipes()`.

    Raises:
        PosencError: No recipe has this name.

    Examples:
        >>> from hf_posenc import get_recipe
        >>> recipe = get_recipe("llama-2-yarn-64k")
        >>> recipe["method"], recipe["scale"]
        ('yarn', 16.0)
    """
    if name not in available_recipes():
        raise unknown("recipe", name, available_recipes())
    return copy.deepcopy(_recipes()[name])


def recipes_of(config: Any, key: str) -> tuple[str, ...]:
    """Return the recipes of a checkpoint, known by its model type and by values of its config.

    Args:
        config: The checkpoint's config.
        key: `"scaled"`: patches that a checkpoint's config has itself. `"unscaled"`: patches that the makers of an
            unscaled checkpoint tell users to add.
    """
    return tuple(name for name, one in _recipes().items() if is_of(config, one["recipe"], key))


def native_models(config: Any = None) -> tuple[dict[str, Any], ...]:
    """Return the models, or those of a config, that were trained on long texts and need no scaling, with sources."""
    models = json.loads((patches_folder() / "native.json").read_text(encoding="utf-8"))
    return tuple(one for one in models if config is None or is_of(config, one, "config"))


def is_of(config: Any, about: Mapping[str, Any], key: str) -> bool:
    """Return whether a config has a model type of a description, and its values under a key."""
    parts = config, config.get_text_config(decoder=True)
    values = about.get(key)
    if values is None or not {part.model_type for part in parts} & {*about["model_types"]}:
        return False
    rope = getattr(parts[1], "rope_parameters", None) or {}
    entry = {**vars(parts[1]), **rope.get("full_attention", rope)}
    return all(entry.get(name) == value for name, value in values.items())
