"""The published patches that ship with the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hf_posenc.adapters import patches_folder
from hf_posenc.errors import unknown


def available_recipes() -> tuple[str, ...]:
    """The names of the published patches that ship with the package, sorted."""
    return tuple(sorted(path.stem for path in recipes_folder().glob("*.json")))


def get_recipe(name: str) -> dict[str, Any]:
    """What a recipe says of itself: checkpoint, model types, source and description, and its patch.

    Raises:
        PosencError: No recipe has this name.
    """
    if name not in available_recipes():
        raise unknown("recipe", name, available_recipes())
    values: dict[str, Any] = json.loads(
        (recipes_folder() / f"{name}.json").read_text(encoding="utf-8")
    )
    return values


def recipes_folder() -> Path:
    """Where they are, a JSON file each."""
    return patches_folder() / "recipes"
