"""Cases of `benchmark.py model`: whole models, patched and unpatched, and `patch_model` itself.

A random Llama of 4 layers and 512 features (head dimension 64), float32, batch 1, on one thread; the unpatched model
computes attention with sdpa. One model is patched and unpatched between the runs, so that all have the same weights in
the same place. A run times a prefill into an empty cache and then ten steps of generation.
"""

from __future__ import annotations

import ctypes
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
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
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h


@dataclass(frozen=True)
class Situation:
    """One length of text in one model.

    Attributes:
        length: Tokens of the prefill.
        key_heads: Key heads, beside 8 query heads.
    """

    length: int
    key_heads: int = 8


SITUATIONS = (Situation(2048), Situation(4096), Situation(8192), Situation(4096, key_heads=2))
MEMORY_LENGTH, PADDING = 8192, 100


def whole_models(rounds: int) -> Iterator[Results]:
    """Measure prefill and generation steps in every situation, one after the other.

    Args:
        rounds: Interleaved rounds.
    """
    for situation in SITUATIONS:
        yield _measured(situation, rounds)


def memory() -> Iterator[Results]:
    """Measure how far a prefill raises resident memory, cache included, with and without padding.

    With padding the unpatched model needs a mask. Positions are passed, as generate() does. Call it last: from then on
    large freed blocks are returned to the system, because blocks that stay would hide the next peak.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(_MMAP_THRESHOLD, 1 << 20)
    model = _llama(4, 8)
    ids = _tokens(MEMORY_LENGTH)
    for padding in (0, PADDING):
        mask = torch.ones_like(ids)
        mask[:, :padding] = 0
        found: dict[str, dict[str, float]] = {}
        for name in (PLAIN, AGAIN, *FEW):
            with _applied(model, name):
                _run(model, ids[:, :1024], mask[:, :1024])  # Created once, on the first call.
                peak = peak_mebibytes(partial(_run, model, ids, mask, steps=0))
            if peak is None:
                return
            first = next(iter(found.values()), {"peak_mib": peak})
            found[name] = {"peak_mib": peak, "peak_ratio": peak / first["peak_mib"]}
        padded = f" with {padding} tokens of padding" if padding else ""
        yield {f"memory of prefill {MEMORY_LENGTH}{padded}": found}


def patching(rounds: int) -> Results:
    """Seconds of `patch_model`, trial and verification included, and their ratio to a forward over seven tokens."""
    found: Results = {}
    for layers, hidden in ((4, 64), (32, 64), (24, 1024)):
        model, ids = _llama(layers, 1, hidden=hidden), torch.arange(7)[None]
        seconds: dict[str, list[float]] = {name: [] for name in ("forward", "yarn", *CASES)}
        for round_ in range(rounds + 1):
            for name, values in seconds.items():
                method, options = CASES.get(name, (name, {"scale": 4}))
                with torch.no_grad():
                    model.lm_head.weight.add_(0)  # as a model that was never tried
                    start = time.perf_counter()
                    if name == "forward":
                        model(ids)
                    else:
                        patch_model(model, method, **options)
                if round_:  # the first is not counted
                    values.append(time.perf_counter() - start)
                if name != "forward":
                    unpatch_model(model)
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        size = "" if hidden == 64 else f" of {hidden} features"
        found[f"patch_model, {layers} layers{size}"] = {
            name: {"seconds": value, "ratio": value / medians["forward"]}
            for name, value in medians.items()
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


def _tokens(length: int) -> Tensor:
    return torch.randint(3, 1024, (1, length), generator=torch.Generator().manual_seed(0))


def _measured(situation: Situation, rounds: int) -> Results:
    model = _llama(4, situation.key_heads)
    ids = _tokens(situation.length)
    mask = torch.ones_like(ids)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in (PLAIN, AGAIN, *CASES)}
    _run(model, ids[:, :1024], mask[:, :1024])  # not counted
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        order = list(found)
        shuffle(order)
        for name in order:
            with _applied(model, name):
                found[name].append(_run(model, ids, mask))
    title = f"{situation.length}, heads 8/{situation.key_heads}"
    return {
        f"{kind} {title}": {name: _summary(runs, found[PLAIN], key) for name, runs in found.items()}
        for kind, key in (("prefill", "prefill"), (f"one of {STEPS} steps after", "step"))
    }


def _applied(model: LlamaForCausalLM, name: str) -> AbstractContextManager[object]:
    if name not in CASES:
        return nullcontext()
    method, options = CASES[name]
    return patched(model, method, **options)


def _run(
    model: LlamaForCausalLM, ids: Tensor, mask: Tensor, steps: int = STEPS
) -> dict[str, float]:
    """CPU seconds of a prefill, and of one step after it."""
    cache = DynamicCache(config=model.config)
    start = time.process_time()
    _forward(model, ids, mask, cache)
    between = time.process_time()
    for _ in range(steps):
        mask = torch.cat((mask, mask.new_ones(1, 1)), 1)
        _forward(model, ids[:, :1], mask, cache)
    step = (time.process_time() - between) / max(1, steps)
    return {"prefill": between - start, "step": step}


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
    """The median, and the median of the ratios to the unpatched model within a round."""
    ratios = [run[key] / base[key] for run, base in zip(runs, plain, strict=True)]
    return {
        "seconds": statistics.median(run[key] for run in runs),
        "ratio": statistics.median(ratios),
    }
