"""What a run will cost, before it runs: floating-point operations and memory, from a model's sizes alone.

A model on the meta device will do, so that an 8B model is estimated without its weights (see `model_shape`).

Operations: 2 for every multiply-add of the weights that a token meets (of experts, those that it is sent to), of the
head for scored tokens only, and of the causal scores and weighted values of attention, within sliding windows only. Not
counted: norms, rotations, softmax and other elementwise work; scans of state-space and linear-attention layers; what
kernels compute of pairs that a mask hides.

Memory: the largest sum of tensors that exist at once, as the forwards of transformers make them in inference mode. Not
counted: what kernels and libraries take inside (workspaces, a CUDA context), rounding and fragmentation of the
allocator, the states of state-space layers. tests/evaluation/scoring/test_estimate_memory.py holds it against what real
forwards make, docs/data/benchmarks/memory.json against resident memory.
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

# Bytes of the tensors that exist at once in a forward, from a model's sizes.
#
# The numbers of copies are those of transformers' forwards in inference mode, as seen by watching every tensor that
# they
# make (tests/evaluation/scoring/test_estimate_memory.py does so again). Too low for Falcon, which makes a mask of all
# pairs where none is needed, and for layers that keep states for every token (Mamba without its CUDA kernels).


# Bytes of a number in float32, in which losses are made, and the rotations and softmaxes of patched layers.
_FLOAT = 4
# Float32 copies of the queries, while a patched layer rotates them and merges its bands.
_ROTATIONS = 5
# Of a block of `attention.exact`: its least rows, and the bytes per score, which are four tensors in float32 and which
# pairs are visible.
_LEAST_ROWS, _EXACT = 16, 17


@dataclass(frozen=True)
class Pass:
    """One run of the decoder: the whole window, or the last piece of it.

    Attributes:
        queries: Tokens that are run.
        keys: Tokens that they see, those in the cache included.
        size: Bytes of a number.
    """

    queries: int
    keys: int
    size: int

    @property
    def pieced(self) -> bool:
        """Whether some of the keys come from a cache."""
        return self.queries < self.keys

    def keys_of(self, layer: Attention) -> int:
        """Keys that a layer is given: a cache keeps no more than its window."""
        if layer.window is None or not self.pieced:
            return self.keys
        return min(self.keys, layer.window + self.queries)


def cache_bytes(shape: ModelShape, run: Pass) -> int:
    """Keys and values of all layers, where the prefill is in pieces; one of them grows into a copy of itself."""
    if not run.pieced:
        return 0
    layers = [
        layer.attention.cached * run.keys_of(layer.attention)
        for layer in shape.layers
        if layer.attention is not None
    ]
    return (sum(layers) + max(layers, default=0) // 2) * run.size


def logit_bytes(shape: ModelShape, rows: int, size: int, *, whole: int = 0) -> int:
    """The logits of some rows, a float32 copy where they are of half precision, and the log-softmax.

    Args:
        shape: The model's sizes.
        rows: Tokens of a chunk.
        size: Bytes of a logit as the model makes it.
        whole: Tokens whose logits are all held, where head replay is off.
    """
    made = max(size, _FLOAT) + (0 if size >= _FLOAT else _FLOAT)
    if whole:
        return (whole * size + rows * made) * shape.vocabulary
    # One chunk is still held while the next is made.
    return rows * max(size + made, 2 * size) * shape.vocabulary


def activation_bytes(shape: ModelShape, run: Pass) -> int:
    """The decoder's widest moment, the keys and values in a cache aside."""
    masks, of_widest = _masks(shape, run)
    kept = (shape.embeddings + 1) * shape.hidden  # the embeddings, and the layer's input
    widest = 0
    for layer in shape.layers:
        # The residual, the normalized input, and a branch beside the MLP or the MLP's output.
        mlp = int((kept + 3 * shape.hidden + layer.intermediate) * run.queries * run.size)
        widest = max(widest, mlp)
        if layer.attention is not None:
            outside = (kept + shape.hidden) * run.queries * run.size
            inside = _attention(shape, layer.attention, run, masked=bool(masks))
            widest = max(widest, outside + inside + of_widest)
    return widest + masks


def _attention(shape: ModelShape, layer: Attention, run: Pass, *, masked: bool) -> int:
    """What one layer's attention makes of its input."""
    keys = run.keys_of(layer)
    made = (layer.query + layer.cached) * run.queries * run.size
    if layer.encoding is not None:
        made += _ROTATIONS * layer.query * run.queries * _FLOAT
        kernels = shape.device.type == "cpu" and not run.pieced and layer.encoding.pairs is None
        if not kernels:  # blocks of scores instead
            rows = max(_LEAST_ROWS, SCRATCH // (layer.heads * keys))
            made += min(rows, run.queries) * layer.heads * keys * _EXACT
        return made
    # Of a rotation: times cosine, halves exchanged, times sine; later the output takes their place.
    made += (3 * layer.query + layer.key_heads * layer.key_dim) * run.queries * run.size
    if shape.implementation == "eager":
        # Scores and their softmax in float32, both; the scores of half precision beside them.
        per_score = 2 * _FLOAT + (run.size if run.size < _FLOAT else 0)
        per_score += 3 * run.size if shape.own_attention else 0
        return made + per_score * layer.heads * run.queries * keys
    if masked and layer.key_heads < layer.heads:  # repeated for every query head
        made += layer.heads * (layer.key_dim + layer.value_dim) * keys * run.size
    return made


def _masks(shape: ModelShape, run: Pass) -> tuple[int, int]:
    """The masks, which live as long as the forward, and what attention makes of the widest one."""
    kinds = {
        (layer.attention.window, layer.attention.chunked): run.keys_of(layer.attention)
        for layer in shape.layers
        if layer.attention is not None and layer.attention.encoding is None
    }
    if shape.implementation == "eager":
        return sum(kinds.values()) * run.queries * run.size, 0
    if shape.implementation != "sdpa":
        return 0, 0
    # A whole text needs none but for a window that is shorter; a later piece of it needs one.
    needed = [
        keys * run.queries
        for (window, _), keys in kinds.items()
        if run.pieced or (window is not None and window <= run.keys)
    ]
    return sum(needed), max(needed, default=0) * (1 + run.size)


@dataclass(frozen=True)
class Cost:
    """What a forward, or a run of many, takes.

    Attributes:
        tokens: Tokens forwarded.
        flops: Floating-point operations.
        weights: Bytes of the model's weights and buffers.
        activations: Bytes of what the decoder makes on the way through a layer, masks and scores included; in pieces,
            also of the logits that are still held from the piece before.
        cache: Bytes of keys and values, where the prefill is in pieces; layers with a window keep no more than that.
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


def forward_cost(
    model: nn.Module,
    length: int,
    *,
    scored: int | None = None,
    windows: int = 1,
    chunk: int | None = None,
    prefill_chunk: int | None = None,
    dtype: torch.dtype | None = None,
    full_logits: bool = False,
) -> Cost:
    """What `TokenScorer` takes for one forward.

    Args:
        model: A causal language model as it is to run: patched, with its attention backend; on any device.
        length: Tokens of a window.
        scored: Tokens that are scored, by default all that have a prediction.
        windows: Windows of this length that are run at once.
        chunk: Tokens whose logits are held at a time; by default as `TokenScorer` chooses.
        prefill_chunk: Tokens that the decoder runs at a time; by default all.
        dtype: Of weights and activations; by default the model's own.
        full_logits: Head replay is off, and the logits of all tokens are held.

    Raises:
        PosencError: A number below 1, or a model without a head or layers.
    """
    window = (length, length - 1 if scored is None else scored)
    return run_cost(
        model,
        [window] * max(1, windows),
        batch=windows,
        chunk=chunk,
        prefill_chunk=prefill_chunk,
        dtype=dtype,
        full_logits=full_logits,
    )


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
    """What a run of many windows takes: the sums of tokens and operations, and the memory of the dearest window.

    Args:
        model: As in `forward_cost`.
        forwards: Tokens of every window and how many of them are scored.
        batch: Windows that are run at once, at the most.
        chunk: As in `forward_cost`.
        prefill_chunk: As in `forward_cost`.
        dtype: As in `forward_cost`.
        full_logits: As in `forward_cost`.

    Raises:
        PosencError: As in `forward_cost`, or no window at all.
    """
    counted = Counter(forwards)
    if not counted:
        raise PosencError("There is no window to estimate: give one or more.")
    numbers = {
        "length": min(counted)[0],
        "windows": batch,
        "chunk": chunk,
        "prefill_chunk": prefill_chunk,
    }
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise PosencError(f"{name} is at least 1, not {value}.")
    shape, weights = read_shape(model), _weights(model, dtype)
    size = (dtype or shape.dtype).itemsize
    chunk = chunk or max(1, LOGITS_PER_CHUNK // shape.vocabulary)
    costs = []
    for (tokens, scored), count in counted.items():
        piece = tokens if prefill_chunk is None or full_logits else min(prefill_chunk, tokens)
        run, together = Pass(piece, tokens, size), min(batch, count)
        rows = min(chunk, together * min(scored, piece))
        held = rows * shape.vocabulary * size if piece < tokens else 0
        cost = Cost(
            tokens=tokens * count,
            flops=_flops(shape, tokens, scored) * count,
            weights=weights,
            activations=together * activation_bytes(shape, run) + held,
            cache=together * cache_bytes(shape, run),
            hidden=together * piece * shape.hidden * size,
            logits=logit_bytes(shape, rows, size, whole=together * tokens if full_logits else 0),
        )
        costs.append(cost)
    dearest = max(costs, key=lambda cost: cost.total)
    return replace(
        dearest,
        tokens=sum(cost.tokens for cost in costs),
        flops=sum(cost.flops for cost in costs),
    )


def visible_pairs(attention: Attention, length: int) -> int:
    """Pairs of a query and a key that it sees, in a text of so many tokens."""
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
    for layer in shape.layers:
        if (found := layer.attention) is not None:
            features = found.heads * (found.key_dim + found.value_dim)
            multiplied += features * visible_pairs(found, length)
    return 2.0 * multiplied


def _weights(model: nn.Module, dtype: torch.dtype | None) -> int:
    return sum(
        tensor.numel() * (dtype if dtype and tensor.is_floating_point() else tensor.dtype).itemsize
        for tensors in (model.parameters(), model.buffers())
        for tensor in tensors
    )
