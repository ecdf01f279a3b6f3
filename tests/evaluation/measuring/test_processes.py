"""Several processes: each takes its share of the documents, and the first reports what one process alone does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_posenc.cli.app import app
from tests.support.tiny_text import prose, tiny_checkpoint

ROOT = Path(__file__).parents[3]
ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
use_cpu: true
num_processes: 2
main_process_port: 0
"""
"""The form in which `accelerate launch` runs two processes on a CPU: with `--cpu --num_processes 2` it runs one."""


@pytest.mark.parametrize(
    "launcher", ["accelerate", pytest.param("torchrun", marks=pytest.mark.slow)]
)
def test_two_processes_report_what_one_does(tmp_path: Path, launcher: str) -> None:
    model, texts = tiny_checkpoint(tmp_path / "model"), tmp_path / "texts"
    texts.mkdir()
    for index in range(3):  # shares of two documents and of one
        (texts / f"{index}.txt").write_text(prose(150, index))
    arguments = [
        str(model),
        "--text",
        str(texts),
        "--lengths",
        "32,64",
        "--no-plot",
        "--device",
        "cpu",
    ]
    arguments += ["--patch", "none", "--patch", "yarn:scale=2", "--output"]
    alone = CliRunner().invoke(app, ["perplexity", *arguments, str(tmp_path / "one")])
    assert alone.exit_code == 0, alone.output
    (tmp_path / "accelerate.yaml").write_text(ACCELERATE)
    launch = {
        "accelerate": [
            "accelerate.commands.launch",
            "--config_file",
            str(tmp_path / "accelerate.yaml"),
        ],
        "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    }[launcher]
    command = [sys.executable, "-m", *launch, str(ROOT / "scripts" / "perplexity.py"), *arguments]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    together = subprocess.run(
        [*command, str(tmp_path / "two")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert together.returncode == 0, together.stderr
    assert together.stdout.count("Wrote perplexity.json") == 1  # only the first process reports
    for name in ("perplexity.json", "perplexity.csv"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
    assert len(list((tmp_path / "two" / "records").glob("*/shard-*-of-2.jsonl"))) == 2
