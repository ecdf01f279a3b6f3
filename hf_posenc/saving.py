"""Models and adapters on disk, loaded with the patch that they were saved with."""

from __future__ import annotations

import contextlib
import copy
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from hf_posenc.diagnosis import (
    check_base,
    check_causal,
    check_source,
    loader_of,
    read_config,
    reason_of,
    taken_warnings,
    unreadable,
)
from hf_posenc.errors import PosencError
from hf_posenc.gguf_file import FLOATS, as_plain_model, find_gguf, loading_gguf, loading_options
from hf_posenc.model.parameters import PARAMETER_FILE, PARAMETERS, trained_parameters
from hf_posenc.model.unwrapping import unwrap
from hf_posenc.patch import export
from hf_posenc.patch.config import PatchConfig
from hf_posenc.patch.files import FILE, apply_config, fill, read_patch
from hf_posenc.patch.patching import get_patch, unpatch_model
from hf_posenc.patch.saving import damaged, restore_withheld
from hf_posenc.patch.state import state_of
from hf_posenc.seams.held import restore

_OF_BOTH = ("dtype", "torch_dtype", "quantization_config")
"""Attributes of a config that are arguments of the loader, which transformers does not let a config absorb."""
_LENGTH = "max_position_embeddings"
_HUB = ("revision", "token", "cache_dir", "local_files_only", "subfolder", "force_download")


def from_pretrained(
    path_or_id: str | Path,
    *,
    auto_class: Any = None,
    allow_missing_weights: bool = False,
    **kwargs: Any,
) -> Any:
    """Load a checkpoint with the patch that it was saved with, whatever the method.

    Reads the `hf_posenc` block that `model.save_pretrained` writes into `config.json`, or else
    `posenc_config.json`. Of an adapter, loads the base model, patches it as the adapter requires and adds the adapter.
    The weights of a GGUF file are dequantized; `save_pretrained` writes them as safetensors.

    Args:
        path_or_id: As for `AutoModelForCausalLM.from_pretrained`; or a GGUF file, or a folder with one and no
            `config.json`.
        auto_class: Another class to load with, e.g. `AutoModelForImageTextToText`. By default the masked or
            sequence-to-sequence class that the config names, else `AutoModelForCausalLM`.
        allow_missing_weights: Load a checkpoint that lacks weights of the model: they are drawn at random, the same
            ones at every call, with a warning instead of an error.
        **kwargs: Passed on to it; of an adapter, `is_trainable` to PEFT. As in transformers, attributes of the config
            (`use_cache=False`, `attention_dropout=0.1`, ...) are set there, unless `config` is given.

    Returns:
        The model, patched if the checkpoint was saved with a patch; of an adapter a `PeftModel`.

    Raises:
        PosencError: Nothing that can be loaded, with the first thing that is wrong (name, config, model, weights); a
            patch that the model cannot take or that an argument contradicts, a checkpoint without weights that the
            model has or with weights of another shape, a config without layers, or an adapter that does not name
            its base model.

    Examples:
        >>> from hf_posenc import from_pretrained, get_patch, patch_model
        >>> patch_model(model, "rerope", window=2048).save_pretrained("longer")
        >>> get_patch(from_pretrained("longer")).method
        'rerope'
    """
    from transformers.utils.peft_utils import find_adapter_config_file

    hub = _some(kwargs, _HUB)
    check_source(path_or_id, "model", **hub)
    adapter = None if find_gguf(path_or_id) else find_adapter_config_file(str(path_or_id), **hub)
    if adapter is not None:
        kwargs["allow_missing_weights"] = allow_missing_weights
        return _with_adapter(path_or_id, adapter, auto_class, kwargs)
    options = _some(kwargs, (*_HUB, "trust_remote_code"))
    given = kwargs.pop("config", None)  # the caller's keeps its patch
    config = read_config(path_or_id, **options) if given is None else copy.deepcopy(given)
    if not hasattr(config, "get_text_config"):
        raise PosencError(f"config is one of transformers, not {config!r:.80}.")
    absorbed: dict[str, Any] = {}
    if given is None:
        keys = [key for key in kwargs if key not in _OF_BOTH and hasattr(config, key)]
        absorbed = {key: kwargs.pop(key) for key in keys}
    if auto_class is None:
        auto_class = loader_of(config)
        if auto_class.__name__ == "AutoModelForCausalLM":
            check_causal(config, path_or_id, "give the class to load it with, auto_class=...")
    elif not hasattr(auto_class, "from_pretrained"):
        raise PosencError(
            f"auto_class is a class of transformers, such as AutoModelForImageTextToText, not {auto_class!r:.80}."
        )
    try:
        return _load(
            path_or_id, config, auto_class, allow_missing_weights, options, absorbed, kwargs
        )
    except (PosencError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # a family, a missing library or the hub: each raises in its own way
        reason = unreadable(path_or_id) or reason_of(error, config)
        raise PosencError(f"The model {path_or_id} cannot be loaded: {reason}") from error


def _load(
    path_or_id: str | Path,
    config: Any,
    auto_class: Any,
    allow_missing_weights: bool,
    options: Mapping[str, Any],
    absorbed: Mapping[str, Any],
    kwargs: dict[str, Any],
) -> Any:
    overrides, saved = list(_overrides(config, absorbed)), copy.deepcopy(config)
    patch = take_patch(config, path_or_id)
    for path, key, value in overrides:
        part = _part(config, path)
        if getattr(part, key, None) == getattr(_part(saved, path), key, None):  # the patch left it
            setattr(part, key, value)
    with_info = kwargs.pop("output_loading_info", False)
    any_shape = kwargs.pop("ignore_mismatched_sizes", False)
    kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    gguf = find_gguf(Path(path_or_id, kwargs.get("subfolder") or ""))
    folder = path_or_id if gguf is None else gguf.parent
    if gguf is not None:
        kwargs = loading_options(gguf) | kwargs
    with _loading_report(path_or_id), _same_random_weights(allow_missing_weights), loading_gguf():
        model, info = auto_class.from_pretrained(folder, config=config, **kwargs)
    if gguf is not None:
        as_plain_model(model, gguf)
    if patch is not None:  # its buffers may follow the new length, and get their values with it
        buffers = {name for name, _ in model.named_buffers()}
        info["mismatched_keys"] = [row for row in info["mismatched_keys"] if row[0] not in buffers]
    _check_weights(path_or_id, info, allow_missing_weights, any_shape)
    _check_stored(path_or_id, model)
    if patch is not None:
        apply_config(model, patch, trained=True)
        if trained := trained_parameters(model):
            fill_from_checkpoint(model, trained, path_or_id, options)
        _keep_overrides(path_or_id, model, overrides)
    return (model, info) if with_info else model


def _overrides(
    config: Any, values: Mapping[str, Any], path: str = ""
) -> Iterator[tuple[str, str, Any]]:
    """Yield the values that a config does not have yet, each with the path of its part of the config, and its key."""
    for key, value in values.items():
        current = getattr(config, key, None)
        if isinstance(value, dict) and hasattr(current, "get_text_config"):
            yield from _overrides(current, value, f"{path}.{key}".lstrip("."))
        elif value != current:
            yield path, key, value


def _part(config: Any, path: str) -> Any:
    return dict(export.config_parts(config))[path]


def _keep_overrides(
    source: str | Path, model: Any, overrides: Iterable[tuple[str, str, Any]]
) -> None:
    """Raise for overrides that contradict a patch in force; a greater length than that of a rotary table is set."""
    if (state := state_of(model)) is None:
        return
    for path, key, value in overrides:
        part = _part(model.config, path)
        names, current = part.attribute_map, getattr(part, key, None)
        if value == current:
            continue
        longer = names.get(key, key) == names.get(_LENGTH, _LENGTH) and value > current
        if state.native is not None or not longer:
            raise PosencError(
                f"{key}={value!r:.80} contradicts the patch of {source}, {state.config}, which sets {current!r:.80}. "
                "Leave it out; patch_model(model, ..., replace=True) gives the loaded model another patch."
            )
        setattr(part, key, value)


@contextlib.contextmanager
def _loading_report(path_or_id: str | Path) -> Iterator[None]:
    """Suppress transformers' table of weights, which `_check_weights` replaces; name the weights in its errors.

    Warn of weights that the config ties and the checkpoint does not: commands disable transformers' own log.
    """
    report, untied = "LOAD REPORT", "will NOT tie"
    try:
        with taken_warnings("modeling_utils", report, untied) as taken:
            yield
    except RuntimeError as error:
        if "above report" not in str(error):
            raise
        rows = "".join(text for text in taken if report in text).splitlines()
        failed = [r.partition("|")[0].strip() for r in rows if "CONVERSION" in r and "|" in r]
        raise PosencError(
            f"The weights of {path_or_id} cannot be converted to this model: {_names(failed)}. "
            "The checkpoint is damaged or incomplete, or belongs to another config.json."
        ) from error
    for text in (text for text in taken if untied in text):
        warnings.warn(f"{path_or_id}: {text}", stacklevel=5)


@contextlib.contextmanager
def _same_random_weights(enabled: bool) -> Iterator[None]:
    """Draw missing weights from one seed, so that a resumed run reads the same model."""
    devices = list(range(torch.cuda.device_count())) if enabled else []
    with torch.random.fork_rng(devices, enabled=enabled):
        if enabled:
            torch.manual_seed(0)
        yield


def _check_weights(path: str | Path, info: Mapping[str, Any], allow: bool, any_shape: bool) -> None:
    """Raise for weights that are missing or of another shape, and warn of unexpected ones; all by name."""
    mismatched = sorted(info["mismatched_keys"])
    if mismatched and not any_shape:
        name, stored, needed = mismatched[0]
        others = f" ({len(mismatched)} such weights: {_names([key for key, *_ in mismatched])})"
        raise PosencError(
            f"The weights of {path} do not fit its config.json: {name} is {tuple(stored)} in the checkpoint and "
            f"{tuple(needed)} in the model{others if mismatched[1:] else ''}. Restore the weights' own config.json."
        )
    _check_missing(path, info["missing_keys"], "model", allow, sorted(info["unexpected_keys"]))
    # A patch's own parameters are loaded after the patch.
    if unexpected := sorted(k for k in info["unexpected_keys"] if f".{PARAMETERS}." not in f".{k}"):
        warnings.warn(
            f"{path} has {len(unexpected)} weights that the model has no use for: {_names(unexpected)}. "
            "Check that its config.json belongs to it.",
            stacklevel=3,
        )


def _check_stored(path: str | Path, model: Any) -> None:
    """Raise if a folder holds, in whole numbers or 8 bits, weights that the model has read as floating point."""
    needed = {} if getattr(model, "is_quantized", False) else dict(model.named_parameters())
    for file in sorted(Path(path).glob("*.safetensors")) if needed else ():
        with safe_open(file, "pt") as weights:
            for name in needed.keys() & set(weights.keys()):
                kind = weights.get_slice(name).get_dtype()
                if needed[name].is_floating_point() and kind not in FLOATS:
                    raise PosencError(
                        f"{file} holds {name} as {kind}, which is no floating-point weight. If it was quantized, "
                        "restore the quantization_config of its config.json; else download it again."
                    )


def _check_missing(
    path: str | Path, missing: Iterable[str], whose: str, allow: bool, others: Sequence[str] = ()
) -> None:
    if not missing:
        return
    names = sorted(missing)
    lacks = f"{path} lacks {len(names)} of the {whose}'s weights: {_names(names)}."
    if others:
        lacks += f" It has {len(others)} others: {_names(others, 2)}."
    if not allow:
        raise PosencError(
            f"{lacks} They would be drawn at random. Get the whole checkpoint, or load it all the same with "
            "allow_missing_weights=True (on the command line: --allow-missing-weights)."
        )
    warnings.warn(f"{lacks} They are drawn at random, from a fixed seed.", stacklevel=4)


def _names(keys: Sequence[str], most: int = 9) -> str:
    return ", ".join(keys[:most]) + (f" and {len(keys) - most} more" if len(keys) > most else "")


def take_patch(config: Any, path_or_id: str | Path) -> PatchConfig | None:
    """Return the patch that a checkpoint was saved with, if any, and restore its config from before the patch."""
    block: Mapping[str, Any] | None = vars(restore_withheld(config)).pop(export.BLOCK, None)
    if block is None:
        beside = Path(path_or_id) / FILE
        return read_patch(beside) if beside.is_file() else None
    if block.get(export.IN_WEIGHTS):
        vars(config)[export.BLOCK] = block  # for `load_patch`: it is in force
        return None
    configs = dict(export.config_parts(config))
    try:
        for path, before in block["before"].items():
            restore(configs[path], before)
        return PatchConfig.from_dict(block)
    except (KeyError, TypeError, AttributeError) as error:
        raise damaged(path_or_id) from error
    except PosencError as error:
        raise PosencError(f"The patch in the config.json of {path_or_id}: {error}") from error


def load_adapter(
    model: nn.Module,
    path_or_id: str | Path,
    *,
    is_trainable: bool = False,
    allow_missing_weights: bool = False,
    **kwargs: Any,
) -> Any:
    """Add a saved adapter to a loaded model, and the patch that it carries.

    Args:
        model: The adapter's base model: not patched, or with the adapter's patch.
        path_or_id: The directory or the hub repository of the adapter.
        is_trainable: Train it further; otherwise it is frozen.
        allow_missing_weights: As for `from_pretrained`, of the adapter's weights.
        **kwargs: For `PeftModel.from_pretrained`.

    Returns:
        A `PeftModel` around the same model.

    Raises:
        PosencError: There is no adapter, it lacks weights, the model has another patch, or cannot take the adapter's.

    Examples:
        >>> from copy import deepcopy
        >>> from peft import get_peft_model
        >>> from hf_posenc import get_patch, load_adapter, patch_model
        >>> from hf_posenc.training import lora_config
        >>> base = deepcopy(model)
        >>> config = lora_config(patch_model(model, "yarn", scale=4))
        >>> get_peft_model(model, config).save_pretrained("longer")
        >>> get_patch(load_adapter(base, "longer")).method
        'yarn'
    """
    from transformers.utils.peft_utils import find_adapter_config_file

    hub = _some(kwargs, _HUB)
    check_source(path_or_id, "adapter", **hub)
    if (file := find_adapter_config_file(str(path_or_id), **hub)) is None:
        raise PosencError(
            f"There is no adapter_config.json in {path_or_id}. Give the directory that PEFT saved an adapter to; "
            "hf_posenc.from_pretrained loads a whole model."
        )
    from peft import PeftModel

    from hf_posenc.patch.lora import read_adapter

    config, required = read_adapter(file)
    if required is not None:
        if fresh := (get_patch(model) is None):
            with _same_random_weights(allow_missing_weights):
                apply_config(model, required, trained=True)
        patch = get_patch(model)
        if patch is not None and patch.config != required:
            raise PosencError(
                f"The adapter in {path_or_id} was trained in a model patched with {_short(required)}, and this model "
                f"is patched with {_short(patch.config)}. Give hf_posenc.load_adapter a model that is not patched "
                "(unpatch_model), or one with that very patch."
            )
        if PARAMETERS not in (getattr(config, "modules_to_save", None) or ()):
            try:
                _fill_beside_adapter(model, path_or_id, fresh, allow_missing_weights, hub)
            except PosencError:
                if fresh:
                    unpatch_model(model)
                raise
    try:
        with _same_random_weights(allow_missing_weights):
            adapted = PeftModel.from_pretrained(
                model, str(path_or_id), config=config, is_trainable=is_trainable, **kwargs
            )
    except KeyError as error:  # a module that was trained whole; PEFT cannot go on without
        if not str(error.args[0]).startswith("base_model."):
            raise
        _check_missing(path_or_id, error.args, "adapter", False)
        raise
    missing = _missing_of_adapter(adapted, path_or_id, hub)
    try:
        _check_missing(path_or_id, missing, "adapter", allow_missing_weights)
    except PosencError:
        adapted.unload()
        raise
    return adapted


def _fill_beside_adapter(
    model: nn.Module, source: str | Path, fresh: bool, allow: bool, options: Mapping[str, Any]
) -> None:
    """Give the parameters of a `fresh` patch the values beside an adapter; raise if a model has others already."""
    trained = trained_parameters(unwrap(model))
    file = _file_of(source, PARAMETER_FILE, options) if trained else None
    if file is None:  # an adapter of an earlier version, or a method without parameters
        _check_missing(source, trained if fresh else (), "patch", allow)
        return
    stored = load_file(file)
    own = {name: each.detach().cpu() for name, each in trained.items()}
    if fresh:
        fill(trained, stored, source)
    elif stored.keys() != own.keys() or any(not own[name].equal(stored[name]) for name in own):
        raise PosencError(
            f"The adapter in {source} was trained with other parameters of the patch than this model has. Give "
            "hf_posenc.load_adapter a model that is not patched (unpatch_model)."
        )


def _missing_of_adapter(model: Any, path_or_id: str | Path, options: Mapping[str, Any]) -> set[str]:
    """Return the weights of a loaded LoRA that its file lacks; none where the file has other names for them."""
    from peft import get_peft_model_state_dict
    from peft.utils import SAFETENSORS_WEIGHTS_NAME

    if (file := _file_of(path_or_id, SAFETENSORS_WEIGHTS_NAME, options)) is None:
        return set()
    with safe_open(file, "pt") as weights:
        stored = set(weights.keys())
    needed = set(get_peft_model_state_dict(model, save_embedding_layers=False))
    return set() if any("lora_" in key for key in stored - needed) else needed - stored


def _short(patch: PatchConfig) -> str:
    values = {**patch.to_dict(), "format": None, "method": None}
    shown = (f"{key}={value}" for key, value in values.items() if value not in (None, {}))
    return f"{patch.method} ({', '.join(shown)})"


def _with_adapter(path: str | Path, file: str, auto_class: Any, kwargs: dict[str, Any]) -> Any:
    from hf_posenc.patch.lora import read_adapter

    config, required = read_adapter(file)
    if not config.base_model_name_or_path:  # PEFT 0.18 writes "" for a model made from a config
        raise PosencError(
            f"The adapter in {path} does not name its base model. Load that yourself and add the adapter "
            "with hf_posenc.load_adapter(model, ...)."
        )
    own = _some(kwargs, (*_HUB, "allow_missing_weights"))
    own["is_trainable"] = kwargs.pop("is_trainable", False)
    check_base(config.base_model_name_or_path, path, revision=config.revision)
    of_adapter = ("revision", "subfolder", "force_download")
    rest = {key: value for key, value in kwargs.items() if key not in of_adapter}
    if config.revision:
        rest["revision"] = config.revision
    model = from_pretrained(config.base_model_name_or_path, auto_class=auto_class, **rest)
    if required and (patch := get_patch(model)) is not None and patch.config != required:
        unpatch_model(model)  # of another run: the adapter was trained with its own
    names = [key for key in rest if key not in _OF_BOTH and hasattr(model.config, key)]
    before = [("", key, copy.deepcopy(getattr(model.config, key))) for key in names]
    adapted = load_adapter(model, path, **own)
    _keep_overrides(path, model, before)
    return adapted


def fill_from_checkpoint(
    model: Any, trained: Mapping[str, Tensor], path_or_id: str | Path, options: Mapping[str, Any]
) -> None:
    """Give the parameters of a patch their values in a checkpoint; raise for others than those of the patch."""
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
    from transformers.utils.hub import cached_file

    def opened(name: str) -> Any:
        return safe_open(cached_file(path_or_id, name, **options), "pt")

    files: dict[str, str] = {}
    if (index := _file_of(path_or_id, SAFE_WEIGHTS_INDEX_NAME, options)) is not None:
        files = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
    beside = _file_of(path_or_id, PARAMETER_FILE, options) is not None
    for name in ([] if files else [SAFE_WEIGHTS_NAME]) + [PARAMETER_FILE] * beside:
        with opened(name) as weights:
            files |= dict.fromkeys(weights.keys(), name)
    own = {name: name for name in trained if name in files}
    # Some families are saved under other names than the model has (EXAONE).
    if len(own) < len(trained):
        numbers = {name: torch.tensor(number) for number, name in enumerate(trained)}
        saved = revert_weight_conversion(model, numbers)
        own |= {key: n for key in files.keys() & saved for n in numbers if saved[key] is numbers[n]}
    loaded: dict[str, Tensor] = {}
    for key, name in own.items():
        with opened(files[key]) as weights:
            loaded[name] = weights.get_tensor(key)
    fill(trained, loaded, path_or_id)


def _file_of(source: str | Path, name: str, options: Mapping[str, Any]) -> Any:
    """Return the path of a file of a folder or hub name; `None` where it has none."""
    from transformers.utils.hub import cached_file

    return cached_file(source, name, **options, _raise_exceptions_for_missing_entries=False)


def _some(kwargs: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: kwargs[name] for name in names if name in kwargs}
