"""Attention as others publish their methods: whole matrices of scores, and biases as masks. For comparison only.

    python -m scripts.peers --output peers --budget 300

measures them as `hf-posenc bench --suite gpu` measures methods, each beside the method itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_posenc.attention.call import Call
from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.exact import score_bias
from hf_posenc.evaluation.device import Formulation
from hf_posenc.evaluation.device.run import GpuRun
from hf_posenc.evaluation.options import BenchOptions


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


def main(arguments: list[str] | None = None) -> None:
    """Measure the methods and their peers, and write what the suite gpu writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--lengths", help="by default those of the suite")
    parser.add_argument("--budget", type=int, help="begin no measurement after so many seconds")
    given = parser.parse_args(arguments)
    lengths = [int(length) for length in given.lengths.split(",")] if given.lengths else None
    options = BenchOptions(suite="gpu", methods=[*PEERS], lengths=lengths, budget=given.budget)
    result = GpuRun(options, peers=PEERS).run(given.output)
    assert result is not None
    print("\n".join(result.write(given.output)))


if __name__ == "__main__":
    main()
