"""The sizes that decide what a forward costs, read off a live model, with no family known by name.

Only shapes and attributes are read, so a model on the meta device, which has no weights, will do:

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.layer_shape import Layer, first_int, own_weights, read_layer


@dataclass(frozen=True)
class ModelShape:
    """A model's sizes.

    Attributes:
        hidden: Features of a hidden state.
        vocabulary: Logits of a token.
        head: Weights of the head.
        layers: The decoder's layers.
        around: Weights that a token is multiplied by between the layers, head and embeddings aside.
        embeddings: Tables that are added up before the first layer.
        dtype: Of the hidden states.
        device: Where the embeddings are.
        implementation: How attention is computed, in transformers' word.
        own_attention: Scores are held in a way of the family's own, which takes more than transformers' common one.
    """

    hidden: int
    vocabulary: int
    head: int
    layers: tuple[Layer, ...]
    around: float
    embeddings: int
    dtype: torch.dtype
    device: torch.device
    implementation: str
    own_attention: bool


def read_shape(model: nn.Module) -> ModelShape:
    """Reads the sizes of a causal language model, with weights or on the meta device.

    Raises:
        PosencError: The model has no head or no list of layers.
    """
    whole: Any = model
    head = whole.get_output_embeddings() if hasattr(whole, "get_output_embeddings") else None
    if head is None:
        raise PosencError(
            f"{type(model).__name__} has no language head, so there is nothing to score: give a causal language model."
        )
    config: Any = whole.config.get_text_config(decoder=True)
    decoder, layers = _decoder(whole, config)
    embeddings = whole.get_input_embeddings()
    inside = {id(module) for layer in layers for module in layer.modules()} | {id(head)}
    around = [module for module in _of_text(decoder) if id(module) not in inside]
    hidden = first_int(config, ("hidden_size",)) or int(embeddings.weight.shape[-1])
    implementation = str(getattr(config, "_attn_implementation", None) or "eager")
    return ModelShape(
        hidden=hidden,
        vocabulary=int(head.weight.shape[0]),
        head=head.weight.numel(),
        layers=tuple(read_layer(layer, config, hidden) for layer in layers),
        around=sum(own_weights(module) for module in around),
        embeddings=max(1, sum(isinstance(module, nn.Embedding) for module in around)),
        dtype=embeddings.weight.dtype,
        device=embeddings.weight.device,
        implementation=implementation,
        own_attention=implementation == "eager" and _computes_attention_itself(decoder),
    )


def _decoder(model: Any, config: Any) -> tuple[nn.Module, list[nn.Module]]:
    """The text decoder and its layers: of its lists of modules the one of the config's length, else the longest."""
    wanted = getattr(config, "num_hidden_layers", None)
    for owner in (model.get_decoder(), model.base_model, model):
        lists = [module for module in owner.modules() if isinstance(module, nn.ModuleList)]
        fitting = [found for found in lists if len(found) == wanted]
        found = next(iter(fitting or sorted(lists, key=len, reverse=True)), None)
        if found is not None:
            return owner, list(found)
    raise PosencError(
        f"{type(model).__name__} holds no list of layers, so its cost cannot be read off."
    )


def _of_text(decoder: nn.Module) -> Iterator[nn.Module]:
    """The modules of a decoder, without the encoders of images or sound that it may hold."""
    yield decoder
    for child in decoder.children():
        if not hasattr(child, "config") or not hasattr(child, "get_input_embeddings"):
            yield from _of_text(child)


def _computes_attention_itself(decoder: nn.Module) -> bool:
    """Whether a family is outside transformers' attention interface, or adds sinks to its scores."""
    sinks = any(hasattr(module, "sinks") for module in decoder.modules())
    return sinks or not getattr(decoder, "_supports_attention_backend", False)
