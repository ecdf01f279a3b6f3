"""The sizes that decide what a forward costs, read off a live model, with no family known by name.

Only shapes and attributes are read, so a model on the meta device, which has no weights, will do:

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

# What one decoder layer costs, read off its modules: weights, the width of its MLP, what its attention works on.


# One call makes one tensor; what other activations are put together from are several.
_FUSED_ACTIVATIONS = (nn.SiLU, nn.ReLU, nn.GELU, nn.Sigmoid, nn.Tanh)
_FUSED_NAMES = ("GELUActivation", "GELUTanh", "SiLUActivation", "ReLUSquaredActivation")
_EXPERTS = (
    *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    *("num_routed_experts", "moe_num_primary_experts"),
)
_CHOSEN = (
    *("top_k", "num_experts_per_tok", "num_experts_per_token", "experts_per_token"),
    *("moe_topk", "moe_top_k", "moe_k", "top_k_experts"),
)
_WINDOWS = ("sliding_window", "attention_window_size", "local_attention", "local_window_size")
_WITHOUT_ATTENTION = ("linear", "mamba", "conv", "recurrent")


@dataclass(frozen=True)
class Attention:
    """What one attention layer works on.

    Attributes:
        heads: Query heads.
        key_heads: Key and value heads, as they are cached.
        key_dim: Features of a query and of a key.
        value_dim: Features of a value.
        window: Tokens that a query sees, itself included; of a chunk, where `chunked`; `None`: all before it.
        chunked: Queries see what is before them in their own chunk.
        encoding: What a patch on the attention seam does here; `None` without one.
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
    """One decoder layer.

    Attributes:
        weights: Weights that a token is multiplied by, of the experts those that it is sent to.
        intermediate: Features of a token that are in memory at once within the MLP or the experts.
        attention: `None` where the layer mixes tokens in another way.
    """

    weights: float
    intermediate: float
    attention: Attention | None


def read_layer(layer: nn.Module, config: Any, hidden: int) -> Layer:
    """Reads one layer.

    Args:
        layer: The module of the layer, with weights or on the meta device.
        config: The config of the text decoder.
        hidden: Features of a hidden state.
    """
    experts = first_int(config, _EXPERTS) or 0
    chosen = _chosen(layer, config, experts)
    weights = 0.0
    groups = {
        id(inner): len(outer)
        for outer in layer.modules()
        if isinstance(outer, nn.ModuleList) and experts > 1 and len(outer) == experts
        for inner in outer.modules()
    }
    for module in layer.modules():
        own = own_weights(module, experts, chosen)
        weights += own * chosen / groups[id(module)] if id(module) in groups else own
    attention = next(
        (found for module in layer.modules() if (found := _attention(module, config))), None
    )
    return Layer(weights, _mlp(layer, hidden, experts, chosen, groups), attention)


def own_weights(module: nn.Module, experts: int = 0, chosen: int = 1) -> float:
    """Weights of this module itself, not of its parts, that a token is multiplied by.

    Args:
        module: Any module; an embedding is looked up and multiplies nothing.
        experts: How many there are; 0: none.
        chosen: Experts that a token is sent to.
    """
    if isinstance(module, nn.Embedding):
        return 0
    sizes = _linear(module)
    if sizes is not None:
        inner = any(_linear(child) is not None for child in module.modules() if child is not module)
        return 0 if inner else sizes[0] * sizes[1]  # a wrapper's features are those of its parts
    count = 0.0
    for parameter in module.parameters(recurse=False):
        if parameter.dim() >= 2:
            count += parameter.numel() * (
                chosen / experts if _of_experts(parameter, experts) else 1
            )
    return count


def _linear(module: nn.Module) -> tuple[int, int] | None:
    """Features in and out, also of a quantized layer, whose weight is packed, and of GPT-2's transposed one."""
    for names in (("in_features", "out_features"), ("nx", "nf")):
        sizes = [getattr(module, name, None) for name in names]
        if isinstance(sizes[0], int) and isinstance(sizes[1], int):
            return sizes[0], sizes[1]
    return None


def _of_experts(parameter: nn.Parameter, experts: int) -> bool:
    return parameter.dim() == 3 and experts > 1 and parameter.shape[0] == experts


def _chosen(layer: nn.Module, config: Any, experts: int) -> int:
    """Experts that a token is sent to; all, where nothing says how many."""
    live = (getattr(module, "top_k", None) for module in layer.modules())
    found = next((k for k in live if isinstance(k, int)), None) or first_int(config, _CHOSEN)
    return min(found or experts, experts)


def _mlp(layer: nn.Module, hidden: int, experts: int, chosen: int, groups: dict[int, int]) -> float:
    """Features of a token that are in memory at once, in the widest of the layer's MLPs.

    An MLP is told by what it ends in: a projection from an intermediate size to the hidden one, with projections to
    that size (a gate and a value, apart or in one) on the same module.
    """
    widest = 0.0
    for module in layer.modules():
        children = [(child, size) for child in module.children() if (size := _linear(child))]
        for last, (intermediate, out) in children:
            others = [s[1] for child, s in children if child is not last and s[0] == out]
            up = sum(size for size in others if size in (intermediate, 2 * intermediate))
            if not up or intermediate == out == up:
                continue
            rows = chosen if id(module) in groups else 1
            steps = 2 if up > intermediate else _steps(module)
            together = (up if len(others) == 1 else intermediate) + steps * intermediate
            widest = max(widest, rows * together)
        for parameter in module.parameters(recurse=False):
            if _of_experts(parameter, experts):
                # A row for each expert of a token: gathered, projected, activated, multiplied; back, sorted, weighted.
                wide = sum(parameter.shape[1:]) - hidden
                widest = max(widest, chosen * max(2 * wide + hidden, 4 * hidden))
    return widest


def _steps(module: nn.Module) -> int:
    """Tensors beside its argument that an MLP's activation has in memory at once."""
    for child in module.children():
        if not any(True for _ in child.parameters()) and "ctivation" in type(child).__name__:
            fused = isinstance(child, _FUSED_ACTIVATIONS) or type(child).__name__ in _FUSED_NAMES
            return 1 if fused else 3
    return 1


def _attention(module: nn.Module, config: Any) -> Attention | None:
    kind = layer_type(module, config)
    if "ttention" not in type(module).__name__ or kind.startswith(_WITHOUT_ATTENTION):
        return None
    size = first_int(module, ("qk_head_dim", "head_dim", "head_size", "attention_head_size"))
    heads = first_int(module, ("num_heads", "num_attention_heads")) or config.num_attention_heads
    if size is None:
        size = first_int(config, ("head_dim",)) or config.hidden_size // heads
    groups = first_int(module, ("num_key_value_groups",))
    key_heads = (
        heads // groups
        if groups
        else first_int(module, ("num_key_value_heads", "num_kv_heads"))
        or first_int(config, ("num_key_value_heads", "num_kv_heads"))
        or heads
    )
    chunked = kind.startswith("chunked")
    layer = module.__dict__.get(LAYER)
    return Attention(
        heads=heads,
        key_heads=key_heads,
        key_dim=size,
        value_dim=first_int(module, ("v_head_dim",)) or size,
        window=config.attention_chunk_size if chunked else _window(module, kind, config),
        chunked=chunked,
        encoding=layer.encoding if layer is not None and layer.patched else None,
    )


def _window(module: nn.Module, kind: str, config: Any) -> int | None:
    if "sliding_window" in vars(module):
        own = vars(module)["sliding_window"]
        return own if isinstance(own, int) else None
    local = kind.startswith(("sliding", "local")) or not getattr(config, "layer_types", None)
    return first_int(config, _WINDOWS) if local else None


def first_int(owner: Any, names: Sequence[str]) -> int | None:
    """The first of these attributes that is there and a whole number."""
    found: Iterator[Any] = (getattr(owner, name, None) for name in names)
    return next((value for value in found if isinstance(value, int) and value is not True), None)


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
