"""Measure methods on SmolLM2-135M (`hf-posenc fetch smollm2`), and keep the results in docs/data/real_model/.

    python scripts/measure_real_model.py --work runs/real                  everything: about 20 hours on one core
    python scripts/measure_real_model.py --work runs/real --only passkey   one part
    python scripts/measure_real_model.py --work runs/real --only tail-16k --patch my_method:scale=2

Every part but `agreement` is one command of `hf-posenc`, which resumes where it was interrupted: `--patch` adds methods
to what the folder has. The documents are files of installed packages, so that anyone has them.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated, Any

import torch
import typer

from hf_posenc.cli.loading import open_session
from hf_posenc.evaluation import measure_perplexity
from hf_posenc.evaluation.measuring.candidates import Candidate
from hf_posenc.evaluation.options import ModelOptions
from hf_posenc.files import to_json, write_atomically

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "data" / "real_model"
MODEL, TEXTS = "smollm2", "texts"
# Written after the model was trained (published in February 2025), with at least 32,768 of its tokens.
NEW_CODE = {
    "gemma4.py": ("transformers", "models/gemma4/modeling_gemma4.py"),
    "qwen4_exp.py": ("transformers", "models/qwen4_exp/modeling_qwen4_exp.py"),
    "pallas.py": ("torch", "_inductor/codegen/pallas.py"),
}
PYTHON_PARTS = 2
"""The reference of the Python language, as `help()` has it, is cut into so many documents."""

CONTROLS = ("none", "truncation", "attention_sinks")
AT_16K = (
    *("yarn:scale=2", "self_extend:scale=2", "rerope", "dual_chunk", "dynamic_yarn"),
    *("sliding_window", "dynamic_ntk:scale=2", "ntk:scale=2", "ntk_by_parts:scale=2", "pi:scale=2"),
    *("leaky_rerope:scale=2", "yarn:scale=2+log_n"),
)
AT_32K = ("yarn:scale=4", "self_extend:scale=4", "rerope", "dual_chunk", "dynamic_yarn")
SEEKERS = ("none", "truncation", "yarn:scale=2", "self_extend:scale=2", "rerope", "dual_chunk")
"""Methods of the retrieval: the controls, and what has the lowest perplexity."""
PARTS = {
    "tail-16k": ("perplexity --protocol tail --lengths 8k,16k", (*CONTROLS, *AT_16K)),
    "passkey": ("retrieval --tasks passkey --lengths 4k,12k --depths 11 --samples 1", SEEKERS),
    "reasoning": (
        "retrieval --tasks babilong_qa1 --lengths 256,512 --depths 5 --samples 12",
        ("none",),
    ),
    "tail-2k": ("perplexity --protocol tail --lengths 2k --tail-tokens 1024", ("none", *AT_16K)),
    "tail-32k": ("perplexity --protocol tail --lengths 8k,32k", (*CONTROLS, *AT_32K)),
}
"""The command of each part, and its methods."""
AGREEMENT = "agreement"
CHARACTERS, WINDOW = 16_000, 2048
"""Of the text that lm-evaluation-harness reads too, and the tokens of its windows."""


def main(
    work: Annotated[Path, typer.Option(help="Folder of texts, records and results.")],
    only: Annotated[str, typer.Option(help="The parts to measure, separated by commas.")] = "",
    patch: Annotated[list[str] | None, typer.Option(help="Methods beside those of a part.")] = None,
    first: Annotated[int, typer.Option(help="Only so many of the methods of a part.")] = 1000,
) -> None:
    """Write the documents, run the parts, and copy their results."""
    texts = write_texts(work / TEXTS)
    for name in only.split(",") if only else (*PARTS, AGREEMENT):
        if name == AGREEMENT:
            write_atomically(RESULTS / f"{name}.json", to_json(agreement(texts / "python_1.txt")))
            continue
        command, methods = PARTS[name]
        flags = [f"--patch {spec}" for spec in (*methods[:first], *(patch or ()))]
        read = f"--text {TEXTS}" if command.startswith("perplexity") else ""
        line = f"{command} {MODEL} {read} {' '.join(flags)} --dtype float32 --output {name}"
        print(f"$ hf-posenc {line}", flush=True)
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        program = [sys.executable, "-c", "from hf_posenc.cli import main; main()"]
        subprocess.run([*program, *shlex.split(line)], env=environ, cwd=work, check=True)
        for file in (work / name).glob("*.*"):
            if file.suffix in (".json", ".png") and file.stem != "timings":
                RESULTS.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, RESULTS / f"{name}{file.suffix}")


def agreement(file: Path) -> dict[str, Any]:
    """Compare with lm-evaluation-harness: log likelihoods of a text in windows, and an answer to a prompt of RULER."""
    from lm_eval import simple_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model, tokenizer, name = open_session(ModelOptions(model=MODEL, dtype="float32"))
    text = file.read_text(encoding="utf-8")[:CHARACTERS]
    rows = []
    for spec in ("none", "yarn:scale=2", "rerope"):
        own = measure_perplexity(
            model, tokenizer, [text], preset="lm-eval", lengths=[WINDOW], methods=[spec]
        ).cells[0]
        with Candidate.parse(spec).checked(model).applied(model, WINDOW):
            harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=WINDOW)
            request = Instance("loglikelihood_rolling", doc={}, arguments=(text,), idx=0)
            (theirs,) = harness.loglikelihood_rolling([request], disable_tqdm=True)
        rows.append({"method": spec, "tokens": own.tokens, "nats": own.nats, "harness": -theirs})
    with (
        tempfile.TemporaryDirectory() as folder,
        Candidate.parse("yarn:scale=2").checked(model).applied(model, WINDOW),
    ):
        tokenizer.save_pretrained(folder)  # the generator of prompts reads it by name
        harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=WINDOW)
        about = {"tokenizer": folder, "max_seq_lengths": [WINDOW]}
        results = simple_evaluate(harness, tasks=["niah_single_1"], metadata=about, limit=1)
        sample = results["samples"]["niah_single_1"][0]
        ids = torch.tensor([harness.tok_encode(sample["arguments"][0][0])])
        new = model.generate(ids, max_new_tokens=128, do_sample=False)[0, ids.shape[1] :]
    ruler = {
        "prompt_tokens": ids.shape[1],
        "harness": sample["resps"][0][0],
        "generate": tokenizer.decode(new, skip_special_tokens=True),
    }
    packages = {name: version(name) for name in ("lm_eval", "torch", "transformers")}
    return {"kind": "agreement", "model": name, "rows": rows, "ruler": ruler, "versions": packages}


def write_texts(folder: Path) -> Path:
    """Write the documents as files of a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (package, file) in NEW_CODE.items():
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        shutil.copyfile(Path(spec.origin).parent / file, folder / name)
    names = sorted(topics)
    size = -(-len(names) // PYTHON_PARTS)
    for part in range(PYTHON_PARTS):
        own = names[part * size : (part + 1) * size]
        text = "\n\n".join(topics[name] for name in own)
        (folder / f"python_{part + 1}.txt").write_text(text, encoding="utf-8")
    return folder


if __name__ == "__main__":
    typer.run(main)
