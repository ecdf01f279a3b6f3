"""Checks of a checkpoint that is to be loaded: the first thing that is wrong, with the whole reason, in one line."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_posenc.errors import PosencError, one_line
from hf_posenc.gguf_file import find_gguf, read_gguf_config


@contextlib.contextmanager
def taken_warnings(module: str, *texts: str) -> Iterator[list[str]]:
    """Collect the warnings that a module of transformers logs and that contain one of these texts; without, all.

    They are collected at every verbosity, since commands have the log disabled, and are not logged.
    """
    logger: Any = logging.getLogger(f"transformers.{module}")
    level, before, taken = logger.getEffectiveLevel(), logger.level, list[str]()

    def keep(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if record.levelno == logging.WARNING and any(text in message for text in texts or ("",)):
            taken.append(message)
            return False
        return bool(record.levelno >= level)

    logger.addFilter(keep)
    # Else transformers, whose loggers have no level of their own, logs more.
    if level > logging.WARNING:
        logger.setLevel(logging.WARNING)
    logger.warning_once = logger.warning  # once in a process, though nobody may have seen it
    try:
        yield taken
    finally:
        del logger.warning_once
        logger.removeFilter(keep)
        logger.setLevel(before)


_FILES = ("config.json", "adapter_config.json", "tokenizer_config.json", "tokenizer.json")


def check_source(
    path_or_id: Any,
    given: str,
    *,
    revision: str | None = None,
    cache_dir: Any = None,
    subfolder: str = "",
    token: Any = None,
    local_files_only: bool = False,
    **_: Any,
) -> None:
    """Raise for what is no folder, no GGUF file and no model cached or on the hub, after one request without retries.

    `given` is the kind of thing in the messages; the other arguments are those of `from_pretrained`.
    """
    if not isinstance(path_or_id, (str, Path)):
        article = "An" if given[0] in "aeiou" else "A"
        raise PosencError(
            f"{article} {given} is given by its folder or hub name, not by {type(path_or_id).__name__}."
        )
    name, path = str(path_or_id), Path(path_or_id)
    if name and (path.is_dir() or find_gguf(path) is not None):
        return
    below = name.startswith((".", "~")) or path.is_absolute() or len(path.parts) > 2
    if path.is_file():
        raise PosencError(
            f"{name} is a file, and no GGUF file. Give the {given}'s folder. Commands that read a text have --text."
        )
    if not name.strip() or path.exists() or below or name == "MODEL":  # as the pages write
        raise PosencError(
            f"There is no {given} folder {name or repr(name)}. Give a folder that save_pretrained wrote, or a hub name "
            "or a GGUF file."
        )
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import (
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    absent = f"There is no {given} {name}: no folder has this name"
    try:
        files = (f"{subfolder}/{file}" if subfolder else file for file in _FILES)
        where: dict[str, Any] = {"revision": revision, "cache_dir": cache_dir}
        if any(isinstance(try_to_load_from_cache(name, file, **where), str) for file in files):
            return
        if constants.HF_HUB_OFFLINE or local_files_only:
            reason, way = "HF_HUB_OFFLINE is set: unset it", "to download, or give a folder."
            if local_files_only:
                reason = "local_files_only is set: leave it out"
            raise PosencError(f"{absent}, and it is not cached. {reason} {way}")
        HfApi(token=token).model_info(name, revision=revision, timeout=10)
    except HFValidationError as error:
        raise PosencError(f"{absent}, and it is no hub name ({reason_of(error)}).") from error
    except RevisionNotFoundError as error:
        raise PosencError(
            f"{name} has no revision {revision}. Give a branch, a tag or a commit of it."
        ) from error
    except RepositoryNotFoundError as error:
        raise PosencError(
            f"{absent}, and the hub has none that you can read. Check the spelling, or log in with `hf auth login`."
        ) from error
    except PosencError:
        raise
    except Exception as error:  # no network, a proxy, a mirror: each raises in its own way
        raise PosencError(
            f"{absent}, it is not in the cache, and {constants.ENDPOINT} cannot be reached ({reason_of(error)}). Give "
            "a folder, or try again with a network."
        ) from error


def check_base(base: Any, adapter: str | Path, **options: Any) -> None:
    """Raise for the base model of an adapter that is not there, or that is an adapter itself."""
    try:
        check_source(base, "base model", **options)
    except PosencError as error:
        raise PosencError(f"{error} The adapter {adapter} names it.") from error
    if (Path(base) / "adapter_config.json").is_file():
        raise PosencError(
            f"The adapter {adapter} names {base} as its base model, and that holds an adapter. Correct "
            "base_model_name_or_path in its adapter_config.json."
        )


def check_folder(folder: Path, name: str | Path) -> None:
    """Raise for a model's folder without a config.json, or with one that no model can have."""
    if not (folder / "config.json").is_file():
        if (folder / "config.json").is_dir() or (folder / "config.json").is_symlink():
            raise PosencError(
                f"The config.json of {folder} is a folder or a link that leads nowhere. Download it again."
            )
        files = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
        more = ", ..." * (len(files) > 5)
        held = f"it has {', '.join(files[:5])}{more}" if files else "it is empty"
        raise PosencError(
            f"The folder {folder} has no config.json ({held}). Give the folder that save_pretrained wrote."
        )
    _check_values(read_json(folder / "config.json", name), name)
    if (folder / "generation_config.json").is_file():  # transformers ignores a damaged one
        read_json(folder / "generation_config.json", name)


def read_config(name: str | Path, **options: Any) -> Any:
    """Return the config of a model that `check_source` has accepted; raise if it cannot be read."""
    from hf_posenc.patch.export import BLOCK
    from hf_posenc.patch.saving import stored_config

    folder = Path(name) / (options.get("subfolder") or "")
    gguf = find_gguf(folder)
    if Path(name).is_dir() and gguf is None:
        check_folder(folder, name)
    try:
        with taken_warnings("modeling_rope_utils") as doubts:
            config = stored_config(name, **options) if gguf is None else read_gguf_config(gguf)
    except PosencError:  # a damaged patch or GGUF file
        raise
    except Exception as error:  # an unknown model type, values of a wrong type, custom code
        if gguf is not None:
            raise PosencError(
                f"The config of {gguf} cannot be read: {reason_of(error)}. Give the checkpoint that it was made from."
            ) from error
        raise PosencError(
            f"The config.json of {name} cannot be read: {reason_of(error)}{_misplaced(folder)}"
        ) from error
    if BLOCK not in vars(config):  # a patch's values were compared with its table when it was saved
        _report_doubts(doubts, name)
    layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", 1)
    if isinstance(layers, int) and layers < 1:  # transformers builds that without an error
        raise PosencError(
            f"The config.json of {name} has num_hidden_layers {layers}: a model needs at least 1 layer. "
            "Restore the value that the checkpoint was saved with."
        )
    return config


def _misplaced(folder: Path) -> str:
    """Return the way out where a scaling lies beside the config of the text model, which should have it."""
    try:
        values = read_json(folder / "config.json", folder)
    except PosencError:
        return ""
    keys = [key for key in ("rope_scaling", "rope_parameters") if values.get(key)]
    if not keys or not isinstance(values.get("text_config"), dict):
        return ""
    return f". Its {keys[0]} lies beside text_config, where the model reads it: move it in there."


def _report_doubts(doubts: Sequence[str], name: str | Path) -> None:
    """Warn of the rope values that transformers finds odd, and raise for those with which it fails or broadcasts."""
    for doubt in dict.fromkeys(doubts):
        # The numbers are right, as in Phi-3's own configs.
        if "we recommend the use of this field" in doubt:
            continue
        text = doubt.replace("`rope_parameters`'s", "rope_parameters:").rstrip(".")
        if "must have length" in text:
            raise PosencError(
                f"The config.json of {name} cannot be used: {text}. Restore the checkpoint's own list."
            )
        warnings.warn(
            f"The config.json of {name} may be wrong, and is used as it is: {text}.", stacklevel=4
        )


def read_json(file: Path, name: str | Path) -> dict[str, Any]:
    """Return the object in a JSON file of a model or adapter."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise PosencError(f"The {file.name} of {name} is not JSON: {reason_of(error)}") from error
    if not isinstance(values, dict):
        kind = "null" if values is None else type(values).__name__
        raise PosencError(f"The {file.name} of {name} is a JSON {kind}, not an object.")
    return values


_CLASSIFIERS = ("SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING")


def loader_of(config: Any) -> Any:
    """Return the class that loads a config's model: `AutoModelForCausalLM`, or what its `architectures` name.

    The latter counts if it is a masked or a sequence-to-sequence language model, or a classifier.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    name = next(iter(getattr(config, "architectures", None) or ()), "")
    for kind in ("MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", *_CLASSIFIERS):
        if name in getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES").values():
            return getattr(transformers, name)
    return transformers.AutoModelForCausalLM


def check_causal(config: Any, name: str | Path, way: str) -> None:
    """Raise for a config of transformers that belongs to no causal language model; `way` is the way out."""
    from transformers import AutoModelForCausalLM

    causal = (
        loader_of(config) is AutoModelForCausalLM
        and type(config) in AutoModelForCausalLM._model_mapping
    )
    if "AutoModelForCausalLM" not in (getattr(config, "auto_map", None) or {}) and not causal:
        raise PosencError(
            f"{name} is a {config.model_type} model, which is not a causal language model: {way}."
        )


_SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
_POSITIVE = (
    *("factor", "attention_factor", "beta_fast", "beta_slow", "low_freq_factor"),
    *("high_freq_factor", "original_max_position_embeddings"),
)
_NUMBERS = ("mscale", "mscale_all_dim", "short_mscale", "long_mscale")
_DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")  # known without torch
_LISTS = ("short_factor", "long_factor")


def _check_values(values: Mapping[str, Any], name: str | Path, place: str = "") -> None:
    """Refuse values of a config that transformers would meet somewhere inside, or not at all."""
    for key, value in values.items():
        if key == "hf_posenc":  # a patch and what it replaced, which its own reader checks
            continue
        if isinstance(value, dict):
            _check_values(value, name, f"{place}{key}.")
        elif value is not None and (kind := _wrong_kind(key, value, place)):
            raise PosencError(
                f"The config.json of {name} has {place}{key} = {value!r:.80}, which is {kind}. Correct it there."
            )


def _wrong_kind(key: str, value: Any, place: str) -> str:
    """Return what a value of a config is not, for the keys that decide; empty for a good one."""
    rotary = "rope" in place
    number = _is_number(value)
    if key == "rope_theta":
        return "" if number and 1 < value < math.inf else "not a number above 1"
    if rotary and key in _POSITIVE:
        return "" if number and 0 < value < math.inf else "not a number above 0"
    if rotary and key in _NUMBERS:
        return "" if number and math.isfinite(value) else "not a number"
    if key == "partial_rotary_factor":
        return "" if number and 0 <= value <= 1 else "not a number from 0 to 1"
    if rotary and key == "truncate":
        return "" if isinstance(value, bool) else "not true or false"
    if rotary and key in _LISTS:
        good = isinstance(value, list) and all(_is_number(x) and 0 < x < math.inf for x in value)
        return "" if good else "not a list of numbers above 0"
    if rotary and key in ("rope_type", "type"):
        return "" if isinstance(value, str) else "not the name of a rope type"
    if not place and key in _SIZES:
        return "not a whole number above 0" if number and value < 1 else ""
    if not place and key == "num_hidden_layers" and number and value > 10_000:
        return "more layers than any model has"
    if not place and key in ("quantization_config", "auto_map"):
        return "not an object"
    if key in ("dtype", "torch_dtype") and value not in _DTYPES:
        import torch

        known = isinstance(getattr(torch, str(value), None), torch.dtype)
        return "" if known else "no dtype of torch, such as bfloat16"
    return ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def reason_of(error: BaseException, config: Any = None) -> str:
    """Return the whole message of an error on one line, with the way out where custom code is needed."""
    text = " ".join(str(error).split())
    if isinstance(error, KeyError) and config is not None:  # transformers has no such class
        values: dict[str, Any] = config.to_dict()
        rope = values.get("rope_parameters")
        values |= {f"rope_parameters.{key}": value for key, value in dict(rope or {}).items()}
        named = (key for key, value in values.items() if value == error.args[0])
        text = f"{next(named, 'one of its values')}: {text} is unknown to transformers"
    elif isinstance(error, (LookupError, TypeError, AttributeError, AssertionError)) or not text:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if "trust_remote_code" in text:
        return (
            "it needs the Python code that comes with it. Read that code, and pass --trust-remote-code (in Python "
            "trust_remote_code=True) to run it."
        )
    return text


def unreadable(name: str | Path) -> str | None:
    """Return what is wrong with a folder's weights: there are none, or an index or a file is not whole."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(Path(name).glob("*.safetensors.index.json")):
        try:
            shards = sorted(set(read_json(file, name)["weight_map"].values()))
        except (PosencError, LookupError, AttributeError, TypeError):
            return f"{file.name} is not the index of its weights: download it again."
        if outside := [shard for shard in shards if Path(str(shard)).name != shard]:
            return f"{file.name} names {outside[0]!r}, which is not beside it: download it again."
        if absent := [shard for shard in shards if not (Path(name) / shard).is_file()]:
            return (
                f"{file.name} names {absent[0]}, which is not there ({len(absent)} of {len(shards)} files are "
                "missing): download it again."
            )
    for file in sorted(Path(name).glob("*.safetensors")):
        try:
            with safe_open(file, "numpy"):  # its header alone, without torch
                pass
        except (OSError, SafetensorError) as error:
            return f"{file.name} is {_damage(file, one_line(error))}."
    for file in sorted(Path(name).glob("pytorch_model*.bin")):
        if _start(file, 2) not in (b"PK", b"\x80\x02"):
            return f"{file.name} is {_damage(file, 'not what torch.save writes')}."
    files = [file for kind in ("*.safetensors*", "*.bin*") for file in Path(name).glob(kind)]
    if not files and Path(name).is_dir() and find_gguf(name) is None:
        return "it has neither model.safetensors nor pytorch_model.bin."
    return None


def _damage(file: Path, reason: str) -> str:
    """Return what a file of weights is that cannot be read, and what to do."""
    if not file.is_file():
        return "a folder or a link that leads nowhere: download it again"
    if _start(file, 64).startswith(b"version https://git-lfs"):
        return "a Git LFS pointer and not the weights: run `git lfs pull` there"
    return f"damaged or incomplete ({reason}): download it again"


def _start(file: Path, count: int) -> bytes:
    try:
        with file.open("rb") as content:
            return content.read(count)
    except OSError:
        return b""
