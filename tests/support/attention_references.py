"""The attention-path methods written once more, naively, from the papers: float64, pair by pair.

Nothing here is shared with the package. A relative position is a function of one query at m and one
key at n <= m, `None` where the pair is masked; a bias is the same with a number for every head.
A new method adds its function to `BANDS`, with the knobs that the tests give it, or to `BIAS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

Relative = Callable[..., "float | None"]


def rerope(m: int, n: int, window: int) -> float:
    return min(m - n, window)


def leaky_rerope(m: int, n: int, window: int, k: float) -> float:
    return m - n if m - n < window else window + (m - n - window) / k


def self_extend(m: int, n: int, window: int, group: int) -> float:
    if m - n < window:
        return m - n
    grouped_query, grouped_key = math.floor(m / group), math.floor(n / group)
    return grouped_query + window - math.floor(window / group) - grouped_key


def dual_chunk(m: int, n: int, chunk: int, window: int) -> float:
    """Equations 2 to 6 of the paper: intra, successive and inter chunk attention."""
    intra = list(range(chunk))
    successive = [min(chunk + i, chunk + window - 1) for i in range(chunk)]
    key = intra[n % chunk]
    if m // chunk == n // chunk:
        return intra[m % chunk] - key
    if m // chunk - n // chunk == 1:
        return successive[m % chunk] - key
    return chunk + window - 1 - key


def string(m: int, n: int, shift: int, window: int) -> float:
    return m - n if m - n < shift else m - n - shift + window


def lm_infinite(m: int, n: int, window: int, sinks: int) -> float | None:
    return min(m - n, window) if m - n < window or n < sinks else None


def attention_sinks(m: int, n: int, window: int, sinks: int) -> float | None:
    """Return the cache position of n in StreamingLLM after the token at m."""
    text = list(range(m + 1))
    cache = text if len(text) <= sinks + window else text[:sinks] + text[-window:]
    return cache.index(m) - cache.index(n) if n in cache else None


def sliding_window(m: int, n: int, window: int) -> float | None:
    return m - n if m - n < window else None


@dataclass(frozen=True)
class Bands:
    """A rotary band method in the tests.

    Attributes:
        relative: The relative position of one pair, with every knob given.
        knobs: Values of each knob for property tests.
        defaults: From the original context length to the knobs in force by default.
        short: Knobs that matter in models of 16 trained tokens.
    """

    relative: Relative
    knobs: Mapping[str, st.SearchStrategy[Any]]
    defaults: Callable[[int], dict[str, Any]]
    short: Mapping[str, Any]


_WINDOW, _SINKS = st.integers(1, 40), st.integers(1, 6)
BANDS: dict[str, Bands] = {
    "rerope": Bands(rerope, {"window": _WINDOW}, lambda n: {"window": n // 2}, {"window": 8}),
    "leaky_rerope": Bands(
        leaky_rerope, {"window": _WINDOW, "k": st.floats(1.0, 32.0)},
        lambda n: {"window": n // 2, "k": 16.0}, {"window": 8, "k": 4.0}),
    "self_extend": Bands(
        self_extend, {"window": _WINDOW, "group": st.integers(1, 9)},
        lambda n: {"window": n // 2, "group": 8}, {"window": 8, "group": 3}),
    "dual_chunk": Bands(
        dual_chunk, {"chunk": st.integers(1, 30), "window": st.integers(1, 20)},
        lambda n: {"chunk": 3 * n // 4, "window": n - 3 * n // 4}, {"chunk": 10, "window": 6}),
    "string": Bands(
        string, {"shift": _WINDOW, "window": _WINDOW},
        lambda n: {"shift": round(n / 3), "window": min(128, round(n / 3) - 1)}, {"shift": 11, "window": 4}),
    "lm_infinite": Bands(
        lm_infinite, {"window": _WINDOW, "sinks": _SINKS},
        lambda n: {"window": n, "sinks": 10}, {"window": 7, "sinks": 3}),
    "attention_sinks": Bands(
        attention_sinks, {"window": _WINDOW, "sinks": _SINKS},
        lambda n: {"window": n - 4, "sinks": 4}, {"window": 7, "sinks": 3}),
    "sliding_window": Bands(sliding_window, {"window": _WINDOW}, lambda n: {"window": n}, {"window": 8}),
}  # fmt: skip
"""By the method's name."""

RELATIVE = {name: bands.relative for name, bands in BANDS.items()}


def position_map(name: str, length: int, **knobs: Any) -> Tensor:
    """`P[m, n]`, shape (length, length), float64, NaN where the pair is masked."""
    rows = torch.full((length, length), math.nan, dtype=torch.float64)
    for m in range(length):
        for n in range(m + 1):
            relative = RELATIVE[name](m, n, **knobs)
            if relative is not None:
                rows[m, n] = relative
    return rows


# ------------------------------------------------------------------------------------------
# Biases: a list with a number for every head


def alibi(r: int, m: int, heads: int, scale: float = 1.0, distance: str = "linear") -> list[float]:
    def slopes(count: int) -> list[float]:
        if math.log2(count).is_integer():
            first = 2 ** (-8 / count)
            return [first ** (h + 1) for h in range(count)]
        power = 2 ** int(math.log2(count))
        return slopes(power) + slopes(2 * power)[0::2][: count - power]

    counted = math.log(1 + r) if distance == "log" else r
    return [-slope * counted / scale for slope in slopes(heads)]


def kerple_log(r: int, m: int, heads: int, r1: Sequence[float], r2: Sequence[float]) -> list[float]:
    return [-a * math.log(1 + b * r) for a, b in zip(r1, r2, strict=True)]


def kerple_power(
    r: int, m: int, heads: int, r1: Sequence[float], r2: Sequence[float]
) -> list[float]:
    return [-a * r**b for a, b in zip(r1, r2, strict=True)]


def sandwich(r: int, m: int, heads: int, dim: int, first: int = 1) -> list[float]:
    """From the embeddings of two positions r apart themselves, sine and cosine."""
    pairs = {1: range(1, dim // 2 + 1), 0: range(dim // 2)}[first]

    def embedding(position: int) -> list[float]:
        angles = [position / 10_000 ** (2 * i / dim) for i in pairs]
        return [*map(math.sin, angles), *map(math.cos, angles)]

    inner = sum(a * b for a, b in zip(embedding(m), embedding(m - r), strict=True))
    return [(inner - dim / 2) / (8 * h / heads) for h in range(1, heads + 1)]


def t5(
    r: int, m: int, heads: int, table: Sequence[Sequence[float]], buckets: int = 32,
    max_distance: int = 128, scale: float = 1.0, mode: str = "distance",
) -> list[float]:  # fmt: skip
    if mode == "distance":
        r = math.floor(r / scale)
    else:
        max_distance = round(max_distance * scale)
    exact = buckets // 2
    bucket = r
    if r >= exact:
        share = math.log(r / exact) / math.log(max_distance / exact)
        bucket = exact + int(share * (buckets - exact))
    return list(table[min(bucket, buckets - 1)])


def fire(
    r: int, m: int, heads: int, c: float, threshold: float, weight_in: Sequence[Sequence[float]],
    bias_in: Sequence[float], weight_out: Sequence[Sequence[float]], bias_out: Sequence[float],
) -> list[float]:  # fmt: skip
    def psi(x: float) -> float:
        return math.log(c * x + 1)

    x = psi(r) / psi(max(m, threshold))
    hidden = [max(0.0, w[0] * x + b) for w, b in zip(weight_in, bias_in, strict=True)]
    return [
        sum(w * a for w, a in zip(row, hidden, strict=True)) + b
        for row, b in zip(weight_out, bias_out, strict=True)
    ]


BIAS: dict[str, Callable[..., list[float]]] = {
    f.__name__: f for f in (alibi, kerple_log, kerple_power, sandwich, t5, fire)
}
"""By the method's name; the knobs and the parameters as plain numbers."""

BIAS_KNOBS: dict[str, list[dict[str, Any]]] = {
    "alibi": [{}, {"scale": 4.0}, {"distance": "log"}, {"distance": "log", "scale": 2.0}],
    "sandwich": [{}, {"dim": 6}, {"dim": 6, "first": 0}],
    "t5": [
        {},
        {"buckets": 8, "max_distance": 20},
        {"buckets": 8, "max_distance": 20, "scale": 2.5},
        {"buckets": 8, "max_distance": 10, "scale": 2.5, "mode": "max_distance"},
    ],
    "fire": [{"threshold": 5.0}, {"hidden": 3, "c": 0.7}],
}
"""Knobs to try of a bias; the defaults alone of those that are not here."""

LEARNS = {"kerple_log": 0, "kerple_power": 0}
"""The distance that a trained bias can single out, where it is not 2: a falling one singles out the token itself."""


def lampe(
    text: int, shown: int, growth: float, shift: float, capacity: float, head: int, tail: int
) -> Tensor:
    """arXiv 2508.02308, from the prefill of scar-on/LaMPE: relative positions of the first tokens of a text.

    The authors count a pair exactly at a border twice; here it belongs to the farther region. `shown` are the tokens to
    return, at most the text's. `growth`, `shift` and `capacity` are of the paper's sigmoid; `head` tokens are read as
    they are, and the last ones read the first `tail` tokens so.
    """
    use_length = int(capacity / (1 + math.exp(-(growth * text + shift))))
    position = torch.arange(shown, dtype=torch.float64)
    relative = position[:, None] - position
    if text < 2 * head or use_length >= text - 1:
        return relative
    mapping = [use_length * p // (text - 1) for p in range(text)]
    re_size = tail
    while re_size + 1 < text and mapping[re_size] == mapping[re_size + 1]:
        re_size += 1
    bias_1 = head - (mapping[head] + 1)
    bias_2 = (text - 1 - re_size) - mapping[text - 1 - re_size] - bias_1
    for m in range(shown):
        for n in range(m + 1):
            if m - n >= text - re_size:
                relative[m, n] = m - bias_2 - n
            elif m - n >= head:
                relative[m, n] = mapping[m] + bias_1 - mapping[n]
    return relative


def jet_long(trained: int, text: int, shown: int, window: int) -> Tensor:
    """arXiv 2607.07740 by its description: relative positions of the first tokens of a text.

    Exact below the window; beyond it on the line from (window, window) to (text - 1, trained - 1).
    """
    relative = torch.zeros(shown, shown, dtype=torch.float64)
    for m in range(shown):
        for n in range(m + 1):
            relative[m, n] = gap = m - n
            if text > trained and gap >= window:
                share = (gap - window) / (text - 1 - window)
                relative[m, n] = window + share * (trained - 1 - window)
    return relative


def _log_n(m: int, trained: int) -> float:
    return max(1.0, math.log(m + 1) / math.log(trained))


def _llama4(m: int, trained: int, beta: float = 0.1) -> float:
    """Llama 4 counts tokens from 1."""
    return 1 + beta * math.log(1 + (m + 1) // trained)


def _ministral(m: int, trained: int, beta: float = 0.1) -> float:
    return 1 + beta * math.log(1 + m // trained)


def _power(m: int, trained: int, beta: float = 0.1) -> float:
    return float((1 + (m + 1) / trained) ** beta)


def _yarn(m: int, trained: int, scale: float | None = None) -> float:
    return max(1.0, 0.1 * math.log((m + 1) / trained if scale is None else scale) + 1)


TEMPERATURES: dict[str, Callable[..., float]] = {
    "log_n": _log_n,
    "llama4": _llama4,
    "ministral": _ministral,
    "power": _power,
    "yarn": _yarn,
    "ssmax": lambda m, trained: math.log(m + 1),  # times a trained number for each head
    "constant": lambda m, trained, factor: factor,
}
LAW_KNOBS: dict[str, dict[str, float]] = {
    "llama4": {"beta": 0.7},
    "ministral": {},
    "power": {"beta": 0.5},
    "yarn": {},
    "ssmax": {},
    "constant": {"factor": 1.4},
}
"""Knobs in the tests; `log_n` is a method of its own too."""


def bias_matrix(name: str, length: int, heads: int, **values: Any) -> Tensor:
    """Shape (heads, length, length), float64, `-inf` above the diagonal."""
    matrix = torch.full((heads, length, length), -math.inf, dtype=torch.float64)
    for m in range(length):
        for n in range(m + 1):
            bias = BIAS[name](m - n, m, heads, **values)
            matrix[:, m, n] = torch.tensor(bias, dtype=torch.float64)
    return matrix


# ------------------------------------------------------------------------------------------
# Scores of one head: q and k of shape (length, d), unrotated, float64


def rotation(angle: float) -> Tensor:
    cos, sin = math.cos(angle), math.sin(angle)
    return torch.tensor([[cos, -sin], [sin, cos]], dtype=torch.float64)


def pair(x: Tensor, i: int) -> Tensor:
    """Features i and i + d/2: the half-split layout."""
    return torch.stack((x[i], x[i + x.shape[0] // 2]))


def rope_score(q: Tensor, k: Tensor, relative: float, frequencies: Sequence[float]) -> float:
    """`q.R(-relative) k`: the relative form of RoPE."""
    return sum(
        float(pair(q, i) @ rotation(-relative * f) @ pair(k, i)) for i, f in enumerate(frequencies)
    )


def xpos_score(
    q: Tensor, k: Tensor, r: int, frequencies: Sequence[float], base: float = 512
) -> float:
    """RoPE in complex numbers, each pair with its decay (torchscale's gamma is 0.4)."""
    dim = q.shape[0]
    total = 0.0
    for i, f in enumerate(frequencies):
        x, y = complex(*pair(q, i).tolist()), complex(*pair(k, i).tolist())
        decay = ((2 * i + 0.4 * dim) / (1.4 * dim)) ** (r / base)
        total += (x * y.conjugate() * complex(math.cos(r * f), math.sin(r * f))).real * decay
    return total


def shaw_score(q: Tensor, k: Tensor, r: int, table: Tensor) -> float:
    return float(q @ (k + table[min(r, table.shape[0] - 1)]))


def transformer_xl_score(
    q: Tensor, k: Tensor, r: int, u: Tensor, v: Tensor, weight: Tensor
) -> float:
    """Terms (a) to (d) of the paper, one after the other."""
    half = q.shape[0] // 2
    angles = [r * 10_000 ** (-i / half) for i in range(half)]
    sinusoid = torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=torch.float64)
    embedded = weight @ sinusoid
    return float(q @ k + q @ embedded + u @ k + v @ embedded)


def as_numbers(parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: value.detach().double().tolist() for name, value in parameters.items()}
