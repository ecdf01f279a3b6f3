"""Triton kernels for attention that no library's kernel computes. Optional: nothing here imports Triton to be imported.

**A step of a generation** (`decode`) reads every cached key once and is bound by memory, so all that counts is to read
no more than that, in few launches, without the host. Two launches do it:

1. `decode_share`: programs share the keys of one key head, and each computes the softmax of its part for the queries
   of all query heads of the group (flash decoding). Blocks of keys are dealt out in turn.
2. `merge_shares`: the parts of a query become one, weighed by their log-sum-exps, with the sinks of GPT-OSS.

Keys are cached as the *last* band has them. A pair's band follows from its two positions, which are read beside the
keys (8 bytes a key beside 512 of key and value), as is the mask: so the result is exact for any padding, cache, crop or
beam, and no parameter of a launch depends on a value on the device. A CUDA graph can replay it, and nothing waits. A
block without a visible pair costs its positions and mask only: free slots of a static cache, padding, and what lies
beyond a window.

Near keys are turned inside the kernel, from the position at which they are cached to that of the near band. Both sides
of a pair are turned less the shift of the first query, which changes no score: the angles are those of distances within
the window, and small, so float32 is precise at any length. `bands` reads the shifts off the position maps of a method,
by probing, as `min(top, start + slope * x + step * (x // group))`: of this form are ReRoPE (slope 1), Leaky ReRoPE
(slope 1 - 1/k), Self-Extend (slope 1, step -1 a group), STRING (start), attention sinks (slope -1 from the end of the
window on, so top 0) and dual chunk attention (a sawtooth). A method with another map is not accepted.

Biases (`biases`) are closed forms of the distance, evaluated in the kernel from the trained parameters themselves, or
tables that are read by distance.

**A whole text under a bias** (`biased`) is flash attention with a bias in registers: the blocks of keys that all rows
see, then those on the diagonal. For ALiBi and KERPLE a first launch finds the distance of each head beyond which all
keys together have at most a share of 1e-8, provably from the norms of queries and keys, and writes it where the second
launch reads it.

**Its backward** computes each tile of weights again from the log-sum-exps: over blocks of queries, then over blocks of
keys for all heads of a group. Trained parameters get their gradients in a fixed order, without atomic additions, so
that runs are alike. Those of KERPLE's closed forms are sums beside those of the queries, one for each block. Those of
a table need the sum over each distance: a third launch goes along the diagonals of the score matrix. There a distance
has the same place in every tile, so that tiles are added up as they are, and the diagonals of their sum are summed
once. All tables and trained methods of a distance alone are served, also those of users; FIRE, which reads the query's
position too, is left to the general path.

**Queries and keys of a whole text** are turned by one launch (`parts`) for PyTorch's flash attention, which takes
them turned: cos and sin come from tables that all layers of a forward share. A kernel for both bands that turned keys
itself would turn them again in every block of queries.

**How it is proven** without a GPU: `scripts/check_kernels.sh` runs the kernels in Triton's interpreter against float64
and compiles them for three generations of GPUs, whose registers, spills and shared memory may only fall. What this
cannot show is a miscompilation, a race, and any speed.
"""
