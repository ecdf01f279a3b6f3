"""Measure what hf_posenc costs, and write JSON with versions and hardware.

    python scripts/benchmark.py core --output docs/data/benchmarks/core.json
    python scripts/benchmark.py attention --output docs/data/benchmarks/attention.json
    python scripts/benchmark.py model --output docs/data/benchmarks/model.json
    python scripts/benchmark.py serving --output docs/data/benchmarks/serving.json   # where vLLM is installed

All compared runs share one process. They are interleaved, in an order that is shuffled in every round, and reported as
medians and ratios, because machines are shared. On a CPU the forward runs on one thread and is measured in CPU time,
which other processes disturb least.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, TypeVar

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a file

import hf_posenc
from hf_posenc import patch_model, patched, unpatch_model
from scripts.benchmark_attention import groups, peak_mebibytes

T = TypeVar("T")
Results = dict[str, dict[str, dict[str, float]]]
"""Numbers by measurement, case and name."""
Patches = Mapping[str, tuple[str, dict[str, Any]]]
"""Method and options by case."""
app = typer.Typer(help=__doc__, add_completion=False)
Output = Annotated[Path | None, typer.Option(help="JSON file to write.")]
Rounds = Annotated[int, typer.Option(help="Interleaved rounds of each measurement.")]

FREQUENCIES: Patches = {
    "yarn": ("yarn", {"scale": 4}),
    "ntk_mixed": ("ntk_mixed", {"scale": 4}),
    "dynamic_ntk": ("dynamic_ntk", {"update": "sequence"}),
    "dynamic_yarn": ("dynamic_yarn", {"update": "sequence"}),
}
_IMPORTS = {
    "transformers Llama": "from transformers import LlamaForCausalLM",
    "and hf_posenc": "from transformers import LlamaForCausalLM; import hf_posenc",
}
WINDOW, STEPS = 512, 10
INSIDE_ATTENTION: Patches = {
    **{name: (name, {"window": WINDOW}) for name in ("rerope", "leaky_rerope", "self_extend")},
    **{name: (name, {}) for name in ("dual_chunk", "alibi", "kerple_log", "log_n")},
    "dynamic_ntk, row": ("dynamic_ntk", {"update": "row"}),
}
UNPATCHED = ("unpatched", "unpatched again")
"""The unpatched model a second time in each round shows the noise."""
SITUATIONS = ((2048, 8), (4096, 8), (8192, 8), (4096, 2))
"""Tokens of a prefill, and key heads beside 8 query heads."""
SERVED: Patches = {
    "yarn": ("yarn", {"scale": 4}),
    **{name: INSIDE_ATTENTION[name] for name in ("rerope", "self_extend", "dual_chunk", "alibi")},
    "dynamic_yarn, row": ("dynamic_yarn", {"update": "row"}),
    "dynamic_yarn, request": ("dynamic_yarn", {"update": "request"}),
}
PROMPTS, ANSWER = (1024, 4096), 17
FEW, MEMORY_LENGTH, PADDING = ("rerope", "alibi", "dynamic_ntk, row"), 8192, 100
MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h


@app.command()
def core(output: Output = None, rounds: Rounds = 31) -> None:
    """Measure the forward of a patched model against the unpatched one, patch_model itself, and the import."""
    torch.set_num_threads(1)
    results = {
        "forward": _forward(rounds),
        "rotary": _rotary(rounds),
        "patch_model_32_layers": _patching(rounds),
        "import": _import(max(3, rounds // 4)),
    }
    _show(results)
    _write(output, results)


@app.command()
def attention(
    output: Output = None,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds; slow situations get fewer.")] = 7,
) -> None:
    """Measure the attention engine on a CPU against plain causal attention and the usual implementations."""
    torch.set_num_threads(1)
    results: Results = {}
    with torch.no_grad():
        for group in groups():
            values = interleaved(group.timed(), max(3, round(rounds * group.share)))
            found = results[group.title] = medians(values)
            for name in found if group.repeats == 1 else ():  # a decode step takes next to none
                if (peak := peak_mebibytes(group.cases[name])) is not None:
                    found[name]["peak_mib"] = peak
                    first = next(iter(found.values()))
                    found[name]["peak_ratio"] = peak / first["peak_mib"]
            _show({group.title: found})
    _write(output, results)


@app.command()
def model(output: Output = None, rounds: Rounds = 3) -> None:
    """Measure whole models on a CPU, patched and unpatched: prefill, generation, peak memory, patch_model.

    A random Llama of 4 layers and 512 features (head dimension 64), float32, batch 1, on one thread; the unpatched
    model computes attention with sdpa. One model is patched and unpatched between the runs, so that all have the same
    weights in the same place. A run times a prefill into an empty cache and then ten steps of generation.
    """
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*starts untrained")
    results: Results = {}
    for found in (*_whole_models(rounds), _trials(rounds), *_memory()):
        _show(found)
        results |= found
    _write(output, results)


@app.command()
def serving(output: Output = None, rounds: Rounds = 5) -> None:
    """Measure a request to vLLM on a CPU, served by the plug-in and unpatched: prefill, steps, peak memory.

    A random Llama of 4 layers and 512 features, 8 query and 2 key heads, with a context of 2,048 tokens, float32, one
    request at a time. All engines share one process and answer in turn. Seconds are CPU time of all threads.
    """
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    torch.set_num_threads(1)
    results: Results = {}
    names = (*UNPATCHED, *SERVED)
    with TemporaryDirectory() as folder:
        engines = {name: _engine(Path(folder) / str(i), name) for i, name in enumerate(names)}
        for length in PROMPTS:
            prompt = _tokens(length)[0].tolist()
            runs = {name: partial(_request, engine, prompt) for name, engine in engines.items()}
            found = interleaved(runs, rounds)
            for index, kind in enumerate(("prefill", "one step after")):
                seconds = {name: [times[index] for times in found[name]] for name in found}
                results[f"{kind} {length}"] = medians(seconds)
        _return_large_blocks()
        for name, run in runs.items():  # of the longest prompt
            if (peak := peak_mebibytes(run)) is not None:
                results[f"prefill {length}"][name]["peak_mib"] = peak
    _show(results)
    _write(output, results)


# core


def _forward(rounds: int) -> dict[str, dict[str, float]]:
    """Measure a forward over 1024 tokens (twice the original length), 4 layers of 256 features.

    One model, patched and unpatched between the runs, so that all have the same weights in the same place.
    """
    ids, llama = torch.randint(0, 1024, (1, 1024)), _llama(4, 256)

    def forward() -> float:
        start = time.process_time()
        with torch.inference_mode():
            llama(input_ids=ids, use_cache=False)
        return time.process_time() - start

    def run(name: str) -> float:
        with _applied(llama, FREQUENCIES, name):
            forward()  # not counted: patching evicted the processor's caches
            return forward()

    names = ("baseline", "none", *FREQUENCIES)
    return medians(interleaved({name: partial(run, name) for name in names}, rounds))


def _rotary(rounds: int) -> dict[str, dict[str, float]]:
    """Measure the rotary module alone over 1024 positions: the only thing that a frequency patch changes."""
    x, positions = torch.zeros(1, 1024, 1), torch.arange(1024)[None]

    def run(module: nn.Module) -> float:
        start = time.perf_counter()
        for _ in range(20):
            module(x, positions)
        return (time.perf_counter() - start) / 20

    models = {name: _llama(1, 256) for name in ("baseline", *FREQUENCIES)}
    for name, (method, options) in FREQUENCIES.items():
        patch_model(models[name], method, **options)
    runs = {name: partial(run, llama.model.rotary_emb) for name, llama in models.items()}
    return medians(interleaved(runs, rounds))


def _patching(rounds: int) -> dict[str, dict[str, float]]:
    """Measure `patch_model`, verification and config export included, on a model of 32 layers."""
    llama = _llama(32, 64)

    def run(method: str, options: dict[str, Any]) -> float:
        start = time.perf_counter()
        patch_model(llama, method, **options)
        seconds = time.perf_counter() - start
        unpatch_model(llama)
        return seconds

    runs = {name: partial(run, *patch) for name, patch in FREQUENCIES.items()}
    return medians(interleaved(runs, rounds))


def _import(rounds: int) -> dict[str, dict[str, float]]:
    """Measure a fresh interpreter that imports transformers' Llama, without and with hf_posenc."""

    def run(code: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.perf_counter() - start

    runs = {name: partial(run, code) for name, code in _IMPORTS.items()}
    results = medians(interleaved(runs, rounds))
    without, with_it = (results[name]["seconds"] for name in _IMPORTS)
    results["and hf_posenc"]["added_seconds"] = with_it - without
    return results


# model


def _whole_models(rounds: int) -> Iterator[Results]:
    """Measure prefill and generation steps in every situation, one after the other."""
    for length, key_heads in SITUATIONS:
        llama, ids = _llama(4, 512, key_heads), _tokens(length)

        def run(name: str, llama: Any = llama, ids: Tensor = ids) -> tuple[float, float]:
            with _applied(llama, INSIDE_ATTENTION, name):
                return _prefill_and_steps(llama, ids, torch.ones_like(ids))

        names = (*UNPATCHED, *INSIDE_ATTENTION)
        found = interleaved({name: partial(run, name) for name in names}, rounds)
        for index, kind in enumerate(("prefill", f"one of {STEPS} steps after")):
            seconds = {name: [run[index] for run in runs] for name, runs in found.items()}
            yield {f"{kind} {length}, heads 8/{key_heads}": medians(seconds)}


def _trials(rounds: int) -> Results:
    """Measure `patch_model`, trial and verification included, by a forward over seven tokens."""
    found: Results = {}
    patches: Patches = {"yarn": ("yarn", {"scale": 4}), **INSIDE_ATTENTION}
    for layers, hidden in ((4, 64), (32, 64), (24, 1024)):
        llama, ids = _llama(layers, hidden, 1), torch.arange(7)[None]

        def run(name: str, llama: Any = llama, ids: Tensor = ids) -> float:
            with torch.no_grad():
                llama.lm_head.weight.add_(0)  # as a model that was never tried
                start = time.perf_counter()
                if name == "forward":
                    llama(ids)
                    return time.perf_counter() - start
                method, options = patches[name]
                patch_model(llama, method, **options)
            seconds = time.perf_counter() - start
            unpatch_model(llama)
            return seconds

        size = "" if hidden == 64 else f" of {hidden} features"
        runs = {name: partial(run, name) for name in ("forward", *patches)}
        found[f"patch_model, {layers} layers{size}"] = medians(interleaved(runs, rounds))
    return found


def _memory() -> Iterator[Results]:
    """Measure how far a prefill raises resident memory, cache included, with and without padding.

    With padding the unpatched model needs a mask. Positions are passed, as generate() does. Call it last: from then on
    large freed blocks are returned to the system, because blocks that stay would hide the next peak.
    """
    _return_large_blocks()
    llama, ids = _llama(4, 512), _tokens(MEMORY_LENGTH)
    for padding in (0, PADDING):
        mask = torch.ones_like(ids)
        mask[:, :padding] = 0
        found: dict[str, dict[str, float]] = {}
        for name in (*UNPATCHED, *FEW):
            with _applied(llama, INSIDE_ATTENTION, name):
                _prefill_and_steps(
                    llama, ids[:, :1024], mask[:, :1024]
                )  # created on the first call
                peak = peak_mebibytes(partial(_prefill_and_steps, llama, ids, mask, steps=0))
            if peak is None:
                return
            first = next(iter(found.values()), {"peak_mib": peak})
            found[name] = {"peak_mib": peak, "peak_ratio": peak / first["peak_mib"]}
        padded = f" with {padding} tokens of padding" if padding else ""
        yield {f"memory of prefill {MEMORY_LENGTH}{padded}": found}


def _return_large_blocks() -> None:
    """Let malloc return large freed blocks to the system from now on: blocks that stay hide the next peak."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(MMAP_THRESHOLD, 1 << 20)


def _engine(folder: Path, name: str) -> Any:
    """Return vLLM's engine for a saved model, patched or not."""
    from vllm import LLM

    llama = _llama(4, 512, 2)
    with _applied(llama, SERVED, name):
        llama.save_pretrained(folder)
    return LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=max(PROMPTS) + ANSWER,
        max_num_seqs=1,
    )


def _request(engine: Any, prompt: list[int]) -> tuple[float, float]:
    """Return CPU seconds of a prefill with its first token, and the median of the steps after it."""
    from vllm import SamplingParams

    limits = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True, detokenize=False)
    start = time.process_time()
    engine.llm_engine.add_request(str(start), {"prompt_token_ids": prompt}, limits)
    answered = []
    while engine.llm_engine.has_unfinished_requests():
        if engine.llm_engine.step():  # a piece of the prompt that is not its last answers nothing
            answered.append(time.process_time())
    steps = [after - before for before, after in pairwise(answered)]
    return answered[0] - start, statistics.median(steps)


def _llama(layers: int, hidden: int, key_heads: int | None = None) -> LlamaForCausalLM:
    heads = hidden // 64
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads or heads,
        vocab_size=1024,
        max_position_embeddings=512 if hidden == 256 else 2048,
    )
    torch.manual_seed(0)
    llama: LlamaForCausalLM = LlamaForCausalLM(config).eval()
    llama.set_attn_implementation("sdpa")
    return llama


def _tokens(length: int) -> Tensor:
    return torch.randint(3, 1024, (1, length), generator=torch.Generator().manual_seed(0))


def _applied(llama: Any, patches: Patches, name: str) -> AbstractContextManager[object]:
    if name not in patches:
        return nullcontext()
    method, options = patches[name]
    return patched(llama, method, **options)


def _prefill_and_steps(
    llama: Any, ids: Tensor, mask: Tensor, steps: int = STEPS
) -> tuple[float, float]:
    """Return CPU seconds of a prefill, and of one step after it."""
    cache, times = DynamicCache(config=llama.config), [time.process_time()]
    for step in range(steps + 1):
        piece = ids[:, :1] if step else ids
        mask = torch.cat((mask, mask.new_ones(1, 1)), 1) if step else mask
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -piece.shape[1] :]
        given = {"attention_mask": mask, "position_ids": positions, "past_key_values": cache}
        with torch.no_grad():
            llama(input_ids=piece, logits_to_keep=1, **given)
        times.append(time.process_time())
    return times[1] - times[0], (times[-1] - times[1]) / max(1, steps)


# Numbers


def interleaved(runs: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Return what each run gives in every round; a first one is not counted, and the order is shuffled."""
    for run in runs.values():
        run()
    found: dict[str, list[T]] = {name: [] for name in runs}
    order, shuffle = list(runs), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            found[name].append(runs[name]())
    return found


def medians(seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Return the median of each run, and of its ratios to the first run's seconds in the same round."""
    first = next(iter(seconds.values()))
    ratios = {
        name: [value / base for value, base in zip(values, first, strict=True)]
        for name, values in seconds.items()
    }
    return {
        name: {"seconds": statistics.median(values), "ratio": statistics.median(ratios[name])}
        for name, values in seconds.items()
    }


def _write(output: Path | None, results: Results) -> None:
    """Write the results with versions and hardware."""
    if output is not None:
        document = {"machine": machine(), "threads": torch.get_num_threads(), "results": results}
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """Return versions and hardware."""
    return {
        "processor": platform.machine(),
        "processor_model": _processor_model(),
        "cores": os.cpu_count(),
        "device": "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_posenc": hf_posenc.__version__,
    }


def _processor_model() -> str | None:
    """Name of the processor and its widest vector unit, which select PyTorch's attention kernel; Linux only."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {torch.backends.cpu.get_cpu_capability()}" if names else None


def _show(results: Results) -> None:
    table = Table("measurement", "case", "median", "ratio", "peak")
    for measurement, cases in results.items():
        for case, values in cases.items():
            ratio = f"{values['ratio']:.3f}" if "ratio" in values else ""
            peak = f"{values['peak_mib']:.1f} MiB" if "peak_mib" in values else ""
            seconds = f"{values['seconds'] * 1e3:.3g} ms" if "seconds" in values else ""
            table.add_row(measurement, case, seconds, ratio, peak)
    Console().print(table)


if __name__ == "__main__":
    app()
