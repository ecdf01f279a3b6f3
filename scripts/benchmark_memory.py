"""Measure memory and time of scoring and of the loss in training, by length and by vocabulary.

    python scripts/benchmark_memory.py scoring            docs/data/benchmarks/memory.json and .png, half an hour
    python scripts/benchmark_memory.py training           docs/data/benchmarks/training.json and .png, as long
    python scripts/benchmark_memory.py scoring --plot     estimate and draw the committed result again

A random Llama of 2 layers (float32, the head shared with the embeddings, so that the weights are few even with a large
vocabulary) reads one text on a CPU, on one thread. Every measurement runs in a fresh process of multiprocessing's fork
server, where the libraries are imported already. Rounds are interleaved in shuffled order, and medians are reported. A
peak is the rise of resident memory over the loaded model; time is CPU time of the process.

- `scoring`: one window is scored. The results also contain the estimate of `hf_posenc.evaluation.scoring.estimate` for
  the same model on the meta device. "Full logits" computes the loss of the model's logits. It is left out where they
  would take more than `FULL_LOGITS_LIMIT`.
- `training`: one forward and one backward with gradient checkpointing. The peak is over weights and gradients. "Whole
  logits" is `model(input_ids=ids, labels=ids).loss.backward()`; "in chunks" is the same after `chunk_loss(model)`.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
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
from hf_posenc.training.chunked_loss import chunk_loss
from scripts.benchmark import Results, machine, return_large_blocks
from scripts.benchmark_attention import MEBIBYTE, peak_mebibytes
from scripts.results import BENCHMARKS

VOCABULARY, LENGTH = 32768, 4096
"""The vocabulary of all lengths, and the length of all vocabularies."""
PIECE = 1024
REPLAY, PIECES, FULL = "head replay", f"head replay, {PIECE:,} tokens at a time", "full logits"
CHUNKS, WHOLE = "in chunks", "whole logits"
FULL_LOGITS_LIMIT = 3 * 2**30
"""Bytes of the logits, of which there is a log-softmax of the same size too."""
Situation = tuple[str, int, int]
"""A case, a length and a vocabulary."""


@dataclass(frozen=True)
class Subject:
    """A subject of measurement: its result, cases and sizes, and for each number the axis and ticks of its picture."""

    result: Path
    cases: tuple[str, ...]
    lengths: tuple[int, ...]
    vocabularies: tuple[int, ...]
    hidden: int
    heads: int
    axes: dict[str, tuple[str, tuple[int, ...]]]

    def situations(self) -> list[Situation]:
        """Return every case in every size."""
        sizes = [(length, VOCABULARY) for length in self.lengths]
        sizes += [(LENGTH, vocabulary) for vocabulary in self.vocabularies]
        return [
            (case, length, vocabulary)
            for length, vocabulary in dict.fromkeys(sizes)
            for case in self.cases
            if case != FULL or length * vocabulary * 4 <= FULL_LOGITS_LIMIT
        ]

    def model(self, vocabulary: int) -> Any:
        """Return the random Llama."""
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 11 // 4,
            num_hidden_layers=2,
            num_attention_heads=self.heads,
            num_key_value_heads=2,
            max_position_embeddings=max(self.lengths),
            tie_word_embeddings=True,
        )
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


SUBJECTS = {
    "scoring": Subject(
        BENCHMARKS / "memory.json",
        (REPLAY, PIECES, FULL),
        (1024, 4096, 8192, 16384, 32768),
        (4096, 16384, 32768, 65536, 262144),
        hidden=512,
        heads=8,
        axes={"peak_mib": ("peak memory beside the weights (MiB)", (128, 256, 512, 1024, 2048, 4096))},
    ),
    "training": Subject(
        BENCHMARKS / "training.json",
        (CHUNKS, WHOLE),
        (1024, 2048, 4096, 8192, 16384),
        (4096, 8192, 16384, 32768, 65536, 131072),
        hidden=256,
        heads=4,
        axes={
            "peak_mib": ("peak memory beside weights\nand gradients (MiB)", (64, 256, 1024, 4096)),
            "seconds": ("time of a step (s)", (1, 3, 10, 30)),
        },
    ),
}  # fmt: skip


def main(
    subject: Annotated[str, typer.Argument(help=" or ".join(SUBJECTS))],
    rounds: Annotated[int, typer.Option(help="Interleaved rounds.")] = 3,
    plot: Annotated[bool, typer.Option(help="Measure nothing.")] = False,
) -> None:
    """Run all measurements, each in its own process, and write medians."""
    measured = SUBJECTS[subject]
    if plot:
        document = json.loads(measured.result.read_text(encoding="utf-8"))
    else:
        document = {"machine": machine(), "threads": 1, "rounds": rounds}
        document["results"] = _medians(subject, rounds)
    for case, length, vocabulary in measured.situations():
        if case in (REPLAY, PIECES):
            with torch.device("meta"):
                model = measured.model(vocabulary)
            piece = PIECE if case == PIECES else None
            cost = run_cost(model, [(length, length - 1)], prefill_chunk=piece)
            values = document["results"][title(length, vocabulary)][case]
            values["estimated_mib"] = cost.beside_weights / MEBIBYTE
    measured.result.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    _draw(measured, document["results"])


def title(length: int, vocabulary: int) -> str:
    """Return the name of a size in the results."""
    return f"length {length}, vocabulary {vocabulary}"


def _medians(subject: str, rounds: int) -> Results:
    """Return medians over rounds, every measurement in a process of its own."""
    order, shuffle = SUBJECTS[subject].situations(), random.Random(0).shuffle
    found: dict[Situation, list[dict[str, float]]] = {one: [] for one in order}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["scripts.benchmark_memory"])
    with context.Pool(1, maxtasksperchild=1) as fresh:
        for _ in range(rounds):
            shuffle(order)
            for situation in order:
                found[situation].append(fresh.apply(_measure, (subject, *situation)))
                print(*situation, found[situation][-1], file=sys.stderr, flush=True)
    results: Results = {}
    for (case, length, vocabulary), runs in found.items():
        medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        results.setdefault(title(length, vocabulary), {})[case] = medians
    return results


def _measure(subject: str, case: str, length: int, vocabulary: int) -> dict[str, float]:
    """Run one measurement in its own process."""
    torch.set_num_threads(1)
    return_large_blocks()
    model = SUBJECTS[subject].model(vocabulary)
    ids = torch.randint(3, vocabulary, (length,), generator=torch.Generator().manual_seed(0))
    values: dict[str, float] = {}
    if case in (REPLAY, PIECES):
        run: Callable[[Tensor], Any] = TokenScorer(
            model, ids, prefill=PIECE if case == PIECES else None
        )
    elif case == FULL:

        def run(ids: Tensor) -> Tensor:
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            return F.cross_entropy(logits.float(), ids[1:], reduction="none")
    else:
        model.train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if case == CHUNKS:
            handle = chunk_loss(model)
            if not handle.exact:
                raise SystemExit("The loss in chunks is not in use.")
            values["chunk"] = handle.chunk

        def run(ids: Tensor) -> Tensor:
            loss: Tensor = model(input_ids=ids[None], labels=ids[None], use_cache=False).loss
            loss.backward()
            return loss.detach()

    with torch.inference_mode(subject == "scoring"):
        run(ids[:64])  # Created once, on the first call; the memory of gradients stays allocated.
        start = time.process_time()
        peak = peak_mebibytes(lambda: run(ids))
        values["seconds"] = time.process_time() - start
    if peak is None:
        raise SystemExit("This system does not tell peaks of memory; Linux does.")
    return values | {"peak_mib": peak}


def _draw(subject: Subject, results: Results) -> None:
    """Draw a row for each number, by length and by vocabulary; small crosses are the estimates."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from hf_posenc.evaluation.plots import COLOURS, STYLE

    by_length = {length: results[title(length, VOCABULARY)] for length in subject.lengths}
    by_vocabulary = {size: results[title(LENGTH, size)] for size in subject.vocabularies}
    columns = (
        ("length (tokens)", f"vocabulary {VOCABULARY:,}", by_length),
        ("vocabulary", f"length {LENGTH:,}", by_vocabulary),
    )
    colours = (*COLOURS[: len(subject.cases) - 1], "0.45")  # grey: what others do
    with rc_context(STYLE):
        figure = Figure(figsize=(7.6, 1.4 + 2 * len(subject.axes)), layout="constrained")
        grid = figure.subplots(len(subject.axes), 2, sharex="col", sharey="row", squeeze=False)
        for number, (field, (label, ticks)) in enumerate(subject.axes.items()):
            row = grid[number]
            for axis, (below, above, groups) in zip(row, columns, strict=True):
                for case, colour, marker in zip(subject.cases, colours, "osD", strict=False):
                    known = {x: group[case] for x, group in groups.items() if case in group}
                    values = [each[field] for each in known.values()]
                    axis.plot([*known], values, marker=marker, markersize=4, color=colour, label=case)  # fmt: skip
                    if case in (REPLAY, PIECES):
                        values = [each["estimated_mib"] for each in known.values()]
                        axis.plot([*known], values, "x", markersize=5, color=colour, alpha=0.7)
                axis.set_xscale("log", base=2)
                axis.set_yscale("log")
                axis.set_xticks([*groups], [f"{at // 1024}k" for at in groups])
                axis.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
                axis.minorticks_off()
                if number == 0:
                    axis.set_title(above)
                if number == len(grid) - 1:
                    axis.set_xlabel(below)
            row[0].set_ylabel(label)
        if REPLAY in subject.cases:
            grid[0, 0].plot([], [], "x", markersize=4, color="0.3", label="estimated")
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        figure.savefig(subject.result.with_suffix(".png"), dpi=200, bbox_inches="tight")


if __name__ == "__main__":
    typer.run(main)
