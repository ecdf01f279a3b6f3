"""Cost of a run before it starts: floating-point operations and memory, from a model's sizes alone.

Only shapes and attributes are read, so a model without weights (`with torch.device("meta"): ...`) is enough.

Operations: 2 for every multiply-add of the weights that a token meets (of experts, those that it is sent to), of the
head for scored tokens only, and of the causal scores and weighted values of attention, within sliding windows only. Not
counted: norms, rotations, softmax and other elementwise work; scans of state-space and linear-attention layers; what
kernels compute for pairs that a mask hides.

Memory: the largest sum of tensors that exist at once, as transformers' forwards create them in inference mode. The
numbers of copies were counted by recording every tensor of a forward; tests/evaluation/scoring/test_estimate.py
does so again, docs/data/benchmarks/memory.json compares with resident memory. Not counted: workspaces of kernels and
libraries, a CUDA context, rounding and fragmentation of the allocator, the states of state-space layers. Too low for
Falcon, which creates a mask of all pairs without need, and for layers that keep states for every token (Mamba without
its CUDA kernels).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hf_posenc.attention.call import Call, CausalMask
from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.engine import Backend, candidate
from hf_posenc.attention.exact import SCRATCH
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.scoring.decoder import linear_features, mlps, sizes_alone
from hf_posenc.evaluation.scoring.head_replay import LOGITS_PER_CHUNK
from hf_posenc.model.attention import native_implementation
from hf_posenc.model.discovery import layer_type
from hf_posenc.model.masks import DENSE
from hf_posenc.model.positions import LAYER

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
# Bytes of a float32, the type of losses and of the rotations and softmaxes of patched layers.
_FLOAT = 4
# Float32 copies of the queries, while a patched layer rotates them and merges its bands.
_ROTATIONS = 5
# Tokens of the text by which a layer's backend is found.
_PROBE = 64
# Of a block of `attention.exact`: its least rows, and the bytes per score: four float32 tensors, and the visible pairs.
_LEAST_ROWS, _EXACT = 16, 17


@dataclass(frozen=True)
class Cost:
    """Tokens and operations of a forward, or of a run of many, and its memory in bytes.

    Attributes:
        activations: The decoder's tensors within a layer, masks and scores included; in pieces, also the logits that
            are still held from the piece before.
        cache: Keys and values, if the prefill is in pieces; layers with a window keep no more than that.
        hidden: The last hidden states, which wait for the head.
        logits: The logits of a chunk, their float32 copy and their log-softmax.
    """

    tokens: int
    flops: float
    weights: int
    activations: int
    cache: int
    hidden: int
    logits: int

    @property
    def beside_weights(self) -> int:
        """Bytes at the peak without the weights: in the decoder or in the head, whichever is more."""
        return self.cache + self.hidden + max(self.activations, self.logits)

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
    mlp_chunk: int | None = None,
    dtype: torch.dtype | None = None,
    full_logits: bool = False,
) -> Cost:
    """Return the cost of many windows: the sums of tokens and operations, and the memory of the most expensive window.

    The model is as it will run: patched, with its attention backend, on any device. A forward is the tokens of a window
    and how many of them are scored; at most `batch` windows are run at once. The defaults are those of `TokenScorer`,
    and the model's dtype. `full_logits`: no head replay.
    """
    counted = Counter(forwards)
    if not counted:
        raise PosencError("There is no window to estimate: give one or more.")
    shape, weights = read_shape(model), _weights(model, dtype)
    size = (dtype or shape.dtype).itemsize
    chunk = chunk or max(1, LOGITS_PER_CHUNK // shape.vocabulary)
    costs = []
    for (tokens, scored), count in counted.items():
        piece = tokens if prefill_chunk is None or full_logits else min(prefill_chunk, tokens)
        run = _Pass(piece, tokens, size, piece if mlp_chunk is None else min(mlp_chunk, piece))
        together = min(batch, count)
        rows = min(chunk, together * min(scored, piece))
        held = rows * shape.vocabulary * size if run.pieced else 0
        # One chunk, or without head replay the whole text, is held while the next chunk is computed: a float32 copy of
        # logits of half precision, and the log-softmax.
        logits = (together * tokens if full_logits else rows) * size
        logits += rows * (size if size >= _FLOAT else 2 * _FLOAT)
        cost = Cost(
            tokens=tokens * count,
            flops=_flops(shape, tokens, scored) * count,
            weights=weights,
            activations=together * _activations(shape, run) + held,
            cache=together * _cache(shape, run),
            hidden=together * piece * shape.hidden * size,
            logits=logits * shape.vocabulary,
        )
        costs.append(cost)
    return replace(
        max(costs, key=lambda cost: cost.total),
        tokens=sum(cost.tokens for cost in costs),
        flops=sum(cost.flops for cost in costs),
    )


def visible_pairs(attention: Attention, length: int) -> int:
    """Return the number of pairs of a query and a visible key in a text of so many tokens."""
    window = attention.window
    if window is None or window >= length:
        return length * (length + 1) // 2
    if attention.chunked:
        chunks, rest = divmod(length, window)
        return chunks * (window * (window + 1) // 2) + rest * (rest + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


def _flops(shape: ModelShape, length: int, scored: int) -> float:
    multiplied = (sum(layer.weights for layer in shape.layers) + shape.around) * length
    multiplied += shape.head * scored
    for layer in shape.attentions:
        features = layer.heads * (layer.key_dim + layer.value_dim)
        multiplied += features * visible_pairs(layer, length)
    return 2.0 * multiplied


@dataclass(frozen=True)
class _Pass:
    """One run of the decoder, over the whole window or its last piece: tokens, bytes of a number, tokens of an MLP."""

    queries: int
    keys: int
    size: int
    mlp: int

    @property
    def pieced(self) -> bool:
        """True if some of the keys come from a cache."""
        return self.queries < self.keys

    def keys_of(self, layer: Attention) -> int:
        """Return the keys of a layer: a cache keeps no more than its window."""
        if layer.window is None or not self.pieced:
            return self.keys
        return min(self.keys, layer.window + self.queries)


def _cache(shape: ModelShape, run: _Pass) -> int:
    """Return the bytes of the keys and values of a prefill in pieces; one layer's grow into a copy."""
    if not run.pieced:
        return 0
    layers = [layer.cached * run.keys_of(layer) for layer in shape.attentions]
    return (sum(layers) + max(layers, default=0) // 2) * run.size


def _activations(shape: ModelShape, run: _Pass) -> int:
    """Return the bytes of the decoder at its peak, without the keys and values in a cache."""
    masks, of_widest = _masks(shape, run)
    kept = (shape.embeddings + 1) * shape.hidden  # the embeddings, and the layer's input
    widest = 0
    for layer in shape.layers:
        # The residual, the normalized input, and a branch beside the MLP or the MLP's output.
        mlp = (kept + 3 * shape.hidden) * run.queries + layer.intermediate * run.mlp
        if run.mlp < run.queries:  # the output of a slice too; experts are not sliced
            mlp += max(
                shape.hidden * run.mlp, layer.experts * run.queries - layer.intermediate * run.mlp
            )
        mlp = int(mlp * run.size)
        widest = max(widest, mlp)
        if layer.attention is not None:
            outside = (kept + shape.hidden) * run.queries * run.size
            inside = _attention(shape, layer.attention, run, bool(masks))
            widest = max(widest, outside + inside + of_widest)
    return widest + masks


def _attention(shape: ModelShape, layer: Attention, run: _Pass, masked: bool) -> int:
    """Return the bytes of one layer's attention beside its input."""
    keys, query = run.keys_of(layer), layer.heads * layer.key_dim
    total = (query + layer.cached) * run.queries * run.size
    if layer.encoding is not None:
        return total + _patched(shape, layer, run)
    # Of a rotation: times cosine, halves exchanged, times sine; later the output reuses their memory.
    total += (3 * query + layer.key_heads * layer.key_dim) * run.queries * run.size
    if shape.implementation == "eager":
        # Scores and their softmax in float32, both; the scores of half precision beside them.
        per_score = 2 * _FLOAT + (run.size if run.size < _FLOAT else 0)
        per_score += 3 * run.size if shape.own_attention else 0
        return total + per_score * layer.heads * run.queries * keys
    if masked and layer.key_heads < layer.heads:  # repeated for every query head
        total += layer.heads * (layer.key_dim + layer.value_dim) * keys * run.size
    return total


def _patched(shape: ModelShape, layer: Attention, run: _Pass) -> int:
    """Return the bytes of one patched layer beside its queries, keys and values."""
    assert layer.encoding is not None
    query, branches = layer.heads * layer.key_dim, len(layer.encoding.plan.branches)
    backend = layer_backend(layer, shape.device, run.size)[0]
    if backend.fused:
        # The queries of every branch, three while they are rotated, the keys, two outputs; log-sum-exps.
        queries = (branches + 3) * query + 2 * layer.heads * layer.value_dim
        keys = branches * layer.key_heads * layer.key_dim * run.keys_of(layer)
        sums = (branches + 1) * layer.heads * run.queries * _FLOAT
        return (queries * run.queries + keys) * run.size + sums
    # Of scores, whose queries are rotated block by block. A short piece has a mask that only they read.
    written = run.pieced and run.queries * run.keys <= DENSE
    blocks = written or backend.name != "prefill"
    total = (1 if blocks else _ROTATIONS) * query * run.queries * _FLOAT
    if (
        run.pieced and not blocks
    ):  # the keys of every band that turns them, one in float32 at a time
        turned = sum(not branch.shares_cache for branch in layer.encoding.plan.branches)
        per_key = turned * run.size + (3 * _FLOAT if turned and run.size < _FLOAT else 0)
        total += layer.key_heads * layer.key_dim * run.keys_of(layer) * per_key
    if blocks:
        rows = max(_LEAST_ROWS, SCRATCH // (layer.heads * run.keys_of(layer)))
        total += min(rows, run.queries) * layer.heads * run.keys_of(layer) * _EXACT
    return total


def layer_backend(
    layer: Attention, device: torch.device, size: int, queries: int = _PROBE
) -> tuple[Backend, bool]:
    """Return the backend of a patched layer for the last queries of a text, and whether it was shown to work."""
    assert layer.encoding is not None
    place = torch.device("cpu") if device.type == "meta" else device
    dtype = torch.float32 if size == _FLOAT else torch.bfloat16
    positions = torch.arange(_PROBE, device=place)[None]
    query, key, value = (
        torch.zeros(1, heads, length, features, dtype=dtype, device=place)
        for heads, length, features in (
            (layer.heads, queries, layer.key_dim),
            (layer.key_heads, _PROBE, layer.key_dim),
            (layer.key_heads, _PROBE, layer.value_dim),
        )
    )
    mask = CausalMask(queries, _PROBE, place)
    with torch.no_grad():
        call = Call(query, key, value, positions[:, -queries:], positions, mask, 1.0)
        return candidate(call, layer.encoding)


def backends(model: nn.Module, queries: int = _PROBE) -> dict[str, bool]:
    """Return the names of what computes a model's attention, each with whether it was shown to work on its device.

    `queries` is 1 for a step of a generation.
    """
    shape = read_shape(model)
    found: dict[str, bool] = {}
    for layer in dict.fromkeys(shape.attentions):
        name, shown = shape.implementation, True
        if layer.encoding is not None:
            backend, shown = layer_backend(layer, shape.device, shape.dtype.itemsize, queries)
            name = backend.name
        found[name] = shown and found.get(name, True)
    return found


def _masks(shape: ModelShape, run: _Pass) -> tuple[int, int]:
    """Return the bytes of the masks, which live as long as the forward, and of attention's copies of the widest."""
    kinds = {
        (layer.window, layer.chunked): run.keys_of(layer)
        for layer in shape.attentions
        if layer.encoding is None
    }
    if shape.implementation == "eager":
        return sum(kinds.values()) * run.queries * run.size, 0
    # Pieces are computed by the engine, which writes no mask.
    if shape.implementation != "sdpa" or (run.pieced and not shape.own_attention):
        return 0, 0
    # A whole text needs a mask only for a shorter window; a later piece always needs one.
    needed = [
        keys * run.queries
        for (window, _), keys in kinds.items()
        if run.pieced or (window is not None and window <= run.keys)
    ]
    return sum(needed), max(needed, default=0) * (1 + run.size)


def _weights(model: nn.Module, dtype: torch.dtype | None) -> int:
    return sum(
        tensor.numel() * (dtype if dtype and tensor.is_floating_point() else tensor.dtype).itemsize
        for tensors in (model.parameters(), model.buffers())
        for tensor in tensors
    )


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
    encoding: Encoding | None = None

    @property
    def cached(self) -> int:
        """Features of a token's keys and values."""
        return self.key_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class Layer:
    """Sizes of one decoder layer; `attention` is `None` if it mixes tokens in another way.

    A token is multiplied by `weights`, of experts those that it is sent to; `intermediate` features of it are in memory
    at once within the MLP or the experts, in these at least `experts`.
    """

    weights: float
    intermediate: float
    experts: float
    attention: Attention | None


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model.

    Attributes:
        head: Weights of the head.
        around: Weights that a token is multiplied by between the layers, head and embeddings aside.
        embeddings: Tables that are added up before the first layer.
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
    """Return the sizes of a causal language model, with weights or on the meta device."""
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
    implementation = native_implementation(getattr(config, "_attn_implementation", None) or "eager")
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
        device=sizes_alone(model) or embeddings.weight.device,
        implementation=implementation,
        own_attention=own_attention,
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
    """Return the sizes of one layer."""
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
    attentions = filter(None, (_read_attention(module, config) for module in layer.modules()))
    wide = _mlp(layer, hidden, experts, chosen, inside)
    return Layer(weights, max(wide), wide[1], next(attentions, None))


def _own_weights(module: nn.Module, experts: int = 0, chosen: int = 1) -> float:
    """Return the weights of this module itself, not of its parts, that a token is multiplied by."""
    if isinstance(module, nn.Embedding):  # a lookup
        return 0
    sizes = linear_features(module)
    if sizes is not None:
        inner = any(
            linear_features(child) is not None for child in module.modules() if child is not module
        )
        return 0 if inner else sizes[0] * sizes[1]  # a wrapper's features are those of its parts
    return sum(
        parameter.numel() * (chosen / experts if _of_experts(parameter, experts) else 1)
        for parameter in module.parameters(recurse=False)
        if parameter.dim() >= 2
    )


def _of_experts(parameter: nn.Parameter, experts: int) -> bool:
    return parameter.dim() == 3 and experts > 1 and parameter.shape[0] == experts


def _mlp(
    layer: nn.Module, hidden: int, experts: int, chosen: int, inside: set[int]
) -> tuple[float, float]:
    """Return the features of a token that are in memory at once: in the widest MLP, and in the experts."""
    widest = {True: 0.0, False: 0.0}
    for mlp in mlps(layer):
        expert = id(mlp.module) in inside
        steps = 2 if mlp.up > mlp.intermediate else _activation_tensors(mlp.module)
        together = mlp.up if mlp.projections == 1 else mlp.intermediate
        together = (chosen if expert else 1) * (together + steps * mlp.intermediate)
        widest[expert] = max(widest[expert], together)
    for module in layer.modules():
        for parameter in module.parameters(recurse=False):
            if _of_experts(parameter, experts):
                # A row for each expert of a token: gathered, projected, activated, multiplied; back, sorted, weighted.
                wide = sum(parameter.shape[1:]) - hidden
                widest[True] = max(widest[True], chosen * max(2 * wide + hidden, 4 * hidden))
    return widest[False], widest[True]


def _activation_tensors(module: nn.Module) -> int:
    """Return the number of tensors beside its argument that an MLP's activation has in memory at once."""
    for child in module.children():
        if "ctivation" in type(child).__name__ and next(child.parameters(), None) is None:
            fused = isinstance(child, _FUSED_ACTIVATIONS) or type(child).__name__ in _FUSED_NAMES
            return 1 if fused else 3
    return 1


def _read_attention(module: nn.Module, config: Any) -> Attention | None:
    kind = layer_type(module, config)
    if "ttention" not in type(module).__name__ or kind.startswith(_WITHOUT_ATTENTION):
        return None
    size = _first_int(module, ("qk_head_dim", "head_dim", "head_size", "attention_head_size"))
    heads = _first_int(module, ("num_heads", "num_attention_heads")) or config.num_attention_heads
    if size is None:
        size = _first_int(config, ("head_dim",)) or config.hidden_size // heads
    names = ("num_key_value_heads", "num_kv_heads")
    key_heads = _first_int(module, names) or _first_int(config, names)
    if groups := _first_int(module, ("num_key_value_groups",)):
        key_heads = heads // groups
    chunked = kind.startswith("chunked")
    layer = module.__dict__.get(LAYER)
    return Attention(
        heads=heads,
        key_heads=key_heads or heads,
        key_dim=size,
        value_dim=_first_int(module, ("v_head_dim",)) or size,
        window=config.attention_chunk_size if chunked else _window(module, kind, config),
        chunked=chunked,
        encoding=layer.encoding if layer and layer.patched and not layer.native else None,
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
