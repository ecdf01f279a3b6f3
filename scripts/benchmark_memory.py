"""Measure the memory of scoring by length and by vocabulary: docs/data/benchmarks/memory.json and .png.

    python scripts/benchmark_memory.py           about half an hour on one core
    python scripts/benchmark_memory.py --plot    estimate and draw the committed result again

A random Llama (2 layers, 512 features, 8 query and 2 key heads, float32, the head shared with the embeddings, so that
the weights are few even with a large vocabulary) scores one window on a CPU, on one thread. Every measurement runs in a
fresh process of multiprocessing's fork server, where the libraries are imported already. Rounds are interleaved in
shuffled order, and medians are reported. A peak is the rise of resident memory over the loaded model. The results also
contain the estimate of `hf_posenc.evaluation.scoring.estimate` for the same model on the meta device.

"Full logits" calls the model and computes the loss of its logits. It is left out where it would take more than
`FULL_LOGITS_LIMIT`.
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
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a file

from hf_posenc.evaluation.scoring.estimate import run_cost
from hf_posenc.evaluation.scoring.head_replay import TokenScorer
from scripts.benchmark import MMAP_THRESHOLD, Results, _machine
from scripts.benchmark_attention import MEBIBYTE, peak_mebibytes

RESULT = Path(__file__).resolve().parents[1] / "docs" / "data" / "benchmarks" / "memory.json"
LENGTHS, VOCABULARY = (1024, 4096, 8192, 16384, 32768), 32768
VOCABULARIES, LENGTH = (4096, 16384, 32768, 65536, 262144), 4096
PIECE = 1024
REPLAY, PIECES, FULL = "head replay", f"head replay, {PIECE:,} tokens at a time", "full logits"
CASES = (REPLAY, PIECES, FULL)
FULL_LOGITS_LIMIT = 3 * 2**30
"""Bytes of the logits, of which there is a log-softmax of the same size too."""
Situation = tuple[str, int, int]
"""A case, a length and a vocabulary."""
app = typer.Typer(help=__doc__, add_completion=False)


@app.command()
def main(
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.")] = 3,
    plot: Annotated[bool, typer.Option(help="Measure nothing.")] = False,
    output: Annotated[Path, typer.Option(help="JSON file; the plot goes beside it.")] = RESULT,
) -> None:
    """Run all measurements, each in its own process, and write medians."""
    if plot:
        document = json.loads(output.read_text(encoding="utf-8"))
    else:
        results = _measured(rounds)
        document = {"machine": _machine("cpu"), "threads": 1, "rounds": rounds, "results": results}
    for case, length, vocabulary in _situations():
        if case != FULL:
            with torch.device("meta"):
                model = _llama(vocabulary)
            piece = PIECE if case == PIECES else None
            cost = run_cost(model, [(length, length - 1)], prefill_chunk=piece)
            values = document["results"][_title(length, vocabulary)][case]
            values["estimated_mib"] = cost.beside_weights / MEBIBYTE
    output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    _draw(document["results"], output.with_suffix(".png"))


def _situations() -> list[Situation]:
    sizes = [(length, VOCABULARY) for length in LENGTHS] + [(LENGTH, size) for size in VOCABULARIES]
    return [
        (case, length, vocabulary)
        for length, vocabulary in dict.fromkeys(sizes)
        for case in CASES
        if case != FULL or length * vocabulary * 4 <= FULL_LOGITS_LIMIT
    ]


def _measured(rounds: int) -> Results:
    """Return medians over rounds, every measurement in a process of its own."""
    found: dict[Situation, list[dict[str, float]]] = {one: [] for one in _situations()}
    order, shuffle = list(found), random.Random(0).shuffle
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["scripts.benchmark_memory"])
    with context.Pool(1, maxtasksperchild=1) as fresh:
        for _ in range(rounds):
            shuffle(order)
            for situation in order:
                found[situation].append(fresh.apply(_measure, situation))
                print(*situation, found[situation][-1], file=sys.stderr, flush=True)
    results: Results = {}
    for (case, length, vocabulary), runs in found.items():
        medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        results.setdefault(_title(length, vocabulary), {})[case] = medians
    return results


def _title(length: int, vocabulary: int) -> str:
    return f"length {length}, vocabulary {vocabulary}"


def _measure(case: str, length: int, vocabulary: int) -> dict[str, float]:
    """Run one measurement in its own process."""
    torch.set_num_threads(1)
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(MMAP_THRESHOLD, 1 << 20)
    model = _llama(vocabulary)
    ids = torch.randint(3, vocabulary, (length,), generator=torch.Generator().manual_seed(0))
    scorer = TokenScorer(model, ids, prefill=PIECE if case == PIECES else None)

    def run() -> Tensor:
        return _full(model, ids) if case == FULL else scorer(ids)

    with torch.inference_mode():
        scorer(ids[:64])  # Created once, on the first call.
        start = time.process_time()
        peak = peak_mebibytes(run)
        seconds = time.process_time() - start
    if peak is None:
        raise SystemExit("This system does not tell peaks of memory; Linux does.")
    return {"peak_mib": peak, "seconds": seconds}


def _llama(vocabulary: int) -> Any:
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=max(LENGTHS),
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def _full(model: Any, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    return F.cross_entropy(logits.float(), ids[1:], reduction="none")


def _draw(results: Results, path: Path) -> None:
    """Draw peaks by length and by vocabulary; small crosses are the estimates."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from hf_posenc.evaluation.plots import COLOURS, STYLE

    by_length = {length: results[_title(length, VOCABULARY)] for length in LENGTHS}
    by_vocabulary = {size: results[_title(LENGTH, size)] for size in VOCABULARIES}
    panels = (
        ("length (tokens)", f"vocabulary {VOCABULARY:,}", by_length),
        ("vocabulary", f"length {LENGTH:,}", by_vocabulary),
    )
    with rc_context(STYLE):
        figure = Figure(figsize=(7.6, 3.4), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        for axis, (label, title, groups) in zip(axes, panels, strict=True):
            for case, colour, marker in zip(CASES, (*COLOURS[:2], "0.45"), "osD", strict=True):
                known = {x: group[case] for x, group in groups.items() if case in group}
                peaks = [values["peak_mib"] for values in known.values()]
                axis.plot([*known], peaks, marker=marker, markersize=4, color=colour, label=case)
                if case != FULL:
                    estimates = [values["estimated_mib"] for values in known.values()]
                    axis.plot([*known], estimates, "x", markersize=5, color=colour, alpha=0.7)
            axis.set_xscale("log", base=2)
            axis.set(yscale="log", xlabel=label, title=title)
            axis.set_xticks([*groups], [f"{at // 1024}k" for at in groups])
            axis.minorticks_off()
        ticks = (128, 256, 512, 1024, 2048, 4096)
        axes[0].set_yticks(ticks, [f"{tick:,}" for tick in ticks])
        axes[0].minorticks_off()
        axes[0].set_ylabel("peak memory beside the weights (MiB)")
        axes[0].plot([], [], "x", markersize=4, color="0.3", label="estimated")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(path, dpi=200, bbox_inches="tight")


if __name__ == "__main__":
    app()
