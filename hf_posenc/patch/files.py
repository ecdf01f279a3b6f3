"""A patch on disk: `posenc_config.json` or a recipe, and the trained parameters beside it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from hf_posenc.adapters import available_recipes, get_recipe
from hf_posenc.errors import PosencError, UntrainedWarning, one_line
from hf_posenc.files import disk_errors
from hf_posenc.methods import available_methods
from hf_posenc.model.parameters import PARAMETER_FILE, trained_parameters, write_parameters
from hf_posenc.model.unwrapping import unwrap
from hf_posenc.patch import export
from hf_posenc.patch.config import PatchConfig
from hf_posenc.patch.patching import get_patch, patch_model, unpatch_model

FILE = "posenc_config.json"


def save_patch(model: nn.Module, directory: str | Path) -> Path:
    """Write a model's patch to `posenc_config.json`, and its trained parameters to `posenc.safetensors`.

    Args:
        model: A patched model.
        directory: The folder to write to; created if it does not exist.

    Returns:
        The file.

    Raises:
        PosencError: The model is not patched, its method is the user's own and cannot be loaded by name, or the
            folder cannot be written.

    Examples:
        >>> from hf_posenc import load_patch, patch_model, save_patch, unpatch_model
        >>> save_patch(patch_model(model, "yarn", scale=8), "my-patch").name
        'posenc_config.json'
        >>> model = load_patch(unpatch_model(model), "my-patch")
    """
    if (config := patch_to_save(model)) is None:
        raise PosencError("This model is not patched: nothing to save. Call patch_model first.")
    if not str(directory or "").strip():
        raise PosencError(f"{directory!r} is no folder to save the patch to. Give its path.")
    path = Path(directory) / FILE
    with disk_errors(f"The patch cannot be saved to {directory}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(config.to_json(), encoding="utf-8")
        write_parameters(trained_parameters(unwrap(model)), path.parent)
    return path


def patch_to_save(model: nn.Module) -> PatchConfig | None:
    """Return a model's patch; `None` where it is not patched. Refuse a method that cannot be loaded by name."""
    if (patch := get_patch(model)) is None:
        return None
    for method in patch.methods:
        if method not in available_methods():
            raise PosencError(
                f"{method!r} is a method of your own, which load_patch cannot find by its name. Register its class: "
                "hf_posenc.register_method."
            )
    return patch.config


def load_patch(model: nn.Module, source: str | Path) -> nn.Module:
    """Patch a model as a file describes.

    Args:
        model: The model to patch, in place.
        source: A recipe's name (`available_recipes()`), a JSON file, or a directory that `save_patch` wrote to.

    Returns:
        The same model.

    Raises:
        PosencError: No such recipe or file, a patch that the model cannot take, or one that it was saved with.

    Examples:
        >>> from hf_posenc import get_patch, load_patch
        >>> model = load_patch(model, "llama-2-yarn-64k")  # a published recipe
        >>> get_patch(model).options
        {'scale': 16.0}
    """
    if not isinstance(source, (str, Path)):
        raise PosencError(
            f"A patch is a recipe's name, a JSON file or a directory, not {type(source).__name__}: for a method and "
            "its options, patch_model."
        )
    beside = Path(source) / PARAMETER_FILE
    config, patch = read_patch(source), get_patch(model)
    if patch is not None and (beside.is_file() or (config.replace and config != patch.config)):
        raise PosencError(
            f"This model is already patched with {patch.config}. Call unpatch_model(model) first."
        )
    carried: Any = getattr(getattr(unwrap(model), "config", None), export.BLOCK, None)
    same_method = isinstance(carried, dict) and carried.get("method") == config.method
    if patch is None and same_method and PatchConfig.from_dict(carried) == config:
        raise PosencError(
            f"This model was saved with {config} and computes it already. hf_posenc.from_pretrained loads the folder "
            "of a whole model with its patch; load_patch is for a model from before it."
        )
    if str(source) in available_recipes():
        _check_base(model, str(source))
    if not beside.is_file():
        return apply_config(model, config)
    try:
        loaded = load_file(beside)
    except (OSError, SafetensorError) as error:
        raise PosencError(f"{beside} cannot be read: {one_line(error)}.") from error
    apply_config(model, config, trained=True)
    try:
        fill(trained_parameters(unwrap(model)), loaded, beside)
    except PosencError:
        unpatch_model(model)
        raise
    return model


def _check_base(model: nn.Module, recipe: str) -> None:
    """Warn of a recipe for checkpoints with another base."""
    about = get_recipe(recipe)["recipe"]
    base = {**about.get("scaled", {}), **about.get("unscaled", {})}.get("rope_theta")
    config: Any = unwrap(model).config
    entry = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    own = entry.get("full_attention", entry).get("rope_theta")
    if None not in (base, own) and base != own:
        warnings.warn(
            f"{recipe} is for {about['checkpoint']}, whose rope_theta is {base:g}, and this model's is {own:g}: its "
            "numbers may not suit it.",
            stacklevel=3,
        )


def read_patch(source: str | Path) -> PatchConfig:
    """Return the patch that a recipe, file or directory holds."""
    path = Path(source, FILE) if Path(source).is_dir() else Path(source)
    if path.is_file():
        try:
            return PatchConfig.from_json(path.read_text(encoding="utf-8"))
        except PosencError as error:
            raise PosencError(f"{path}: {error}") from error
    name = str(source)
    if name not in available_recipes() and (path.suffix == ".json" or path.name != name):
        raise PosencError(
            f"There is no file {path}. Give a directory with {FILE}, a JSON file or a recipe's name. A model that was "
            "saved with its patch is loaded by from_pretrained."
        )
    return PatchConfig.from_dict(get_recipe(name))


def apply_config(model: nn.Module, config: PatchConfig, *, trained: bool = False) -> nn.Module:
    """Patch a model in place; without a warning for untrained parameters, where trained ones are loaded afterwards."""
    with warnings.catch_warnings():
        if trained:
            warnings.simplefilter("ignore", UntrainedWarning)
        return patch_model(model, **config.request())


def fill(trained: Mapping[str, Tensor], loaded: Mapping[str, Tensor], source: str | Path) -> None:
    """Give parameters their stored values; raise for others than those of the model."""
    stored, own = ({k: tuple(v.shape) for k, v in each.items()} for each in (loaded, trained))
    if wrong := sorted(k for k in {*stored, *own} if stored.get(k) != own.get(k)):
        name = wrong[0]
        raise PosencError(
            f"{source} does not have the parameters of this patch: the shape of {name} is "
            f"{stored.get(name, 'missing')} there and {own.get(name, 'missing')} in the model ({len(wrong)} differ)."
        )
    for name, parameter in trained.items():
        parameter.data.copy_(loaded[name])
