"""Measure methods on SmolLM2-135M (`hf-posenc fetch smollm2`), and keep the results in docs/data/real_model/.

    python scripts/measure_real_model.py --work runs/real                  everything: about 27 hours on one core
    python scripts/measure_real_model.py --work runs/real --only passkey   one part
    python scripts/measure_real_model.py --work runs/real --only tail-16k --patch my_method:scale=2

Every part but `agreement` and `recommend` is one command, which resumes where it was interrupted: `--patch` adds
methods to what the folder has. What is committed counts as measured where Python and the packages are the same
versions. All texts are files of installed packages, so that anyone has them.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated, Any

import torch
import typer

from hf_posenc.evaluation import measure_perplexity
from hf_posenc.evaluation.measuring.candidates import Candidate
from hf_posenc.evaluation.measuring.store import Key, record_line
from hf_posenc.evaluation.options import ModelOptions
from hf_posenc.evaluation.perplexity import document_key
from hf_posenc.evaluation.recommend import recommend
from hf_posenc.files import to_json, write_atomically
from hf_posenc.training.loading import open_session

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "data" / "real_model"
MODEL, TUNED = "smollm2", "finetuned"
TEXTS, NEW_MODELS, TRAINING = "texts", "new_models", "train"
# Written after the model was trained (its paper is of February 2025), with at least 32,768 of its tokens.
NEW_CODE = {
    "gemma4.py": ("transformers", "models/gemma4/modeling_gemma4.py"),
    "qwen4_exp.py": ("transformers", "models/qwen4_exp/modeling_qwen4_exp.py"),
    "pallas.py": ("torch", "_inductor/codegen/pallas.py"),
}
NEW_MODEL_TYPES = (
    *("gemma4", "qwen4_exp", "glm5_next", "esmfold2", "deimv2"),
    *("pp_doclayout_v2", "unlimited_ocr", "sam3_lite_text", "rf_detr", "edgetam_video"),
)
"""Types of transformers whose code is newer than the model too: the documents of one kind that `extend` reads."""
PYTHON_PARTS = 2
"""The reference of the Python language, as `help()` has it, is cut into so many documents."""
NOT_TRAINED_ON = {
    *("pydoc_data", "test", "tests", "idle_test", "idlelib"),
    *("lib2to3", "encodings", "site-packages"),
}
"""Folders of the standard library without training text: what is measured, and tests, tables and old code."""
LEAST_TRAINING_BYTES = 8192
"""Of a module that is trained on: it has a block of 2,048 tokens."""

CONTROLS = ("none", "truncation", "attention_sinks")
AT_16K = (
    *("yarn:scale=2", "self_extend:scale=2", "rerope", "dual_chunk", "dynamic_yarn"),
    *("sliding_window", "dynamic_ntk:scale=2", "ntk:scale=2", "ntk_by_parts:scale=2", "pi:scale=2"),
    *("leaky_rerope:scale=2", "yarn:scale=2+log_n"),
    *("self_extend:scale=4", "rerope+log_n", "ntk:scale=2.93"),
)
AT_32K = (
    *("truncation", "dual_chunk", "yarn:scale=4", "self_extend:scale=4"),
    *("rerope", "attention_sinks", "dynamic_yarn", "none"),
)
SEEKERS = ("truncation", "yarn:scale=2", "self_extend:scale=2", "dual_chunk", "rerope", "none")
"""Methods of retrieval and LongPPL: a control first, what has the lowest perplexity, and the unpatched model."""


@dataclass(frozen=True)
class Part:
    """One command: the texts that it reads, its methods, and the model, for fine-tuning a script that makes one."""

    command: str
    methods: tuple[str, ...] = ()
    text: str = ""
    model: str = MODEL


TAIL = "perplexity --protocol tail --lengths 8k,16k"
PASSKEY = "retrieval --tasks passkey --lengths 4k,12k --depths 11 --samples 1"
NEEDLES = (
    "retrieval --tasks niah_single_1,niah_multikey_2,vt --lengths 2k,12k --depths 5 --samples 1"
)
PARTS = {
    "tail-16k": Part(TAIL, (*CONTROLS, *AT_16K), TEXTS),
    "passkey": Part(PASSKEY, SEEKERS),
    "generated": Part(f"{PASSKEY.replace('depths 11', 'depths 6')} --decode generate", SEEKERS),
    "needles": Part(NEEDLES, SEEKERS),
    "reasoning": Part("retrieval --tasks babilong_qa1 --lengths 256,512 --depths 5 --samples 12", ("none",)),
    "tail-2k": Part("perplexity --protocol tail --lengths 2k --tail-tokens 1024", ("none", *AT_16K), TEXTS),
    TUNED: Part(
        "--patch yarn:scale=2 --positions pose --target_length 16384 --block_length 2048 --train lora "
        "--learning_rate 1e-4 --lr_scheduler_type linear --warmup_steps 10 --max_steps 100 --save_steps 25 "
        "--per_device_train_batch_size 1 --logging_steps 1 --no_score --report_to none", text=TRAINING),
    f"{TUNED}-tail": Part(TAIL, ("none",), TEXTS, TUNED),
    f"{TUNED}-passkey": Part(PASSKEY, ("none",), model=TUNED),
    "extend": Part("extend --target-length 12k --budget 390m", text=NEW_MODELS),
    "longppl-16k": Part("perplexity --protocol prefix --lengths 16k --longppl self@dual_chunk", SEEKERS, TEXTS),
    "tail-32k": Part("perplexity --protocol tail --lengths 8k,32k", AT_32K, TEXTS),
}  # fmt: skip
FILES = ("perplexity", "retrieval", "extend", "training_log", "loss")
"""Names of the results that are kept: as JSON, and for these parts as a picture."""
PICTURES = ("passkey", "needles", TUNED)
AGREEMENT, ADVICE, COPIED = "agreement", "recommend", "copied"
CHARACTERS, WINDOW = 16_000, 2048
"""Of the text that lm-evaluation-harness reads too, and the tokens of its windows."""
RUN = 8
"""Tokens of a run that counts as copied if it occurs before."""


def main(
    work: Annotated[Path, typer.Option(help="Folder of texts, records and results.")],
    only: Annotated[str, typer.Option(help="The parts to measure, separated by commas.")] = "",
    patch: Annotated[list[str] | None, typer.Option(help="Methods beside those of a part.")] = None,
    first: Annotated[int, typer.Option(help="Only so many of the methods of a part.")] = 1000,
) -> None:
    """Write the documents, run the parts, and copy their results."""
    write_texts(work)
    computed: dict[str, Callable[[], dict[str, Any]]] = {
        AGREEMENT: lambda: agreement(work / TEXTS / "python_1.txt"),
        ADVICE: advice,
        COPIED: lambda: copied(work / TEXTS),
    }
    for name in only.split(",") if only else (*PARTS, *computed):
        if name in computed:
            write_atomically(RESULTS / f"{name}.json", to_json(computed[name]()))
            continue
        part = PARTS[name]
        methods = (*part.methods[:first], *(patch or ()))
        text = f"--text {part.text}" if part.text else ""
        if name == TUNED:
            program = [sys.executable, "-m", "hf_posenc.training"]
            line = f"--use_cpu --model {MODEL} {part.command} {text} --output_dir {name}"
        else:
            program = [sys.executable, "-c", "from hf_posenc.cli import main; main()"]
            flags = " ".join(f"--patch {spec}" for spec in methods)
            line = f"{part.command} {part.model} {text} {flags} --dtype float32 --output {name}"
        print(f"$ {'hf-posenc finetune' if name == TUNED else 'hf-posenc'} {line}", flush=True)
        if (committed := RESULTS / f"{name}.json").exists():
            restore(work / name, json.loads(committed.read_text(encoding="utf-8")))
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run([*program, *shlex.split(line)], env=environ, cwd=work, check=True)
        (RESULTS / TUNED).mkdir(parents=True, exist_ok=True)
        for file in (work / name).glob("*.*"):
            kinds = (".json", ".png") if name in PICTURES else (".json",)
            if file.stem in FILES and file.suffix in kinds:
                kept = f"{name}/{file.name}" if name == TUNED else f"{name}{file.suffix}"
                shutil.copyfile(file, RESULTS / kept)


def restore(folder: Path, result: Mapping[str, Any]) -> None:
    """Write the records of a result's JSON into a folder, so that its command measures only what the result lacks.

    Nothing is restored of LongPPL and of `extend`, whose results have some of their values as sums alone, and of a
    result with failures.
    """
    sums_alone = result["kind"] == "extend" or result.get("curve", {}).get("methods")
    if sums_alone or result["failures"]:
        return
    methods = {}
    for entry in result["methods"]:
        candidate = Candidate.parse(entry["spec"])
        key = dataclasses.replace(candidate, original=entry["original"]).key
        methods[entry["label"]] = (key, entry["auto_scale"])
    values: dict[Key, dict[str, Any]] = {}
    documents = {entry["name"]: document_key(entry) for entry in result.get("documents", ())}
    for record in result["records"]:
        method, auto_scale = methods[record["method"]]
        if result["kind"] == "retrieval":
            sample = (record[name] for name in ("task", "length", "depth", "sample"))
            scores = ("correct", "score", "nats", "rank", "candidates", "distance", "text")
            values[(method, *sample)] = {name: record[name] for name in scores}
        else:
            lengths = [record["length"]] if auto_scale else result["settings"]["lengths"]
            item = (method, lengths[0], lengths[-1], documents[record["document"]], 0)
            sums = ("protocol", "length", "nats", "tokens", "bytes", "words", "weighted", "weight")
            value = values.setdefault(item, {"sums": [], "curve": None})
            value["sums"].append([record[name] for name in sums])
    path = folder / "records" / result["fingerprint"] / "shard-restored.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(record_line(*entry) for entry in values.items()))


def agreement(file: Path) -> dict[str, Any]:
    """Compare with lm-evaluation-harness: log likelihoods of a text in windows, and an answer to a prompt of RULER."""
    from lm_eval import simple_evaluate
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model, tokenizer, name = open_session(ModelOptions(model=MODEL, dtype="float32"))
    text = file.read_text(encoding="utf-8")[:CHARACTERS]
    window: dict[str, Any] = {"preset": "lm-eval", "lengths": [WINDOW]}
    rows = []
    for spec in ("none", "yarn:scale=2", "rerope"):
        own = measure_perplexity(model, tokenizer, [text], methods=[spec], **window).cells[0]
        with Candidate.parse(spec).checked(model).applied(model, WINDOW):
            harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=WINDOW)
            request = Instance("loglikelihood_rolling", doc={}, arguments=(text,), idx=0)
            (theirs,) = harness.loglikelihood_rolling([request], disable_tqdm=True)
        rows.append({"method": spec, "tokens": own.tokens, "nats": own.nats, "harness": -theirs})
    yarn = Candidate.parse("yarn:scale=2").checked(model)
    with tempfile.TemporaryDirectory() as folder, yarn.applied(model, WINDOW):
        tokenizer.save_pretrained(folder)  # the generator of prompts reads it by name
        harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=WINDOW)
        about = {"tokenizer": folder, "max_seq_lengths": [WINDOW]}
        results = simple_evaluate(harness, tasks=["niah_single_1"], metadata=about, limit=1)
        sample = results["samples"]["niah_single_1"][0]
        ids = torch.tensor([harness.tok_encode(sample["arguments"][0][0])])
        new = model.generate(ids, max_new_tokens=128, do_sample=False)[0, ids.shape[1] :]
    ruler = {"prompt_tokens": ids.shape[1], "harness": sample["resps"][0][0]}
    ruler["generate"] = tokenizer.decode(new, skip_special_tokens=True)
    packages = {name: version(name) for name in ("lm_eval", "torch", "transformers")}
    return {"kind": "agreement", "model": name, "rows": rows, "ruler": ruler, "versions": packages}


def advice() -> dict[str, Any]:
    """Return what `recommend` says about the model and the longest texts of the first part."""
    model, _, _ = open_session(ModelOptions(model=MODEL, dtype="float32"))
    return recommend(model, 16_384).to_dict()


def copied(folder: Path) -> dict[str, Any]:
    """Return the share of tokens that end a run which occurs farther back than the model reads, and not nearer.

    Of the scored tokens of each document: its tail with 16,384 and with 32,768 tokens, and the second half of its first
    16,384.
    """
    model, tokenizer, name = open_session(ModelOptions(model=MODEL, dtype="float32"))
    reach, rows = model.config.max_position_embeddings, []
    for file in sorted(folder.iterdir()):
        ids = tokenizer(file.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
        parts = {f"tail of {n * reach:,}": (ids[-n * reach :], n * reach - 1024) for n in (2, 4)}
        parts["whole text"] = (ids[: 2 * reach], reach)
        shares = {part: copied_share(*about, reach) for part, about in parts.items()}
        rows.append({"document": file.name, **shares})
    return {"kind": "copied", "model": name, "run": RUN, "reach": reach, "rows": rows}


def copied_share(ids: Sequence[int], begin: int, reach: int) -> float:
    """Return the share of tokens from `begin` on that end a run which stands `reach` or more before, and not nearer."""
    last: dict[tuple[int, ...], int] = {}
    copied = 0
    for end in range(RUN, len(ids) + 1):
        run = tuple(ids[end - RUN : end])
        copied += end > begin and run in last and end - last[run] >= reach
        last[run] = end
    return copied / (len(ids) - begin)


def write_texts(work: Path) -> None:
    """Write the documents as files of three folders: those measured, those of `extend`, and those trained on."""
    texts, models, training = (work / name for name in (TEXTS, NEW_MODELS, TRAINING))
    for folder in (texts, models, training):
        folder.mkdir(parents=True, exist_ok=True)
    for name, (package, file) in NEW_CODE.items():
        shutil.copyfile(_package(package) / file, texts / name)
    for name in NEW_MODEL_TYPES:
        code = _package("transformers") / "models" / name / f"modeling_{name}.py"
        shutil.copyfile(code, models / code.name)
    names = sorted(topics)
    size = -(-len(names) // PYTHON_PARTS)
    for part in range(PYTHON_PARTS):
        own = names[part * size : (part + 1) * size]
        text = "\n\n".join(topics[name] for name in own)
        (texts / f"python_{part + 1}.txt").write_text(text, encoding="utf-8")
    library = Path(os.__file__).parent
    for module in sorted(library.rglob("*.py")):
        path = module.relative_to(library)
        if not NOT_TRAINED_ON & set(path.parts) and module.stat().st_size >= LEAST_TRAINING_BYTES:
            shutil.copyfile(module, training / "_".join(path.parts))


def _package(name: str) -> Path:
    """Return the folder of an installed package."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    return Path(str(spec.origin)).parent


if __name__ == "__main__":
    typer.run(main)
