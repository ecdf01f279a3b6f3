"""Steps of a generation: an operator of two launches, and its row for the engine's table."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_posenc.attention.call import Call
from hf_posenc.attention.decode import QUERIES as QUERIES
from hf_posenc.attention.encoding import Encoding, Plan
from hf_posenc.attention.kernels import (
    available,
    output_like,
    padded,
    precision,
    strided,
    takes,
    trains,
    unwatched,
)
from hf_posenc.attention.kernels.bands import UNTURNED, scheme_of
from hf_posenc.attention.kernels.biases import Operands, operands_of

_ROWS = 64
"""Queries of the heads that share a key head, in one program; more than that read the keys again."""
_SPLITS = 64
_PROGRAMS = 4
"""Programs for each multiprocessor: loads are in flight while others compute."""
_SCHEME = "_kernel_scheme"


def _decode(query: Tensor, key: Tensor, value: Tensor, *given: Any) -> Tensor:
    """Compute attention of a few queries over all cached keys, in two launches and without a wait.

    Arguments are those of the schema below. Tensors are those of `Call`, float32 or halves, with `visible` of
    `Mask.rows`; `bias`, `first` and `second` are `Operands`; `inv_freq`, (pairs,), is float32, and `None` if nothing is
    turned. `scheme` is the `repr` of `Scheme.numbers`, since an operator takes no tuples. The result is that of
    `output_like`.
    """
    from hf_posenc.attention.kernels import decode_triton

    query_position, key_position, visible, inv_freq, sinks, *others = given
    bias, first, second, scheme, scaling, softcap = others
    batch, heads, rows, head_dim = query.shape
    key_heads, keys, value_dim = key.shape[1], key.shape[2], value.shape[-1]
    group = heads // key_heads
    bands, chunk, features = _parsed(scheme)
    rotated = features[1]
    tile = min(_ROWS, padded(group * rows))
    tiles = key_heads * -(-group * rows // tile)
    # Measured on an H200 for halves of 128 features: 1.25 times as fast as 64 keys and 4 warps.
    narrow = max(head_dim, value_dim) * query.element_size() <= 256
    block, warps = 32, 2 if narrow else 4
    splits = _splits(query.device, tiles * batch, -(-keys // block))
    if visible is not None:
        visible = visible.expand(batch, heads, rows, keys).view(torch.uint8)
    shares = query.new_empty(batch, heads, rows, splits, value_dim, dtype=torch.float32)
    lse = query.new_empty(batch, heads, rows, splits, dtype=torch.float32)
    out = output_like(query, value)
    sizes = {"SPLITS": splits, "DV": value_dim, "VALUES": padded(value_dim)}
    with torch.cuda.device_of(query):
        decode_triton.decode_share[(splits, tiles, batch)](
            *strided(query), *strided(key), *strided(value),
            *strided(query_position.expand(batch, -1)), *strided(key_position.expand(batch, -1)),
            *strided(visible), inv_freq, *strided(first), second,
            Operands(bias, first, second).distances, shares, lse,
            key_heads, group, rows, keys, scaling, softcap,
            BANDS=bands, CHUNK=chunk, FEATURES=features, BIAS=bias or None, D=head_dim,
            HALF=padded(rotated // 2), REST=padded(head_dim - rotated), BM=tile, BN=block,
            PRECISION=precision(query.dtype), num_warps=warps, **sizes,
        )  # fmt: skip
        decode_triton.merge_shares[(batch * heads * rows,)](
            shares, lse, sinks, *strided(out), heads, rows, **sizes
        )
    return out


decode = torch.library.custom_op(
    "hf_posenc::decode",
    _decode,
    mutates_args=(),
    schema=(
        "(Tensor query, Tensor key, Tensor value, Tensor query_position, Tensor key_position,"
        " Tensor? visible, Tensor? inv_freq, Tensor? sinks, str bias, Tensor? first, Tensor? second,"
        " str scheme, float scaling, float? softcap) -> Tensor"
    ),
)


@decode.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> Tensor:
    return output_like(query, value)


def _splits(device: torch.device, programs: int, blocks: int) -> int:
    """The shares of the keys, a power of two: enough programs for the device, from shapes alone."""
    processors = 1
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    most = min(_SPLITS, blocks, -(-processors * _PROGRAMS // programs))
    return 1 << (max(most, 1) - 1).bit_length()


@functools.lru_cache(maxsize=64)
def _parsed(scheme: str) -> tuple[tuple[float, ...], int, tuple[int, ...]]:
    bands, chunk, features = ast.literal_eval(scheme)
    return bands, chunk, features


def accepts(call: Call, encoding: Encoding) -> bool:
    """True if the operator computes this call; nothing on the device is read."""
    if not available(call.query.device):
        return False
    queries = call.query.shape[2]
    # Before the size is looked at: a prefill prepares the traced steps that follow.
    formed = prepared(encoding.plan) is not None and _bias(call, encoding) is not None
    return (
        formed
        and queries <= QUERIES
        and takes(call, encoding)
        and not trains(call, encoding)
        and call.mask.added(0, queries) is None
    )


def _bias(call: Call, encoding: Encoding) -> Operands | None:
    return operands_of(encoding, call.query.shape[2], call.key.shape[2], call.query.device)


def prepared(plan: Plan) -> str | None:
    """Return the plan's scheme as the operator takes it; `None` where it has none.

    It is found once, by probing. A graph cannot be traced through that: a plan that no eager call and no one else has
    prepared has none while compiling.
    """
    if not torch.compiler.is_compiling() and not hasattr(plan, _SCHEME):
        scheme = scheme_of(plan)
        setattr(plan, _SCHEME, None if scheme is None else repr(scheme.numbers()))
    found: str | None = getattr(plan, _SCHEME, None)
    return found


def run(call: Call, encoding: Encoding) -> tuple[Tensor, None]:
    """Compute a call that is accepted."""
    plan, query = encoding.plan, call.query
    scheme = prepared(plan)
    assert scheme is not None
    bias = _bias(call, encoding)
    assert bias is not None
    inv_freq = None
    if not scheme.endswith(f"{UNTURNED})"):  # no call, which a trace could not follow
        inv_freq = plan.rotation.inv_freq.to(query.device)
    compute: Callable[..., Tensor] = _decode if unwatched(query) else decode
    out = compute(
        encoding.scaled(query, call.query_position).to(call.dtype),
        call.key.to(call.dtype),
        call.value,
        call.query_position,
        call.key_position,
        call.mask.rows(0, query.shape[2]),
        inv_freq,
        call.sinks,
        *bias,
        scheme,
        call.scaling,
        call.softcap,
    )
    return out, None
