"""What the engines compute, in float64, written from their sources and not from `hf_posenc.methods`.

The four pieces are common to transformers 4.57.1 and 5.23.0 (`modeling_rope_utils.py`), vLLM 0.33.0
(`model_executor/layers/rotary_embedding/`) and SGLang 0.5.23 (`srt/layers/rotary_embedding/`); the engines differ in
which keys of a config they read and in what they make of them, and that is in the engines' own files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Table:
    """A rotary table.

    Attributes:
        inv_freq: Shape (d/2,), float64, radians per token.
        factor: The factor on cos and sin.
    """

    inv_freq: Tensor
    factor: float = 1.0


def plain(theta: float, dim: int) -> Tensor:
    """`theta ** (-2i/d)`, shape (d/2,)."""
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def yarn(
    theta: float,
    dim: int,
    factor: float,
    original: float,
    *,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> Tensor:
    """YaRN's frequencies: `_compute_yarn_parameters`, `YaRNScalingRotaryEmbedding._compute_inv_freq`."""

    def pair_of(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_of(beta_fast), pair_of(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    pairs = torch.arange(dim // 2, dtype=torch.float64)
    divided = ((pairs - low) / (high - low)).clamp(0, 1)
    kept = plain(theta, dim)
    return kept / factor * divided + kept * (1 - divided)


def yarn_factor(factor: float, mscale: float = 1.0) -> float:
    """YaRN's factor on cos and sin: `get_mscale`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def llama3(
    theta: float, dim: int, factor: float, low: float, high: float, original: float
) -> Tensor:
    """Llama 3.1's frequencies: `_compute_llama3_parameters`, `Llama3RotaryEmbedding._compute_inv_freq`."""
    kept = plain(theta, dim)
    wavelength = 2 * math.pi / kept
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * kept / factor + smooth * kept
    slow = torch.where(wavelength > original / low, kept / factor, between)
    return torch.where(wavelength < original / high, kept, slow)


def longrope(theta: float, dim: int, divisors: Sequence[float]) -> Tensor:
    """A divisor for every pair: `_compute_longrope_parameters`, `Phi3LongRoPEScaledRotaryEmbedding`."""
    return plain(theta, dim) / torch.tensor(divisors, dtype=torch.float64)


def longrope_factor(reach: float, original: float) -> float:
    """LongRoPE's factor on cos and sin, where none is given."""
    scale = reach / original
    return 1.0 if scale <= 1 else math.sqrt(1 + math.log(scale) / math.log(original))


def dynamic(theta: float, dim: int, factor: float, length: float, original: float) -> Tensor:
    """Dynamic NTK for a text of `length` tokens: `_compute_dynamic_ntk_parameters`."""
    growth = factor * max(length, original) / original - (factor - 1)
    return plain(theta * growth ** (dim / (dim - 2)), dim)
