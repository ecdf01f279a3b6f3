"""Device functions of all kernels: tiles of tensors, biases by distance, soft cap, cosine and sine."""

import triton
import triton.language as tl

from hf_posenc.methods.penalties import LEAST, KerplePower

LOG2E = tl.constexpr(1.4426950408889634)
"""Scores are kept in units of log2, since the hardware has exp2 and log2."""
TURN = tl.constexpr(0.15915494309189535)
"""1 / (2 pi)."""
_LEAST = tl.constexpr(LEAST)
_MOST = tl.constexpr(KerplePower.most)


@triton.jit
def rows_of(X, strides, batch, head, row, mask, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Rows of one head of a tensor (batch, heads, rows, SIZE), 0 beyond them."""
    feature = tl.arange(0, PADDED)[None, :]
    at = X + batch * strides[0] + head.to(tl.int64) * strides[1] + feature
    at += row[:, None].to(tl.int64) * strides[2]
    return tl.load(at, mask=mask[:, None] & (feature < SIZE), other=0.0)


@triton.jit
def cos_sin(angle):
    """Cosine and sine of angles in radians, float32, to 1e-7 of the angle as it is rounded.

    `tl.sin` of an argument that may be large keeps a table in local memory; here the argument is first reduced to a
    quarter turn, where the polynomials of the Cephes library (sinf.c) have the precision of float32.
    """
    quarters = angle * (4 * TURN)
    nearest = tl.floor(quarters + 0.5)
    x = (quarters - nearest) * 1.5707963267948966
    z = x * x
    sine = ((-1.9515295891e-4 * z + 8.3321608736e-3) * z - 1.6666654611e-1) * z * x + x
    cosine = (2.443315711809948e-5 * z - 1.388731625493765e-3) * z + 4.166664568298827e-2
    cosine = cosine * z * z - 0.5 * z + 1.0
    quarter = nearest.to(tl.int32) & 3
    odd = (quarter & 1) == 1
    cos = tl.where(odd, sine, cosine)
    sin = tl.where(odd, cosine, sine)
    return tl.where((quarter == 1) | (quarter == 2), -cos, cos), tl.where(quarter >= 2, -sin, sin)


@triton.jit
def bias_parameters(KIND: tl.constexpr, FIRST, SECOND, head, mask):
    """The numbers of a bias for query heads; those of KERPLE are held within its bounds, as its method does."""
    first = tl.zeros_like(head).to(tl.float32)
    second = first
    if KIND == "alibi":
        first = tl.load(FIRST + head, mask=mask, other=0.0).to(tl.float32)
    elif KIND == "kerple_log" or KIND == "kerple_power":
        first = tl.maximum(tl.load(FIRST + head, mask=mask, other=1.0).to(tl.float32), _LEAST)
        second = tl.maximum(tl.load(SECOND + head, mask=mask, other=1.0).to(tl.float32), _LEAST)
        if KIND == "kerple_power":
            second = tl.minimum(second, _MOST)
    return first, second


@triton.jit
def bias(KIND: tl.constexpr, first, second, TABLE, INDEX, head, strides, distances, distance):
    """The bias of scores, in units of log2, by distance (float32, >= 0); all but strides broadcast."""
    if KIND == "alibi":
        return -(first * LOG2E) * distance
    elif KIND == "kerple_log":
        return -first * tl.log2(1.0 + second * distance)
    elif KIND == "kerple_power":
        power = tl.exp2(second * tl.log2(tl.maximum(distance, 1.0)))  # of distance 0 below
        return tl.where(distance > 0, -(first * LOG2E) * power, 0.0)
    else:
        row = tl.minimum(distance, distances - 1).to(tl.int32)
        if KIND == "buckets":
            row = tl.load(INDEX + row)
        return tl.load(TABLE + head * strides[0] + row * strides[1]).to(tl.float32) * LOG2E


@triton.jit
def capped(score, cap):
    """`cap * tanh(score / cap)` in units of log2, from scores that are not; tanh by way of exp2."""
    return (2.0 / (1.0 + tl.exp2(score * (-2.0 * LOG2E / cap))) - 1.0) * (cap * LOG2E)
