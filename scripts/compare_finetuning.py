"""Train the embedded model in several ways with `scripts/finetune.py`, and write their perplexities.

    python scripts/compare_finetuning.py --output docs/data/benchmarks/finetuning.json

Every way gets the same number of steps and, unless positions are drawn, the same number of tokens. The held-out tokens
are the same for all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_posenc.evaluation import measure_perplexity
from hf_posenc.evaluation.documents import read_embedded
from hf_posenc.evaluation.measuring.identity import environment
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.files import to_json, write_atomically

ROOT = Path(__file__).resolve().parents[1]
LENGTHS = (256, 512, 1024)
EMBEDDED_PATCH = "yarn:scale=4"  # that of scripts/recipes/embedded.yaml
# Blocks of 256 tokens: eight to a step are as many tokens as two of 1,024.
_SHORT = ["--per_device_train_batch_size", "8"]
WAYS: dict[str, list[str]] = {
    "yarn, contiguous": [],
    "yarn, packed": ["--positions", "packed"],
    "yarn, pose": ["--positions", "pose", *_SHORT],
    "yarn, random": ["--positions", "random", *_SHORT],
    "yarn, cream": ["--positions", "cream", *_SHORT],
    "yarn, blocks of 256 tokens": ["--block_length", "256", *_SHORT],
    "yarn, LoRA": ["--train", "lora"],
    "pi": ["--patch", "pi:scale=4"],
    "abf": ["--patch", "abf:rope_theta=100000", "--target_length", "1024"],
    "no patch": ["--patch", "none", "--target_length", "1024"],
    "kerple_log, the encoding alone": ["--patch", "kerple_log", "--train", "encoding", "--target_length", "1024"],
    "kerple_log": ["--patch", "kerple_log", "--target_length", "1024"],
}  # fmt: skip


def main(
    output: Annotated[Path, typer.Option(help="JSON file to write.")],
    only: Annotated[str, typer.Option(help="Only ways with this in their name.")] = "",
    steps: Annotated[int, typer.Option(help="Optimizer steps of each.")] = 150,
) -> None:
    """Run every way and write tail perplexities before and after."""
    rows: dict[str, Any] = {}
    before = _untrained({_patch_of(options) for options in WAYS.values()})
    if only and output.is_file():
        rows = json.loads(output.read_text(encoding="utf-8"))["ways"]
    with tempfile.TemporaryDirectory() as work:
        for name, options in WAYS.items():
            if only in name:
                rows[name] = {"options": options, **_trained(Path(work) / "run", options, steps)}
                print(name, rows[name]["tail"])
    rows = {
        name: {**rows[name], "before": before[_patch_of(WAYS[name])]}
        for name in WAYS
        if name in rows
    }
    values = {
        "kind": "finetuning",
        "format": 1,
        "steps": steps,
        "environment": environment(),
        "ways": rows,
    }
    write_atomically(output, to_json(values))


def _trained(folder: Path, options: list[str], steps: int) -> dict[str, Any]:
    """Return perplexities by protocol and length at the end of a training."""
    command = [
        *(sys.executable, str(ROOT / "scripts" / "finetune.py"), "--fresh"),
        *("--output_dir", str(folder), "--max_steps", str(steps), "--save_strategy", "no"),
        *("--score_lengths", *map(str, LENGTHS), *options),
    ]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, check=False, text=True, capture_output=True, env=environ)
    if done.returncode:
        raise typer.BadParameter(f"{' '.join(options)}: {done.stderr.strip().splitlines()[-1]}")
    stored = (folder / "scores" / "perplexity.json").read_text(encoding="utf-8")
    scores = PerplexityResult.from_dict(json.loads(stored))
    return _cells(scores, scores.candidates[-1].label)


def _untrained(patches: set[str]) -> dict[str, Any]:
    """Return the same perplexities with every patch before any training."""
    from hf_posenc.cli.loading import embedded_model, load_model, load_tokenizer, one_thread

    one_thread()
    model, tokenizer = (
        load_model(embedded_model(), dtype="float32"),
        load_tokenizer(embedded_model()),
    )
    perplexities = {}
    for patch in sorted(patches):
        result = measure_perplexity(
            model, tokenizer, read_embedded(), methods=[patch], lengths=LENGTHS
        )
        perplexities[patch] = _cells(result, result.candidates[0].label)
    return perplexities


def _patch_of(options: list[str]) -> str:
    return options[options.index("--patch") + 1] if "--patch" in options else EMBEDDED_PATCH


def _cells(scores: PerplexityResult, label: str) -> dict[str, Any]:
    cells: dict[str, Any] = {"prefix": {}, "tail": {}}
    for cell in scores.cells:
        if cell.method == label:
            cells[cell.protocol][str(cell.length)] = cell.perplexity
    return cells


if __name__ == "__main__":
    typer.run(main)
