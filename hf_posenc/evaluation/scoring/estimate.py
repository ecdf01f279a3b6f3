"""Cost of a run before it starts: floating-point operations and memory, from a model's sizes alone.

A model on the meta device is enough, so that an 8B model is estimated without its weights (see `shape`).

Operations: 2 for every multiply-add of the weights that a token meets (of experts, those that it is sent to), of the
head for scored tokens only, and of the causal scores and weighted values of attention, within sliding windows only. Not
counted: norms, rotations, softmax and other elementwise work; scans of state-space and linear-attention layers; what
kernels compute for pairs that a mask hides.

Memory: the largest sum of tensors that exist at once, as transformers' forwards create them in inference mode. The
numbers of copies were counted by recording every tensor of a forward; tests/evaluation/scoring/test_estimate_memory.py
does so again, docs/data/benchmarks/memory.json compares with resident memory. Not counted: workspaces of kernels and
libraries, a CUDA context, rounding and fragmentation of the allocator, the states of state-space layers. Too low for
Falcon, which creates a mask of all pairs without need, and for layers that keep states for every token (Mamba without
its CUDA kernels).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn

from hf_posenc.attention.exact import SCRATCH
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.scoring.head_replay import LOGITS_PER_CHUNK
from hf_posenc.evaluation.scoring.shape import Attention, ModelShape, read_shape

# Bytes of a float32, the type of losses and of the rotations and softmaxes of patched layers.
_FLOAT = 4
# Float32 copies of the queries, while a patched layer rotates them and merges its bands.
_ROTATIONS = 5
# Of a block of `attention.exact`: its least rows, and the bytes per score: four float32 tensors, and the visible pairs.
_LEAST_ROWS, _EXACT = 16, 17


@dataclass(frozen=True)
class Cost:
    """Cost of a forward, or of a run of many.

    Attributes:
        tokens: Tokens forwarded.
        flops: Floating-point operations.
        weights: Bytes of the model's weights and buffers.
        activations: Bytes of the decoder's tensors within a layer, masks and scores included; in pieces, also of the
            logits that are still held from the piece before.
        cache: Bytes of keys and values, if the prefill is in pieces; layers with a window keep no more than that.
        hidden: Bytes of the last hidden states, which wait for the head.
        logits: Bytes of the logits of a chunk, of their float32 copy and of their log-softmax.
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
    dtype: torch.dtype | None = None,
    full_logits: bool = False,
) -> Cost:
    """Return the cost of many windows: the sums of tokens and operations, and the memory of the most expensive window.

    Args:
        model: A causal language model as it will run: patched, with its attention backend; on any device.
        forwards: Tokens of every window, and how many of them are scored.
        batch: Largest number of windows that are run at once.
        chunk: Tokens whose logits are held at a time; by default that of `TokenScorer`.
        prefill_chunk: Tokens that the decoder runs at a time; by default all.
        dtype: Type of weights and activations; by default the model's own.
        full_logits: Head replay is off, and the logits of all tokens are held.

    Raises:
        PosencError: There is no window, a number is below 1, or the model has no head or layers.
    """
    counted = Counter(forwards)
    if not counted:
        raise PosencError("There is no window to estimate: give one or more.")
    least = {"length": min(counted)[0], "windows": batch}
    for name, value in {**least, "chunk": chunk, "prefill_chunk": prefill_chunk}.items():
        if value is not None and value < 1:
            raise PosencError(f"{name} is at least 1, not {value}.")
    shape, weights = read_shape(model), _weights(model, dtype)
    size = (dtype or shape.dtype).itemsize
    chunk = chunk or max(1, LOGITS_PER_CHUNK // shape.vocabulary)
    costs = []
    for (tokens, scored), count in counted.items():
        piece = tokens if prefill_chunk is None or full_logits else min(prefill_chunk, tokens)
        run, together = _Pass(piece, tokens, size), min(batch, count)
        rows = min(chunk, together * min(scored, piece))
        held = rows * shape.vocabulary * size if run.pieced else 0
        cost = Cost(
            tokens=tokens * count,
            flops=_flops(shape, tokens, scored) * count,
            weights=weights,
            activations=together * _activations(shape, run) + held,
            cache=together * _cache(shape, run),
            hidden=together * piece * shape.hidden * size,
            logits=_logits(shape, rows, size, whole=together * tokens if full_logits else 0),
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
    """One run of the decoder, over the whole window or its last piece.

    Attributes:
        queries: Tokens that are run.
        keys: Tokens that they attend to, those in the cache included.
        size: Bytes of a number.
    """

    queries: int
    keys: int
    size: int

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
    """Return the bytes of all layers' keys and values, if the prefill is in pieces; one of them grows into a copy."""
    if not run.pieced:
        return 0
    layers = [layer.cached * run.keys_of(layer) for layer in shape.attentions]
    return (sum(layers) + max(layers, default=0) // 2) * run.size


def _logits(shape: ModelShape, rows: int, size: int, whole: int) -> int:
    """Return the bytes of logits, of a float32 copy if they are of half precision, and of the log-softmax.

    A chunk has `rows` tokens. Without head replay the logits of `whole` tokens are held beside it.
    """
    derived = size if size >= _FLOAT else 2 * _FLOAT
    if whole:
        return (whole * size + rows * derived) * shape.vocabulary
    # One chunk is still held while the next is computed.
    return rows * (size + derived) * shape.vocabulary


def _activations(shape: ModelShape, run: _Pass) -> int:
    """Return the bytes of the decoder at its peak, without the keys and values in a cache."""
    masks, of_widest = _masks(shape, run)
    kept = (shape.embeddings + 1) * shape.hidden  # the embeddings, and the layer's input
    widest = 0
    for layer in shape.layers:
        # The residual, the normalized input, and a branch beside the MLP or the MLP's output.
        mlp = int((kept + 3 * shape.hidden + layer.intermediate) * run.queries * run.size)
        widest = max(widest, mlp)
        if layer.attention is not None:
            outside = (kept + shape.hidden) * run.queries * run.size
            inside = _attention(shape, layer.attention, run, bool(masks))
            widest = max(widest, outside + inside + of_widest)
    return widest + masks


def _attention(shape: ModelShape, layer: Attention, run: _Pass, masked: bool) -> int:
    """Return the bytes of one layer's attention beside its input."""
    keys = run.keys_of(layer)
    total = (layer.query + layer.cached) * run.queries * run.size
    if layer.encoding is not None:
        total += _ROTATIONS * layer.query * run.queries * _FLOAT
        kernels = (
            shape.device.type == "cpu" and not run.pieced and layer.encoding.plan.kernel is not None
        )
        if not kernels:  # blocks of scores instead
            rows = max(_LEAST_ROWS, SCRATCH // (layer.heads * keys))
            total += min(rows, run.queries) * layer.heads * keys * _EXACT
        return total
    # Of a rotation: times cosine, halves exchanged, times sine; later the output reuses their memory.
    total += (3 * layer.query + layer.key_heads * layer.key_dim) * run.queries * run.size
    if shape.implementation == "eager":
        # Scores and their softmax in float32, both; the scores of half precision beside them.
        per_score = 2 * _FLOAT + (run.size if run.size < _FLOAT else 0)
        per_score += 3 * run.size if shape.own_attention else 0
        return total + per_score * layer.heads * run.queries * keys
    if masked and layer.key_heads < layer.heads:  # repeated for every query head
        total += layer.heads * (layer.key_dim + layer.value_dim) * keys * run.size
    return total


def _masks(shape: ModelShape, run: _Pass) -> tuple[int, int]:
    """Return the bytes of the masks, which live as long as the forward, and of attention's copies of the widest."""
    kinds = {
        (layer.window, layer.chunked): run.keys_of(layer)
        for layer in shape.attentions
        if layer.encoding is None
    }
    if shape.implementation == "eager":
        return sum(kinds.values()) * run.queries * run.size, 0
    if shape.implementation != "sdpa":
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
