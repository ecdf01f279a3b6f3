"""Decode kernels: a share of the keys for the query heads of a key head, and the merge of the shares."""

import triton
import triton.language as tl

from hf_posenc.attention.kernels.bands import FIELDS as _FIELDS
from hf_posenc.attention.kernels.common_triton import LOG2E, bias, bias_parameters, capped, cos_sin

FIELDS = tl.constexpr(_FIELDS)


@triton.jit
def _inside(BANDS: tl.constexpr, band: tl.constexpr, span, n):
    """The pairs of a band, from their distance in tokens or chunks and the position of the key."""
    inside = span >= BANDS[band * FIELDS]
    if BANDS[band * FIELDS + 1] >= 0:
        inside &= span < BANDS[band * FIELDS + 1]
    if BANDS[band * FIELDS + 2] >= 0:
        inside &= n < BANDS[band * FIELDS + 2]
    return inside


@triton.jit
def _shift(BANDS: tl.constexpr, band: tl.constexpr, x):
    """The shift of positions x, as `bands.Shift`."""
    moved = BANDS[band * FIELDS + 5] + BANDS[band * FIELDS + 6] * x.to(tl.float32)
    moved += BANDS[band * FIELDS + 7] * (x // BANDS[band * FIELDS + 8]).to(tl.float32)
    if BANDS[band * FIELDS + 9] > 0:
        moved = tl.minimum(moved, BANDS[band * FIELDS + 10])
    return moved


@triton.jit
def _shift_from(BANDS: tl.constexpr, band: tl.constexpr, x, origin):
    """The shift of positions x less that of an origin: a small number, whose angles are precise."""
    groups = x // BANDS[band * FIELDS + 8] - origin // BANDS[band * FIELDS + 8]
    moved = BANDS[band * FIELDS + 6] * (x - origin).to(tl.float32)
    return moved + BANDS[band * FIELDS + 7] * groups.to(tl.float32)


@triton.jit
def _turned(first, second, angle):
    """Pairs of features turned by angles, in the dtype that they have."""
    cos, sin = cos_sin(angle)
    x, y = first.to(tl.float32), second.to(tl.float32)
    return (x * cos - y * sin).to(first.dtype), (y * cos + x * sin).to(first.dtype)


@triton.jit
def _band_scores(
    BANDS: tl.constexpr, band: tl.constexpr, first_query, second_query, first_key, second_key,
    scores, frequency, n, origin, PRECISION: tl.constexpr,
):  # fmt: skip
    """The scores of one band, (queries, keys), beyond those of the features that are not rotated."""
    if BANDS[band * FIELDS + 4] > 0:
        angle = frequency[:, None] * _shift_from(BANDS, band, n, origin)[None, :]
        first_key, second_key = _turned(first_key, second_key, angle)
    scores = tl.dot(first_query, first_key, scores, input_precision=PRECISION)
    return tl.dot(second_query, second_key, scores, input_precision=PRECISION)


@triton.jit
def decode_share(
    Q, q_strides, K, k_strides, V, v_strides, M, m_strides, N, n_strides, SEEN, seen_strides,
    FREQUENCIES, FIRST, first_strides, SECOND, distances, OUT, LSE, key_heads, group, rows, keys,
    scale, cap,
    BANDS: tl.constexpr, CHUNK: tl.constexpr, FEATURES: tl.constexpr, BIAS: tl.constexpr,
    SPLITS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, HALF: tl.constexpr,
    REST: tl.constexpr, VALUES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The softmax over the blocks `split`, `split + SPLITS`, ... of keys, for queries of one key head.

    Blocks are dealt out in turn, so that the shares are even wherever the visible keys lie in a
    cache. Positions and mask of a block are read first; without a visible pair it costs no more.

    OUT, (batch, heads, rows, SPLITS, DV), and LSE, the same without DV, are float32, LSE in units
    of log2. HALF, REST and VALUES are numbers of features as powers of two: half of the rotated
    ones, the others, those of a value; 0: there are none.
    """
    split = tl.program_id(0)
    key_head = tl.program_id(1) % key_heads
    batch = tl.program_id(2).to(tl.int64)
    r = tl.program_id(1) // key_heads * BM + tl.arange(0, BM)
    valid = r < group * rows
    head = key_head * group + r // rows
    row = r % rows

    m = tl.load(M + batch * m_strides[0] + row * m_strides[1], mask=valid, other=0).to(tl.int32)
    origin = tl.load(M + batch * m_strides[0]).to(tl.int32)
    first_parameter, second_parameter = bias_parameters(BIAS, FIRST, SECOND, head, valid)

    # Features: the first and the second of every rotated pair, and those that stay.
    at_query = head.to(tl.int64) * q_strides[1] + row.to(tl.int64) * q_strides[2]
    q = Q + batch * q_strides[0] + at_query[:, None]
    k = K + batch * k_strides[0] + key_head.to(tl.int64) * k_strides[1]
    v = V + batch * v_strides[0] + key_head.to(tl.int64) * v_strides[1]
    value_at = tl.arange(0, VALUES)
    first_queries = ()
    second_queries = ()
    if HALF > 0:
        pair = tl.arange(0, HALF)
        in_pair = pair < FEATURES[1] // 2
        if FEATURES[2]:
            first_at = FEATURES[0] + 2 * pair
            second_at = first_at + 1
        else:
            first_at = FEATURES[0] + pair
            second_at = first_at + FEATURES[1] // 2
        frequency = tl.load(FREQUENCIES + pair, mask=in_pair, other=0.0) * FEATURES[3]
        loaded = valid[:, None] & in_pair[None, :]
        first = tl.load(q + first_at[None, :], mask=loaded, other=0.0)
        second = tl.load(q + second_at[None, :], mask=loaded, other=0.0)
        for band in tl.static_range(len(BANDS) // FIELDS):
            x, y = first, second
            if BANDS[band * FIELDS + 3] > 0:
                if BANDS[band * FIELDS + 4] > 0:
                    moved = _shift_from(BANDS, band, m, origin) + BANDS[band * FIELDS + 5]
                else:
                    moved = _shift(BANDS, band, m)
                x, y = _turned(first, second, moved[:, None] * frequency[None, :])
            first_queries = first_queries + (x,)
            second_queries = second_queries + (y,)
    if REST > 0:
        rest_at = tl.arange(0, REST)
        in_rest = rest_at < D
        if HALF > 0:
            in_rest = rest_at < D - FEATURES[1]
            rest_at = tl.where(rest_at < FEATURES[0], rest_at, rest_at + FEATURES[1])
        rest_query = tl.load(
            q + rest_at[None, :], mask=valid[:, None] & in_rest[None, :], other=0.0
        )

    out = tl.zeros([BM, VALUES], tl.float32)
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    for block in range(split, tl.cdiv(keys, BN), SPLITS):
        j = block * BN + tl.arange(0, BN)
        known = j < keys
        n = tl.load(N + batch * n_strides[0] + j * n_strides[1], mask=known, other=0).to(tl.int32)
        seen = valid[:, None] & known[None, :]
        if SEEN is not None:
            at = batch * seen_strides[0] + (head * seen_strides[1] + row * seen_strides[2])[:, None]
            seen &= tl.load(SEEN + at + j[None, :] * seen_strides[3], mask=seen, other=0) != 0
        distance = tl.maximum(m[:, None] - n[None, :], 0)
        span = distance
        if CHUNK > 1:
            span = tl.maximum((m // CHUNK)[:, None] - (n // CHUNK)[None, :], 0)
        covered = _inside(BANDS, 0, span, n[None, :])
        for band in tl.static_range(1, len(BANDS) // FIELDS):
            covered |= _inside(BANDS, band, span, n[None, :])
        seen &= covered
        live = tl.max(seen.to(tl.int32), 0) > 0
        if tl.max(live.to(tl.int32), 0) > 0:
            # Keys and values that no query sees are not read: what lies there may be anything.
            at_key = k + j[None, :].to(tl.int64) * k_strides[2]
            at_value = v + j[:, None].to(tl.int64) * v_strides[2]
            if HALF > 0:
                pair_mask = in_pair[:, None] & live[None, :]
                first_key = tl.load(at_key + first_at[:, None], mask=pair_mask, other=0.0)
                second_key = tl.load(at_key + second_at[:, None], mask=pair_mask, other=0.0)
            rest = tl.zeros([BM, BN], tl.float32)
            if REST > 0:
                rest_key = tl.load(
                    at_key + rest_at[:, None], mask=in_rest[:, None] & live[None, :], other=0.0
                )
                rest = tl.dot(rest_query, rest_key, rest, input_precision=PRECISION)
            value = tl.load(
                at_value + value_at[None, :],
                mask=live[:, None] & (value_at < DV)[None, :],
                other=0.0,
            )
            s = rest
            if HALF > 0:
                for band in tl.static_range(len(BANDS) // FIELDS):
                    pairs = seen & _inside(BANDS, band, span, n[None, :])
                    if tl.max(tl.max(pairs.to(tl.int32), 1), 0) > 0:
                        part = _band_scores(
                            BANDS, band, first_queries[band], second_queries[band], first_key,
                            second_key, rest, frequency, n, origin, PRECISION,
                        )  # fmt: skip
                        s = tl.where(pairs, part, s)
            s *= scale
            if cap is not None:
                s = capped(s, cap)
            else:
                s *= LOG2E
            if BIAS is not None:
                s += bias(
                    BIAS, first_parameter[:, None], second_parameter[:, None], FIRST, SECOND,
                    head[:, None], first_strides, distances, distance.to(tl.float32),
                )  # fmt: skip
            s = tl.where(seen, s, float("-inf"))
            new = tl.maximum(top, tl.max(s, 1))
            safe = tl.where(new == float("-inf"), 0.0, new)
            weights = tl.exp2(s - safe[:, None])
            kept = tl.exp2(top - safe)
            total = total * kept + tl.sum(weights, 1)
            out = tl.dot(
                weights.to(value.dtype), value, out * kept[:, None], input_precision=PRECISION
            )
            top = new
    filled = tl.where(total == 0.0, 1.0, total)
    lse = tl.where(total == 0.0, float("-inf"), top + tl.log2(filled))
    at = ((batch * key_heads * group + head) * rows + row) * SPLITS + split
    tl.store(LSE + at, lse, mask=valid)
    tl.store(
        OUT + at[:, None] * DV + value_at[None, :],
        out / filled[:, None],
        mask=valid[:, None] & (value_at < DV)[None, :],
    )


@triton.jit
def merge_shares(
    OUT, LSE, SINKS, RESULT, result_strides, heads, rows,
    SPLITS: tl.constexpr, DV: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """One query's shares, weighed by their sums; a sink takes part in the sum and has no value."""
    at = tl.program_id(0).to(tl.int64)
    head = at // rows % heads
    share = tl.arange(0, SPLITS)
    feature = tl.arange(0, VALUES)
    lse = tl.load(LSE + at * SPLITS + share)
    top = tl.max(lse, 0)
    seen = top != float("-inf")
    top = tl.where(seen, top, 0.0)
    total = tl.zeros([1], tl.float32)
    if SINKS is not None:
        sink = tl.load(SINKS + head).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
        total += tl.exp2(sink - top)
    weights = tl.exp2(lse - top)
    total += tl.sum(weights, 0)
    outs = tl.load(
        OUT + (at * SPLITS + share)[:, None] * DV + feature[None, :],
        mask=(feature < DV)[None, :],
        other=0.0,
    )
    out = tl.sum(outs * weights[:, None], 0) / tl.where(seen, total, 1.0)
    to = at // (heads * rows) * result_strides[0] + head * result_strides[1]
    to += at % rows * result_strides[2]
    tl.store(RESULT + to + feature, out.to(RESULT.dtype.element_ty), mask=feature < DV)
