"""Run a terminal session and draw it, in docs/assets/cast.svg: `python -m scripts.site.cast`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "assets" / "cast.svg"
PYTHON = """\
from transformers import AutoModelForCausalLM
from hf_posenc import get_patch, patch_model
from hf_posenc.embedded import model_path
model = AutoModelForCausalLM.from_pretrained(model_path())
model = patch_model(model, "yarn", scale=4)
print(get_patch(model))
"""
MEASURE = "hf-posenc perplexity --lengths 256,1k,2k --limit 6 --protocol tail"
PATCHES = "--patch none --patch truncation --patch yarn --patch rerope"
SESSION = ((">>> ", PYTHON), ("$ ", f"{MEASURE} {PATCHES}"))
COLUMNS = 100


def main() -> None:
    """Run the programs of the session and write the picture."""
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), highlight=False)  # noqa: PTH123, SIM115
    for prompt, program in SESSION:
        for command in program.splitlines():
            console.print(Text.assemble((prompt, "#7fd1b9"), (command, "bold")))
        console.print(Text.from_ansi(output_of(program, shell=prompt == "$ ")))
    picture = console.export_svg(title="", theme=DIMMED_MONOKAI, unique_id="cast")
    # Fonts of another site, which GitHub does not load.
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
    PICTURE.write_text(picture, encoding="utf-8")


def output_of(program: str, *, shell: bool) -> str:
    """Return what a program prints, in colours; progress goes to stderr, which is not recorded."""
    call = ["-c", program]
    if shell:
        words = program.split()[1:]
        call = ["-c", "from hf_posenc.cli import main; main()", *words, "--output", "out"]
    environ = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS)}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, *call],
            cwd=folder,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=True,
        )
    return done.stdout


if __name__ == "__main__":
    main()
