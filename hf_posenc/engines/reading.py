"""Flags of other engines read back: the config that they put in force.

The flags are those of vLLM 0.33.0 (`config/model.py`: `_apply_dict_overrides`, `_update_nested`), SGLang 0.5.23
(`srt/utils/hf_transformers/config.py`) and llama.cpp.
"""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
    notes: list[str] = field(default_factory=list)

    @property
    def text(self) -> Any:
        """The part of the config that the decoder is built from."""
        return self.config.get_text_config(decoder=True)

    @property
    def rope(self) -> dict[str, Any]:
        """The `rope_parameters` in force."""
        return dict(getattr(self.text, "rope_parameters", None) or {})


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
    lengths = [read_length(v, name=k) for k, v in values.items() if not _ENGINES[k]]
    reading = Reading(copy.deepcopy(config), config, engine, lengths[-1] if lengths else None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, for rope_scaling
        (_llama_cpp if engine == "llama.cpp" else _override)(reading, values)
    return reading


def engine_of(flags: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return the engine that some flags belong to, and the values of those that are read."""
    values = dict(_words(flags))
    engines = {_ENGINES[name] for name in values} - {""}
    if (value := values.get("--rope-scaling", "")).lstrip().startswith("{"):
        raise PosencError(
            "vLLM has no --rope-scaling since 0.11.1 (pull request 28006) and does not start with it. Give "
            f"--hf-overrides '{{\"rope_parameters\": {value}}}', with the folder's rope_theta in it."
        )
    if not engines:
        known = ", ".join(name for name, engine in _ENGINES.items() if engine)
        raise PosencError(f"None of these flags scales positions. Those that are read: {known}.")
    if len(engines) > 1:
        raise PosencError(f"These are flags of {' and '.join(sorted(engines))}: give one command.")
    return engines.pop(), values


_ENGINES = {
    "--hf-overrides": "vLLM",
    "--json-model-override-args": "SGLang",
    **dict.fromkeys(("--rope-scaling", "--rope-scale"), "llama.cpp"),
    **dict.fromkeys(("--rope-freq-scale", "--rope-freq-base", "--yarn-orig-ctx"), "llama.cpp"),
    **dict.fromkeys(("--yarn-ext-factor", "--yarn-attn-factor"), "llama.cpp"),
    **dict.fromkeys(("--yarn-beta-fast", "--yarn-beta-slow"), "llama.cpp"),
    **dict.fromkeys(("--max-model-len", "--context-length", "--ctx-size"), ""),
}
"""The flags that are read, by engine; empty for a length alone, which names none."""
_SHORT = {"-c": "--ctx-size", "--max-model-length": "--max-model-len"}
_REMOVED = ("--grp-attn-n", "--grp-attn-w", "-gan", "-gaw")
_OF_POSITIONS = ("rope", "yarn", "override", "position")


def _words(flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the flags that are read and their values."""
    words = [part for word in flags for part in _split(word)]
    for index, word in enumerate(words):
        name = "--" + word[2:].replace("_", "-") if word.startswith("--") else word
        name = _SHORT.get(name, name)
        if name in _REMOVED:
            raise PosencError(
                f"{word}: llama.cpp's server has no Self-Extend since October 2024 (pull request 9860). "
                'hf_posenc computes it: patch_model(model, "self_extend", ...).'
            )
        if name not in _ENGINES:
            if name.startswith("--") and any(part in name for part in _OF_POSITIONS):
                raise PosencError(f"{word} is not a flag that is read: {', '.join(_ENGINES)}.")
            continue
        if index + 1 == len(words):
            raise PosencError(f"{word} has no value.")
        yield name, words[index + 1]


def _split(word: str) -> list[str]:
    name, equals, value = word.partition("=")
    return [name, value] if equals and name.startswith("--") else [word]


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


def _override(reading: Reading, values: Mapping[str, str]) -> None:
    """Apply the JSON object of vLLM or SGLang, which replaces attributes of the config."""
    from hf_posenc.patch.export import (
        config_parts,
    )  # imports torch, which wrong flags need not wait for

    config, engine, notes = reading.config, reading.engine, reading.notes
    (name,) = (name for name in values if _ENGINES[name] == engine)
    for key, value in _object(name, values[name]).items():
        part = getattr(config, key, None)
        if isinstance(value, dict) and _is_config(part):
            _update(part, value, deep=engine == "vLLM")
            continue
        if key in BLOCKS and config is not reading.text and isinstance(value, dict):
            path = next(path for path, part in config_parts(config) if part is reading.text)
            notes.append(
                f"{key} at the top does nothing: this model reads it in {path}. Nest it there."
            )
        elif engine == "vLLM" and key == "rope_scaling" and value and "rope_theta" not in value:
            raise PosencError(
                "transformers adds an empty rope_theta to this rope_scaling, with which vLLM makes no table. Name the "
                "block rope_parameters, with the folder's rope_theta in it."
            )
        if engine == "SGLang" and key in BLOCKS and isinstance(value, dict):
            key, value = (
                "rope_parameters",
                {**(getattr(config, "rope_parameters", None) or {}), **value},
            )
        _set(config, key, value)
    rope = getattr(reading.text, "rope_parameters", None) or {}  # flat, or nested by layer type
    nested = [value for value in rope.values() if isinstance(value, dict)]
    for entry in nested or filter(None, [rope]):
        _complete(reading, entry)


def _update(target: Any, updates: Mapping[str, Any], *, deep: bool) -> None:
    """Update a config or a dict: vLLM's `_update_nested`, or one level of it."""
    for key, value in updates.items():
        inner = target.get(key) if isinstance(target, dict) else getattr(target, key, None)
        if deep and isinstance(value, dict) and (isinstance(inner, dict) or _is_config(inner)):
            _update(inner, value, deep=True)
        elif isinstance(target, dict):
            target[key] = value
        else:
            _set(target, key, value)


def _is_config(part: Any) -> bool:
    return hasattr(part, "model_type") and hasattr(part, "to_dict")


def _complete(reading: Reading, entry: dict[str, Any]) -> None:
    """Add to a block of `rope_parameters` what the engine adds; note what it does not read."""
    engine, kind = reading.engine, entry.get("type", "default")
    if engine == "vLLM":
        entry.setdefault("rope_type", "default")
    if "type" in entry and entry.get("rope_type", kind) != kind:
        reading.notes.append(
            f'{engine} reads "rope_type" here, so "type": "{kind}" does nothing. Rename it.'
        )
    entry.setdefault("rope_type", kind)
    if entry.get("rope_theta") is None:
        replaced = (
            f"{engine} replaces the whole of rope_parameters, and this override has no rope_theta"
        )
        if engine != "vLLM":
            raise PosencError(f"{replaced}. Add the folder's.")
        entry["rope_theta"] = 10_000.0
        reading.notes.append(
            f"{replaced}: it computes with 10,000, or the default of the model's class. Add the folder's."
        )
    # The original length, which transformers and the engines read from the config.
    if entry["rope_type"] in ("yarn", "llama3", "longrope"):
        entry.setdefault(_ORIGINAL, getattr(reading.text, _LENGTH))


def _llama_cpp(reading: Reading, values: Mapping[str, str]) -> None:
    rope = reading.rope
    entry = dict(rope.get("full_attention", rope))
    kind = values.get("--rope-scaling", entry.get("rope_type", "default"))
    if kind not in ("none", "linear", "yarn", "default"):
        if "--rope-scaling" in values:
            raise PosencError(f"llama.cpp has no --rope-scaling {kind}: none, linear, yarn.")
        return
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
        trained = entry.get(_ORIGINAL) or getattr(reading.text, _LENGTH)
        result[_ORIGINAL] = int(_number(values, "--yarn-orig-ctx", 0)) or int(trained)
        for beta, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
            result[beta] = _number(values, f"--yarn-{beta.replace('_', '-')}", default)
    if kind == "yarn" and scale == 1:
        reading.notes.append("YaRN with a scale of 1 changes nothing: give --rope-scale.")
    if "--yarn-attn-factor" in values:
        reading.notes.append("llama.cpp overwrites --yarn-attn-factor wherever YaRN is on.")
    result = {**{key: entry[key] for key in OWN_KEYS if key in entry}, **result}
    nested = "full_attention" in rope
    reading.text.rope_parameters = {**rope, "full_attention": result} if nested else result
