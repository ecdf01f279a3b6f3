"""Kernels for whole causal texts under a bias by distance: provable windows, and the attention within them."""

import triton
import triton.language as tl

from hf_posenc.attention.kernels.common_triton import LOG2E, bias, bias_parameters


@triton.jit
def provable_windows(
    Q, q_strides, K, k_strides, M, m_strides, N, n_strides, FIRST, SECOND, WINDOWS,
    group, rows, keys, scale, drop,
    BIAS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The distance of each head beyond which all keys together have a negligible share of any row.

    As `toeplitz.provable_windows`: a row's largest score is at least that of its own key, and none
    is above `|q| max|k| scale`; so a key counts for nothing whose bias lies below that difference
    and `drop`. All keys count where positions do not count up, and distances are none of places.
    """
    head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    feature = tl.arange(0, DP)[None, :]
    k = K + batch * k_strides[0] + (head // group).to(tl.int64) * k_strides[1]
    q = Q + batch * q_strides[0] + head.to(tl.int64) * q_strides[1]
    start = tl.load(N + batch * n_strides[0])
    longest = 0.0
    slack = 0.0
    astray = 0
    for j0 in range(0, keys, BN):
        j = j0 + tl.arange(0, BN)
        row = j - (keys - rows)
        known, asked = j < keys, (j < keys) & (row >= 0)
        n = tl.load(N + batch * n_strides[0] + j * n_strides[1], mask=known, other=0)
        m = tl.load(M + batch * m_strides[0] + row * m_strides[1], mask=asked, other=0)
        wrong = (known & (n - start != j)) | (asked & (m != n))
        astray = tl.maximum(astray, tl.max(wrong.to(tl.int32), 0))
        at_key = k + j[:, None].to(tl.int64) * k_strides[2] + feature
        key = tl.load(at_key, mask=known[:, None] & (feature < D), other=0.0).to(tl.float32)
        longest = tl.maximum(longest, tl.max(tl.sum(key * key, 1), 0))
        at_query = q + row[:, None].to(tl.int64) * q_strides[2] + feature
        query = tl.load(at_query, mask=asked[:, None] & (feature < D), other=0.0).to(tl.float32)
        most = tl.sqrt(tl.sum(query * query, 1) * longest) - tl.sum(query * key, 1)
        slack = tl.maximum(slack, tl.max(most, 0))
    drop = (drop + slack * scale) * 1.001  # sums are rounded
    own = head + tl.arange(0, 1)
    first, second = bias_parameters(BIAS, FIRST, SECOND, own, own >= 0)
    reach = drop / first
    if BIAS == "kerple_log":
        reach = (tl.exp2(reach * LOG2E) - 1.0) / second
    elif BIAS == "kerple_power":
        reach = tl.exp2(tl.log2(reach) / second)
    reach = tl.ceil(tl.minimum(reach, keys)).to(tl.int32)
    reach = tl.where(astray > 0, keys, reach)
    tl.store(WINDOWS + batch * tl.num_programs(0) + own, reach)


@triton.jit
def biased_forward(
    Q, q_strides, K, k_strides, V, v_strides, M, m_strides, N, n_strides, FIRST, first_strides,
    SECOND, distances, WINDOWS, OUT, out_strides, LSE, group, rows, keys, scale,
    BIAS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, VALUES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of queries of one head: the blocks that all of its rows see, then those on the diagonal.

    Every row sees its own key, so no row is empty. The longest blocks of queries start first.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = block * BM + tl.arange(0, BM)
    valid = row < rows
    i = row + keys - rows
    m = tl.load(M + batch * m_strides[0] + row * m_strides[1], mask=valid, other=0).to(tl.float32)
    at = batch * q_strides[0] + head.to(tl.int64) * q_strides[1]
    feature = tl.arange(0, DP)[None, :]
    at_query = Q + at + row[:, None].to(tl.int64) * q_strides[2] + feature
    q = tl.load(at_query, mask=valid[:, None] & (feature < D), other=0.0)
    k = K + batch * k_strides[0] + (head // group).to(tl.int64) * k_strides[1]
    v = V + batch * v_strides[0] + (head // group).to(tl.int64) * v_strides[1]
    of_row = head + tl.zeros_like(row)
    first, second = bias_parameters(BIAS, FIRST, SECOND, of_row, valid)
    lowest = block * BM + keys - rows
    begin = 0
    if WINDOWS is not None:
        begin = tl.maximum(lowest - tl.load(WINDOWS + batch * tl.num_programs(1) + head), 0)
        begin = begin // BN * BN
    shared = tl.maximum((lowest + 1) // BN * BN, begin)
    out = tl.zeros([BM, VALUES], tl.float32)
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    value_at = tl.arange(0, VALUES)[None, :]
    for diagonal in tl.static_range(2):
        stop = shared
        if diagonal:
            begin, stop = shared, tl.minimum(lowest + BM, keys)
        for j0 in range(begin, stop, BN):
            j = j0 + tl.arange(0, BN)
            known = j < keys
            at_key = k + j[None, :].to(tl.int64) * k_strides[2] + tl.arange(0, DP)[:, None]
            key_mask = known[None, :] & (tl.arange(0, DP) < D)[:, None]
            key = tl.load(at_key, mask=key_mask, other=0.0)
            n = tl.load(N + batch * n_strides[0] + j * n_strides[1], mask=known, other=0)
            s = tl.dot(q, key, input_precision=PRECISION) * (scale * LOG2E)
            s += bias(
                BIAS, first[:, None], second[:, None], FIRST, SECOND, of_row[:, None],
                first_strides, distances, tl.maximum(m[:, None] - n.to(tl.float32)[None, :], 0.0),
            )  # fmt: skip
            if diagonal:
                s = tl.where(j[None, :] <= i[:, None], s, float("-inf"))
            new = tl.maximum(top, tl.max(s, 1))
            weights = tl.exp2(s - new[:, None])
            kept = tl.exp2(top - new)
            total = total * kept + tl.sum(weights, 1)
            at_value = v + j[:, None].to(tl.int64) * v_strides[2] + value_at
            value = tl.load(at_value, mask=known[:, None] & (value_at < DV), other=0.0)
            out = tl.dot(
                weights.to(value.dtype), value, out * kept[:, None], input_precision=PRECISION
            )
            top = new
    if LSE is not None:  # in units of log2
        of_head = batch * tl.num_programs(1) + head
        tl.store(LSE + of_head * rows + row, top + tl.log2(total), mask=valid)
    at = OUT + batch * out_strides[0] + head.to(tl.int64) * out_strides[1]
    at_out = at + row[:, None].to(tl.int64) * out_strides[2] + value_at
    out = (out / total[:, None]).to(OUT.dtype.element_ty)
    tl.store(at_out, out, mask=valid[:, None] & (value_at < DV))
