"""Device function that FlashAttention-4 calls for every score: a bias by distance from a table."""

import cutlass
import cutlass.cute as cute


@cute.jit
def by_distance(score, b_idx, h_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
    """The score plus the entry of its head and distance, float32, in a table (heads, distances)."""
    distance = q_idx[0] + seqlen_info.seqlen_k - seqlen_info.seqlen_q - kv_idx[0]
    entry = cute.make_rmem_tensor(1, dtype=cutlass.Float32)
    entry[0] = aux_tensors[0][h_idx[0], cutlass.max(distance, 0)]
    return score + entry.load()
