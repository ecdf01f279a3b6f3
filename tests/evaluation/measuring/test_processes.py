"""Several processes: each takes its share of the documents, and the first reports what one process alone does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_posenc.cli import main
from tests.support.commands import invoke
from tests.support.killing import launch
from tests.support.selection import late
from tests.support.tiny_text import text_files, tiny_checkpoint

ROOT = Path(__file__).parents[3]
ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
use_cpu: true
num_processes: 2
main_process_port: 0
"""
"""The form in which `accelerate launch` runs two processes on a CPU: with `--cpu --num_processes 2` it runs one."""


def together(arguments: list[str], folder: Path, launcher: str | None) -> str:
    """Run the command in two processes, and return what they print."""
    if launcher is None:
        assert launch(folder / "two", processes=2, work=_measure, arguments=arguments) == [0, 0]
        return "".join((folder / f"two-{rank}.out").read_text() for rank in range(2))
    (folder / "accelerate.yaml").write_text(ACCELERATE)
    command = {
        "accelerate": f"accelerate.commands.launch --config_file {folder / 'accelerate.yaml'}",
        "torchrun": "torch.distributed.run --standalone --nproc-per-node 2",
    }[launcher].split()
    alone = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    shown: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 300, "check": False}
    words = [*command, str(ROOT / "scripts" / "perplexity.py"), *arguments]
    done = subprocess.run([sys.executable, "-m", *words], env={**os.environ, **alone}, **shown)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _measure(output: Path, moment: Any, *, arguments: list[str]) -> None:
    main(["perplexity", *arguments])


@pytest.mark.parametrize(
    "launcher", late([None, "accelerate", "torchrun"]), ids=lambda name: name or "forked"
)
def test_two_processes_report_what_one_does(tmp_path: Path, launcher: str | None) -> None:
    """Also without a launcher, in processes whose environment is what one would set."""
    model = tiny_checkpoint(tmp_path / "model")
    texts = text_files(tmp_path / "texts", 3, 150)  # shares of two documents and of one
    options = "--lengths 32,64 --no-plot --device cpu --patch none --patch yarn:scale=2 --output"
    arguments = [str(model), "--text", str(texts), *options.split()]
    alone = invoke("perplexity", *arguments, tmp_path / "one")
    assert alone.exit_code == 0, alone.output
    printed = together([*arguments, str(tmp_path / "two")], tmp_path, launcher)
    assert printed.count("Wrote perplexity.json") == 1  # only the first process reports
    for name in ("perplexity.json", "perplexity.csv"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
    assert len(list((tmp_path / "two" / "records").glob("*/shard-*-of-2.jsonl"))) == 2
