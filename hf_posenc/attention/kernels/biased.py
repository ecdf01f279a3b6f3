"""Whole texts and pieces of them under a bias by distance: an operator, and FlashAttention-4."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_posenc.attention.call import Call
from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.fused.flash4 import Flash4, interface
from hf_posenc.attention.kernels import (
    available,
    decode,
    output_like,
    padded,
    precision,
    strided,
    takes,
    trains,
    trains_bias,
)
from hf_posenc.attention.kernels.biases import Operands, has_table, operands_of
from hf_posenc.attention.toeplitz import DROPPED as DROPPED
from hf_posenc.attention.toeplitz import LEAST
from hf_posenc.methods import T5, ALiBi, DistanceBias, KerplePower

_SCHEMA = (
    "Tensor query, Tensor key, Tensor value, Tensor query_position, Tensor key_position,"
    " str bias, Tensor first, Tensor? second, float scaling"
)


@torch.library.custom_op(
    "hf_posenc::biased",
    mutates_args=(),
    schema=f"({_SCHEMA}, bool kept) -> (Tensor, Tensor, Tensor)",
)
def biased(query: Tensor, key: Tensor, value: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Compute causal attention in which query i sees the keys up to `keys - queries + i`.

    It launches the windows of closed forms, then attention. Arguments are those of the schema. Tensors are those of
    `Call`, float32 or halves; `bias`, `first` and `second` are `Operands`. All but positions and `second` of a table
    get gradients; that of a table by distance needs positions that count up.

    Returns:
        The output, that of `output_like`. For its backward, with `kept`, the log-sum-exp of each row in units of log2,
        (batch, heads, queries), float32, else an empty tensor; and the distances beyond which keys are left out,
        (batch, heads), int32, empty for a table.
    """
    from hf_posenc.attention.kernels import biased_triton

    m, n, bias, first, second, scaling, kept = given
    batch, heads, rows, _ = query.shape
    keys, group = key.shape[2], heads // key.shape[1]
    positions, sizes = _positions(batch, m, n), _sizes(query, value)
    small = _small(query, value)
    tile = 64 if small else 128
    out, lse, windows = _results(query, value, bias, kept)
    with torch.cuda.device_of(query):
        if windows.numel():
            biased_triton.provable_windows[(heads, batch)](
                *strided(query), *strided(key), *positions, first, second, windows, group, rows, keys,
                scaling, math.log(keys / DROPPED), BIAS=bias, BN=64, D=sizes["D"], DP=sizes["DP"],
            )  # fmt: skip
        biased_triton.biased_forward[(-(-rows // tile), heads, batch)](
            *strided(query), *strided(key), *strided(value), *positions, *strided(first), second,
            Operands(bias, first, second).distances, windows if windows.numel() else None,
            *strided(out), lse if kept else None, group, rows, keys, scaling,
            BIAS=bias, BM=tile, BN=32 if small else 64, num_warps=8, num_stages=2, **sizes,
        )  # fmt: skip
    return out, lse, windows


@biased.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _results(query, value, rest[2], rest[-1])


def _results(query: Tensor, value: Tensor, bias: str, kept: bool) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, rows, _ = query.shape
    lse = query.new_empty(batch, heads, rows if kept else 0, dtype=torch.float32)
    closed = bias.startswith(("alibi", "kerple"))
    windows = query.new_empty(batch, heads if closed else 0, dtype=torch.int32)
    return output_like(query, value), lse, windows


def _positions(batch: int, *positions: Tensor) -> list[Any]:
    return [x for p in positions for x in strided(p.expand(batch, -1))]


def _sizes(query: Tensor, value: Tensor) -> dict[str, Any]:
    head_dim, value_dim = query.shape[-1], value.shape[-1]
    return {
        "D": head_dim,
        "DP": padded(head_dim),
        "DV": value_dim,
        "VALUES": padded(value_dim),
        "PRECISION": precision(query.dtype),
    }


def _small(query: Tensor, value: Tensor) -> bool:
    """True if a row is so wide that tiles have fewer of them."""
    return max(query.shape[-1], value.shape[-1]) * query.element_size() > 256


@torch.library.custom_op(
    "hf_posenc::biased_backward",
    mutates_args=(),
    schema=(
        f"(Tensor grad, {_SCHEMA}, Tensor out, Tensor lse, Tensor windows, bool trained)"
        " -> (Tensor, Tensor, Tensor, Tensor)"
    ),
)
def biased_backward(grad: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of query, key and value from that of the output, `grad`, and from the results of `biased`.

    With `trained`, that of the bias is the fourth: (2, heads), of both parameters of KERPLE, or of the table. Its sums
    have a fixed order, without atomic additions.
    """
    from hf_posenc.attention.kernels import biased_triton as kernels

    query, key, value, m, n, bias, first, second, scaling, *results = given
    out, lse, windows, trained = results
    batch, heads, rows, _ = query.shape
    key_heads, keys = key.shape[1:3]
    positions, sizes = _positions(batch, m, n), _sizes(query, value)
    tile, block = (32, 32) if _small(query, value) else (128, 64)  # more spills registers
    blocks = -(-rows // tile)
    bias_of = *strided(first), second, Operands(bias, first, second).distances
    window = windows if windows.numel() else None
    tensors = *strided(query), *strided(key), *strided(value)
    inputs = *tensors, *positions, *bias_of, window
    numbers = heads // key_heads, rows, keys, scaling
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    of_query, of_key, of_value = (output_like(x, x) for x in (query, key, value))
    of_bias, delta = _of_bias(first, bias, trained), torch.empty_like(lse)
    of_rows = *strided(grad), lse, delta
    parts = lse.new_empty(2, batch, heads, blocks) if trained and window is not None else None
    with torch.cuda.device_of(query):
        kernels.gradients_of_queries[(blocks, heads, batch)](
            *inputs, *strided(out), *of_rows, *strided(of_query), parts, *numbers,
            BIAS=bias, BM=tile, BN=32, num_warps=8, num_stages=2, **sizes,
        )  # fmt: skip
        kernels.gradients_of_keys[(-(-keys // block), key_heads, batch)](
            *inputs, *of_rows, *strided(of_key), *strided(of_value), *numbers,
            BIAS=bias, BM=32, BN=block, num_warps=8, num_stages=3, **sizes,
        )  # fmt: skip
        if parts is not None:
            torch.sum(parts, (1, 3), out=of_bias)
        elif trained:
            count = min(keys, bias_of[-1])
            sums = lse.new_empty(batch, heads, -(-count // block) + 1, 2, block)
            kernels.gradients_of_distances[(sums.shape[2], heads, batch)](
                *tensors, *bias_of, *of_rows, sums, *numbers,
                BIAS=bias, BM=block, num_warps=4, num_stages=2, **sizes,
            )  # fmt: skip
            _sum_by_entry(sums, count, keys, second, of_bias)
    return of_query, of_key, of_value, of_bias


@biased_backward.register_fake
def _(grad: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    of_query, of_key, of_value = (output_like(x, x) for x in inputs[:3])
    return of_query, of_key, of_value, _of_bias(inputs[6], inputs[5], inputs[-1])


def _of_bias(first: Tensor, bias: str, trained: bool) -> Tensor:
    sizes = (2, *first.shape) if bias.startswith("kerple") else first.shape
    return first.new_empty(sizes if trained else 0)


def _sum_by_entry(
    sums: Tensor, count: int, keys: int, second: Tensor | None, of_table: Tensor
) -> None:
    """Add up the gradient of a table, (heads, entries), from (batch, heads, tiles, 2, distances) of the kernel."""
    of_tiles = sums.sum(0)
    by_distance = (of_tiles[:, :-1, 0] + of_tiles[:, 1:, 1]).flatten(1)[:, :count]
    if count < keys:
        # The last entry is that of all distances beyond. The gradients of a row's scores sum to 0, so it has the rest.
        by_distance[:, -1] = -by_distance[:, :-1].sum(-1)
    if second is None:
        of_table.zero_()[:, :count] = by_distance
        return
    chosen = second[:count, None] == torch.arange(of_table.shape[1], device=second.device)
    of_table.copy_(by_distance.double() @ chosen.double())  # float32 products may be TF32


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.bias, first, second, ctx.scaling, _ = inputs
    ctx.save_for_backward(*tensors, first, second, *output)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    *tensors, first, second, out, lse, windows = ctx.saved_tensors
    trained = any(ctx.needs_input_grad[6:8])
    of_bias: Tensor
    *of_tensors, of_bias = biased_backward(
        grad, *tensors, ctx.bias, first, second, ctx.scaling, out, lse, windows, trained
    )
    of_second = None
    if trained and ctx.bias.startswith("kerple"):
        of_bias, of_second = of_bias
    return *of_tensors, None, None, None, of_bias if trained else None, of_second, None, None


biased.register_autograd(_gradients, setup_context=_keep)


def accepts(call: Call, encoding: Encoding) -> bool:
    """True if the operator computes this call."""
    query, key = call.query, call.key
    if not available(query.device) or encoding.bias is None or encoding.method is not None:
        return False
    if query.shape[2] <= decode.QUERIES or not call.plain or not takes(call, encoding):
        return False
    tabled = has_table(encoding)
    if not tabled and operands_of(encoding, 0, key.shape[2], query.device) is None:
        return False
    runs = call.runs()
    if runs is None or any(run.window is not None for run in runs):
        return False
    # A table ends with the keys: without gaps, no distance is beyond it. The gradient of one is by place. This waits
    # for the device, once a forward, and no graph can be traced through it.
    if tabled or (isinstance(encoding.bias, T5) and trains_bias(encoding)):
        return not torch.compiler.is_compiling() and call.count_up(from_zero=False)
    return True


def run(call: Call, encoding: Encoding) -> tuple[Tensor, None]:
    """Compute a call that is accepted."""
    bias = operands_of(encoding, 0, call.key.shape[2], call.query.device)
    assert bias is not None
    kept = trains(call, encoding)

    def attend(*tensors: Tensor) -> Tensor:
        out: Tensor = biased(*tensors, *bias, call.scaling, kept)[0]
        return out

    return by_runs(call, encoding, attend), None


def by_runs(call: Call, encoding: Encoding, attend: Callable[..., Tensor]) -> Tensor:
    """Compute every run by an operator of queries, keys, values and both positions.

    Queries in no run are padding and give zeros.
    """
    runs = call.runs()
    assert runs is not None
    query = encoding.scaled(call.query, call.query_position).to(call.dtype)
    key, results = call.key.to(call.dtype), []
    for part in runs:
        rows, keys = (part.batch, slice(None), part.queries), (part.batch, slice(None), part.keys)
        tensors = query[rows], key[keys], call.value[keys], *call.positions_of(part)
        results.append(attend(*tensors))
    if len(runs) == 1 and results[0].shape[:-1] == query.shape[:-1]:
        return results[0]
    out = output_like(query, call.value).zero_()
    for part, result in zip(runs, results, strict=True):
        out[part.batch, :, part.queries] = result
    return out


# A bias from a table, by FlashAttention-4; for inference.


def accepts_table(call: Call, encoding: Encoding) -> bool:
    """True if FlashAttention-4 computes this call.

    ALiBi and KERPLE's power stay with the kernel whose windows leave keys out: it is faster in long texts.
    """
    features = max(call.query.shape[-1], call.value.shape[-1])
    return (
        Flash4().serves(call.query.device, call.dtype, features)
        and isinstance(encoding.bias, DistanceBias)
        and not isinstance(encoding.bias, ALiBi | KerplePower)
        and not trains(call, encoding)
        and not torch.compiler.is_compiling()
        and accepts(call, encoding)
        and call.count_up(from_zero=False)
    )


def run_table(call: Call, encoding: Encoding) -> tuple[Tensor, None]:
    """Compute a call that is accepted."""
    table = table_of(encoding, call.key.shape[2], call.query.device)

    def attend(query: Tensor, key: Tensor, value: Tensor, *positions: Tensor) -> Tensor:
        return tabled(query, key, value, table, call.scaling)

    return by_runs(call, encoding, attend), None


def table_of(encoding: Encoding, keys: int, device: torch.device) -> Tensor:
    """Return the bias of every head and distance, (heads, keys or more), float32."""
    method = encoding.bias
    assert isinstance(method, DistanceBias)
    if not encoding.parameters:  # kept for all layers and forwards
        kept = operands_of(encoding, 0, keys, device)
        assert kept is not None
        assert kept.first is not None
        return kept.first
    distance = torch.arange(keys, device=device, dtype=torch.float32)
    bias = encoding.own(method.bias(distance, encoding.all_heads, encoding.parameters or {}))
    return bias.float().clamp_min(LEAST).contiguous()


def tabled(query: Tensor, key: Tensor, value: Tensor, table: Tensor, scaling: float) -> Tensor:
    """Compute causal attention, aligned to the bottom right, with `table[head, distance]` added to the scores.

    Shapes: queries (B, H, R, D), keys and values (B, HK, N, D), the table (H, N), and the result (B, H, R, D).
    """
    from hf_posenc.attention.kernels import biased_cute

    out: Tensor = interface()._flash_attn_fwd(
        *(x.transpose(1, 2) for x in (query, key, value)),
        softmax_scale=scaling,
        causal=True,
        score_mod=biased_cute.by_distance,
        aux_tensors=[table],
        pack_gqa=False,
    )[0]
    return out.transpose(1, 2)
