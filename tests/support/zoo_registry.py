"""Architectures with a rotation, read from transformers' registry and modelling sources."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import re
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from transformers import PretrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

TABLE_TYPES = ("codegen", "gptj", "roformer")
"""Types that keep sines and cosines of every position, and no frequencies."""

NOT_BUILT: dict[str, str] = {
    "gemma3n": "its vision tower needs timm; the text decoder is gemma3n_text",
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"),
        "a draft model that reads another model's key/value cache: it does not run alone",
    ),
    **dict.fromkeys(("fast_vlm", "perception_lm"), "its vision tower needs timm"),
    **dict.fromkeys(
        ("fun_asr_nano", "molmo2", "nemo_speechlm"),
        "its towers cannot be shrunk by general rules; the text decoder is covered by itself",
    ),
    "granite4_vision": "its vision tower wants layers that a small one does not have",
    "voxtral_realtime": "does not run on text alone",
    **dict.fromkeys(
        ("qwen2_5_omni", "qwen3_omni_moe"),
        "no forward of its own; its thinker is covered by itself",
    ),
    "vibevoice_asr": "its audio tower takes half a minute to build; the text decoder is qwen2",
}
"""Rotary types of the registry that the zoo does not build, with the reason."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' advice on configurations that no one would ship."""
    log: Any = transformers.logging
    level = log.get_verbosity()
    loud = level < log.ERROR  # a change of level empties the caches of all loggers: a millisecond
    if loud:
        log.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if loud:
            log.set_verbosity(level)


_ROTARY_MODULE = re.compile(r"[=(]\s+(?!\w*(?:Vision(?!Text)|Audio))\w*RotaryEmbedding\(")
_ROTARY_TABLE = re.compile(r"= (?:self\.)?apply_rotary\w*\(")
_DELEGATES = re.compile(r"AutoModel\w*\.from_config\(\s*(?:config\.)?text_config")
_TEXT_PARTS = ("text_config", "thinker_config")


def causal_lm_types() -> dict[str, str]:
    names: Mapping[str, Any] = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return {key: name if isinstance(name, str) else name[0] for key, name in names.items()}


def multimodal_types() -> dict[str, str]:
    """Model types with a text decoder inside, however this transformers version calls them."""
    merged: dict[str, str] = {}
    for mapping in ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"):
        names = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES", {})
        merged.update({k: v if isinstance(v, str) else v[0] for k, v in names.items()})
    return merged


def seq2seq_names() -> dict[str, str]:
    """Model types of encoder-decoder models, of text or speech, and their classes."""
    return {
        **modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
        **modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    }


def config_class_of(model_type: str) -> type[PretrainedConfig]:
    return CONFIG_MAPPING[model_type]


def parts(config_class: type[PretrainedConfig]) -> Mapping[str, type[PretrainedConfig]]:
    return getattr(config_class, "sub_configs", None) or {}


def source_of(module: str) -> str:
    spec = importlib.util.find_spec(module)
    return Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else ""


def modelling_module(config_class: type[PretrainedConfig]) -> str:
    return config_class.__module__.replace(".configuration_", ".modeling_")


def field_names(config_class: type[PretrainedConfig]) -> set[str]:
    fields = set(getattr(config_class, "__dataclass_fields__", {}))
    return fields | set(inspect.signature(config_class.__init__).parameters)


def _rotates(model_type: str, class_name: str) -> bool:
    """Return whether the modelling source of ``model_type`` rotates queries and keys in its text part."""
    config_class = config_class_of(model_type)
    source = source_of(modelling_module(config_class))
    if f"class {class_name}(" not in source:  # the model class is another family's
        source = source_of(getattr(transformers, class_name).__module__)
    if _ROTARY_MODULE.search(source):
        return True
    if "RotaryEmbedding" not in source and _ROTARY_TABLE.search(source):
        return True
    if _DELEGATES.search(source):
        inner = config_class().get_text_config(decoder=True).model_type
        names = causal_lm_types()
        return inner != model_type and inner in names and _rotates(inner, names[inner])
    return False


@cache
def decoder_types() -> tuple[str, ...]:
    """Model types that ``AutoModelForCausalLM`` builds with rotary positions, and this file too."""
    names = causal_lm_types()
    known = (t for t in sorted(names) if t in CONFIG_MAPPING and t not in NOT_BUILT)
    return tuple(t for t in known if _rotates(t, names[t]))


def _text_class(model_type: str) -> type[PretrainedConfig]:
    """The class of the text part of a multimodal model's configuration: its own if it has no parts."""
    config_class = config_class_of(model_type)
    while part := next((p for p in _TEXT_PARTS if p in parts(config_class)), None):
        inner = parts(config_class)[part]
        if not issubclass(inner, PretrainedConfig):  # AutoConfig: any, so ask for the default one
            with quiet():
                inner = type(getattr(config_class(), part))
        config_class = inner
    return config_class


@cache
def _multimodal_text_types() -> dict[str, str]:
    """Multimodal model type -> the type of its text decoder, where that rotates."""
    found: dict[str, str] = {}
    causal = causal_lm_types()
    for model_type in multimodal_types():
        if model_type in CONFIG_MAPPING and model_type not in causal:
            try:
                config_class = _text_class(model_type)
            except Exception:  # a release whose default configuration is invalid
                continue
            text_type = getattr(config_class, "model_type", "")
            rotary = _ROTARY_MODULE.search(source_of(modelling_module(config_class)))
            rotates = rotary and "rope_parameters" in field_names(config_class)
            if text_type in decoder_types() or rotates:
                found[model_type] = text_type
    return found


@cache
def text_tower_types() -> tuple[str, ...]:
    """Types of the rotary text decoders of multimodal models that no causal LM type covers."""
    towers = set(_multimodal_text_types().values()) - set(decoder_types()) - set(NOT_BUILT)
    return tuple(sorted(towers & set(CONFIG_MAPPING.keys())))


@cache
def composite_types() -> tuple[str, ...]:
    """Multimodal models with a rotary text decoder inside them."""
    whole = {*_multimodal_text_types()} - {*decoder_types(), *text_tower_types(), *NOT_BUILT}
    return tuple(sorted(whole))


@cache
def seq2seq_types() -> tuple[str, ...]:
    """Encoder-decoder models whose text decoder rotates."""
    others = {*decoder_types(), *text_tower_types(), *composite_types(), *NOT_BUILT}
    names = {key: name for key, name in seq2seq_names().items() if key in CONFIG_MAPPING}
    rotary = (t for t in sorted({*names} - others) if _rotates(t, names[t]))
    return tuple(t for t in rotary if config_class_of(t)().is_encoder_decoder)
