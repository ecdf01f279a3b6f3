"""Bytes of the tensors that exist at once in a forward, from a model's sizes.

The numbers of copies are those of transformers' forwards in inference mode, as seen by watching every tensor that they
make (tests/test_estimate_memory.py does so again). Too low for Falcon, which makes a mask of all pairs where none is
needed, and for layers that keep states for every token (Mamba without its CUDA kernels).
"""

from __future__ import annotations

from dataclasses import dataclass

from hf_posenc.attention.exact import SCRATCH
from hf_posenc.evaluation.layer_shape import Attention
from hf_posenc.evaluation.model_shape import ModelShape

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
