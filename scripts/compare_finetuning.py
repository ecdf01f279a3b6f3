"""Train the embedded model in several ways with `hf-posenc finetune`, and write their perplexities.

    python -m scripts.compare_finetuning --output docs/data/benchmarks/finetuning.json
    python -m scripts.compare_finetuning --output positions.json --group positions --steps 100 --seeds 42,43,44

Every way gets the same number of steps and, unless positions are drawn, the same number of tokens. The held-out tokens
are the same for all.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import Trainer

from hf_posenc import from_pretrained, unpatch_model
from hf_posenc.evaluation import measure_perplexity, measure_retrieval
from hf_posenc.evaluation.documents import read_embedded
from hf_posenc.evaluation.documents.document import TokenizedDocument
from hf_posenc.evaluation.loading import embedded_model, load_model, load_tokenizer, one_thread
from hf_posenc.evaluation.measuring.identity import environment
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.evaluation.scoring.decoder import replaced
from hf_posenc.files import to_json, write_atomically
from hf_posenc.training.options import RECIPES, read_yaml
from hf_posenc.training.train import finetune, parse_arguments
from scripts.measure_real_model import write_texts

LENGTHS = (256, 512, 1024)
EMBEDDED_PATCH = "yarn:scale=4"  # that of the recipe embedded
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
# Ways to reach 1,024 tokens; all but the first have blocks of 256.
POSITIONS: dict[str, list[str]] = {
    "blocks of 1,024 tokens": [],
    "blocks of 256 tokens": ["--block_length", "256", *_SHORT],
    "PoSE": ["--positions", "pose", *_SHORT],
    "random (Randomized YaRN)": ["--positions", "random", *_SHORT],
    "the same with a curriculum": ["--positions", "random", "--curriculum", "1,2,4", *_SHORT],
}  # fmt: skip
# Ways that train on blocks of 256 tokens alone, for 1,024.
_PI = ["--patch", "pi:scale=4", *_SHORT]
SHORT: dict[str, list[str]] = {
    "blocks of 256 tokens": [*_PI, "--block_length", "256"],
    "the same, distilled": [*_PI, "--block_length", "256", "--distill", "short"],
    "EndPrompt": [*_PI, "--positions", "endprompt"],
    "EndPrompt, distilled": [*_PI, "--positions", "endprompt", "--distill", "short"],
    "EndPrompt, distilled from itself": [*_PI, "--positions", "endprompt", "--distill", "positions"],
    "PoSE": [*_PI, "--positions", "pose"],
    "PoSE, distilled": [*_PI, "--positions", "pose", "--distill", "short"],
    "PoSE, distilled from itself": [*_PI, "--positions", "pose", "--distill", "positions"],
}  # fmt: skip
CONVERSIONS: dict[str, list[str]] = {
    "no rotation at all (DroPE)": ["--recipe", "drope"],
    "none in layers 1 and 3 (SWAN)": ["--recipe", "swan"],
}
# Ways that train SmolLM2-135M (8,192 tokens) on blocks of 1,024 tokens alone, for 16,384. Texts: the standard library.
_REAL = ["--model", "smollm2", "--block_length", "1024", "--per_device_train_batch_size", "1"]
_REAL += ["--gradient_accumulation_steps", "1", "--learning_rate", "1e-4", "--warmup_steps", "10"]
_REAL += ["--lr_scheduler_type", "constant_with_warmup", "--bf16", "true", "--use_cpu", "true"]
SMOLLM2: dict[str, list[str]] = {
    "pi, blocks": ["--patch", "pi:scale=2"],
    "pi, EndPrompt": ["--patch", "pi:scale=2", "--positions", "endprompt"],
    "pi, PoSE, distilled from itself": [
        *("--patch", "pi:scale=2", "--positions", "pose", "--distill", "positions")
    ],
    "no patch, blocks": ["--patch", "none", "--target_length", "16384"],
    "yarn, blocks": ["--patch", "yarn:scale=2"],
    "yarn, blocks, distilled": ["--patch", "yarn:scale=2", "--distill", "short"],
}  # fmt: skip
GROUPS = {
    "ways": WAYS,
    "positions": POSITIONS,
    "short": SHORT,
    "conversions": CONVERSIONS,
    "smollm2": SMOLLM2,
}
# The constant softmax scale of DroPE, for a model in which it was trained as 1.
_TEMPERATURES = ("1.1", "1.2", "1.4")


def main(
    output: Annotated[Path, typer.Option(help="JSON file to write.")],
    group: Annotated[
        str, typer.Option(help="Ways to compare: ways, positions, short, conversions, smollm2.")
    ] = "ways",
    steps: Annotated[int, typer.Option(help="Optimizer steps of each.")] = 150,
    seeds: Annotated[str, typer.Option(help="Seeds of each, separated by commas.")] = "42",
) -> None:
    """Run every way with every seed that the file has not yet, and write tail perplexities before and after."""
    one_thread()
    ways, rows = GROUPS[group], dict[str, Any]()
    known = json.loads(output.read_text(encoding="utf-8")) if output.is_file() else {"ways": {}}
    patches = {_patch_of(ways[name]) for name in ways}
    beside = {"short": {"none", EMBEDDED_PATCH}, "smollm2": {"none", "truncation"}}.get(
        group, set()
    )
    was = known.get("environment", {})  # where another version began the file, both are named
    both = {k: [*was.get(k, v).split(", "), v] for k, v in environment().items()}
    runs = {name: list(known["ways"].get(name, {}).get("runs", ())) for name in ways}
    with tempfile.TemporaryDirectory() as work:
        texts = Path(work) if group == "smollm2" else None
        if texts:
            write_texts(texts)
        before = known.get("untrained") or _untrained(patches | beside, texts)
        for seed in map(int, seeds.split(",")):
            for name in ways:
                if seed not in [run["seed"] for run in runs[name]]:
                    cells = _trained(Path(work) / "run", ways[name], steps, seed, texts)
                    print(name, seed, cells, flush=True)
                    runs[name].append({"seed": seed, **cells})
                rows[name] = {
                    "options": ways[name],
                    "runs": runs[name],
                    "before": before[_patch_of(ways[name])],
                }
                values = {
                    "kind": "finetuning",
                    "format": 1,
                    "steps": steps,
                    "environment": {k: ", ".join(dict.fromkeys(x)) for k, x in both.items()},
                    **({"untrained": before} if beside else {}),
                    "ways": {name: rows[name] for name in ways if name in rows},
                }
                write_atomically(output, to_json(values))


def _trained(
    folder: Path, options: list[str], steps: int, seed: int, texts: Path | None
) -> dict[str, Any]:
    """Return what is measured at the end of a training, and the least CPU time of a step without optimizer.

    Of DroPE also the perplexities with a constant softmax scale. `texts` is the folder of those of SmolLM2.
    """
    plain, seconds = Trainer.training_step, list[float]()
    if texts:
        options = [*_REAL, "--text", str(texts / "train"), *options]

    def timed(*given: Any) -> Any:
        began = time.process_time()
        loss = plain(*given)
        seconds.append(time.process_time() - began)
        return loss

    given = [
        *("--fresh", "--no_score", "--output_dir", str(folder), "--max_steps", str(steps)),
        *("--seed", str(seed), "--save_strategy", "no", "--eval_strategy", "no", *options),
    ]
    with replaced(Trainer, "training_step", timed):
        finetune(parse_arguments(given))
    model = from_pretrained(str(folder), dtype=torch.bfloat16 if texts else torch.float32)
    cells = _measured(model, None, texts)
    cells["seconds_per_step"] = round(min(seconds), 4)
    if _patch_of(options) == "nope":
        unpatch_model(model)
        scaled = {f: f"nope+temperature:law=constant,factor={f}" for f in _TEMPERATURES}
        cells["temperatures"] = {f: _measured(model, patch, None) for f, patch in scaled.items()}
    return cells


def _untrained(patches: set[str], texts: Path | None) -> dict[str, Any]:
    """Return the same numbers with every patch before any training."""
    name, dtype = ("smollm2", "bfloat16") if texts else (embedded_model(), "float32")
    model = load_model(name, dtype=dtype)
    return {patch: _measured(model, patch, texts) for patch in sorted(patches)}


def _measured(model: Any, patch: str | None, texts: Path | None) -> dict[str, Any]:
    """Return perplexities by protocol and length; of SmolLM2 also passkeys beyond its context."""
    methods = None if patch is None else [patch]
    if texts:
        return _of_smollm2(model, methods, texts)
    tokenizer = load_tokenizer(embedded_model())
    result = measure_perplexity(
        model, tokenizer, read_embedded(), methods=methods, lengths=LENGTHS, protocols=["tail"]
    )
    return _cells(result, result.candidates[0].label)


def _of_smollm2(model: Any, methods: list[str] | None, texts: Path) -> dict[str, Any]:
    """Return perplexities of five texts' first tokens, and the keys found beyond the context."""
    tokenizer, short, long = load_tokenizer("smollm2"), 2048, 12_288
    documents = []
    for file in sorted((texts / "texts").iterdir()):
        ids = tokenizer(file.read_text(encoding="utf-8"))["input_ids"][:long]
        documents.append(TokenizedDocument(file.name, torch.tensor(ids), None, None))
    result = measure_perplexity(model, tokenizer, documents, methods=methods, lengths=[short, long])
    label = result.candidates[0].label
    cells = [cell for cell in result.cells if cell.method == label]
    found = measure_retrieval(
        model,
        tokenizer,
        methods=methods,
        tasks=["passkey"],
        lengths=[long],
        depths=[0, 0.1, 0.2, 0.3],
        samples=1,
    )
    keys = found.needles(label, "passkey", far=True)
    return {
        **{
            p: {str(c.length): c.perplexity for c in cells if c.protocol == p}
            for p in ("prefix", "tail")
        },
        "keys": len(keys),
        "answered": sum(key.correct for key in keys),
        "first": sum(key.rank == 1 for key in keys),
    }


def _patch_of(options: list[str]) -> str:
    if "--recipe" in options:
        recipe = RECIPES / f"{options[options.index('--recipe') + 1]}.yaml"
        return str(read_yaml("recipe", recipe)["patch"])
    return options[options.index("--patch") + 1] if "--patch" in options else EMBEDDED_PATCH


def _cells(scores: PerplexityResult, label: str) -> dict[str, Any]:
    cells = [cell for cell in scores.cells if cell.method == label]
    return {"tail": {str(cell.length): cell.perplexity for cell in cells}}


if __name__ == "__main__":
    typer.run(main)
