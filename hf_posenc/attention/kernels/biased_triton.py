"""Kernels for whole causal texts under a bias by distance: provable windows, the attention within them, its gradients.

With the log-sum-exp of the forward, the backward computes the weights of any tile again (flash attention, Dao et al.
2022, arXiv 2205.14135). Every sum has a fixed order: no kernel adds to memory that another program writes, so runs are
alike.
"""

import triton
import triton.language as tl

from hf_posenc.attention.kernels.common_triton import LOG2E, bias, bias_parameters, rows_of


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


@triton.jit
def gradients_of_queries(
    Q, q_strides, K, k_strides, V, v_strides, M, m_strides, N, n_strides, FIRST, first_strides,
    SECOND, distances, WINDOWS, OUT, out_strides, GRAD, grad_strides, LSE, DELTA, DQ, dq_strides,
    SUMS, group, rows, keys, scale,
    BIAS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, VALUES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of queries of one head, over the keys that `biased_forward` reads for it.

    DELTA gets the sums of `grad * out` that the other kernels subtract. An output in halves is rounded, so gradients of
    a bias, sums that mostly cancel, would have errors of percents. The sum of a row's gradients is 0 without that, and
    corrects them. SUMS, where given, gets the block's part of the gradients of KERPLE's two parameters.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = block * BM + tl.arange(0, BM)
    valid = row < rows
    i = row + keys - rows
    m = tl.load(M + batch * m_strides[0] + row * m_strides[1], mask=valid, other=0).to(tl.float32)
    grad = rows_of(GRAD, grad_strides, batch, head, row, valid, DV, VALUES)
    out = rows_of(OUT, out_strides, batch, head, row, valid, DV, VALUES)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    of_head = batch * tl.num_programs(1) + head
    lse = tl.load(LSE + of_head * rows + row, mask=valid, other=float("inf"))
    q = rows_of(Q, q_strides, batch, head, row, valid, D, DP)
    of_row = head + tl.zeros_like(row)
    first, second = bias_parameters(BIAS, FIRST, SECOND, of_row, valid)
    lowest = block * BM + keys - rows
    begin = 0
    if WINDOWS is not None:
        begin = tl.maximum(lowest - tl.load(WINDOWS + of_head), 0) // BN * BN
    shared = tl.maximum((lowest + 1) // BN * BN, begin)
    dq = tl.zeros([BM, DP], tl.float32)
    error = tl.zeros([BM], tl.float32)
    of_first, of_second, mean_first, mean_second = error, error, error, error
    for diagonal in tl.static_range(2):
        stop = shared
        if diagonal:
            begin, stop = shared, tl.minimum(lowest + BM, keys)
        for j0 in range(begin, stop, BN):
            j = j0 + tl.arange(0, BN)
            known = j < keys
            k = rows_of(K, k_strides, batch, head // group, j, known, D, DP)
            n = tl.load(N + batch * n_strides[0] + j * n_strides[1], mask=known, other=0)
            distance = tl.maximum(m[:, None] - n.to(tl.float32)[None, :], 0.0)
            added = bias(
                BIAS, first[:, None], second[:, None], FIRST, SECOND, of_row[:, None],
                first_strides, distances, distance,
            )  # fmt: skip
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E) + added
            if diagonal:
                s = tl.where(j[None, :] <= i[:, None], s, float("-inf"))
            weights = tl.exp2(s - lse[:, None])
            v = rows_of(V, v_strides, batch, head // group, j, known, DV, VALUES)
            of_weights = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
            of_scores = weights * (of_weights - delta[:, None])
            dq = tl.dot(of_scores.to(k.dtype), k, dq, input_precision=PRECISION)
            error += tl.sum(of_scores, 1)
            if SUMS is not None:
                if BIAS == "kerple_log":
                    slope = distance / (1.0 + second[:, None] * distance)
                else:
                    slope = added * tl.log2(tl.maximum(distance, 1.0))
                of_first += tl.sum(of_scores * added, 1)
                mean_first += tl.sum(weights * added, 1)
                of_second += tl.sum(of_scores * slope, 1)
                mean_second += tl.sum(weights * slope, 1)
    tl.store(DELTA + of_head * rows + row, delta + error, mask=valid)
    feature = tl.arange(0, DP)[None, :]
    at = DQ + batch * dq_strides[0] + head.to(tl.int64) * dq_strides[1] + feature
    at += row[:, None].to(tl.int64) * dq_strides[2]
    dq = (dq * scale).to(DQ.dtype.element_ty)
    tl.store(at, dq, mask=valid[:, None] & (feature < D))
    if SUMS is not None:
        # From sums in units of log2: both biases are in proportion to their first parameter.
        of_first -= error * mean_first
        of_second -= error * mean_second
        of_second *= -first if BIAS == "kerple_log" else 1.0 / (LOG2E * LOG2E)
        parts = SUMS + of_head * tl.num_programs(0) + block
        tl.store(parts, tl.sum(of_first / first, 0) / LOG2E)
        every = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
        tl.store(parts + every, tl.sum(of_second, 0))


@triton.jit
def gradients_of_keys(
    Q, q_strides, K, k_strides, V, v_strides, M, m_strides, N, n_strides, FIRST, first_strides,
    SECOND, distances, WINDOWS, GRAD, grad_strides, LSE, DELTA, DK, dk_strides, DVALUE, dv_strides,
    group, rows, keys, scale,
    BIAS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, VALUES: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of keys and values of one key head, over the queries of all heads of its group.

    Keys are the rows of every tile, so that no weights are transposed. The longest blocks start first.
    """
    block = tl.program_id(0)
    key_head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    j = block * BN + tl.arange(0, BN)
    known = j < keys
    k = rows_of(K, k_strides, batch, key_head, j, known, D, DP)
    v = rows_of(V, v_strides, batch, key_head, j, known, DV, VALUES)
    n = tl.load(N + batch * n_strides[0] + j * n_strides[1], mask=known, other=0).to(tl.float32)
    dk = tl.zeros([BN, DP], tl.float32)
    dv = tl.zeros([BN, VALUES], tl.float32)
    past = keys - rows
    lowest = block * BN - past
    for of_group in range(group):
        head = key_head * group + of_group
        of_head = batch * tl.num_programs(1) * group + head
        of_key = head + tl.zeros_like(j)
        first, second = bias_parameters(BIAS, FIRST, SECOND, of_key, known)
        stop = rows
        if WINDOWS is not None:
            stop = tl.minimum(stop, lowest + BN + tl.load(WINDOWS + of_head))
        begin = tl.maximum(lowest, 0) // BM * BM
        shared = tl.minimum(tl.cdiv(tl.maximum(lowest + BN - 1, 0), BM) * BM, stop)
        for diagonal in tl.static_range(2):
            start, end = shared, stop
            if not diagonal:
                start, end = begin, shared
            for r0 in range(start, end, BM):
                row = r0 + tl.arange(0, BM)
                valid = row < rows
                q = rows_of(Q, q_strides, batch, head, row, valid, D, DP)
                m = tl.load(M + batch * m_strides[0] + row * m_strides[1], mask=valid, other=0)
                lse = tl.load(LSE + of_head * rows + row, mask=valid, other=float("inf"))
                s = tl.dot(k, tl.trans(q), input_precision=PRECISION) * (scale * LOG2E)
                s += bias(
                    BIAS, first[:, None], second[:, None], FIRST, SECOND, of_key[:, None],
                    first_strides, distances, tl.maximum(m.to(tl.float32)[None, :] - n[:, None], 0.0),
                )  # fmt: skip
                if not diagonal:
                    s = tl.where(j[:, None] <= row[None, :] + past, s, float("-inf"))
                weights = tl.exp2(s - lse[None, :])
                grad = rows_of(GRAD, grad_strides, batch, head, row, valid, DV, VALUES)
                dv = tl.dot(weights.to(grad.dtype), grad, dv, input_precision=PRECISION)
                delta = tl.load(DELTA + of_head * rows + row, mask=valid, other=0.0)
                of_weights = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
                of_scores = weights * (of_weights - delta[None, :])
                dk = tl.dot(of_scores.to(q.dtype), q, dk, input_precision=PRECISION)
    feature = tl.arange(0, DP)[None, :]
    at = DK + batch * dk_strides[0] + key_head.to(tl.int64) * dk_strides[1] + feature
    at += j[:, None].to(tl.int64) * dk_strides[2]
    tl.store(at, (dk * scale).to(DK.dtype.element_ty), mask=known[:, None] & (feature < D))
    feature = tl.arange(0, VALUES)[None, :]
    at = DVALUE + batch * dv_strides[0] + key_head.to(tl.int64) * dv_strides[1] + feature
    at += j[:, None].to(tl.int64) * dv_strides[2]
    tl.store(at, dv.to(DVALUE.dtype.element_ty), mask=known[:, None] & (feature < DV))


@triton.jit
def gradients_of_distances(
    Q, q_strides, K, k_strides, V, v_strides, FIRST, first_strides, SECOND, distances,
    GRAD, grad_strides, LSE, DELTA, SUMS, group, rows, keys, scale,
    BIAS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, VALUES: tl.constexpr,
    BM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The tiles of one head along a diagonal, where distances are the same in all of them.

    So the tiles are summed as they are, and the diagonals of the sum are the distances: those from the tile's own
    `BM * program` on, and the ones before it, for each half a line of SUMS. Positions count up.
    """
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    away = tl.program_id(0) * BM
    of_head = batch * tl.num_programs(1) + head
    place = tl.arange(0, BM)
    distance = away + place[:, None] - place[None, :]
    added = bias(
        BIAS, 0.0, 0.0, FIRST, SECOND, head, first_strides, distances,
        tl.maximum(distance, 0).to(tl.float32),
    )  # fmt: skip
    added = tl.where(distance >= 0, added, float("-inf"))
    past = keys - rows
    total = tl.zeros([BM, BM], tl.float32)
    for r0 in range(tl.maximum(away - past - BM + 1, 0) // BM * BM, rows, BM):
        row, j = r0 + place, r0 + past - away + place
        valid, known = row < rows, (j >= 0) & (j < keys)
        q = rows_of(Q, q_strides, batch, head, row, valid, D, DP)
        k = rows_of(K, k_strides, batch, head // group, j, known, D, DP)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E) + added
        lse = tl.load(LSE + of_head * rows + row, mask=valid, other=float("inf"))
        weights = tl.where(known[None, :], tl.exp2(s - lse[:, None]), 0.0)
        grad = rows_of(GRAD, grad_strides, batch, head, row, valid, DV, VALUES)
        v = rows_of(V, v_strides, batch, head // group, j, known, DV, VALUES)
        delta = tl.load(DELTA + of_head * rows + row, mask=valid, other=0.0)
        of_weights = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
        total += weights * (of_weights - delta[:, None])
    # With its row moved to the right by as many places, an entry's column is its diagonal.
    skewed = tl.gather(total, (place[:, None] - place[None, :]) & (BM - 1), 1)
    own = place[:, None] >= place[None, :]
    at = SUMS + (of_head * tl.num_programs(0) + tl.program_id(0)) * 2 * BM + place
    tl.store(at, tl.sum(tl.where(own, skewed, 0.0), 0))
    tl.store(at + BM, tl.sum(tl.where(own, 0.0, skewed), 0))
