"""Flags of other engines read back: the config that they put in force.

The flags are those of vLLM 0.33.0 (`config/model.py`: `_apply_dict_overrides`, `_update_nested`), SGLang 0.5.23
(`srt/utils/hf_transformers/config.py`), llama.cpp, LLaMA-Factory 0.9.5 (`model/model_utils/rope.py`), axolotl 0.19.0
(`loaders/utils.py`) and unsloth 2026.10.9 (`models/llama.py`, `_user_rope_scaling`, `_extended_rope_scaling`).
"""

from __future__ import annotations

import copy
import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hf_posenc.diagnosis import reason_of
from hf_posenc.errors import PosencError, one_line
from hf_posenc.lengths import read_length

BLOCKS = ("rope_parameters", "rope_scaling")
"""The names under which a config has its rotary parameters."""
OWN_KEYS = (
    *("partial_rotary_factor", "mrope_section", "mrope_interleaved", "xdrope_section"),
    "llama_4_scaling_beta",
)
"""Keys of `rope_parameters` that belong to the model and not to a scaling."""
_ORIGINAL = "original_max_position_embeddings"
_LENGTH = "max_position_embeddings"


@dataclass(frozen=True, eq=False)
class Reading:
    """A config as flags change it.

    Attributes:
        config: The changed config.
        base: The config of the model's folder.
        engine: The engine whose flags they are.
        length: The longest text that the flags ask for, in tokens.
        notes: What the engine does with them that their author may not expect.
    """

    config: Any
    base: Any
    engine: str
    length: int | None = None
    notes: tuple[str, ...] = ()


def read_flags(config: Any, flags: Sequence[str]) -> Reading:
    """Return the config that an engine computes with, from its command's flags.

    Flags that do not bear on positions are skipped.

    Args:
        config: The config of the model's folder; not changed.
        flags: The words of the command line; a whole command may be given.

    Raises:
        PosencError: Flags of no known engine or of several, a flag that none of them reads any more, or values that
            the engine refuses.
    """
    engine, values = engine_of(flags)
    lengths = [read_length(v, name=k) for k, v in values.items() if _READ[k][1] == "length"]
    reading = Reading(copy.deepcopy(config), config, engine, lengths[-1] if lengths else None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, for rope_scaling
        return _APPLIED[engine](reading, values)


def engine_of(flags: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return the engine that some flags belong to, and the values of those that are read."""
    values = dict(_words(flags))
    engines = {_READ[name][0] for name in values if _READ[name][0]}
    if "--rope-scaling" in values:
        engines.discard("llama.cpp")
        engines.add(_owner_of_rope_scaling(values))
    if not engines:
        known = ", ".join(name for name, (engine, _) in _READ.items() if engine)
        raise PosencError(f"None of these flags scales positions. Those that are read: {known}.")
    if len(engines) > 1:
        raise PosencError(f"These are flags of {' and '.join(sorted(engines))}: give one command.")
    return engines.pop(), values


def is_read(word: str) -> bool:
    """Return whether a word of a command line is a flag that is read, or was in an earlier version of its engine."""
    name = _name(word.partition("=")[0])
    return name in _READ or name in _REMOVED


_READ = {
    "--hf-overrides": ("vLLM", "json"),
    "--max-model-len": ("", "length"),
    "--json-model-override-args": ("SGLang", "json"),
    "--context-length": ("", "length"),
    "--rope-scaling": ("llama.cpp", "text"),
    "--rope-scale": ("llama.cpp", "number"),
    "--rope-freq-scale": ("llama.cpp", "number"),
    "--rope-freq-base": ("llama.cpp", "number"),
    "--yarn-orig-ctx": ("llama.cpp", "number"),
    "--yarn-ext-factor": ("llama.cpp", "number"),
    "--yarn-attn-factor": ("llama.cpp", "number"),
    "--yarn-beta-fast": ("llama.cpp", "number"),
    "--yarn-beta-slow": ("llama.cpp", "number"),
    "--ctx-size": ("", "length"),
    "--cutoff-len": ("", "length"),
    "--overrides-of-model-config": ("axolotl", "json"),
    "--max-seq-length": ("unsloth", "length"),
}
"""The flags that are read, by the engine (empty: a length alone names none) and the kind of their value."""
_SHORT = {"-c": "--ctx-size", "--max-model-length": "--max-model-len"}
_REMOVED = ("--grp-attn-n", "--grp-attn-w", "-gan", "-gaw")
# The options of trainers as their files and calls have them: `rope_scaling: yarn`, `max_seq_length=16384`.
_WITHOUT_DASHES = re.compile(
    r"(rope_scaling|cutoff_len|overrides_of_model_config|max_seq_length)\s*[:=]\s*(.*)", re.DOTALL
)
_OF_POSITIONS = ("rope", "yarn", "override", "position")


def _words(flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the flags that are read and their values."""
    words = [part for word in flags for part in _split(word)]
    for index, word in enumerate(words):
        name = _name(word)
        if name in _REMOVED:
            raise PosencError(
                f"{word}: llama.cpp's server has no Self-Extend since October 2024 (pull request 9860). "
                'hf_posenc computes it: patch_model(model, "self_extend", ...).'
            )
        if name not in _READ:
            if name.startswith("--") and any(part in name for part in _OF_POSITIONS):
                raise PosencError(f"{word} is not a flag that is read: {', '.join(_READ)}.")
            continue
        if index + 1 == len(words):
            raise PosencError(f"{word} has no value.")
        yield name, words[index + 1]


def _name(word: str) -> str:
    """Return a flag under the name by which it is read: with dashes, in full."""
    name = "--" + word[2:].replace("_", "-") if word.startswith("--") else word
    return _SHORT.get(name, name)


def _split(word: str) -> list[str]:
    if option := _WITHOUT_DASHES.fullmatch(word.strip()):
        name, value = option[1], option[2].rstrip(",").strip("'\"")
        return [f"--{name}", value] if value else [f"--{name}"]
    name, equals, value = word.partition("=")
    return [name, value] if equals and name.startswith("--") else [word]


def _owner_of_rope_scaling(values: Mapping[str, str]) -> str:
    """Return the engine of `--rope-scaling`: the trainers have a length beside it, and no other of these flags."""
    value = values["--rope-scaling"]
    if value.lstrip().startswith("{"):
        if "--max-seq-length" in values:
            return "unsloth"
        raise PosencError(
            "vLLM has no --rope-scaling since 0.11.1 (pull request 28006) and does not start with it. Give "
            f"--hf-overrides '{{\"rope_parameters\": {value}}}', with the folder's rope_theta in it. (unsloth's "
            "rope_scaling= is read beside its max_seq_length=.)"
        )
    others = [name for name in values if name not in ("--rope-scaling", "--cutoff-len")]
    return "llama.cpp" if others or "--cutoff-len" not in values else "LLaMA-Factory"


def _object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise PosencError(f"{name} {text:.60}: {reason_of(error)}. Give JSON in quotes.") from error
    if not isinstance(value, dict):
        raise PosencError(f"{name} {text:.60}: give a JSON object.")
    return value


def _number(values: Mapping[str, str], name: str, default: float) -> float:
    try:
        number = float(values.get(name, default))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise PosencError(f"{name} {values[name]}: give a number.")
    return number


def _set(config: Any, key: str, value: Any) -> None:
    """Set an attribute of a config; raise for a value that transformers refuses, or a block that is none."""
    none = value is None and key != "rope_parameters"
    if key in BLOCKS and not none and not isinstance(value, dict):
        raise PosencError(f"{key} is an object with a rope_type, not {json.dumps(value):.80}.")
    try:
        setattr(config, key, value)
    except Exception as error:
        raise PosencError(f"{key} cannot be {json.dumps(value):.80}: {one_line(error)}") from error


# What each engine makes of its flags.


def _vllm(reading: Reading, values: Mapping[str, str]) -> Reading:
    config, notes = reading.config, list[str]()
    for key, value in _object("--hf-overrides", values["--hf-overrides"]).items():
        part = getattr(config, key, None)
        if isinstance(value, dict) and _is_config(part):
            _merge(part, value)
            continue
        if key in BLOCKS and _is_part(config):
            notes.append(_beside(config, key))
        elif key == "rope_scaling" and "rope_theta" not in (value or {"rope_theta": None}):
            raise PosencError(
                "transformers adds an empty rope_theta to this rope_scaling, with which vLLM makes no table. Name the "
                "block rope_parameters, with the folder's rope_theta in it."
            )
        _set(config, key, value)
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None)
    for entry in _entries(rope):
        notes += _unread_type(reading, entry)
        if entry.get("rope_theta") is None:
            entry["rope_theta"] = 10_000.0
            notes.append(
                "vLLM replaces the whole of rope_parameters, and this override has no rope_theta: it computes with "
                "10,000, or the default of the model's class. Add the folder's."
            )
        _complete(text, entry)
    return replace(reading, notes=tuple(notes))


def _sglang(reading: Reading, values: Mapping[str, str]) -> Reading:
    config, notes = reading.config, list[str]()
    name = "--json-model-override-args"
    for key, value in _object(name, values[name]).items():
        part = getattr(config, key, None)
        if isinstance(value, dict) and _is_config(part):
            for inner, new in value.items():
                _set(part, inner, new)
        elif key in BLOCKS and isinstance(value, dict):
            if _is_part(config):
                notes.append(_beside(config, key))
            config.rope_parameters = {**(getattr(config, "rope_parameters", None) or {}), **value}
        else:
            _set(config, key, value)
    text = config.get_text_config(decoder=True)
    for entry in _entries(getattr(text, "rope_parameters", None)):
        if "rope_type" in entry:
            notes += _unread_type(reading, entry)
        _require_theta(reading, text, entry)
    return replace(reading, notes=tuple(notes))


def _axolotl(reading: Reading, values: Mapping[str, str]) -> Reading:
    name = "--overrides-of-model-config"
    for key, value in _object(name, values[name]).items():
        if isinstance(value, dict) and _is_config(getattr(reading.config, key, None)):
            raise PosencError(
                f"axolotl replaces the whole of {key} by this object: save the folder with the patch instead."
            )
        setattr(reading.config, key, value)
    text = reading.config.get_text_config(decoder=True)
    for entry in _entries(getattr(text, "rope_parameters", None)):
        _require_theta(reading, text, entry)
    return reading


def _llamafactory(reading: Reading, values: Mapping[str, str]) -> Reading:
    text = reading.config.get_text_config(decoder=True)
    rope = dict(getattr(text, "rope_parameters", None) or {})
    original = rope.get(_ORIGINAL) or getattr(text, _LENGTH)
    length = reading.length or 0
    if length <= original:
        note = f"LLaMA-Factory scales nothing: --cutoff_len is not above {original:,}."
        return replace(reading, notes=(note,))
    kind, factor = values["--rope-scaling"], float(math.ceil(length / original))
    scaled: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind != "linear":
        scaled[_ORIGINAL] = original
    if kind == "llama3":
        scaled |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind not in ("linear", "dynamic", "yarn", "llama3"):
        raise PosencError(
            f"LLaMA-Factory has no rope_scaling {kind}: linear, dynamic, yarn, llama3."
        )
    text.rope_parameters = {"rope_theta": rope.get("rope_theta"), **scaled}
    note = (
        f"LLaMA-Factory rounds the factor up to {factor:g}. On transformers 5 the model is not built, since the "
        "rope_scaling that it sets has no rope_theta: give it a folder that was saved with the patch instead."
    )
    return replace(reading, notes=(note,))


def _unsloth(reading: Reading, values: Mapping[str, str]) -> Reading:
    text = reading.config.get_text_config(decoder=True)
    rope = dict(getattr(text, "rope_parameters", None) or {})
    length, trained = reading.length or 0, getattr(text, _LENGTH)
    if "--rope-scaling" in values:
        block = _object("rope_scaling", values["--rope-scaling"])
        kind = block.get("rope_type") or block.get("type")
        if kind not in ("linear", "yarn", "llama3"):
            return replace(reading, notes=(f"unsloth ignores a rope_scaling of type {kind}.",))
        if kind == "yarn":
            block.setdefault(_ORIGINAL, rope.get(_ORIGINAL) or trained)
        text.rope_parameters = {"rope_theta": rope.get("rope_theta"), **block, "rope_type": kind}
        return reading
    if length <= trained:
        return replace(reading, notes=(f"unsloth scales nothing up to {trained:,} tokens.",))
    if rope.get("rope_type") == "llama3":
        return replace(reading, notes=("unsloth keeps a llama3 table as it is.",))
    factor = length / trained
    text.rope_parameters = {
        "rope_type": "linear",
        "factor": factor,
        "rope_theta": rope.get("rope_theta"),
    }
    note = (
        f"unsloth divides every frequency by {factor:g}, which needs training. Pass rope_scaling= for another method, "
        "or load a folder that was saved with the patch."
    )
    return replace(reading, notes=(note,))


def _llama_cpp(reading: Reading, values: Mapping[str, str]) -> Reading:
    text, notes = reading.config.get_text_config(decoder=True), list[str]()
    rope = getattr(text, "rope_parameters", None) or {}
    entry = dict(rope.get("full_attention", rope))
    kind = values.get("--rope-scaling", entry.get("rope_type", "default"))
    if kind not in ("none", "linear", "yarn", "default"):
        if "--rope-scaling" in values:
            raise PosencError(f"llama.cpp has no --rope-scaling {kind}: none, linear, yarn.")
        return reading
    for name in ("--rope-scale", "--rope-freq-scale", "--rope-freq-base"):
        number = _number(values, name, 1.0)
        if number < 0 or (number == 0 and name == "--rope-scale"):
            raise PosencError(f"{name} {values[name]}: give a positive number.")
    # 0 of these two means: that of the file.
    frequency = _number(values, "--rope-freq-scale", 0.0)
    theta = _number(values, "--rope-freq-base", 0.0) or float(entry["rope_theta"])
    scale = _number(values, "--rope-scale", float(entry.get("factor") or 1.0))
    scale = 1 / frequency if frequency else scale
    if kind == "default" and scale != 1:
        kind = "linear"  # what it takes where a file names no type
    if kind == "yarn" and _number(values, "--yarn-ext-factor", 1.0) == 0:
        kind = "linear"
    result: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if kind != "none" and scale != 1:
        result |= {"rope_type": kind, "factor": scale}
    if result["rope_type"] == "yarn":
        trained = entry.get(_ORIGINAL) or getattr(text, _LENGTH)
        result[_ORIGINAL] = int(_number(values, "--yarn-orig-ctx", 0)) or int(trained)
        for beta, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
            result[beta] = _number(values, f"--yarn-{beta.replace('_', '-')}", default)
    if kind == "yarn" and scale == 1:
        notes.append("YaRN with a scale of 1 changes nothing: give --rope-scale.")
    if "--yarn-attn-factor" in values:
        notes.append("llama.cpp overwrites --yarn-attn-factor wherever YaRN is on.")
    result = {**{key: entry[key] for key in OWN_KEYS if key in entry}, **result}
    text.rope_parameters = (
        {**rope, "full_attention": result} if "full_attention" in rope else result
    )
    return replace(reading, notes=tuple(notes))


_APPLIED: dict[str, Callable[[Reading, Mapping[str, str]], Reading]] = {
    "vLLM": _vllm,
    "SGLang": _sglang,
    "axolotl": _axolotl,
    "LLaMA-Factory": _llamafactory,
    "unsloth": _unsloth,
    "llama.cpp": _llama_cpp,
}


def _is_config(part: Any) -> bool:
    return hasattr(part, "model_type") and hasattr(part, "to_dict")


def _is_part(config: Any) -> bool:
    """Return whether the text model has a config of its own inside this one."""
    return config.get_text_config(decoder=True) is not config


def _beside(config: Any, key: str) -> str:
    from hf_posenc.patch.export import config_parts

    path = next(
        p for p, part in config_parts(config) if part is config.get_text_config(decoder=True)
    )
    return f"{key} at the top does nothing: this model reads it in {path}. Nest it there."


def _merge(target: Any, updates: Mapping[str, Any]) -> None:
    """Update a config or dict recursively, as vLLM's `_update_nested`."""
    for key, value in updates.items():
        inner = target.get(key) if isinstance(target, dict) else getattr(target, key, None)
        if isinstance(value, dict) and (isinstance(inner, dict) or _is_config(inner)):
            _merge(inner, value)
        elif isinstance(target, dict):
            target[key] = value
        else:
            setattr(target, key, value)


def _entries(rope: Any) -> list[dict[str, Any]]:
    """Return the blocks of `rope_parameters`, flat or nested by layer type."""
    if not isinstance(rope, dict):
        return []
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return nested or [rope]


def _unread_type(reading: Reading, entry: dict[str, Any]) -> list[str]:
    """Return a note where `type` names another method than `rope_type`, which alone is read then."""
    kind = entry.get("type", "default")
    if entry.setdefault("rope_type", "default") == kind or "type" not in entry:
        return []
    return [
        f'{reading.engine} reads "rope_type" here, so "type": "{kind}" does nothing. Rename it.'
    ]


def _require_theta(reading: Reading, config: Any, entry: dict[str, Any]) -> None:
    entry.setdefault("rope_type", entry.get("type", "default"))
    if entry.get("rope_theta") is None:
        raise PosencError(
            f"{reading.engine} replaces the whole of rope_parameters, and this override has no rope_theta. Add the "
            "folder's."
        )
    _complete(config, entry)


def _complete(config: Any, entry: dict[str, Any]) -> None:
    """Add the original length that transformers and the engines read from the config."""
    if entry["rope_type"] in ("yarn", "llama3", "longrope"):
        entry.setdefault(_ORIGINAL, getattr(config, _LENGTH))
