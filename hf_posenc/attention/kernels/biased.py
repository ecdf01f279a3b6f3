"""Whole texts and pieces of them under a bias by distance: the operator, and its row for the engine's table."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hf_posenc.attention.call import Call
from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.kernels import decode
from hf_posenc.attention.kernels.biases import Operands, operands_of
from hf_posenc.attention.kernels.device import (
    available,
    output_like,
    padded,
    precision,
    strided,
    takes,
)

DROPPED = 1e-8
"""Share of the softmax that keys beyond a provable window may have, together, at most."""
LAUNCHES = 2
"""Launches by one call of the operator: windows (of closed forms), and attention."""


@torch.library.custom_op(
    "hf_posenc::biased",
    mutates_args=(),
    schema=(
        "(Tensor query, Tensor key, Tensor value, Tensor query_position, Tensor key_position,"
        " str bias, Tensor first, Tensor? second, float scaling) -> Tensor"
    ),
)
def biased(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_position: Tensor,
    key_position: Tensor,
    bias: str,
    first: Tensor,
    second: Tensor | None,
    scaling: float,
) -> Tensor:
    """Compute causal attention in which query i sees the keys up to `keys - queries + i`.

    Tensors are those of `Call`, float32 or halves; `bias`, `first` and `second` are `Operands`. The result is that of
    `output_like`.
    """
    from hf_posenc.attention.kernels import biased_triton

    batch, heads, rows, head_dim = query.shape
    keys, value_dim, group = key.shape[2], value.shape[-1], heads // key.shape[1]
    positions = [x for p in (query_position, key_position) for x in strided(p.expand(batch, -1))]
    widths = {"D": head_dim, "DP": padded(head_dim)}
    small = max(head_dim, value_dim) * query.element_size() > 256
    tile = 64 if small else 128
    out = output_like(query, value)
    with torch.cuda.device_of(query):
        windows = None
        if bias.startswith(("alibi", "kerple")):
            windows = query.new_empty(batch, heads, dtype=torch.int32)
            biased_triton.provable_windows[(heads, batch)](
                *strided(query), *strided(key), *positions, first, second, windows, group, rows, keys,
                scaling, math.log(keys / DROPPED), BIAS=bias, BN=64, **widths,
            )  # fmt: skip
        biased_triton.biased_forward[(-(-rows // tile), heads, batch)](
            *strided(query), *strided(key), *strided(value), *positions, *strided(first), second,
            Operands(bias, first, second).distances, windows, *strided(out), group, rows, keys, scaling,
            BIAS=bias, DV=value_dim, VALUES=padded(value_dim), BM=tile, BN=32 if small else 64,
            PRECISION=precision(query.dtype), num_warps=8, num_stages=2, **widths,
        )  # fmt: skip
    return out


@biased.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> Tensor:
    return output_like(query, value)


def accepts(call: Call, encoding: Encoding) -> bool:
    """True if the operator computes this call."""
    query, key = call.query, call.key
    if not available(query.device) or encoding.bias is None or encoding.method is not None:
        return False
    if query.shape[2] <= decode.QUERIES or not call.plain or not takes(call, encoding):
        return False
    bias = operands_of(encoding, 0, key.shape[2], query.device)
    runs = None if bias is None else call.runs()
    if bias is None or runs is None or any(run.window is not None for run in runs):
        return False
    # A table ends with the keys: without gaps, no distance is beyond it. This waits for the device, once a forward.
    return bias.kind != "table" or call.count_up(from_zero=False)


def run(call: Call, encoding: Encoding) -> tuple[Tensor, None]:
    """Compute a call that is accepted; queries in no run are padding and give zeros."""
    runs = call.runs()
    bias = operands_of(encoding, 0, call.key.shape[2], call.query.device)
    assert runs is not None
    assert bias is not None
    query = encoding.scaled(call.query, call.query_position)
    results = []
    for part in runs:
        rows, keys = (part.batch, slice(None), part.queries), (part.batch, slice(None), part.keys)
        tensors = query[rows], call.key[keys], call.value[keys], *call.positions_of(part)
        results.append(biased(*tensors, bias.kind, bias.first, bias.second, call.scaling))
    if len(runs) == 1 and results[0].shape[:-1] == query.shape[:-1]:
        return results[0], None
    out = output_like(query, call.value).zero_()
    for part, result in zip(runs, results, strict=True):
        out[part.batch, :, part.queries] = result
    return out, None
