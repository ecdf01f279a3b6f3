"""Repeat what was measured on SmolLM2-135M by the commands in docs/data/real_model/, or measure more for that folder.

    hf-posenc fetch smollm2                                                and `fetch gemma3`, for passkey-gemma3
    python scripts/measure_real_model.py --work runs/real                  everything: about 29 hours on one core
    python scripts/measure_real_model.py --work runs/real --only passkey   one result
    python scripts/measure_real_model.py --work runs/real --only tail-16k --patch my_method:scale=2

Every command resumes where it was interrupted in the folder. All texts are files of installed packages, so that anyone
has them.
"""

from __future__ import annotations

import importlib.resources
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated, Any

import typer

from hf_posenc.evaluation.loading import open_session
from hf_posenc.evaluation.options import ModelOptions
from hf_posenc.evaluation.recommend import recommend
from hf_posenc.files import to_json, write_atomically

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a file
from scripts.results import REAL_MODEL, ROOT, read

PARTS = (
    *("tail-16k", "passkey", "generated", "needles", "reasoning", "tail-2k", "finetuned"),
    *("finetuned-tail", "finetuned-passkey", "extend", "longppl-16k", "tail-32k"),
    *("recommend", "copied", "passkey-dynamic", "passkey-32k", "passkey-gemma3", "kv-mrcr"),
)
"""The results; a fine-tuning comes before the measurements of its model, and what no command computes at the end."""
KEPT = ("perplexity", "retrieval", "extend", "training_log")
"""Names of the files that become results: JSON, and pictures where one is committed."""
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
NOT_TRAINED_ON = {
    *("pydoc_data", "test", "tests", "idle_test", "idlelib"),
    *("lib2to3", "encodings", "site-packages"),
}
"""Folders of the standard library without training text: what is measured, and tests, tables and old code."""
LEAST_TRAINING_BYTES = 8192
"""Of a module that is trained on: it has a block of 2,048 tokens."""
RUN = 8
"""Tokens of a run that counts as copied if it occurs before."""


def main(
    work: Annotated[Path, typer.Option(help="Folder of texts, records and results.")],
    only: Annotated[str, typer.Option(help="The results to measure, separated by commas.")] = "",
    patch: Annotated[list[str] | None, typer.Option(help="Methods beside those measured.")] = None,
) -> None:
    """Write the documents, run the commands of the results, and keep what they write."""
    write_texts(work)
    computed: dict[str, Callable[[], dict[str, Any]]] = {
        "recommend": lambda: recommend(_opened()[0], 16_384).to_dict(),
        "copied": lambda: copied(work / "texts"),
    }
    for name in only.split(",") if only else PARTS:
        if name in computed:
            write_atomically(REAL_MODEL / f"{name}.json", to_json(computed[name]()))
            continue
        folder = REAL_MODEL / name
        tuning = folder.is_dir()
        values = read(folder / "training_log.json" if tuning else folder.with_suffix(".json"))
        command = values.get("command") or values["about"]["command"]
        words = shlex.split(f"{command} {'--output_dir' if tuning else '--output'} {name}")
        words += [word for spec in patch or () for word in ("--patch", spec)]
        program = [sys.executable, "-c", "from hf_posenc.cli import main; main()", *words[1:]]
        print(f"$ {shlex.join(words)}", flush=True)
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(program, env=environ, cwd=work, check=True)
        for file in (file for file in (work / name).glob("*.*") if file.stem in KEPT):
            kept = folder / file.name if tuning else folder.with_suffix(file.suffix)
            if kept.exists():
                shutil.copyfile(file, kept)


def copied(folder: Path) -> dict[str, Any]:
    """Return the share of tokens that end a run which occurs farther back than the model reads, and not nearer.

    Of the scored tokens of each document: its tail with 16,384 and with 32,768 tokens, and the second half of its first
    16,384.
    """
    model, tokenizer, name = _opened()
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
    texts, models, training = (work / name for name in ("texts", "new_models", "train"))
    for folder in (texts, models, training):
        folder.mkdir(parents=True, exist_ok=True)
    for name, (package, file) in NEW_CODE.items():
        shutil.copyfile(_package(package) / file, texts / name)
    for name in NEW_MODEL_TYPES:
        code = _package("transformers") / "models" / name / f"modeling_{name}.py"
        shutil.copyfile(code, models / code.name)
    # The reference of the Python language, as `help()` has it, in two halves.
    names = sorted(topics)
    half = -(-len(names) // 2)
    for part, own in enumerate((names[:half], names[half:]), 1):
        text = "\n\n".join(topics[name] for name in own)
        (texts / f"python_{part}.txt").write_text(text, encoding="utf-8")
    library = Path(os.__file__).parent
    for module in sorted(library.rglob("*.py")):
        path = module.relative_to(library)
        if not NOT_TRAINED_ON & set(path.parts) and module.stat().st_size >= LEAST_TRAINING_BYTES:
            shutil.copyfile(module, training / "_".join(path.parts))


def _opened() -> tuple[Any, Any, str | None]:
    return open_session(ModelOptions(model="smollm2", dtype="float32"))


def _package(name: str) -> Path:
    """Return the folder of an installed package."""
    return Path(str(importlib.resources.files(name)))


if __name__ == "__main__":
    typer.run(main)
