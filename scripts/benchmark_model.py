"""What `benchmark.py model` measures: whole models, patched against unpatched, and `patch_model` itself.

A random Llama of 4 layers and 512 features (head dimension 64), float32, batch 1, on one thread; the unpatched model
computes attention with sdpa. One model is patched and unpatched between the runs, so that all have the same weights in
the same place. A run is a prefill into an empty cache, timed, and ten steps of generation after it, timed too.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_posenc import patch_model, patched, unpatch_model
from scripts.benchmark_attention import peak_mebibytes

Results = dict[str, dict[str, dict[str, float]]]
PLAIN, AGAIN = "unpatched", "unpatched again"
ORIGINAL, WINDOW, STEPS = 2048, 512, 10
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "rerope": ("rerope", {"window": WINDOW}),
    "leaky_rerope": ("leaky_rerope", {"window": WINDOW}),
    "self_extend": ("self_extend", {"window": WINDOW}),
    "dual_chunk": ("dual_chunk", {}),
    "alibi": ("alibi", {}),
    "kerple_log": ("kerple_log", {}),
    "log_n": ("log_n", {}),
    "dynamic_ntk, row": ("dynamic_ntk", {"update": "row"}),
}
FEW = ("rerope", "alibi", "dynamic_ntk, row")


@dataclass(frozen=True)
class Situation:
    """One length of text in one model.

    Attributes:
        length: Tokens of the prefill.
        key_heads: Key heads, beside 8 query heads.
        rounds: Interleaved rounds.
        cases: Names in `CASES`.
        padded: Whether a hundred tokens of it are padding on the left, for which the unpatched model needs a mask; the
            positions are then given, as generate() gives them.
    """

    length: int
    key_heads: int = 8
    rounds: int = 3
    cases: tuple[str, ...] = tuple(CASES)
    padded: bool = False

    @property
    def title(self) -> str:
        """For tables."""
        padding = ", left-padded" if self.padded else ""
        return f"{self.length}{padding}, heads 8/{self.key_heads}"


SITUATIONS = (
    Situation(2048, rounds=5),
    Situation(4096),
    Situation(8192),
    Situation(8192, padded=True, cases=FEW, rounds=1),
    Situation(4096, key_heads=2),
)


def whole_models(scale: float = 1.0) -> Iterator[Results]:
    """Prefill and steps of generation in every situation, one after the other.

    Args:
        scale: Factor on the number of rounds.
    """
    for situation in SITUATIONS:
        yield _measured(situation, max(1, round(situation.rounds * scale)))


def patching(rounds: int) -> Results:
    """Seconds of `patch_model`, trial and verification included, on models of 4 and 32 tiny layers."""
    found: Results = {}
    for layers in (4, 32):
        model = _llama(layers, 1, hidden=64)
        seconds: dict[str, list[float]] = {name: [] for name in ("yarn", *CASES)}
        for round_ in range(rounds + 1):
            for name, values in seconds.items():
                method, options = CASES.get(name, (name, {"scale": 4}))
                start = time.perf_counter()
                patch_model(model, method, **options)
                if round_:  # the first is not counted
                    values.append(time.perf_counter() - start)
                unpatch_model(model)
        found[f"patch_model, {layers} layers"] = {
            name: {"seconds": statistics.median(values)} for name, values in seconds.items()
        }
    return found


def _llama(layers: int, key_heads: int, hidden: int = 512) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=key_heads,
        vocab_size=1024,
        max_position_embeddings=ORIGINAL,
    )
    torch.manual_seed(0)
    model: LlamaForCausalLM = LlamaForCausalLM(config).eval()
    model.set_attn_implementation("sdpa")
    return model


def _measured(situation: Situation, rounds: int) -> Results:
    model = _llama(4, situation.key_heads)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 1024, (1, situation.length), generator=generator)
    mask = torch.ones_like(ids)
    if situation.padded:
        mask[:, :100] = 0
    names = [PLAIN, AGAIN, *situation.cases]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    _run(model, ids[:, :1024], mask[:, :1024])  # not counted
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        order = list(names)
        shuffle(order)
        for name in order:
            with _applied(model, name):
                found[name].append(_run(model, ids, mask))
    return {
        f"{kind} {situation.title}": {
            name: _summary(runs, found[PLAIN], key) for name, runs in found.items()
        }
        for kind, key in (("prefill", "prefill"), (f"one of {STEPS} steps after", "step"))
    }


def _applied(model: LlamaForCausalLM, name: str) -> AbstractContextManager[object]:
    if name not in CASES:
        return nullcontext()
    method, options = CASES[name]
    return patched(model, method, **options)


def _run(model: LlamaForCausalLM, ids: Tensor, mask: Tensor) -> dict[str, float]:
    """CPU seconds of a prefill and of one step after it, and how far the prefill raises resident memory, in MiB."""
    seconds: dict[str, float] = {}
    cache = DynamicCache(config=model.config)

    def timed(key: str, call: Callable[[], object]) -> None:
        start = time.process_time()
        call()
        seconds[key] = time.process_time() - start

    def prefill() -> None:
        timed("prefill", lambda: _forward(model, ids, mask, cache))

    def steps() -> None:
        for count in range(1, STEPS + 1):
            seen = torch.cat((mask, mask.new_ones(1, count)), 1)
            _forward(model, ids[:, :1], seen, cache)

    peak = peak_mebibytes(prefill)
    timed("step", steps)
    seconds["step"] /= STEPS
    return seconds if peak is None else {**seconds, "peak": peak}


def _forward(model: Any, ids: Tensor, mask: Tensor, cache: DynamicCache) -> None:
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    with torch.no_grad():
        model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            logits_to_keep=1,
        )


def _summary(
    runs: list[dict[str, float]], plain: list[dict[str, float]], key: str
) -> dict[str, float]:
    """Medians, and the median of the ratios to the unpatched model within a round."""
    values = {
        "seconds": statistics.median(run[key] for run in runs),
        "ratio": _ratio(runs, plain, key),
    }
    if key == "prefill" and "peak" in runs[0]:
        values["peak_mib"] = statistics.median(run["peak"] for run in runs)
        values["peak_ratio"] = _ratio(runs, plain, "peak")
    return values


def _ratio(runs: list[dict[str, float]], plain: list[dict[str, float]], key: str) -> float:
    return statistics.median(run[key] / base[key] for run, base in zip(runs, plain, strict=True))
