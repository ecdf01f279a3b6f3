"""Attention as others publish their methods: whole matrices of scores, and biases as masks. For comparison only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_posenc.attention.call import Call
from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.exact import score_bias

Formulation = Callable[[Call, Encoding], Tensor]
"""Computes attention of a call, whose keys all are visible but for causality."""


def two_matrices(
    bands: Sequence[tuple[Tensor, Tensor, Tensor | None]], value: Tensor, scaling: float
) -> Tensor:
    """Compute causal attention that scores all pairs once per band and then selects.

    As modeling_llama.py of github.com/bojone/rerope does, and Self-Extend's of github.com/datamllab/LongLM.

    Args:
        bands: Queries (B, H, Q, D), keys (B, HK, K, D) and the pairs of the band, bool, of a shape that broadcasts to
            (B, H, Q, K); `None` in the first one: all.
        value: Shape (B, HK, K, DV).
        scaling: The factor on q.k.

    Returns:
        The output, shape (B, H, Q, DV).
    """
    groups = bands[0][0].shape[1] // value.shape[1]
    scores: Tensor | None = None
    for query, key, inside in bands:
        part = query @ key.repeat_interleave(groups, 1).transpose(-1, -2) * scaling
        scores = part if scores is None or inside is None else torch.where(inside, part, scores)
    assert scores is not None
    scores = scores + _causal(scores)
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    return weights @ value.repeat_interleave(groups, 1)


def by_two_matrices(call: Call, encoding: Encoding) -> Tensor:
    """Compute a method of two bands by two whole matrices of scores."""
    m, n = call.query_position, call.key_position
    origin = n.new_zeros(())
    bands = [
        (
            branch.query(call.query, m, origin),
            branch.key(call.key, n, origin),
            branch.contains(m[:, None, :, None], n[:, None, None, :]),
        )
        for branch in encoding.plan.branches
    ]
    return two_matrices(bands, call.value, call.scaling)


def by_mask(call: Call, encoding: Encoding) -> Tensor:
    """Compute a bias by PyTorch's own attention, whose mask holds it for all heads and pairs."""
    bias = score_bias(call, encoding, call.query)
    mask = (bias + _causal(bias)).to(call.query.dtype)
    return F.scaled_dot_product_attention(
        call.query, call.key, call.value, attn_mask=mask, scale=call.scaling, enable_gqa=True
    )


def _causal(scores: Tensor) -> Tensor:
    """Return what hides the keys behind each query of some scores: 0 or minus infinity, shape (Q, K)."""
    rows, keys = scores.shape[-2:]
    return scores.new_full((rows, keys), -torch.inf).triu(keys - rows + 1)


PEERS: dict[str, tuple[str, Formulation]] = {
    "rerope": ("two score matrices", by_two_matrices),
    "self_extend": ("two score matrices", by_two_matrices),
    "alibi": ("bias as a mask", by_mask),
    "t5": ("bias as a mask", by_mask),
}
"""By method, the name of the formulation that others publish, and the formulation."""
