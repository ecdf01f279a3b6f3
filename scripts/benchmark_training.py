"""Measure memory and time of the chunked loss in training: docs/data/benchmarks/training.json and .png.

    python scripts/benchmark_training.py           about half an hour on one core
    python scripts/benchmark_training.py --plot    draw the committed result again

A random Llama (2 layers, 256 features, 4 query and 2 key heads, float32, the head shared with the embeddings) runs one
forward and one backward pass over one text on a CPU, on one thread, with gradient checkpointing, as long-context
training does. Every measurement runs in a fresh process of multiprocessing's fork server, where the libraries are
imported already. Rounds are interleaved in shuffled order, and medians are reported. A peak is the rise of resident
memory over the weights and their gradients; time is CPU time of the process.

"Whole logits" is `model(input_ids=ids, labels=ids).loss.backward()`; "in chunks" is the same after `chunk_loss(model)`.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import random
import statistics
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a file

from hf_posenc.training.chunked_loss import chunk_loss
from scripts.benchmark import _machine
from scripts.benchmark_attention import peak_mebibytes

RESULT = Path(__file__).resolve().parents[1] / "docs" / "data" / "benchmarks" / "training.json"
LENGTHS, VOCABULARY = (1024, 2048, 4096, 8192, 16384), 32768
VOCABULARIES, LENGTH = (4096, 8192, 16384, 32768, 65536, 131072), 4096
CHUNKS, WHOLE = "in chunks", "whole logits"
CASES = (CHUNKS, WHOLE)
# M_MMAP_THRESHOLD of malloc.h: freed blocks of this size go back to the system.
_MMAP_THRESHOLD = -3

Results = dict[str, dict[str, dict[str, float]]]
app = typer.Typer(help=__doc__, add_completion=False)


@app.command()
def main(
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.")] = 3,
    plot: Annotated[bool, typer.Option(help="Measure nothing.")] = False,
    output: Annotated[Path, typer.Option(help="JSON file; the plot goes beside it.")] = RESULT,
) -> None:
    """Run all measurements, each in its own process, and write medians."""
    if not plot:
        document = {"machine": _machine("cpu"), "threads": 1, "rounds": rounds}
        document["results"] = _interleaved(rounds)
        output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    results = json.loads(output.read_text(encoding="utf-8"))["results"]
    _draw(results, output.with_suffix(".png"))


def title(length: int, vocabulary: int) -> str:
    """Return the name of a situation in the results."""
    return f"length {length}, vocabulary {vocabulary}"


def _interleaved(rounds: int) -> Results:
    sizes = dict.fromkeys(
        [(length, VOCABULARY) for length in LENGTHS] + [(LENGTH, size) for size in VOCABULARIES]
    )
    order = [(case, *size) for size in sizes for case in CASES]
    found: dict[tuple[str, int, int], list[dict[str, float]]] = {one: [] for one in order}
    shuffle = random.Random(0).shuffle
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["scripts.benchmark_training"])
    with context.Pool(1, maxtasksperchild=1) as fresh:
        for _ in range(rounds):
            shuffle(order)
            for situation in order:
                values = fresh.apply(_measure, situation)
                found[situation].append(values)
                print(*situation, values, file=sys.stderr, flush=True)
    results: Results = {}
    for (case, length, vocabulary), runs in found.items():
        group = results.setdefault(title(length, vocabulary), {})
        group[case] = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    return results


def _measure(case: str, length: int, vocabulary: int) -> dict[str, float]:
    """Run one measurement in its own process."""
    torch.set_num_threads(1)
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(_MMAP_THRESHOLD, 1 << 20)
    model = _llama(vocabulary)
    ids = torch.randint(3, vocabulary, (1, length), generator=torch.Generator().manual_seed(0))
    values: dict[str, float] = {}
    if case == CHUNKS:
        handle = chunk_loss(model)
        if not handle.exact:
            raise SystemExit("The loss in chunks is not in use.")
        values["chunk"] = handle.chunk

    def step(tokens: Tensor = ids) -> Tensor:
        loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        return loss.detach()

    step(ids[:, :64])  # Created once; the memory of the gradients stays allocated.
    start = time.process_time()
    peak = peak_mebibytes(step)
    values["seconds"] = time.process_time() - start
    if peak is None:
        raise SystemExit("This system does not tell peaks of memory; Linux does.")
    return values | {"peak_mib": peak}


def _llama(vocabulary: int) -> Any:
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max(LENGTHS),
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _draw(results: Results, path: Path) -> None:
    """Draw peaks and times by length and by vocabulary."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    from hf_posenc.evaluation.plots import COLOURS, STYLE

    columns = (
        ("length (tokens)", [(length, title(length, VOCABULARY)) for length in LENGTHS]),
        ("vocabulary", [(size, title(LENGTH, size)) for size in VOCABULARIES]),
    )
    titles = (f"vocabulary {VOCABULARY:,}", f"length {LENGTH:,}")
    rows = (
        ("peak_mib", "peak memory beside weights\nand gradients (MiB)", (64, 256, 1024, 4096)),
        ("seconds", "time of a step (s)", (1, 3, 10, 30)),
    )
    with rc_context(STYLE):
        figure = Figure(figsize=(7.6, 5.4), layout="constrained")
        axes = figure.subplots(2, 2, sharex="col", sharey="row")
        for row, (field, label, ticks) in zip(axes, rows, strict=True):
            for axis, (below, groups) in zip(row, columns, strict=True):
                for case, colour, marker in zip(CASES, (COLOURS[0], "0.45"), "oD", strict=True):
                    x = [at for at, _ in groups]
                    y = [results[group][case][field] for _, group in groups]
                    axis.plot(x, y, marker=marker, markersize=4, color=colour, label=case)
                axis.set_xscale("log", base=2)
                axis.set_yscale("log")
                axis.set_xticks(x, [f"{at // 1024}k" for at in x])
                axis.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
                for side in (axis.xaxis, axis.yaxis):
                    side.set_minor_locator(NullLocator())
                if field == "seconds":
                    axis.set_xlabel(below)
            row[0].set_ylabel(label)
        for axis, name in zip(axes[0], titles, strict=True):
            axis.set_title(name)
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
        figure.savefig(path, dpi=200, bbox_inches="tight")


if __name__ == "__main__":
    app()
