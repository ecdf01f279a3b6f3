"""A tiny random model of every text type of transformers: causal, masked, sequence to sequence; any encoding."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.support.zoo import _ready, copied
from tests.support.zoo_registry import config_class_of, quiet
from tests.support.zoo_sizes import shrunken

_MAPPINGS = ("SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM")
_WIDE = dict.fromkeys(
    ("sliding_window", "local_attention", "attention_window", "attention_chunk_size"), 32
)
"""Windows that hold the whole text of an experiment, as those of trained models do."""


@cache
def text_types() -> dict[str, str]:
    """Return the class of every text type: the one that reads in both directions, where there are several."""
    found: dict[str, str] = {}
    for mapping in _MAPPINGS:
        names = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES")
        for model_type, name in names.items():
            if model_type in CONFIG_MAPPING:
                found.setdefault(model_type, name if isinstance(name, str) else name[0])
    return dict(sorted(found.items()))


def build_text_model(
    model_type: str, name: str = "", seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """Build the tiny model of a text type, of its class in `text_types` or of another one by name."""
    make = partial(_built, model_type, name, seed, **overrides)
    return copied(f"text {model_type} {name} {seed}", make, overrides)


def _built(model_type: str, name: str, seed: int, **overrides: Any) -> PreTrainedModel:
    config_class = config_class_of(model_type)
    with quiet():
        known = set(vars(config_class())) if not overrides else set(overrides)
        wide = {key: value for key, value in _WIDE.items() if key in known}
        config = shrunken(config_class, **{**wide, **overrides})
        for part in vars(config).values():  # of a text tower
            if isinstance(part, PretrainedConfig):
                vars(part).update({k: v for k, v in _WIDE.items() if vars(part).get(k) is not None})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return _ready(getattr(transformers, name or text_types()[model_type])(config))
