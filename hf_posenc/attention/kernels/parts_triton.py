"""Around a fused operator, one pass each: queries or keys turned by tables, and parts of a softmax merged."""

import triton
import triton.language as tl

from hf_posenc.attention.fused import EMPTY
from hf_posenc.attention.kernels.common_triton import rows_of

_EMPTY = tl.constexpr(EMPTY)


@triton.jit
def _turn_rows(
    X, x_strides, COS, cos_strides, SIN, sin_strides, OUT, out_strides, heads, rows, batch, program,
    START: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, D: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """A block of rows in every `num_programs(1)`-th head, which share their cos and sin.

    X and OUT have the axes (turns, batch, heads, rows, features), COS and SIN (turns, batch, rows,
    pairs). HALF and REST are numbers of features as powers of two: of pairs, and of those that stay.
    """
    turn = (program // batch).to(tl.int64)  # with strides, beyond int32 in a long text
    b = (program % batch).to(tl.int64)
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    row = r[:, None].to(tl.int64)
    pair = tl.arange(0, HALF)[None, :]
    inside = (r < rows)[:, None] & (pair < PAIRS)
    at_cos = COS + turn * cos_strides[0] + b * cos_strides[1] + row * cos_strides[2]
    at_sin = SIN + turn * sin_strides[0] + b * sin_strides[1] + row * sin_strides[2]
    cos = tl.load(at_cos + pair * cos_strides[3], mask=inside, other=0.0)
    sin = tl.load(at_sin + pair * sin_strides[3], mask=inside, other=0.0)
    if INTERLEAVED:
        first_at = START + 2 * pair
        second_at = first_at + 1
    else:
        first_at = START + pair
        second_at = first_at + PAIRS
    x = X + turn * x_strides[0] + b * x_strides[1] + row * x_strides[3]
    out = OUT + turn * out_strides[0] + b * out_strides[1] + row * out_strides[3]
    head = tl.program_id(1).to(tl.int64)
    for _ in range(tl.program_id(1), heads, tl.num_programs(1)):
        from_head = x + head * x_strides[2]
        to_head = out + head * out_strides[2]
        first = tl.load(from_head + first_at, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(from_head + second_at, mask=inside, other=0.0).to(tl.float32)
        kind = OUT.dtype.element_ty
        tl.store(to_head + first_at, (first * cos - second * sin).to(kind), mask=inside)
        tl.store(to_head + second_at, (second * cos + first * sin).to(kind), mask=inside)
        if REST > 0:
            rest = tl.arange(0, REST)[None, :]
            stays = (r < rows)[:, None] & (rest < D - 2 * PAIRS)
            rest = tl.where(rest < START, rest, rest + 2 * PAIRS)
            tl.store(to_head + rest, tl.load(from_head + rest, mask=stays), mask=stays)
        head += tl.num_programs(1)


@triton.jit
def turn_pairs(
    X, x_strides, COS, cos_strides, SIN, sin_strides, OUT, out_strides, heads, rows,
    Y, y_strides, COS_Y, cos_y_strides, SIN_Y, sin_y_strides, OUT_Y, out_y_strides, heads_y, rows_y,
    batch, programs,
    START: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, D: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Two tensors, the first one by so many programs of the last axis; shapes as in `_turn_rows`."""
    program = tl.program_id(2)
    if program < programs:
        _turn_rows(
            X, x_strides, COS, cos_strides, SIN, sin_strides, OUT, out_strides, heads, rows, batch,
            program, START, PAIRS, INTERLEAVED, D, HALF, REST, BM,
        )  # fmt: skip
    else:
        _turn_rows(
            Y, y_strides, COS_Y, cos_y_strides, SIN_Y, sin_y_strides, OUT_Y, out_y_strides, heads_y,
            rows_y, batch, program - programs, START, PAIRS, INTERLEAVED, D, HALF, REST, BM,
        )  # fmt: skip


@triton.jit
def _lse_of(LSE, strides, batch, head, row, mask):
    """Log-sum-exps of rows, `EMPTY` for a row without keys, whichever infinity its operator has for that."""
    at = LSE + batch * strides[0] + head.to(tl.int64) * strides[1] + row.to(tl.int64) * strides[2]
    lse = tl.load(at, mask=mask, other=0.0)
    lse = tl.where(lse == float("inf"), _EMPTY, lse)
    return tl.where(lse < _EMPTY, _EMPTY, lse)  # a NaN stays one


@triton.jit
def merge_parts(
    OUT, out_strides, LSE, lse_strides, PARTS, rows,
    COUNT: tl.constexpr, FRESH: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """A block of rows of one head; OUT and LSE are overwritten, and are a part themselves unless FRESH.

    PARTS has for each part: outputs (chunks, heads, rows, D), three strides, log-sum-exps, three strides, the first row
    in OUT and the number there, how many of those are a chunk, its own rows of a chunk, and 1 where they are reversed.
    """
    r = tl.program_id(0) * BM + tl.arange(0, BM)
    head = tl.program_id(1)
    valid = r < rows
    if FRESH:
        out = tl.zeros((BM, PADDED), tl.float32)
        top = tl.full((BM,), _EMPTY, tl.float32)
        total = tl.zeros((BM,), tl.float32)
    else:
        out = rows_of(OUT, out_strides, 0, head, r, valid, D, PADDED).to(tl.float32)
        top = _lse_of(LSE, lse_strides, 0, head, r, valid)
        total = tl.full((BM,), 1.0, tl.float32)
    for i in tl.static_range(COUNT):
        strides = (PARTS[13 * i + 1], PARTS[13 * i + 2], PARTS[13 * i + 3])
        of_lse = (PARTS[13 * i + 5], PARTS[13 * i + 6], PARTS[13 * i + 7])
        place = r - PARTS[13 * i + 8]
        inside = (place >= 0) & (place < PARTS[13 * i + 9])
        chunk = place // PARTS[13 * i + 10]
        row = place - chunk * PARTS[13 * i + 10]
        last = PARTS[13 * i + 11] - 1
        inside = inside & (row <= last)
        row = tl.where(PARTS[13 * i + 12] == 1, last - row, row)
        chunk = chunk.to(tl.int64)
        lse = _lse_of(PARTS[13 * i + 4], of_lse, chunk, head, row, inside)
        lse = tl.where(inside, lse, float("-inf"))
        both = tl.maximum(top, lse)
        share = tl.exp(top - both)
        own = tl.exp(lse - both)
        part = rows_of(PARTS[13 * i], strides, chunk[:, None], head, row, inside, D, PADDED)
        out = out * share[:, None] + part.to(tl.float32) * own[:, None]
        total = total * share + own
        top = both
    out = out / total[:, None]
    feature = tl.arange(0, PADDED)[None, :]
    at = OUT + head.to(tl.int64) * out_strides[1] + r[:, None].to(tl.int64) * out_strides[2]
    tl.store(at + feature, out.to(OUT.dtype.element_ty), mask=valid[:, None] & (feature < D))
    at = LSE + head.to(tl.int64) * lse_strides[1]
    tl.store(at + r.to(tl.int64) * lse_strides[2], top + tl.log(total), mask=valid)
