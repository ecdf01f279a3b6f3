"""The engines' tables in float64, written from their sources and not from `hf_posenc.methods`.

They are common to transformers 4.57.1 and 5.24.0 (`modeling_rope_utils.py`), vLLM 0.33.0 and SGLang 0.5.23
(`layers/rotary_embedding/`), which differ in the keys of a config that they read and in their meaning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Table:
    """A rotary table: frequencies of shape (d/2,), float64, radians per token, and the factor on cos and sin."""

    inv_freq: Tensor
    factor: float = 1.0


def plain(theta: float, dim: int) -> Tensor:
    """Return `theta ** (-2i/d)`, shape (d/2,)."""
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
    """Return YaRN's frequencies: `_compute_yarn_parameters`, `YaRNScalingRotaryEmbedding._compute_inv_freq`."""

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
    """Return YaRN's factor on cos and sin: `get_mscale`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def llama3(
    theta: float, dim: int, factor: float, low: float, high: float, original: float
) -> Tensor:
    """Return Llama 3.1's frequencies: `_compute_llama3_parameters`, `Llama3RotaryEmbedding._compute_inv_freq`."""
    kept = plain(theta, dim)
    wavelength = 2 * math.pi / kept
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * kept / factor + smooth * kept
    slow = torch.where(wavelength > original / low, kept / factor, between)
    return torch.where(wavelength < original / high, kept, slow)


def longrope(theta: float, dim: int, divisors: Sequence[float]) -> Tensor:
    """Return LongRoPE's frequencies: `_compute_longrope_parameters`, `Phi3LongRoPEScaledRotaryEmbedding`."""
    return plain(theta, dim) / torch.tensor(divisors, dtype=torch.float64)


def longrope_factor(reach: float, original: float) -> float:
    """Return LongRoPE's factor on cos and sin, where the config has none."""
    scale = reach / original
    return 1.0 if scale <= 1 else math.sqrt(1 + math.log(scale) / math.log(original))


def of_transformers(
    rope: Mapping[str, Any], config: Mapping[str, Any], theta: float, dim: int, length: int
) -> Table | str:
    """Return the table of `ROPE_INIT_FUNCTIONS[rope_type]` for a text of `length` tokens, or the reason for none."""
    kind = rope["rope_type"]
    if kind == "default":
        return Table(plain(theta, dim))
    if kind == "linear":
        return Table(plain(theta, dim) / float(rope["factor"]))
    if kind == "dynamic":
        original, scale = config["max_position_embeddings"], float(rope["factor"])
        growth = scale * max(length, original) / original - (scale - 1)
        return Table(plain(theta * growth ** (dim / (dim - 2)), dim))
    if kind == "proportional":
        table = plain(theta, dim) / float(rope.get("factor") or 1.0)
        table[int(float(rope.get("partial_rotary_factor") or 1.0) * dim // 2) :] = 0
        return Table(table)
    original = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        return Table(llama3(theta, dim, float(rope["factor"]), low, high, original))
    if kind == "yarn":
        return Table(yarn_of(rope, theta, dim, original), yarn_factor_of(rope))
    if kind == "longrope":
        divisors = rope["long_factor" if length > original else "short_factor"]
        if (factor := rope.get("attention_factor")) is None:
            scale = rope.get("factor") or config["max_position_embeddings"] / original
            factor = longrope_factor(scale * original, original)
        if "short_mscale" in rope:  # Phi-3.5-MoE
            factor = rope["long_mscale" if length > original else "short_mscale"]
        return Table(longrope(theta, dim, divisors), float(factor))
    return f"it has no rope_type {kind!r}"


def yarn_of(rope: Mapping[str, Any], theta: float, dim: int, original: float) -> Tensor:
    """Return YaRN's frequencies by the keys of transformers and vLLM."""
    return yarn(
        theta,
        dim,
        float(rope["factor"]),
        original,
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        truncate=rope.get("truncate", True),
    )


def yarn_factor_of(rope: Mapping[str, Any]) -> float:
    """Return YaRN's factor by the same keys."""
    given, factor = rope.get("attention_factor"), float(rope["factor"])
    if given is not None:
        return float(given)
    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale and all_dim:
        return yarn_factor(factor, mscale) / yarn_factor(factor, all_dim)
    return yarn_factor(factor)
