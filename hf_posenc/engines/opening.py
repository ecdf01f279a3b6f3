"""Opens what is to be exported: a saved model or adapter, with its patch or with another."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hf_posenc.config import PatchConfig
from hf_posenc.engines.source import Source, SourceTable
from hf_posenc.errors import PosencError
from hf_posenc.methods import Method, get_method, seam_of
from hf_posenc.patching import get_patch, patch_model
from hf_posenc.resolve import MethodLike, adapter_of, tables_of
from hf_posenc.saving import apply_config, take_patch
from hf_posenc.seams.rotary import PosencRotary
from hf_posenc.seams.sincos import SinCosTable


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
    for table in tables_of(model, adapter_of(model)):
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
