"""Known checkpoints: the patches that they were published with (recipes), and the configs that they are known by."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping
from typing import Any

from hf_posenc.adapters import patches_folder
from hf_posenc.errors import unknown


@functools.cache
def _recipes() -> Mapping[str, dict[str, Any]]:
    files = sorted((patches_folder() / "recipes").glob("*.json"))
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}


def available_recipes() -> tuple[str, ...]:
    """Return the names of the published patches that ship with the package, sorted.

    Examples:
        >>> from hf_posenc import available_recipes
        >>> "llama-2-yarn-64k" in available_recipes()
        True
    """
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
    file = patches_folder() / "native.json"
    models = json.loads(file.read_text(encoding="utf-8"))
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
