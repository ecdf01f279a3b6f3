"""Run the commands of the worked example in docs/finetuning.md, and keep their output in docs/data/finetuned/.

python scripts/make_finetuned.py
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from hf_posenc.files import write_atomically

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "data" / "finetuned"
RESULT = "longer"
COMMANDS = {
    "finetune": f"accelerate launch scripts/finetune.py --output_dir {RESULT} --verify_export",
    "evaluate": f"hf-posenc perplexity {RESULT} --patch none --lengths 256,512,1024,2048 --output {RESULT}-perplexity",
    "transformers4": f"hf-posenc export {RESULT} --to transformers4",
    "vllm": f"hf-posenc export {RESULT} --to vllm",
    "llama.cpp": f"hf-posenc export {RESULT} --to llama.cpp",
}  # fmt: skip
"""The commands, by the name of the file with their output."""
KEPT = ("README.md", "loss.png", "perplexity.png", "perplexity.json", "training_log.json")


def main() -> None:
    """Run the commands one after the other."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    programs = Path(sys.executable).parent
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{programs}:{os.environ['PATH']}"}
    environ["COLUMNS"] = "100"
    with tempfile.TemporaryDirectory() as work:
        (Path(work) / "scripts").symlink_to(ROOT / "scripts")
        for name, command in COMMANDS.items():
            print(f"$ {command}", flush=True)
            done = subprocess.run(
                shlex.split(command), cwd=work, env=environ, text=True, capture_output=True, check=False
            )  # fmt: skip
            if done.returncode:
                sys.exit(done.stderr)
            write_atomically(FOLDER / f"{name}.txt", _clean(done.stdout))
        for file in KEPT:
            shutil.copyfile(Path(work) / RESULT / file, FOLDER / file)
        evaluated = Path(work) / f"{RESULT}-perplexity" / "perplexity.json"
        shutil.copyfile(evaluated, FOLDER / "evaluation.json")


def _clean(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n"


if __name__ == "__main__":
    main()
