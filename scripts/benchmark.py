"""Measure what hf_posenc costs, and write JSON with versions and hardware.

    python scripts/benchmark.py attention --output docs/data/benchmarks/attention.json
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
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a file

import hf_posenc
from hf_posenc import patch_model
from hf_posenc.evaluation.device import Clock
from scripts.benchmark_attention import groups, peak_mebibytes

T = TypeVar("T")
Results = dict[str, dict[str, dict[str, float]]]
"""Numbers by measurement, case and name."""
app = typer.Typer(help=__doc__, add_completion=False)
Output = Annotated[Path | None, typer.Option(help="JSON file to write.")]
Rounds = Annotated[int, typer.Option(help="Interleaved rounds of each measurement.")]

UNPATCHED = ("unpatched", "unpatched again")
"""The unpatched model a second time in each round shows the noise."""
SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "yarn": ("yarn", {"scale": 4}),
    **{name: (name, {"window": 512}) for name in ("rerope", "self_extend")},
    **{name: (name, {}) for name in ("dual_chunk", "alibi")},
    "dynamic_yarn, row": ("dynamic_yarn", {"update": "row"}),
    "dynamic_yarn, request": ("dynamic_yarn", {"update": "request"}),
}
"""Method and options by case."""
SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
}
PROMPTS, ANSWER = (1024, 4096), 17


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
            prompt = torch.randint(3, 1024, (length,)).tolist()
            runs = {name: partial(_request, engine, prompt) for name, engine in engines.items()}
            found = interleaved(runs, rounds)
            for index, kind in enumerate(("prefill", "one step after")):
                seconds = {name: [times[index] for times in found[name]] for name in found}
                results[f"{kind} {length}"] = medians(seconds)
        return_large_blocks()
        for name, run in runs.items():  # of the longest prompt
            if (peak := peak_mebibytes(run)) is not None:
                results[f"prefill {length}"][name]["peak_mib"] = peak
    _show(results)
    _write(output, results)


def return_large_blocks() -> None:
    """Let malloc return large freed blocks to the system from now on: blocks that stay hide the next peak."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD of malloc.h


def _engine(folder: Path, name: str) -> Any:
    """Return vLLM's engine for a saved model, patched or not."""
    from vllm import LLM

    torch.manual_seed(0)
    llama: Any = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    if name in SERVED:
        method, options = SERVED[name]
        patch_model(llama, method, **options)
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
    found, first = {}, next(iter(seconds.values()))
    for name, values in seconds.items():
        ratios = [value / base for value, base in zip(values, first, strict=True)]
        found[name] = {"seconds": statistics.median(values), "ratio": statistics.median(ratios)}
    return found


def _write(output: Path | None, results: Results) -> None:
    """Write the results with versions and hardware."""
    if output is not None:
        document = {"machine": machine(), "threads": torch.get_num_threads(), "results": results}
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """Return versions and hardware; the widest vector unit selects PyTorch's attention kernel."""
    model = Clock(torch.nn.Linear(1, 1)).machine()["device"]  # that of the CPU
    return {
        "processor": platform.machine(),
        "processor_model": f"{model}, {torch.backends.cpu.get_cpu_capability()}",
        "cores": os.cpu_count(),
        "device": "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_posenc": hf_posenc.__version__,
    }


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
