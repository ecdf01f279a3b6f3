"""Attention of few queries over all cached keys: the step of a generation, one matrix product per key head."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from hf_posenc.attention.softmax import grouped_scores, weighted_values

Near = tuple[Tensor, Tensor, Tensor]


@overload
def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    *,
    near: Near | None = ...,
    bias: Tensor | None = ...,
    mask: Tensor | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    weights: Literal[False] = ...,
) -> Tensor: ...
@overload
def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    *,
    near: Near | None = ...,
    bias: Tensor | None = ...,
    mask: Tensor | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    weights: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    *,
    near: Near | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with all scores of a few rows at hand, exact, differentiable; on any device, traceable.

    Grouped query heads are rows of one product, so that each key is read once and not once per query head. Keys are
    never sliced: a product with a slice of a cache falls off the fast path.

    Args:
        query: Shape (B, H, Q, D), of the far band where there are two.
        key: Shape (B, HK, KV, D), H a multiple of HK.
        value: Shape (B, HK, KV, DV).
        scaling: Factor on the scores.
        near: The near band's query (B, H, Q, D), the last W keys as that band rotates them (B, HK, W, D), and which
            of these pairs are near, (B or 1, 1, Q, W), bool: their scores replace the far band's.
        bias: Added to the scores; broadcasts to (B, H, Q, KV).
        mask: Which keys are visible, broadcasts to (B, 1, Q, KV), bool; a row without any gives zeros.
        softcap: Scores become `softcap * tanh(scores / softcap)` before bias and mask (Gemma 2, arXiv 2408.00118).
        sinks: A logit per query head, shape (H,), that takes part in the softmax and has no value (gpt-oss).
        weights: Return the weights as well.

    Returns:
        Shape (B, H, Q, DV); with `weights` also the softmax, (B, H, Q, KV), float32 (float64 for float64).
    """
    scores = grouped_scores(query, key, scaling)
    if near is not None:
        near_query, near_key, is_near = near
        width = near_key.shape[2]
        tail = scores[..., key.shape[2] - width :]
        near_scores = grouped_scores(near_query, near_key, scaling)
        tail.copy_(torch.where(is_near, near_scores, tail))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores.add_(bias)
    out, probabilities = weighted_values(scores, value, mask, sinks=sinks)
    return (out, probabilities) if weights else out
