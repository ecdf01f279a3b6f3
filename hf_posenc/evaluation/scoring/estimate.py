"""Cost of a run before it starts: floating-point operations, memory and time, from a model's sizes alone.

Only shapes and attributes are read, so a model without weights (`with torch.device("meta"): ...`) is enough. Four
formulas, with coarse constants that were measured:

- Operations: 2 x (the weights that a token meets x tokens + the head x scored tokens), and 2 for every feature of every
  visible pair of attention, in the scores and in the weighted values. Of experts, those count that a token is sent to.
- Keys and values: their features x tokens x layers, of a prefill in pieces; a layer with a window keeps no more.
- Activations: tokens of a piece x (`STATES` hidden sizes + `WIDE` widths of the widest layer), and the matrices of
  queries x keys that eager attention, the path `exact` and masks of sliding windows write.
- Logits: those of a chunk, their float32 copy and their log-softmax.

The memory answers "does it fit or not", not more: over 18 families and all backends it is 0.6 to 1.7 times what the
tensors of a forward take (tests/evaluation/scoring/test_estimate.py counts them). Not counted: workspaces of kernels, a
CUDA context, fragmentation, states of state-space layers, and scores that a family's own code writes.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hf_posenc.attention.call import Call, CausalMask, Mask
from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.engine import Backend, candidate
from hf_posenc.attention.exact import SCRATCH
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.options import duration
from hf_posenc.evaluation.scoring.decoder import sizes_alone
from hf_posenc.evaluation.scoring.head_replay import LOGITS_PER_CHUNK
from hf_posenc.model.attention import native_implementation
from hf_posenc.model.discovery import layer_type
from hf_posenc.model.masks import LazyMask
from hf_posenc.model.positions import LAYER

STATES, WIDE = 5, 3
"""Tensors of the hidden size, and of the width of the widest layer, that a forward holds at once for each token."""
FLOAT = 4  # bytes of the type in which scores, their softmax and losses are computed
EXACT = 17  # bytes for a score of the path `exact`: four float32 tensors, and the visible pairs
PER_THREAD = 6.0e10
"""Operations per second of one thread in float32: 2,048 tokens, unpatched (once, on an EPYC)."""
SHARE = 0.4
"""Share of a GPU's peak that a forward is taken to reach: a guess, not a measurement."""
PEAKS = {"B200": 2.25e15, "A100": 3.12e14, "L40S": 3.62e14, "4090": 1.65e14}
PEAKS |= dict.fromkeys(("H200", "H100"), 9.89e14)
"""The makers' dense peaks in bfloat16, operations per second, by a part of the device's name."""
SLOWER = {
    **dict.fromkeys(("cuda flash, triton", "cuda flash"), 1.7),
    "flash attention 4, table": 2.1,
    "triton biased": 4.0,
    "exact": 100.0,
}
"""Times of plain attention by backend, rounded: H200, prefills of 32,768 tokens, by `exact` of 8,192 (docs/gpu.md)."""
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
_PROBE = 64  # tokens of the text by which a layer's backend is found


@dataclass(frozen=True)
class Cost:
    """Tokens and operations of a forward, or of a run of many, and the bytes of its largest window."""

    tokens: int
    flops: float
    weights: int
    activations: int
    cache: int
    logits: int

    @property
    def beside_weights(self) -> int:
        """Bytes at the peak without the weights: in the decoder or in the head, whichever is more."""
        return self.cache + max(self.activations, self.logits)

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return self.weights + self.beside_weights


def run_cost(
    model: nn.Module,
    forwards: Iterable[tuple[int, int]],
    *,
    batch: int = 1,
    chunk: int | None = None,
    prefill_chunk: int | None = None,
    full_logits: bool = False,
) -> Cost:
    """Return the cost of many windows: the sums of tokens and operations, and the memory of the most expensive window.

    The model is as it will run: patched, with its attention backend, on any device. A forward is the tokens of a window
    and how many of them are scored; at most `batch` windows are run at once. The defaults are those of `TokenScorer`.
    `full_logits`: no head replay.
    """
    counted = Counter(forwards)
    if not counted:
        raise PosencError("There is no window to estimate: give one or more.")
    shape, costs = read_shape(model), []
    size = shape.dtype.itemsize
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    chunk = chunk or max(1, LOGITS_PER_CHUNK // shape.vocabulary)
    for (tokens, scored), count in counted.items():
        piece = tokens if prefill_chunk is None or full_logits else min(prefill_chunk, tokens)
        together = min(batch, count)
        rows = min(chunk, together * min(scored, piece))
        # Without head replay all logits are held while the losses of a chunk are computed.
        held = (together * tokens if full_logits else rows) * size
        held += rows * (size if size >= FLOAT else 2 * FLOAT)
        states = piece * size * int(STATES * shape.hidden + WIDE * shape.width)
        activations = together * (states + score_matrix(shape, piece, tokens, size))
        if piece < tokens:  # the last chunk of the piece before is still held
            activations += rows * shape.vocabulary * size
        cost = Cost(
            tokens=tokens * count,
            flops=forward_flops(shape, tokens, scored) * count,
            weights=weights,
            activations=activations,
            cache=together * _cache(shape, piece, tokens) * size,
            logits=held * shape.vocabulary,
        )
        costs.append(cost)
    return replace(
        max(costs, key=lambda cost: cost.total),
        tokens=sum(cost.tokens for cost in costs),
        flops=sum(cost.flops for cost in costs),
    )


def forward_flops(shape: ModelShape, length: int, scored: int) -> float:
    """Return the operations of a forward over a text, of whose tokens so many are scored; pairs count as `SLOWER`."""
    pairs = 0.0
    for layer, count in Counter(shape.attentions).items():
        features = count * layer.heads * (layer.key_dim + layer.value_dim)
        times = 1.0
        if layer.encoding is not None and shape.device.type == "cuda":
            backend, _ = layer_backend(layer, shape.device, shape.dtype.itemsize, length)
            times = SLOWER.get(backend.name, times)
        pairs += times * features * visible_pairs(layer, length)
    return 2.0 * (shape.met * length + shape.head * scored + pairs)


def visible_pairs(attention: Attention, length: int) -> int:
    """Return the number of pairs of a query and a visible key in a text of so many tokens."""
    window = attention.window
    if window is None or window >= length:
        return length * (length + 1) // 2
    if attention.chunked:
        chunks, rest = divmod(length, window)
        return chunks * (window * (window + 1) // 2) + rest * (rest + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


def _cache(shape: ModelShape, queries: int, tokens: int) -> int:
    """Return the numbers in the cache of a prefill in pieces; the largest layer's grow by a copy."""
    if queries == tokens:
        return 0
    layers = [
        layer.cached * min(tokens, tokens if layer.window is None else layer.window + queries)
        for layer in shape.attentions
    ]
    return sum(layers) + max(layers, default=0)


def score_matrix(shape: ModelShape, queries: int, keys: int, size: int) -> int:
    """Return the bytes of the largest matrix of queries x keys; 0 where a fused kernel writes none."""
    matrix = 0
    for layer in dict.fromkeys(shape.attentions):
        if layer.encoding is not None:
            if layer_backend(layer, shape.device, size, keys)[0].name == "exact":
                block = max(16, SCRATCH // (layer.heads * keys))
                matrix = max(matrix, min(block, queries) * layer.heads * keys * EXACT)
        elif shape.implementation == "eager":
            per_score = 2 * FLOAT + (size if size < FLOAT else 0)
            matrix = max(matrix, queries * keys * (layer.heads * per_score + size))
        elif queries == keys and layer.window is not None and layer.window <= keys:
            matrix = max(matrix, queries * keys * (2 + size))  # a mask, its copy, and it as a bias
    return matrix


def layer_backend(
    layer: Attention, device: torch.device, size: int, length: int, queries: int = _PROBE
) -> tuple[Backend, bool]:
    """Return the backend of a patched layer for the last queries of a text, and whether it was shown to work."""
    assert layer.encoding is not None
    place = torch.device("cpu") if device.type == "meta" else device
    dtype = torch.float32 if size == FLOAT else torch.bfloat16
    positions = torch.arange(_PROBE, device=place)[None]
    zeros = functools.partial(torch.zeros, dtype=dtype, device=place)
    query = zeros(1, layer.heads, queries, layer.key_dim)
    key = zeros(1, layer.key_heads, _PROBE, layer.key_dim)
    value = zeros(1, layer.key_heads, _PROBE, layer.value_dim)
    mask: Mask = CausalMask(queries, _PROBE, place)
    if layer.window is not None and layer.window < length:
        mask = Mask() if layer.chunked else LazyMask.of_window(queries, _PROBE, _PROBE // 2, place)
    sinks = torch.zeros(layer.heads, device=place) if layer.sinks else None
    last = positions[:, -queries:]
    with torch.no_grad():
        call = Call(query, key, value, last, positions, mask, 1.0, layer.softcap, sinks)
        return candidate(call, layer.encoding)


def backends(model: nn.Module, length: int, queries: int = _PROBE) -> dict[str, bool]:
    """Return the names of what computes attention to a text, each with whether it was shown to work on the device.

    `queries` is 1 for a step of a generation.
    """
    shape = read_shape(model)
    found: dict[str, bool] = {}
    for layer in dict.fromkeys(shape.attentions):
        name, shown = shape.implementation, True
        if layer.encoding is not None:
            size = shape.dtype.itemsize
            backend, shown = layer_backend(layer, shape.device, size, length, queries)
            name = backend.name
        found[name] = shown and found.get(name, True)
    return found


def rate_of(device: torch.device) -> tuple[float | None, str]:
    """Return the operations per second of a device, and where the number comes from; `None` if nothing is known."""
    if device.type == "cpu":
        count = torch.get_num_threads()
        source = f"at the rate measured for one thread of an AMD EPYC, times {count}: a guess for another CPU"
        return PER_THREAD * count, source
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    peak = next((peak for part, peak in PEAKS.items() if part in name), None)
    if peak is None:
        return None, f"no rate of {name} is known"
    return SHARE * peak, f"a guess: {SHARE:.0%} of the bfloat16 peak of {name}"


def estimated(flops: float, device: torch.device) -> tuple[float | None, str]:
    """Return the seconds that so many operations take on a device, and a sentence with the source of the number."""
    rate, source = rate_of(device)
    if rate is None:
        return None, f"The time is unknown: {source}."
    return flops / rate, f"All of it takes about {duration(flops / rate)}, {source}."


# The sizes of a model that decide the cost, for any family.


@dataclass(frozen=True)
class Attention:
    """Sizes of one attention layer, patched with `encoding` or not; `key_heads` are those of keys and values.

    A query attends to `window` tokens, itself included (`None`: all before it); if `chunked`, to those before it in its
    own chunk of that size.
    """

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    chunked: bool = False
    softcap: float | None = None
    sinks: bool = False
    encoding: Encoding | None = None

    @property
    def cached(self) -> int:
        """Features of a token's keys and values."""
        return self.key_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model.

    Attributes:
        head: Weights of the head.
        met: Weights of the decoder that a token is multiplied by.
        width: Features of a token between the projections of the widest MLP, or its queries, keys and values.
        attentions: The attention layers, in order.
    """

    hidden: int
    vocabulary: int
    head: int
    met: float
    width: int
    attentions: tuple[Attention, ...]
    dtype: torch.dtype
    device: torch.device
    implementation: str


def read_shape(model: nn.Module) -> ModelShape:
    """Return the sizes of a causal language model, with weights or on the meta device."""
    whole: Any = model
    head = whole.get_output_embeddings() if hasattr(whole, "get_output_embeddings") else None
    if head is None:
        raise PosencError(
            f"{type(model).__name__} has no language head, so there is nothing to score: give a causal language model."
        )
    config, embeddings = whole.config.get_text_config(decoder=True), whole.get_input_embeddings()
    decoder, layers = _decoder(model, embeddings, config)
    attentions = list[Attention]()
    for layer in layers:  # one that mixes tokens in another way has none
        for module in layer.modules():
            kind = layer_type(module, config)
            if "ttention" in type(module).__name__ and not kind.startswith(_WITHOUT_ATTENTION):
                attentions.append(_attention(module, kind, config))
                break
    hidden = _first_int(config, "hidden_size") or int(embeddings.weight.shape[-1])
    met, width = _weights(decoder, layers, config, head)
    features = (each.heads * each.key_dim + each.cached for each in attentions)
    implementation = getattr(config, "_attn_implementation", None) or "eager"
    return ModelShape(
        hidden=hidden,
        vocabulary=int(head.weight.shape[0]),
        head=head.weight.numel(),
        met=met,
        width=max(width, *features, 0),
        attentions=tuple(attentions),
        dtype=embeddings.weight.dtype,
        device=sizes_alone(model) or embeddings.weight.device,
        implementation=native_implementation(implementation),
    )


def _decoder(
    model: nn.Module, embeddings: nn.Module, config: Any
) -> tuple[nn.Module, list[nn.Module]]:
    """Return the innermost module with the embeddings and the layers, and these: a list of the config's length."""
    count, found = getattr(config, "num_hidden_layers", None), None
    for owner in model.modules():
        if any(module is embeddings for module in owner.modules()):
            lists = [module for module in owner.modules() if isinstance(module, nn.ModuleList)]
            if lists:
                found = owner, lists
    if found is None:
        problem = f"{type(model).__name__} has no list of layers, so its cost cannot be estimated."
        raise PosencError(problem)
    decoder, lists = found
    lists.sort(key=lambda each: (len(each) != count, -len(each)))
    return decoder, list(lists[0])


def _of_text(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a decoder, without encoders of images or sound inside it."""
    yield module
    for child in module.children():
        if not hasattr(child, "config") or not hasattr(child, "get_input_embeddings"):
            yield from _of_text(child)


def _weights(
    decoder: nn.Module, layers: Sequence[nn.Module], config: Any, head: nn.Module
) -> tuple[float, int]:
    """Return the weights that a token is multiplied by, and the most features between two projections of an MLP."""
    inside = [module for layer in layers for module in layer.modules()]
    experts = _first_int(config, *_EXPERTS) or 0
    live = (getattr(module, "top_k", None) for module in inside)
    chosen = next((k for k in live if isinstance(k, int)), None)
    chosen = min(chosen or _first_int(config, *_EXPERTS_PER_TOKEN) or experts, experts)
    in_lists = {
        id(part)
        for module in inside
        if isinstance(module, nn.ModuleList) and len(module) == experts > 1
        for part in module.modules()
    }  # experts as remote code has them
    met, width = 0.0, 0
    for module in _of_text(decoder):
        if isinstance(module, nn.Embedding) or module is head:  # a lookup; counted by scored tokens
            continue
        each = chosen if id(module) in in_lists else 1
        share = chosen / experts if id(module) in in_lists else 1.0
        if (sizes := linear_features(module)) is not None:
            inner = (linear_features(part) for part in module.modules() if part is not module)
            if not any(inner):  # a wrapper's features are those of its parts
                met += share * sizes[0] * sizes[1]
                width = max(width, each * sizes[0])
            continue
        for weight in module.parameters(recurse=False):
            if weight.dim() == 3 and weight.shape[0] == experts > 1:
                met += weight.numel() * chosen / experts
                width = max(width, chosen * (sum(weight.shape[1:])))
            elif weight.dim() >= 2:
                met += share * weight.numel()
    return met, width


def linear_features(module: nn.Module) -> tuple[int, int] | None:
    """Return the features in and out of a linear layer, quantized (its weight is packed) and GPT-2's included."""
    for names in (("in_features", "out_features"), ("nx", "nf")):
        sizes = [getattr(module, name, None) for name in names]
        if all(type(size) is int for size in sizes):
            return sizes[0], sizes[1]  # type: ignore[return-value]
    return None


def _attention(module: nn.Module, kind: str, config: Any) -> Attention:
    size = _first_int(module, "qk_head_dim", "head_dim", "head_size", "attention_head_size")
    heads = _first_int(module, "num_heads", "num_attention_heads") or config.num_attention_heads
    if size is None:
        size = _first_int(config, "head_dim") or config.hidden_size // heads
    names = ("num_key_value_heads", "num_kv_heads")
    key_heads = _first_int(module, *names) or _first_int(config, *names)
    if groups := _first_int(module, "num_key_value_groups"):
        key_heads = heads // groups
    chunked = kind.startswith("chunked")
    if chunked:
        window = config.attention_chunk_size
    elif "sliding_window" in vars(module):
        window = _first_int(module, "sliding_window")
    else:
        local = kind.startswith(("sliding", "local")) or not getattr(config, "layer_types", None)
        window = _first_int(config, *_WINDOWS) if local else None
    layer = module.__dict__.get(LAYER)
    return Attention(
        heads=heads,
        key_heads=key_heads or heads,
        key_dim=size,
        value_dim=_first_int(module, "v_head_dim") or size,
        window=window,
        chunked=chunked,
        softcap=getattr(module, "attn_logit_softcapping", None),
        sinks=getattr(module, "sinks", None) is not None,
        encoding=layer.encoding if layer and layer.patched and not layer.native else None,
    )


def _first_int(owner: Any, *names: str) -> int | None:
    values: Iterator[Any] = (getattr(owner, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value is not True), None)
