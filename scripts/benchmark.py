"""Measure what hf_posenc costs, and write JSON with versions and hardware.

    python scripts/benchmark.py core --output docs/data/benchmarks/core.json
    python scripts/benchmark.py attention --output docs/data/benchmarks/attention.json
    python scripts/benchmark.py model --output docs/data/benchmarks/model.json

All compared runs share one process. They are interleaved, in an order that is shuffled in every round, and reported as
medians and ratios, because machines are shared. On a CPU the forward runs on one thread and is measured in CPU time,
which other processes disturb least.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import hf_posenc
from hf_posenc import patch_model, patched, unpatch_model

app = typer.Typer(help=__doc__, add_completion=False)
METHODS: dict[str, dict[str, Any]] = {
    "yarn": {"scale": 4},
    "ntk_mixed": {"scale": 4},
    "dynamic_ntk": {"update": "sequence"},
    "dynamic_yarn": {"update": "sequence"},
}
_IMPORTS = {
    "transformers Llama": "from transformers import LlamaForCausalLM",
    "and hf_posenc": "from transformers import LlamaForCausalLM; import hf_posenc",
}


@app.command()
def core(
    output: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds of each measurement.")] = 31,
    device: Annotated[str, typer.Option(help="Where the models run.")] = "cpu",
) -> None:
    """Measure the forward of a patched model against the unpatched one, patch_model itself, and the import."""
    results = {
        "forward": _forward(rounds, torch.device(device)),
        "rotary": _rotary(rounds, torch.device(device)),
        "patch_model_32_layers": _patching(rounds),
        "import": _import(max(3, rounds // 4)),
    }
    _show(results)
    _write(output, device, results)


@app.command()
def attention(
    output: Annotated[
        Path | None, typer.Option(help="JSON file to write; a plot goes beside it, as PNG and SVG.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds; slow situations get fewer.")] = 7,
    only: Annotated[str, typer.Option(help="Only situations with this word in the title.")] = "",
) -> None:
    """Measure the attention engine on a CPU against plain causal attention and the usual implementations."""
    sys.path.insert(
        0, str(Path(__file__).resolve().parents[1])
    )  # when run as a file, not as a module
    from scripts import benchmark_attention, benchmark_plot

    torch.set_num_threads(1)
    results: dict[str, dict[str, dict[str, float]]] = {}
    with torch.no_grad():
        for group in benchmark_attention.groups():
            if only not in group.title:
                continue
            results[group.title] = _interleaved(group.timed(), max(3, round(rounds * group.share)))
            for name, values in results[group.title].items():
                peak = benchmark_attention.peak_mebibytes(group.cases[name])
                if peak is not None and group.repeats == 1:  # a decode step takes next to none
                    first = next(iter(results[group.title].values()))
                    values["peak_mib"] = peak
                    values["peak_ratio"] = peak / first["peak_mib"]
            _show({group.title: results[group.title]})
    _write(output, "cpu", results)
    if output is not None:
        benchmark_plot.write(results, output.with_suffix(".png"), output.with_suffix(".svg"))


@app.command()
def model(
    output: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds of each measurement.")] = 3,
) -> None:
    """Measure whole models on a CPU, patched and unpatched: prefill, generation, peak memory, patch_model."""
    sys.path.insert(
        0, str(Path(__file__).resolve().parents[1])
    )  # when run as a file, not as a module
    from scripts import benchmark_model

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*starts untrained")
    results: dict[str, dict[str, dict[str, float]]] = {}
    for found in itertools.chain(
        benchmark_model.whole_models(rounds),
        [benchmark_model.patching(rounds)],
        benchmark_model.memory(),
    ):
        _show(found)
        results |= found
    _write(output, "cpu", results)


def _write(
    output: Path | None, device: str, results: dict[str, dict[str, dict[str, float]]]
) -> None:
    """Write the results with versions and hardware."""
    if output is None:
        return
    document = {"machine": _machine(device), "threads": torch.get_num_threads(), "results": results}
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _llama(layers: int, device: torch.device, hidden: int = 256) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        vocab_size=1024,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    model: LlamaForCausalLM = LlamaForCausalLM(config).eval()
    model.to(device)  # type: ignore[arg-type]
    return model


def _forward(rounds: int, device: torch.device) -> dict[str, dict[str, float]]:
    """Seconds of a forward over 1024 tokens (twice the original length), 4 layers of 256 features.

    One model, patched and unpatched between the runs, so that all have the same weights in the same
    place; `none` is the unpatched model a second time in each round and shows the noise.
    """
    ids = torch.randint(0, 1024, (1, 1024), device=device)
    model = _llama(4, device)
    clock = time.perf_counter
    if device.type == "cpu":
        torch.set_num_threads(1)
        clock = time.process_time

    def forward() -> float:
        start = clock()
        with torch.inference_mode():
            model(input_ids=ids, use_cache=False)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return clock() - start

    def run(name: str) -> Callable[[], float]:
        def measure() -> float:
            with patched(model, name, **METHODS[name]) if name in METHODS else nullcontext():
                forward()  # Not counted: patching evicted the processor's caches.
                return forward()

        return measure

    return _interleaved({name: run(name) for name in ("baseline", "none", *METHODS)}, rounds)


def _rotary(rounds: int, device: torch.device) -> dict[str, dict[str, float]]:
    """Seconds of the rotary module alone over 1024 positions: the only thing that a frequency patch changes."""
    x = torch.zeros(1, 1024, 1, device=device)
    positions = torch.arange(1024, device=device)[None]
    modules = {"baseline": _llama(1, device).model.rotary_emb}
    for name, options in METHODS.items():
        modules[name] = patch_model(_llama(1, device), name, **options).model.rotary_emb

    def run(module: torch.nn.Module) -> Callable[[], float]:
        def call() -> float:
            start = time.perf_counter()
            for _ in range(20):
                module(x, positions)
            if device.type == "cuda":
                torch.cuda.synchronize()
            return (time.perf_counter() - start) / 20

        return call

    return _interleaved({name: run(module) for name, module in modules.items()}, rounds)


def _patching(rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of `patch_model`, verification and config export included, on a model of 32 layers."""
    model = _llama(32, torch.device("cpu"), hidden=64)

    def run(name: str) -> Callable[[], float]:
        def patch() -> float:
            start = time.perf_counter()
            patch_model(model, name, **METHODS[name])
            seconds = time.perf_counter() - start
            unpatch_model(model)
            return seconds

        return patch

    return _interleaved({name: run(name) for name in METHODS}, rounds)


def _import(rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of a fresh interpreter that imports transformers' Llama, without and with hf_posenc."""

    def run(code: str) -> Callable[[], float]:
        def start() -> float:
            begin = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            return time.perf_counter() - begin

        return start

    results = _interleaved({name: run(code) for name, code in _IMPORTS.items()}, rounds)
    without, with_it = (results[name]["seconds"] for name in _IMPORTS)
    results["and hf_posenc"]["added_seconds"] = with_it - without
    return results


def _interleaved(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, dict[str, float]]:
    """The median of each run, and of its ratios to the first run's seconds in the same round."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    order = list(runs)
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            seconds[name].append(runs[name]())
    first = next(iter(seconds.values()))
    return {
        name: {
            "seconds": statistics.median(values),
            "ratio": statistics.median(
                value / base for value, base in zip(values, first, strict=True)
            ),
        }
        for name, values in seconds.items()
    }


def _machine(device: str) -> dict[str, Any]:
    return {
        "processor": platform.machine(),
        "processor_model": _processor_model(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else "cpu",
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


def _show(results: dict[str, dict[str, dict[str, float]]]) -> None:
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
