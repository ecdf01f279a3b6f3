"""What a rotary table says about lengths, in closed form: nothing is run.

Two things go wrong past the trained length, and each method trades one for the other. Slow pairs, which made less than
one turn in training, reach angles that the model has never met. Slowed-down fast pairs, which tell neighbouring tokens
apart, make neighbours look closer than they ever did.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.evaluation import published
from hf_posenc.evaluation.published import PublishedTable, Row, Value
from hf_posenc.rope import RopeSpec

FAST_TURNS = 32
"""Pairs of at least so many turns in training are fast: YaRN's beta_fast (arXiv 2309.00071)."""

FIT_FACTOR, FIT_EXPONENT = 0.0424, 1.628
"""The fit `b >= 0.0424 L^1.628` of Men et al. 2024 (arXiv 2405.14591, figure 1), made for 128 rotary dimensions."""

_BLOCK = 1 << 14


@dataclass(frozen=True)
class RotaryLimits:
    """What a table and the length that it was trained at imply.

    Attributes:
        original: The trained length L, in tokens.
        theta: The base b.
        dim: Rotary dimension d.
        turns: Turns that each pair makes over L tokens, `L f_i / (2 pi)`; shape (d/2,).
        rotated: Pairs that rotate at all.
        full_turns: Pairs that made one whole turn in training.
        fast: Pairs that made `FAST_TURNS` of them.
        critical_dimension: Features of these whole-turn pairs, `2 ceil(d/2 log_b(L / (2 pi)))` for a plain table (Liu
            et al. 2023, arXiv 2310.05209); those past it have not seen all their angles.
        base_context: The length for which this base is the least, by the fit.
        similar_until: The first distance at which `sum_i cos(m f_i)` is negative, so that a similar token no longer
            gets more attention than a random one (arXiv 2405.14591, theorem 1); `None`: not up to the target.
    """

    original: int
    theta: float
    dim: int
    turns: tuple[float, ...]
    rotated: int
    full_turns: int
    fast: int
    critical_dimension: int
    base_context: int
    similar_until: int | None

    @property
    def slow(self) -> int:
        """Pairs that rotate, and made less than one turn in training."""
        return self.rotated - self.full_turns


def rotary_limits(spec: RopeSpec, target: int) -> RotaryLimits:
    """Reads a table.

    Args:
        spec: The table as it was trained.
        target: How far to look, in tokens.
    """
    table = spec.default_inv_freq()
    original = spec.original_max_position_embeddings
    turns = turns_of(table, original)
    full = int((turns >= 1).sum())
    return RotaryLimits(
        original=original,
        theta=spec.theta,
        dim=spec.dim,
        turns=tuple(turns.tolist()),
        rotated=int((table > 0).sum()),
        full_turns=full,
        fast=int((turns >= FAST_TURNS).sum()),
        critical_dimension=2 * full,
        base_context=math.floor((spec.theta / FIT_FACTOR) ** (1 / FIT_EXPONENT)),
        similar_until=similar_until(table, target),
    )


def turns_of(table: Tensor, length: int) -> Tensor:
    """Turns that each pair makes over so many tokens, shape (d/2,)."""
    return table * (length / (2 * math.pi))


def least_base(length: int) -> float:
    """The least base for a length, by the fit of arXiv 2405.14591."""
    return FIT_FACTOR * math.pow(length, FIT_EXPONENT)


def similar_until(table: Tensor, limit: int) -> int | None:
    """The first distance below `limit`, in tokens, at which `sum_i cos(m f_i) < 0`; `None`: there is none."""
    for start in range(0, limit, _BLOCK):
        distances = torch.arange(start, min(start + _BLOCK, limit), dtype=torch.float64)
        negative = (torch.outer(distances, table).cos().sum(1) < 0).nonzero()
        if len(negative):
            return start + int(negative[0])
    return None


def met_until(trained: Tensor, patched: Tensor, original: int) -> float:
    """The length in tokens up to which no slow pair of a changed table leaves the angles of training.

    The least of `L f_i / f'_i` over the pairs with `L f_i < 2 pi`; infinite where there is none.

    Args:
        trained: The frequencies f of training, shape (d/2,).
        patched: The changed ones f', of that shape.
        original: The trained length L, in tokens.
    """
    slow = (trained > 0) & (turns_of(trained, original) < 1) & (patched > 0)
    if not bool(slow.any()):
        return math.inf
    return original * float((trained[slow] / patched[slow]).min())


def slowed_by(trained: Tensor, patched: Tensor, original: int) -> float:
    """By how much the most slowed of the fast pairs turns slower than in training; at least 1.

    Args:
        trained: As for `met_until`.
        patched: As for `met_until`.
        original: As for `met_until`.
    """
    fast = (turns_of(trained, original) >= FAST_TURNS) & (patched > 0)
    if not bool(fast.any()):
        return 1.0
    return max(1.0, float((trained[fast] / patched[fast]).max()))


# What the keys and values of a text take, found by filling transformers' own cache on the meta device.


_TOKENS = 4


@dataclass(frozen=True)
class CacheCost:
    """The cache of one text, keys and values alone.

    Attributes:
        tokens: Length of the text.
        bytes: What it takes.
        bytes_per_token: What one more token takes, in the layers that keep every token.
        full_layers: Layers that keep every token.
        window_layers: Layers that keep a window.
        window: Tokens that these keep; 0 where there are none.
        dtype: The number format.
    """

    tokens: int
    bytes: int
    bytes_per_token: int
    full_layers: int
    window_layers: int
    window: int
    dtype: str


def cache_cost(model: nn.Module, tokens: int, dtype: torch.dtype) -> CacheCost | None:
    """The cache of one text of so many tokens.

    A model of the same config runs a few tokens on the meta device, where nothing is computed or stored, so that
    grouped heads, latent attention, shared and sliding-window layers are counted as transformers keeps them.

    Args:
        model: Any model of that config.
        tokens: Length of the text.
        dtype: The number format of keys and values.

    Returns:
        The cost; `None` where the model does not run on the meta device.
    """
    layers = _filled(model)
    if layers is None:
        return None
    growing = fixed = window = full = windowed = 0
    for layer in layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.ndim != 4:
            continue
        size = (keys[0].numel() + values[0].numel()) // _TOKENS * dtype.itemsize
        if getattr(layer, "is_sliding", False):
            kept = min(tokens, int(layer.sliding_window) - 1)  # the next token completes the window
            fixed, window, windowed = fixed + size * kept, max(window, kept), windowed + 1
        else:
            growing, full = growing + size, full + 1
    total = growing * tokens + fixed
    name = str(dtype).removeprefix("torch.")
    return CacheCost(tokens, total, growing, full, windowed, window, name) if total else None


def _filled(model: nn.Module) -> list[Any] | None:
    """The layers of a cache that holds a few tokens."""
    config: Any = copy.deepcopy(model.config)
    text = config.get_text_config(decoder=True)
    text.rope_parameters = _unscaled(getattr(text, "rope_parameters", None))
    make: Any = type(model)
    try:
        # bfloat16: mixtures of experts take nothing else on this device
        with torch.device("meta"), torch.no_grad():
            twin = make._from_config(config, dtype=torch.bfloat16).eval()
            ids = torch.zeros(1, _TOKENS, dtype=torch.int64)
            cache = twin(ids, use_cache=True).past_key_values
        return list(cache.layers)
    except Exception:  # a family may need values, which this device does not have
        return None


def _unscaled(parameters: Any) -> Any:
    """The same table without its scaling, which may read the positions: they have no values here."""
    if not isinstance(parameters, dict):
        return parameters
    if "rope_type" not in parameters:
        return {key: _unscaled(value) for key, value in parameters.items()}
    kept = {
        key: parameters[key] for key in ("rope_theta", "partial_rotary_factor") if key in parameters
    }
    return {"rope_type": "default", **kept}


# How far published tables saw a method go without any training: read from the tables, not typed in here.


TOLERANCE = 1.25
"""A method holds while its perplexity is at most so many times the unpatched model's at the trained length.

Our choice: the tables fall in two, a few per cent above and many times as much, and this is between the two.
"""

UNTRAINED: dict[str, tuple[tuple[str, str, str], ...]] = {
    "pi": (
        ("pose-t6-govreport", "LLaMA-7B", "linear, no fine-tuning (16k)"),
        ("pose-t6-proof-pile", "LLaMA-7B", "linear, no fine-tuning (16k)"),
        ("ntk-exllama-118", "tulu-30B-GPTQ", "linear factor 4"),
    ),
    "ntk": (
        ("pose-t6-govreport", "LLaMA-7B", "NTK, no fine-tuning (16k)"),
        ("pose-t6-proof-pile", "LLaMA-7B", "NTK, no fine-tuning (16k)"),
        ("rerope-readme", "Llama-2-13b", "NTK-RoPE (not dynamic)"),
        ("ntk-exllama-118", "tulu-30B-GPTQ", "NTK alpha=4"),
    ),
    "yarn": (
        ("pose-t6-govreport", "LLaMA-7B", "YaRN, no fine-tuning (16k)"),
        ("pose-t6-proof-pile", "LLaMA-7B", "YaRN, no fine-tuning (16k)"),
    ),
    "dynamic_pi": (("dca-t1-pg19", "Llama-2-7b", "linear (PI), dynamic factor"),),
    "dynamic_ntk": (
        ("dca-t1-pg19", "Llama-2-7b", "NTK, dynamic factor"),
        ("ntk-chinese-llama-705", "Chinese-LLaMA-Plus-7B", "adaptive NTK"),
    ),
    "rerope": (
        ("rerope-readme", "Llama-2-13b", "ReRoPE w=1024"),
        ("dca-t1-pg19", "Llama-2-7b", "ReRoPE"),
    ),
    "dual_chunk": (
        ("dca-t1-pg19", "Llama-2-7b", "DCA (ChunkLlama)"),
        ("dca-readme-llama3", "Llama-3-8b", "DCA"),
        ("dca-readme-llama3", "Llama-3-70b", "DCA"),
    ),
}
"""For each method the table, model and row that show it on a model that was not trained for it."""


@dataclass(frozen=True)
class Seen:
    """What one published row shows of a method.

    Attributes:
        table: The table's id.
        model: The model, in the table's words.
        held: The largest multiple of the trained length at which it held; 0: not even there.
        broke: The first multiple at which it did not; `None`: nowhere in the table.
    """

    table: str
    model: str
    held: float
    broke: float | None


def seen(method: str) -> tuple[Seen, ...]:
    """What the published tables show of a method without training; empty where they show nothing."""
    return tuple(_seen(*place) for place in UNTRAINED.get(method, ()))


def verdict(shown: Sequence[Seen], factor: float) -> int:
    """1 where a table saw it hold at this multiple and none saw it break by then, -1 where one did, else 0."""
    if any(one.broke is not None and one.broke <= factor for one in shown):
        return -1
    return int(any(one.held >= factor for one in shown))


def sentence(shown: Sequence[Seen]) -> str:
    """What they show, in a few words; empty where there are none."""
    parts = []
    best = max(shown, key=lambda one: one.held, default=None)
    if best is not None and best.held > 0:
        parts.append(f"held at x{best.held:g} ({best.table}, {best.model})")
    broken = [(one.broke, one) for one in shown if one.broke is not None]
    if broken:
        factor, one = min(broken, key=lambda pair: pair[0])
        parts.append(f"not at x{factor:g} ({one.table}, {one.model})")
    return f"published, untrained: {', '.join(parts)}" if parts else ""


def _seen(id: str, model: str, method: str) -> Seen:
    table = published.get(id)
    baseline = _row(table, model, "none")
    row = _row(table, model, method)
    points = list(_points(table, baseline))
    best = min(value for _, value in points)
    trained = max(length for length, value in points if value == best)
    held, broke = 0.0, None
    for length, value in _points(table, row):
        if length < trained:
            continue
        if value > TOLERANCE * best:
            broke = length / trained
            break
        held = length / trained
    return Seen(id, model, held, broke)


def _row(table: PublishedTable, model: str, method: str) -> Row:
    return next(row for row in table.rows if (row.model, row.method) == (model, method))


def _points(table: PublishedTable, row: Row) -> Iterator[tuple[int, float]]:
    """The lengths with a perplexity; a bound counts as infinite, and `OOM` says nothing of the method."""
    for column, value in zip(table.columns, row.values, strict=True):
        known = _perplexity(table, value)
        if known is not None:
            yield int(column), known


def _perplexity(table: PublishedTable, value: Value) -> float | None:
    if isinstance(value, str):
        return math.inf if value.startswith(">") else None
    return math.exp(value) if table.metric == "loss" and value is not None else value
