"""The kernel that merges two parts of a softmax: one pass over both outputs."""

import triton
import triton.language as tl

from hf_posenc.attention.fused.protocol import EMPTY
from hf_posenc.attention.kernels.common_triton import rows_of

_EMPTY = tl.constexpr(EMPTY)


@triton.jit
def _lse_of(LSE, strides, batch, head, row, mask):
    """Log-sum-exps of rows, `EMPTY` for a row without keys, whichever infinity its operator has for that."""
    at = LSE + batch * strides[0] + head.to(tl.int64) * strides[1] + row.to(tl.int64) * strides[2]
    lse = tl.load(at, mask=mask, other=0.0)
    lse = tl.where(lse == float("inf"), _EMPTY, lse)
    return tl.where(lse < _EMPTY, _EMPTY, lse)  # a NaN stays one


@triton.jit
def merge_rows(
    OUT, out_strides, LSE, lse_strides, PART, part_strides, PART_LSE, part_lse_strides, heads, rows,
    REVERSE: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """A block of rows of one head; OUT and LSE are overwritten."""
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    head = tl.program_id(1) % heads
    batch = (tl.program_id(1) // heads).to(tl.int64)
    valid = r < rows
    from_row = r
    if REVERSE:
        from_row = rows - 1 - r
    lse = _lse_of(LSE, lse_strides, batch, head, r, valid)
    other = _lse_of(PART_LSE, part_lse_strides, batch, head, from_row, valid)
    top = tl.maximum(lse, other)
    weight = tl.exp(lse - top)
    weight_other = tl.exp(other - top)
    total = weight + weight_other
    out = rows_of(OUT, out_strides, batch, head, r, valid, D, PADDED).to(tl.float32)
    part = rows_of(PART, part_strides, batch, head, from_row, valid, D, PADDED).to(tl.float32)
    merged = (out * weight[:, None] + part * weight_other[:, None]) / total[:, None]
    feature = tl.arange(0, PADDED)[None, :]
    at = OUT + batch * out_strides[0] + head.to(tl.int64) * out_strides[1] + feature
    at += r[:, None].to(tl.int64) * out_strides[2]
    tl.store(at, merged.to(OUT.dtype.element_ty), mask=valid[:, None] & (feature < D))
    at = LSE + batch * lse_strides[0] + head.to(tl.int64) * lse_strides[1]
    tl.store(at + r.to(tl.int64) * lse_strides[2], top + tl.log(total), mask=valid)
