"""Frequencies and factors of every method, from the published formulas, in plain Python floats.

Written from the papers and the authors' code, loop by loop, and not from ``hf_posenc``: nothing here is imported from
there, and nothing is arranged as there (no tensors, no ratios to a default table, no shared helpers beyond a ramp).
Each function returns ``(frequencies, factor on cos and sin)`` for a rotary dimension ``d``, a base ``b``, the trained
length ``L`` and the current length ``N``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

Table = tuple[list[float], float]


def default(d: int, b: float, trained: int, length: int | None = None) -> Table:
    """RoPE itself (arXiv 2104.09864): ``b^(-2i/d)``."""
    return [1.0 / b ** (2 * i / d) for i in range(d // 2)], 1.0


def _needed(trained: int, length: int | None) -> float:
    """The scale of the dynamic methods: 1 up to the trained length, then ``N/L``."""
    return max(1.0, length / trained) if length is not None else 1.0


def pi(d: int, b: float, trained: int, length: int | None = None, *, scale: float) -> Table:
    """Chen 2023 (arXiv 2306.15595): position ``m`` is read as ``m / s``."""
    return [1.0 / (scale * b ** (2 * i / d)) for i in range(d // 2)], 1.0


def diffusion_ntk(
    d: int, b: float, trained: int, length: int | None = None, *, scale: float,
    both_sides: bool = True,
) -> Table:  # fmt: skip
    """He 2025 (arXiv 2510.10481): the factor lambda' on the base, with T_cap = 2 T_train, T_Ecap = 2 T_target."""
    cap = (2 if both_sides else 1) * trained
    critical = 2 * max(1, math.ceil(d / 2 * math.log(cap / (2 * math.pi), b)))
    factor = (scale * cap / (2 * math.pi)) ** (d / critical) / b
    return [(b * max(1.0, factor)) ** (-2 * i / d) for i in range(d // 2)], 1.0


def dynamic_pi(d: int, b: float, trained: int, length: int | None = None) -> Table:
    return pi(d, b, trained, length, scale=_needed(trained, length))


def ntk(d: int, b: float, trained: int, length: int | None = None, *, scale: float) -> Table:
    """bloc97 2023: a new base, such that the slowest pair is slowed by ``s``."""
    return default(d, b * scale ** (d / (d - 2)), trained)


def dynamic_ntk(
    d: int, b: float, trained: int, length: int | None = None, *, scale: float = 1.0
) -> Table:
    """emozilla 2023; transformers calls ``a`` the factor."""
    if length is None or length <= trained:
        return default(d, b, trained)
    return default(d, b * (scale * length / trained - (scale - 1)) ** (d / (d - 2)), trained)


def abf(d: int, b: float, trained: int, length: int | None = None, *, rope_theta: float) -> Table:
    """Xiong 2023 (arXiv 2309.16039): another base."""
    return default(d, rope_theta, trained)


def nope(d: int, b: float, trained: int, length: int | None = None) -> Table:
    """Haviv 2022, Kazemnejad 2023: every angle is zero, so cos = 1 and sin = 0."""
    return [0.0] * (d // 2), 1.0


def _turns_to_pair(turns: float, d: int, b: float, trained: int) -> float:
    """The pair that makes ``turns`` full turns in ``trained`` tokens: ``L b^(-2i/d) = 2 pi turns``."""
    return d * math.log(trained / (2 * math.pi * turns)) / (2 * math.log(b))


def _falling(
    i: int, fast: float, slow: float, d: int, b: float, trained: int, truncate: bool = True
) -> float:
    """1 on the pairs faster than ``fast`` turns, 0 on those slower than ``slow``, linear between."""
    start = _turns_to_pair(fast, d, b, trained)
    end = _turns_to_pair(slow, d, b, trained)
    if truncate:
        start, end = math.floor(start), math.ceil(end)
    start, end = max(start, 0), min(end, d - 1)
    if start == end:
        return 1.0 if i <= start else 0.0
    return 1.0 - min(1.0, max(0.0, (i - start) / (end - start)))


def partial_ntk(
    d: int, b: float, trained: int, length: int | None = None, *, scale: float,
    ntk_factor: float = 1.0, extrapolation_factor: float = 1.0, beta_0: float = 1.25,
    beta_1: float = 0.75, gamma_0: float = 16.0, gamma_1: float = 2.0,
) -> Table:  # fmt: skip
    """LlamaPartNTKScaledRotaryEmbedding of jquesnelle/yarn."""
    kept, _ = default(d, b, trained)
    linear, _ = pi(d, b, trained, scale=scale)
    based, _ = ntk(d, b, trained, scale=scale)
    table = []
    for i in range(d // 2):
        weight = ntk_factor * _falling(i, beta_0, beta_1, d, b, trained)
        value = linear[i] * (1 - weight) + based[i] * weight
        weight = extrapolation_factor * _falling(i, gamma_0, gamma_1, d, b, trained)
        table.append(value * (1 - weight) + kept[i] * weight)
    return table, 1.0


def dynamic_partial_ntk(
    d: int, b: float, trained: int, length: int | None = None, **knobs: Any
) -> Table:
    """LlamaDynamicPartNTKScaledRotaryEmbedding of jquesnelle/yarn."""
    return partial_ntk(d, b, trained, scale=_needed(trained, length), **knobs)


def ntk_by_parts(
    d: int, b: float, trained: int, length: int | None = None, *, scale: float,
    beta_fast: float = 32.0, beta_slow: float = 1.0, truncate: bool = True, ramp: str = "index",
) -> Table:  # fmt: skip
    """Peng 2023 (arXiv 2309.00071) 3.2: the text's ramp is in turns, the code's in the pair index."""
    table = []
    for i in range(d // 2):
        frequency = 1.0 / b ** (2 * i / d)
        if ramp == "rotations":
            turns = trained / (2 * math.pi / frequency)
            gamma = min(1.0, max(0.0, (turns - beta_slow) / (beta_fast - beta_slow)))
        else:
            gamma = _falling(i, beta_fast, beta_slow, d, b, trained, truncate)
        table.append((1 - gamma) * frequency / scale + gamma * frequency)
    return table, 1.0


def yarn(
    d: int, b: float, trained: int, length: int | None = None, *, scale: float,
    attention_factor: float | None = None, mscale: float | None = None,
    mscale_all_dim: float | None = None, **ramp: Any,
) -> Table:  # fmt: skip
    """Peng 2023 (arXiv 2309.00071) 3.4; ``mscale`` and ``mscale_all_dim`` as DeepSeek has them."""
    table, _ = ntk_by_parts(d, b, trained, scale=scale, **ramp)
    if attention_factor is not None:
        return table, attention_factor
    over, under = 1.0, 0.0
    if mscale and mscale_all_dim:
        over, under = mscale, mscale_all_dim
    log = math.log(scale) if scale > 1 else 0.0
    return table, (1 + 0.1 * over * log) / (1 + 0.1 * under * log)


def dynamic_yarn(d: int, b: float, trained: int, length: int | None = None, **ramp: Any) -> Table:
    """LlamaDynamicYaRNScaledRotaryEmbedding of jquesnelle/yarn."""
    return yarn(d, b, trained, scale=_needed(trained, length), **ramp)


def ntk_mixed(
    d: int, b: float, trained: int, length: int | None = None, *, scale: float, q: float = 0.75
) -> Table:
    """Su 2023 (kexue.fm 9706), ntk_patch.py of bojone/rerope: pair ``j = 1 .. d/2`` slowed by ``exp(a j^q)``."""
    a = math.log(scale) / (d / 2) ** q
    return [b ** (-2 * (j - 1) / d) / math.exp(a * j**q) for j in range(1, d // 2 + 1)], 1.0


def mrrope(
    d: int, b: float, trained: int, length: int | None = None, *, scale: float,
    ramp: str = "uniform", beta_fast: float = 32.0, beta_slow: float = 1.0, **others: Any,
) -> Table:  # fmt: skip
    """Tian 2026 (arXiv 2601.22181), eq. 13-16: the digit j of a position has the radix ``b^(2/d) lambda_j``."""
    low = math.floor(_turns_to_pair(beta_fast, d, b, trained))
    high = math.ceil(_turns_to_pair(beta_slow, d, b, trained))
    low, high = max(low, 0), min(high, d - 1)
    n, table, weight = high - low, [], 1.0
    for j in range(d // 2):
        table.append(1.0 / (b ** (2 * j / d) * weight))
        if low <= j < high:
            weight *= scale ** (1 / n if ramp == "uniform" else 2 * (1 + j - low) / ((1 + n) * n))
        elif n == 0 and j == low:
            weight = scale
    return table, yarn(d, b, trained, scale=scale, **others)[1]


def llama3(
    d: int, b: float, trained: int, length: int | None = None, *, scale: float,
    low_freq_factor: float = 1.0, high_freq_factor: float = 4.0,
) -> Table:  # fmt: skip
    """``apply_scaling`` of meta-llama/llama-models."""
    table = []
    for i in range(d // 2):
        frequency = 1.0 / b ** (2 * i / d)
        wavelength = 2 * math.pi / frequency
        if wavelength < trained / high_freq_factor:
            table.append(frequency)
        elif wavelength > trained / low_freq_factor:
            table.append(frequency / scale)
        else:
            smooth = (trained / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
            table.append((1 - smooth) * frequency / scale + smooth * frequency)
    return table, 1.0


def longrope(
    d: int, b: float, trained: int, length: int | None = None, *, short_factor: Sequence[float],
    long_factor: Sequence[float], scale: float = 1.0, attention_factor: float | None = None,
    short_mscale: float | None = None, long_mscale: float | None = None,
) -> Table:  # fmt: skip
    """Ding 2024 (arXiv 2402.13753); the two mscales are Phi-3.5-MoE's."""
    past = length is not None and length > trained
    divisors = long_factor if past else short_factor
    table = [1.0 / (divisors[i] * b ** (2 * i / d)) for i in range(d // 2)]
    own = long_mscale if past else short_mscale
    if own is not None:
        return table, own
    if attention_factor is not None:
        return table, attention_factor
    return table, math.sqrt(1 + math.log(scale) / math.log(trained)) if scale > 1 else 1.0


def clip_of(
    table: list[float], trained: int, *, soft: int | None = None, pairs: int | None = None,
    share: float | None = None, turns: float | None = None,
) -> list[float]:  # fmt: skip
    """CoPE (arXiv 2602.05258), its HardClip, p-RoPE (arXiv 2410.06205), and a floor on the turns over L."""
    result, count = list(table), len(table)
    if (soft, pairs, share, turns) == (None,) * 4:
        soft = max(3, math.floor(count * 0.3125 + 0.5))
    for i, frequency in enumerate(table):
        j = i - (count - min(soft or 0, count))  # place among the softly clipped
        if soft is not None and j > 0:
            result[i] = frequency * (1 + math.cos(math.pi * j / (min(soft, count) - 1))) / 2
        hard = pairs is not None and i >= count - pairs
        outside = share is not None and i >= math.floor(share * count)
        slow = turns is not None and frequency * trained < 2 * math.pi * turns
        if hard or outside or slow:
            result[i] = 0.0
    return result


def resonance_of(table: list[float], trained: int) -> list[float]:
    """Wang 2024 (arXiv 2403.00071): wavelengths become the nearest integers."""
    return [2 * math.pi / max(1, round(2 * math.pi / f)) if f else 0.0 for f in table]


def power_basis_of(table: list[float], trained: int, *, power: float) -> list[float]:
    """Pal 2023 (arXiv 2308.10882)."""
    return [f * (1 - i / len(table)) ** power for i, f in enumerate(table)]


def truncated_basis_of(table: list[float], trained: int, *, wavelength: float) -> list[float]:
    """Pal 2023 (arXiv 2308.10882), with the numbers of abacusai/Long-Context."""
    cutoff = 2 * math.pi / wavelength
    return [f if f >= cutoff else cutoff / 16 if f >= cutoff / 8 else 0.0 for f in table]


FILTERS: dict[str, Callable[..., list[float]]] = {
    reference.__name__.removesuffix("_of"): reference
    for reference in (clip_of, resonance_of, power_basis_of, truncated_basis_of)
}
"""By the filter's canonical name: a table and L, in tokens, to a table."""


def _of_the_default_table(name: str) -> Callable[..., Table]:
    def table(d: int, b: float, trained: int, length: int | None = None, **knobs: Any) -> Table:
        return FILTERS[name](default(d, b, trained)[0], trained, **knobs), 1.0

    return table


REFERENCES: dict[str, Callable[..., Table]] = {
    reference.__name__: reference
    for reference in (
        *(pi, ntk, diffusion_ntk, mrrope, dynamic_pi, dynamic_ntk, partial_ntk, ntk_by_parts, yarn),
        *(dynamic_partial_ntk, dynamic_yarn, ntk_mixed, llama3, longrope, abf, nope),
    )
} | {name: _of_the_default_table(name) for name in FILTERS}
"""By the method's canonical name."""


KNOBS: dict[str, dict[str, list[Any]]] = {
    "partial_ntk": {
        "ntk_factor": [1.0, 0.5, 0.0],
        "extrapolation_factor": [1.0, 0.7, 0.0],
        "beta_0": [1.25, 2.0],
        "gamma_0": [16.0, 8.0],
    },
    "ntk_by_parts": {
        "beta_fast": [32.0, 16.0, 64.0],
        "beta_slow": [1.0, 2.0],
        "truncate": [True, False],
        "ramp": ["index", "rotations"],
    },
    "ntk_mixed": {"q": [0.75, 0.625, 1.0]},
    "diffusion_ntk": {"both_sides": [True, False]},
    "llama3": {"low_freq_factor": [1.0, 0.5], "high_freq_factor": [4.0, 8.0]},
}
KNOBS["dynamic_partial_ntk"] = KNOBS["partial_ntk"]
KNOBS["dynamic_yarn"] = KNOBS["ntk_by_parts"]
KNOBS["mrrope"] = KNOBS["ntk_by_parts"] | {
    "truncate": [True],
    "ramp": ["uniform", "progressive"],
    "mscale_all_dim": [None, 0.707],
}
KNOBS["yarn"] = KNOBS["ntk_by_parts"] | {
    "attention_factor": [None, None, 1.3],
    "mscale": [None, 0.707, 1.0],
    "mscale_all_dim": [None, 0.707],
}
"""Values to try of the knobs besides the scale, by the method's name."""

REQUIRED: dict[str, Callable[[int], dict[str, Any]]] = {
    "clip": lambda pairs: {"pairs": max(1, pairs // 2)},
    "dpe": lambda pairs: {"factors": [1, 2, 4, 8]},
    "lampe": lambda pairs: {"growth": 0.01, "shift": -0.5, "capacity": 50.0},
    "power_basis": lambda pairs: {"power": 0.5},
    "truncated_basis": lambda pairs: {"wavelength": 40.0},
    "abf": lambda pairs: {"rope_theta": 500_000.0},
    "longrope": lambda pairs: {
        "short_factor": [1.0 + 0.01 * i for i in range(pairs)],
        "long_factor": [1.0 + 0.3 * i for i in range(pairs)],
    },
}
"""Values of the knobs without a default, besides the scale, for a number of pairs."""

DYNAMIC = {f"dynamic_{name}": name for name in ("pi", "ntk", "partial_ntk", "yarn")}
"""Each length-dependent method and the static one that it equals at ``s = max(1, N/L)``."""
