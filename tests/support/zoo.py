"""A tiny random model of every rotary architecture that the installed transformers knows.

Nothing here is a list of architectures: the types come from transformers' own registry, a type's modelling source says
whether it rotates, and its configuration class says which sizes there are to shrink. Only what no rule predicts is in
``_QUIRKS`` (``tests/support/zoo_sizes.py``), keyed by model type, each with its reason.

Every model has 4 layers, hidden size 64, 4 heads of size 16, a vocabulary of 128 and 64 trained positions, in float32,
in eval mode, and weights of standard deviation 0.2: large enough that attention is far from uniform, so that a wrong
position changes the logits by much more than rounding does.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a tiny model needs nothing from anywhere

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.models.auto import modeling_auto

from hf_posenc import Patch, PosencError, available_methods, get_method, get_patch, patch_model
from hf_posenc.methods import RopeScaling
from hf_posenc.model.discovery import tables_of
from hf_posenc.model.sampled import sample_of
from hf_posenc.seams import hidden
from tests.support.references import REQUIRED
from tests.support.zoo_registry import (
    NOT_BUILT,
    TABLE_TYPES,
    causal_lm_types,
    composite_types,
    config_class_of,
    decoder_types,
    modelling_module,
    multimodal_types,
    quiet,
    seq2seq_names,
    seq2seq_types,
    text_tower_types,
)
from tests.support.zoo_sizes import ORIGINAL_LENGTH, shrunken

__all__ = ["NOT_BUILT", "ORIGINAL_LENGTH", "TABLE_TYPES"]
__all__ += ["composite_types", "decoder_types", "seq2seq_types", "text_tower_types"]
"""Names of neighbouring modules that tests import from here."""

CACHE = (
    "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
)
"""The argument and output that is the cache, which transformers 5.24 renamed."""

_REPRESENTATIVE = (
    "llama",  # half-split
    "cohere",  # interleaved
    "glm",  # interleaved, half of the head
    "gpt_neox",  # half-split, a quarter of the head
    "gptj",  # a table of sines and cosines in every layer instead of frequencies
    "roformer",  # the same as one embedding
    "falcon",  # attention outside the common interface
    "phi3",  # its own original_max_position_embeddings
    "phimoe",  # a forward that ignores its buffer
    "gpt_oss",  # comes with YaRN; attention sinks
    "apertus",  # comes with llama3
    "ministral3",  # comes with YaRN; scales queries by position
    "gemma3",  # one table per layer type, inside a vision-language model
    "gemma3_text",
    "olmo3",  # one table per layer type
    "gemma4_text",  # a proportional table, and another head size in full layers
    "lfm2",  # hybrid
    "recurrent_gemma",  # a rotary in some layers, no length in the config
    "moshi",  # a rotary in every layer
    "deepseek_v2",  # latent attention, complex numbers
    "deepseek_v3",  # latent attention, real numbers
    "llama4_text",  # complex numbers, and layers without positions
    "qwen2_5_vl_text",  # three axes of positions
    "ernie4_5_vl_moe_text",  # three axes, frequencies in another order
    "mistral_large4_text",  # learned scaling of the frequencies; sparse attention
)


HELD = (
    *("llama", "gptj", "roformer", "phimoe", "gemma3", "gemma4_text", "recurrent_gemma", "moshi"),
    *("deepseek_v2", "qwen2_5_vl_text", "mistral_large4_text"),
)
"""Of the representative types, one for each way in which a model holds its table and reads it."""


ATTENDING = (*HELD, "cohere", "gpt_neox", "falcon", "gpt_oss", "ministral3", "lfm2", "llama4_text")
"""Those, and one for each way in which attention differs beside the table."""


@cache
def representative() -> tuple[str, ...]:
    """Return one model type for each way in which the architectures differ.

    A process that asks for none need not read the sources of all architectures, which takes seconds.
    """
    return tuple(t for t in _REPRESENTATIVE if t in {*decoder_types(), *text_tower_types()})


def _model_class(config: PretrainedConfig) -> type[Any]:
    """The class for a configuration outside the causal LM registry: with a head if there is one."""
    names = {**multimodal_types(), **seq2seq_names()}
    if config.model_type in names:
        named: type[Any] = getattr(transformers, names[config.model_type])
        return named
    module = importlib.import_module(modelling_module(type(config)))
    models = [
        c for c in vars(module).values() if inspect.isclass(c) and issubclass(c, PreTrainedModel)
    ]
    own = [
        c
        for c in models
        if c.__module__ == module.__name__ and not c.__name__.endswith("PreTrainedModel")
        if getattr(c, "config_class", None) is type(config)
    ]
    return next((c for c in own if c.__name__.endswith("ForCausalLM")), own[-1])


def _ready(model: Any) -> PreTrainedModel:
    """In float32 and eval mode, with noise on the vectors: biases and norms start as zeros and ones,
    which hides a wrong order of norm and rotation, and may switch a part of the model off."""
    module = model.float().eval()
    assert isinstance(module, PreTrainedModel)
    for name, value in module.state_dict().items():
        if value.dim() == 1 and value.is_floating_point() and "inv_freq" not in name:
            value.add_(torch.randn(value.shape), alpha=0.1)
    return module


def tiny_config(model_type: str, **overrides: Any) -> PretrainedConfig:
    """The shrunken configuration of ``model_type``; ``overrides`` replace fields of it."""
    with quiet():
        return shrunken(config_class_of(model_type), **overrides)


def from_config(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A seeded random float32 model in eval mode, of the class that ``config`` belongs to."""
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if config.model_type in causal_lm_types():
            auto: Any = AutoModelForCausalLM
            return _ready(auto.from_config(config, dtype=torch.float32))
        return _ready(_model_class(config)(config))


_BUILT: dict[str, PreTrainedModel] = {}
"""The models that were built, as nobody has changed them. A copy takes half as long as another one."""


_AGAIN: set[str] = set()
"""Those of which there is more than one copy."""


def copied(name: str, make: Callable[[], PreTrainedModel], overrides: Mapping[str, Any]) -> Any:
    """A copy of what was made under this name with these overrides, or is now.

    The first copy is a model as any other. Before the second one the original is tried for hidden positions, as a first
    patch does; this and all later copies count as tried, as a model does that is patched again.
    """
    key = f"{name} {sorted(overrides.items())} {torch.get_default_device()}"
    if key not in _BUILT:
        _BUILT[key] = make()
        return copy.deepcopy(_BUILT[key])
    made = _BUILT[key]
    if key not in _AGAIN and made.device.type != "meta":
        with contextlib.suppress(PosencError):
            hidden.refuse_hidden(made, tables_of(made), "pi", sample_of(made))
    _AGAIN.add(key)
    found = copy.deepcopy(made)
    if made in hidden._known:
        hidden._known[found] = hidden.version_of(found), dict(hidden._known[made][1])
    return found


def build(model_type: str, **overrides: Any) -> PreTrainedModel:
    """Build the tiny model of ``model_type``; ``overrides`` replace fields of its configuration."""
    return copied(model_type, lambda: from_config(tiny_config(model_type, **overrides)), overrides)


_NOT_TEXT = re.compile("vision|audio|codec|vq_|protein|perceiver|depth")


def rope_configs(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """The parts of ``config`` that describe rotary text layers: one, but in models made of several (BLT)."""
    if getattr(config, "rope_parameters", None):
        yield config
    for name, part in vars(config).items():
        if isinstance(part, PretrainedConfig) and not _NOT_TEXT.match(name):
            yield from rope_configs(part)


def twin(
    model: PreTrainedModel,
    edit: Callable[[PretrainedConfig], None] = lambda config: None,
    share_config: bool = False,
) -> PreTrainedModel:
    """A second model with the same weights, built from a copy of the configuration.

    ``edit`` receives each of the copy's ``rope_configs``, or the copy itself where RoPE has no configuration.
    Nothing is shared with ``model``, unless ``share_config``: then both hold the same configuration object.
    """
    config = model.config if share_config else copy.deepcopy(model.config)
    for part in list(rope_configs(config)) or [config]:
        edit(part)
    with quiet():
        other = _ready(type(model)(config))
    weights, fitting = other.state_dict(), copy.deepcopy(model.state_dict())
    for name in weights:  # all but a table of positions that the edit has made longer
        if weights[name].shape == fitting[name].shape:
            weights[name] = fitting[name]
    other.load_state_dict(weights)
    return other


def load(model_class: type[PreTrainedModel], folder: Path) -> PreTrainedModel:
    with quiet():
        loaded: Any = model_class.from_pretrained(folder)
    loaded.eval()
    assert isinstance(loaded, PreTrainedModel)
    return loaded


def frequency_methods() -> tuple[str, ...]:
    """The methods that change rotary frequencies; the others compute attention themselves."""
    return tuple(n for n in available_methods() if issubclass(get_method(n), RopeScaling))


def promising(*contracts: str) -> list[str]:
    """The frequency methods that declare all of these contracts, which are attributes of their classes."""
    return [n for n in frequency_methods() if all(getattr(get_method(n), c) for c in contracts)]


def frequency_options(name: str, *, pairs: int = 8, scale: float = 4.0) -> dict[str, Any]:
    """Options under which a frequency method changes something and leaves attention to the model."""
    method = get_method(name)
    options: dict[str, Any] = {"scale": scale} if method.takes_scale() else {}
    options |= REQUIRED[name](pairs) if name in REQUIRED else {}
    return options | ({"update": "sequence"} if method.knobs().get("update") == "row" else {})


def length_of(config: PretrainedConfig) -> int | None:
    """The trained length that the text configuration names, if any."""
    text: Any = next(rope_configs(config), config)
    names = ("max_position_embeddings", "n_positions")
    return next((value for n in names if (value := getattr(text, n, None))), None)


def longest(model: PreTrainedModel) -> int:
    """Return the longest text of the unpatched model: short if positions are read from a table."""
    return ORIGINAL_LENGTH if model.config.model_type in TABLE_TYPES else 1 << 20


def is_plain(model: PreTrainedModel) -> bool:
    """Return whether the model has ordinary, unscaled RoPE."""
    ropes = [part.rope_parameters for part in rope_configs(model.config)]
    entries = [e for rope in ropes for e in (rope, *rope.values()) if isinstance(e, Mapping)]
    return all(e.get("rope_type", "default") in ("default", "proportional") for e in entries)


NOT_TEXT_MODULE = re.compile("vis|audio|codec|vq|protein|perceiver")
"""Matches the paths of modules outside the text decoder."""


def tokens(length: int, batch: int = 1, seed: int = 0) -> Tensor:
    """Random ordinary token ids of shape ``(batch, length)``."""
    return torch.randint(3, 100, (batch, length), generator=torch.Generator().manual_seed(seed))


def _required_inputs(config: Any, input_ids: Tensor) -> dict[str, Tensor]:
    """Return the inputs of a forward on text: the tokens, and what some families require besides."""
    batch, length = input_ids.shape
    if config.model_type == "idefics":  # an image: one that no token looks at
        image = torch.zeros(batch, 1, 5, 64)
        seen = torch.zeros(batch, length, 1)
        looks = {"image_encoder_embeddings": image, "image_attention_mask": seen}
        return {"input_ids": input_ids, **looks}
    if config.model_type == "kyutai_speech_to_text":  # a token of text and of every codebook
        return {"input_ids": input_ids[..., None].expand(-1, -1, config.num_codebooks + 1)}
    if config.model_type == "voxtral_realtime_text":  # the delay of the transcription
        return {"input_ids": input_ids, "t_cond": torch.ones(1, 64)}
    if config.model_type == "dia":  # a token of every channel
        spoken = input_ids[..., None].expand(-1, -1, config.decoder_config.num_channels)
        return {"input_ids": input_ids, "decoder_input_ids": spoken}
    speech = config.model_type in modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
    if speech and config.is_encoder_decoder:
        sound = torch.randn(1, 4000, generator=torch.Generator().manual_seed(0))
        return {"input_values": sound.expand(batch, -1), "decoder_input_ids": input_ids}
    if config.is_encoder_decoder and config.model_type not in causal_lm_types():
        return {"input_ids": input_ids, "decoder_input_ids": input_ids}
    return {"input_ids": input_ids}


def in_force(model: torch.nn.Module) -> Patch:
    """Return the patch of a model that has one."""
    patch = get_patch(model)
    assert patch is not None
    return patch


@torch.no_grad()
def run(model: PreTrainedModel, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Any]:
    """Logits of ``model`` in float64, or its last hidden state if it has no head; and its cache."""
    kwargs = _required_inputs(model.config, input_ids) | kwargs
    with torch.random.fork_rng(devices=[]):
        # DiffusionGemma starts from noise. torch.manual_seed would also note the stack for every kind of GPU: 2 ms.
        torch.default_generator.manual_seed(0)
        out = model(**kwargs)
    values = getattr(out, "logits", None)
    final: Tensor = out.last_hidden_state if values is None else values
    return final.double(), getattr(out, CACHE, None)


def logits(model: PreTrainedModel, input_ids: Tensor, **kwargs: Any) -> Tensor:
    """As `run`, quietly and without a cache."""
    with quiet():
        return run(model, input_ids, use_cache=False, **kwargs)[0]


def snapshot(model: torch.nn.Module) -> dict[str, Any]:
    """All that a patch may change: what modules hold, by identity or value, their order, and the config."""
    held: dict[str, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        held[path] = type(module), [*module._modules]
        for key, value in vars(module).items():
            if isinstance(value, dict):
                held |= {f"{path}.{key}.{inner}": id(each) for inner, each in value.items()}
            elif key != "config" and not key.startswith("_compiled"):
                held[f"{path}.{key}"] = value if isinstance(value, int | float) else id(value)
    anything: Any = model
    config = copy.deepcopy(anything.config.to_dict())
    return {**held, "config": config, "attention": anything.config._attn_implementation}


def refused(model: PreTrainedModel, words: str, method: Any, **options: Any) -> None:
    """Assert that a patch is refused with these words, and that the model is as it was."""
    with unchanged(model), pytest.raises(PosencError, match=words):
        patch_model(model, method, **options)
    assert get_patch(model) is None


@contextlib.contextmanager
def unchanged(model: PreTrainedModel) -> Iterator[None]:
    """Assert that a block leaves a model as it was."""
    ids = tokens(9)
    before, state = logits(model, ids), snapshot(model)
    yield
    assert snapshot(model) == state
    assert torch.equal(logits(model, ids), before)


def relative_difference(a: Tensor, b: Tensor) -> float:
    """``max |a - b| / max |b|``."""
    return ((a - b).abs().max() / b.abs().max()).item()
