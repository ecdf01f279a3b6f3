"""A candidate as a recipe that `hf_posenc.load_patch` reads."""

from __future__ import annotations

import json
from typing import Any

from torch import nn

from hf_posenc.evaluation.candidates import Candidate
from hf_posenc.patching import get_patch


def recipe_of(
    model: nn.Module,
    candidate: Candidate,
    *,
    name: str,
    checkpoint: str,
    source: str,
    description: str,
) -> dict[str, Any]:
    """The patch as `save_patch` would write it, with what it is and where it comes from.

    Args:
        model: The model that it was measured on, unpatched.
        candidate: A method whose scale is set.
        name: A name for the recipe.
        checkpoint: The model's name.
        source: How the recipe was found.
        description: What it was measured to do.
    """
    with candidate.applied(model, 1):
        patch = get_patch(model)
    assert patch is not None
    config: Any = model.config
    about = {
        "name": name,
        "model_types": [config.model_type],
        "checkpoint": checkpoint,
        "source": source,
        "description": description,
    }
    return {**patch.config.to_dict(), "recipe": about}


def recipe_text(recipe: dict[str, Any]) -> str:
    """The JSON text of a recipe, as the recipes that ship with the package are written."""
    return json.dumps(recipe, indent=2, allow_nan=False) + "\n"
