"""Patches on disk: beside a checkpoint, as a recipe, and back into a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from hf_posenc import export
from hf_posenc.adapters import patches_folder
from hf_posenc.config import PatchConfig
from hf_posenc.errors import PosencError, unknown
from hf_posenc.patching import get_patch, patch_model

FILE = "posenc_config.json"


def save_patch(model: nn.Module, directory: str | Path) -> Path:
    """Writes what is in force in a model to `posenc_config.json`.

    Args:
        model: A patched model.
        directory: Where to write; made where it does not exist.

    Returns:
        The file.

    Raises:
        PosencError: The model is not patched.
    """
    patch = get_patch(model)
    if patch is None:
        raise PosencError(
            "This model is not patched; there is nothing to save. Call patch_model first."
        )
    path = Path(directory) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(patch.config.to_json(), encoding="utf-8")
    return path


def load_patch(model: nn.Module, source: str | Path) -> nn.Module:
    """Patches a model as a file says.

    Args:
        model: The model to patch, in place.
        source: A recipe's name (`available_recipes()`), a JSON file, or a directory that
            `save_patch` wrote to.

    Returns:
        The same model.

    Raises:
        PosencError: No such recipe or file, or a patch that the model cannot take.
    """
    return apply_config(model, read_patch(source))


def read_patch(source: str | Path) -> PatchConfig:
    """The patch that a recipe, file or directory holds.

    Raises:
        PosencError: No such recipe or file, or text that is not a patch.
    """
    path = Path(source)
    if path.is_dir():
        path = path / FILE
    if not path.is_file():
        if str(source) not in available_recipes():
            if path.suffix or path.name != str(source):
                raise PosencError(
                    f"There is no file {path}. Give a directory with {FILE}, a JSON file or a recipe's name."
                )
            raise unknown("recipe", str(source), available_recipes())
        path = _recipes_folder() / f"{source}.json"
    return PatchConfig.from_json(path.read_text(encoding="utf-8"))


def available_recipes() -> tuple[str, ...]:
    """The names of the published patches that ship with the package, sorted."""
    return tuple(sorted(path.stem for path in _recipes_folder().glob("*.json")))


def get_recipe(name: str) -> dict[str, Any]:
    """What a recipe says of itself: checkpoint, model types, source and description, and its patch.

    Raises:
        PosencError: No recipe has this name.
    """
    if name not in available_recipes():
        raise unknown("recipe", name, available_recipes())
    values: dict[str, Any] = json.loads(
        (_recipes_folder() / f"{name}.json").read_text(encoding="utf-8")
    )
    return values


def apply_config(model: nn.Module, config: PatchConfig) -> nn.Module:
    """Patches a model as a `PatchConfig` says; the same model."""
    return patch_model(
        model,
        config.build() if config.others else config.method,
        scale=None if config.others else config.scale,
        original_max_position_embeddings=config.original_max_position_embeddings,
        layers=config.layers,
        compose=config.compose,
        replace=config.replace,
        **({} if config.others else config.options),
    )


def from_pretrained(path_or_id: str | Path, *, auto_class: Any = None, **kwargs: Any) -> Any:
    """Loads a checkpoint with the patch that it was saved with, whatever the method.

    Reads the `hf_posenc` block that `model.save_pretrained` writes into `config.json`, or else
    `posenc_config.json`.

    Args:
        path_or_id: As for `AutoModelForCausalLM.from_pretrained`.
        auto_class: Another class to load with, e.g. `AutoModelForImageTextToText`.
        **kwargs: Passed on to it.

    Returns:
        The model, patched where the checkpoint says so.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = kwargs.pop("config", None) or AutoConfig.from_pretrained(
        path_or_id, **_hub_options(kwargs)
    )
    block: Mapping[str, Any] | None = vars(config).pop(export.BLOCK, None)
    if block is not None:
        patch: PatchConfig | None = PatchConfig.from_dict(block)
        _restore_before(config, block)
    else:
        beside = Path(path_or_id) / FILE
        patch = read_patch(beside) if beside.is_file() else None
    loader = AutoModelForCausalLM if auto_class is None else auto_class
    model = loader.from_pretrained(path_or_id, config=config, **kwargs)
    return model if patch is None else apply_config(model, patch)


def _restore_before(config: Any, block: Mapping[str, Any]) -> None:
    """Takes the native form of a patch out of a loaded config, so that the patch itself can be put in."""
    configs = dict(export.config_parts(config))
    for path, before in block["before"].items():
        export.restore(configs[path], before)


def _hub_options(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = (
        "revision",
        "token",
        "cache_dir",
        "local_files_only",
        "trust_remote_code",
        "subfolder",
        "force_download",
    )
    return {name: kwargs[name] for name in names if name in kwargs}


def _recipes_folder() -> Path:
    return patches_folder() / "recipes"
