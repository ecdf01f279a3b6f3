"""Sizes of a live model that decide the cost of a forward, for any family.

Only shapes and attributes are read, so a model on the meta device, which has no weights, is enough:

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_posenc.attention.encoding import Encoding
from hf_posenc.errors import PosencError
from hf_posenc.model.attention import LAYER
from hf_posenc.model.discovery import layer_type

# Activations that create one tensor in one call; others are composed of several.
_FUSED_ACTIVATIONS = (nn.SiLU, nn.ReLU, nn.GELU, nn.Sigmoid, nn.Tanh)
_FUSED_NAMES = ("GELUActivation", "GELUTanh", "SiLUActivation", "ReLUSquaredActivation")
_EXPERTS = (
    *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    *("num_routed_experts", "moe_num_primary_experts"),
)
_EXPERTS_PER_TOKEN = (
    *("top_k", "num_experts_per_tok", "num_experts_per_token", "experts_per_token"),
    *("moe_topk", "moe_top_k", "moe_k", "top_k_experts"),
)
_WINDOWS = ("sliding_window", "attention_window_size", "local_attention", "local_window_size")
_WITHOUT_ATTENTION = ("linear", "mamba", "conv", "recurrent")


@dataclass(frozen=True)
class Attention:
    """Sizes of one attention layer.

    Attributes:
        heads: Query heads.
        key_heads: Key and value heads, as they are cached.
        key_dim: Features of a query and of a key.
        value_dim: Features of a value.
        window: Tokens that a query attends to, itself included; of a chunk, if `chunked`; `None`: all before it.
        chunked: Queries attend to what is before them in their own chunk.
        encoding: The encoding of a patch on this layer's attention; `None` without one.
    """

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    chunked: bool = False
    encoding: Encoding | None = None

    @property
    def query(self) -> int:
        """Features of all queries of a token."""
        return self.heads * self.key_dim

    @property
    def cached(self) -> int:
        """Features of a token's keys and values."""
        return self.key_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class Layer:
    """Sizes of one decoder layer.

    Attributes:
        weights: Weights that a token is multiplied by, of the experts those that it is sent to.
        intermediate: Features of a token that are in memory at once within the MLP or the experts.
        attention: `None` if the layer mixes tokens in another way.
    """

    weights: float
    intermediate: float
    attention: Attention | None


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model.

    Attributes:
        hidden: Features of a hidden state.
        vocabulary: Logits of a token.
        head: Weights of the head.
        layers: The decoder's layers.
        around: Weights that a token is multiplied by between the layers, head and embeddings aside.
        embeddings: Tables that are added up before the first layer.
        dtype: Of the hidden states.
        device: Of the embeddings.
        implementation: The attention implementation, by transformers' name.
        own_attention: The family computes its scores in its own way, which needs more memory than transformers'.
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

    @property
    def attentions(self) -> list[Attention]:
        """Sizes of the attention layers, in order."""
        return [layer.attention for layer in self.layers if layer.attention is not None]


def read_shape(model: nn.Module) -> ModelShape:
    """Return the sizes of a causal language model, with weights or on the meta device.

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
    hidden = _first_int(config, ("hidden_size",)) or int(embeddings.weight.shape[-1])
    implementation = str(getattr(config, "_attn_implementation", None) or "eager")
    # A family outside transformers' attention interface, or one that adds sinks to its scores.
    own_attention = any(hasattr(module, "sinks") for module in decoder.modules()) or not getattr(
        decoder, "_supports_attention_backend", False
    )
    return ModelShape(
        hidden=hidden,
        vocabulary=int(head.weight.shape[0]),
        head=head.weight.numel(),
        layers=tuple(read_layer(layer, config, hidden) for layer in layers),
        around=sum(_own_weights(module) for module in around),
        embeddings=max(1, sum(isinstance(module, nn.Embedding) for module in around)),
        dtype=embeddings.weight.dtype,
        device=embeddings.weight.device,
        implementation=implementation,
        own_attention=implementation == "eager" and own_attention,
    )


def _decoder(model: Any, config: Any) -> tuple[nn.Module, list[nn.Module]]:
    """Return the text decoder and its layers: the list of modules of the config's length, else the longest."""
    count = getattr(config, "num_hidden_layers", None)
    for owner in (model.get_decoder(), model.base_model, model):
        lists = [module for module in owner.modules() if isinstance(module, nn.ModuleList)]
        if lists:
            layers = next((each for each in lists if len(each) == count), max(lists, key=len))
            return owner, list(layers)
    raise PosencError(
        f"{type(model).__name__} has no list of layers, so its cost cannot be estimated."
    )


def _of_text(decoder: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a decoder, without encoders of images or sound inside it."""
    yield decoder
    for child in decoder.children():
        if not hasattr(child, "config") or not hasattr(child, "get_input_embeddings"):
            yield from _of_text(child)


def read_layer(layer: nn.Module, config: Any, hidden: int) -> Layer:
    """Return the sizes of one layer.

    Args:
        layer: The module of the layer, with weights or on the meta device.
        config: The config of the text decoder.
        hidden: Features of a hidden state.
    """
    experts = _first_int(config, _EXPERTS) or 0
    live = (getattr(module, "top_k", None) for module in layer.modules())
    per_token = next((k for k in live if isinstance(k, int)), None)
    chosen = min(per_token or _first_int(config, _EXPERTS_PER_TOKEN) or experts, experts)
    inside = {
        id(inner)
        for outer in layer.modules()
        if isinstance(outer, nn.ModuleList) and experts > 1 and len(outer) == experts
        for inner in outer.modules()
    }  # modules of experts that are a list
    weights = 0.0
    for module in layer.modules():
        own = _own_weights(module, experts, chosen)
        weights += own * chosen / experts if id(module) in inside else own
    attention = next(
        (found for module in layer.modules() if (found := _attention(module, config))), None
    )
    return Layer(weights, _mlp(layer, hidden, experts, chosen, inside), attention)


def _own_weights(module: nn.Module, experts: int = 0, chosen: int = 1) -> float:
    """Return the weights of this module itself, not of its parts, that a token is multiplied by.

    Args:
        module: Any module; an embedding is a lookup and multiplies nothing.
        experts: Number of experts, 0 if there are none.
        chosen: Experts that a token is sent to.
    """
    if isinstance(module, nn.Embedding):
        return 0
    sizes = _linear(module)
    if sizes is not None:
        inner = any(_linear(child) is not None for child in module.modules() if child is not module)
        return 0 if inner else sizes[0] * sizes[1]  # a wrapper's features are those of its parts
    return sum(
        parameter.numel() * (chosen / experts if _of_experts(parameter, experts) else 1)
        for parameter in module.parameters(recurse=False)
        if parameter.dim() >= 2
    )


def _linear(module: nn.Module) -> tuple[int, int] | None:
    """Return the features in and out of a linear layer, quantized (its weight is packed) and GPT-2's included."""
    for names in (("in_features", "out_features"), ("nx", "nf")):
        sizes = [getattr(module, name, None) for name in names]
        if isinstance(sizes[0], int) and isinstance(sizes[1], int):
            return sizes[0], sizes[1]
    return None


def _of_experts(parameter: nn.Parameter, experts: int) -> bool:
    return parameter.dim() == 3 and experts > 1 and parameter.shape[0] == experts


def _mlp(layer: nn.Module, hidden: int, experts: int, chosen: int, inside: set[int]) -> float:
    """Return the features of a token that are in memory at once, in the widest of the layer's MLPs.

    An MLP ends in a projection from an intermediate size to the hidden one, and has projections to that size (a gate
    and a value, apart or in one) on the same module.
    """
    widest = 0.0
    for module in layer.modules():
        children = [(child, size) for child in module.children() if (size := _linear(child))]
        for last, (intermediate, out) in children:
            others = [s[1] for child, s in children if child is not last and s[0] == out]
            up = sum(size for size in others if size in (intermediate, 2 * intermediate))
            if not up or intermediate == out == up:
                continue
            rows = chosen if id(module) in inside else 1
            steps = 2 if up > intermediate else _activation_tensors(module)
            together = (up if len(others) == 1 else intermediate) + steps * intermediate
            widest = max(widest, rows * together)
        for parameter in module.parameters(recurse=False):
            if _of_experts(parameter, experts):
                # A row for each expert of a token: gathered, projected, activated, multiplied; back, sorted, weighted.
                wide = sum(parameter.shape[1:]) - hidden
                widest = max(widest, chosen * max(2 * wide + hidden, 4 * hidden))
    return widest


def _activation_tensors(module: nn.Module) -> int:
    """Return the number of tensors beside its argument that an MLP's activation has in memory at once."""
    for child in module.children():
        if "ctivation" in type(child).__name__ and next(child.parameters(), None) is None:
            fused = isinstance(child, _FUSED_ACTIVATIONS) or type(child).__name__ in _FUSED_NAMES
            return 1 if fused else 3
    return 1


def _attention(module: nn.Module, config: Any) -> Attention | None:
    kind = layer_type(module, config)
    if "ttention" not in type(module).__name__ or kind.startswith(_WITHOUT_ATTENTION):
        return None
    size = _first_int(module, ("qk_head_dim", "head_dim", "head_size", "attention_head_size"))
    heads = _first_int(module, ("num_heads", "num_attention_heads")) or config.num_attention_heads
    if size is None:
        size = _first_int(config, ("head_dim",)) or config.hidden_size // heads
    groups = _first_int(module, ("num_key_value_groups",))
    names = ("num_key_value_heads", "num_kv_heads")
    key_heads = (
        heads // groups if groups else _first_int(module, names) or _first_int(config, names)
    )
    chunked = kind.startswith("chunked")
    layer = module.__dict__.get(LAYER)
    return Attention(
        heads=heads,
        key_heads=key_heads or heads,
        key_dim=size,
        value_dim=_first_int(module, ("v_head_dim",)) or size,
        window=config.attention_chunk_size if chunked else _window(module, kind, config),
        chunked=chunked,
        encoding=layer.encoding if layer is not None and layer.patched else None,
    )


def _window(module: nn.Module, kind: str, config: Any) -> int | None:
    if "sliding_window" in vars(module):
        return _first_int(module, ("sliding_window",))
    local = kind.startswith(("sliding", "local")) or not getattr(config, "layer_types", None)
    return _first_int(config, _WINDOWS) if local else None


def _first_int(owner: Any, names: Sequence[str]) -> int | None:
    """Return the first of these attributes that exists and is an integer."""
    values: Iterator[Any] = (getattr(owner, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value is not True), None)
