"""A run that is killed at any moment, told to stop, or refused by the disk continues as if nothing had happened.

The losses are compared as the JSON numbers that the Trainer logs, the final weights byte by byte: dropout, gradient
accumulation and a schedule are on, checkpoints are rotated down to one.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hf_posenc.training.checkpoints import MANIFEST, checkpoints, complete_checkpoints
from tests.support.file_operations import Moment
from tests.support.killing import REFUSED, launch, losses, train
from tests.support.tiny_text import text_files, tiny_checkpoint

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
LAUNCH = {1: "one_process.yaml", 2: "two_cpu_processes.yaml"}
SIGKILLED = -signal.SIGKILL


class Whole:
    """A run that nothing happened to."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.options = options
        self.folder = folder
        log = folder.parent / f"{folder.name}.operations"
        assert set(launch(folder, log=log, **options)) == {0}, output(folder)
        self.operations = log.read_text().splitlines()
        self.losses = losses(folder)
        self.weights = weights(folder)

    def place(self, name: str, number: int = 1) -> int:
        """The number of the operation of this name that comes as the `number`-th."""
        found = [n for n, each in enumerate(self.operations, start=1) if each.startswith(name)]
        return found[number - 1]

    def after(self, number: int, name: str) -> int:
        """The number of the first operation of this name behind another one."""
        return number + [each.startswith(name) for each in self.operations[number:]].index(True) + 1

    def check(self, folder: Path) -> None:
        assert set(launch(folder, **self.options)) == {0}, output(folder)
        assert losses(folder) == self.losses
        assert weights(folder) == self.weights
        assert [path.name for path in checkpoints(folder)] == ["checkpoint-12"]
        assert not (folder / ".saving").exists()


def weights(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def output(folder: Path) -> str:
    files = sorted(folder.parent.glob(f"{folder.name}-*.out"))
    return "\n".join(path.read_text() for path in files)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:

    @cache
    def made(**options: Any) -> Whole:
        return Whole(tmp_path_factory.mktemp("whole") / "run", **options)

    return made


@pytest.mark.parametrize(
    ("operation", "number", "how"),
    [
        # torn weights in checkpoint-6
        ("safetensors", 2, "within"),
        # checkpoint-9 has a trainer_state.json only after it
        ("torch.save rng_state", 3, "before"),
        ("rename", 5, "before"),  # the manifest of checkpoint-6 is not there yet
        # checkpoint-3 is half removed
        ("remove optimizer.pt", 1, "before"),
        ("rename model.safetensors", 1, "before"),  # the result is half in place
    ],
)
def test_killed_inside_a_save(
    whole: Any, tmp_path: Path, operation: str, number: int, how: str
) -> None:
    run = whole()
    assert launch(tmp_path / "run", Moment(run.place(operation, number), how)) == [SIGKILLED]
    run.check(tmp_path / "run")


SHARDED: dict[str, Any] = {"processes": 2, "kind": "sharded full"}
"""FSDP2, whose processes write a checkpoint together."""
FULL = (
    "^ERROR (checkpoint-6|The checkpoint) could not be saved: .*No space left on device.*"
    "Checkpoint-3 is complete: make room and run the same command again"
)


@pytest.mark.parametrize(
    ("operation", "options", "lines"),
    [
        ("safetensors", {}, [FULL]),
        ("torch.save optimizer", {}, [FULL]),
        ("fsync", {}, [FULL]),
        ("torch.save optimizer", {"processes": 2}, [FULL, "nother process of the run ended"]),
        ("open __0_0", SHARDED, [FULL, FULL]),
    ],
)
def test_a_full_disk_is_one_line_of_each_process_and_loses_nothing_older(
    whole: Any, tmp_path: Path, operation: str, options: dict[str, Any], lines: list[str]
) -> None:
    run, folder = whole(**options), tmp_path / "run"
    moment = Moment(run.after(run.place("mkdir checkpoint-6"), operation), "full")
    assert launch(folder, moment, **options) == [REFUSED] * len(lines)
    found = [line for line in output(folder).splitlines() if "rror" in line.lower()]
    assert len(found) == len(lines), found
    assert all(map(re.search, lines, found)), found
    assert [path.name for path in complete_checkpoints(folder)] == ["checkpoint-3"]
    run.check(folder)


def test_what_the_system_itself_says_of_a_full_disk(whole: Any, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: torch.save reports it from C++, in words of its own."""
    run = whole()
    assert launch(tmp_path / "run", work=_limited) == [REFUSED]
    (line,) = [line for line in output(tmp_path / "run").splitlines() if line.startswith("ERROR")]
    assert "checkpoint-3 could not be saved: torch.save could not write a file to its end (" in line
    assert "There is no earlier one: make room" in line
    assert checkpoints(tmp_path / "run") == []
    run.check(tmp_path / "run")


def _limited(folder: Path, moment: Moment | None, **options: Any) -> None:
    # The weights fit, the optimizer does not.
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
    train(folder, moment, **options)


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_in_a_save_that_the_other_has_done(whole: Any, tmp_path: Path, rank: int) -> None:
    run = whole(processes=2)
    # Of rank 1, the operations are: make the folder of checkpoint-3, write its random state, the same for checkpoint-6.
    moment = Moment(4, "within", rank=1) if rank else Moment(run.place("rename", 4))
    codes = launch(tmp_path / "run", moment, processes=2)
    assert codes[rank] == SIGKILLED
    if codes[1 - rank] == REFUSED:  # it was not killed before it noticed
        message = "checkpoint-6 could not be saved: another process of the run"
        assert message in output(tmp_path / "run")
    assert [path.name for path in complete_checkpoints(tmp_path / "run")] == ["checkpoint-3"]
    run.check(tmp_path / "run")


LOGS: dict[str, Any] = {"logging_steps": 5, "eval_strategy": "epoch", "eval_on_start": True}
LOGS["save_steps"] = 4
"""Averages over five steps, evaluations that draw random numbers at the ends of epochs, saves at neither."""


@pytest.mark.parametrize(
    ("step", "when", "processes", "saved"),
    [
        (5, "step", 1, 5),  # the last of its epoch: what is due then comes first
        (5, "evaluation", 1, 5),
        (5, "epoch", 1, 6),
        (7, "step", 2, 7),
        (12, "step", 1, 12),  # the last of all
    ],
)
def test_told_to_stop(
    whole: Any, tmp_path: Path, step: int, when: str, processes: int, saved: int
) -> None:
    run, folder = whole(processes=processes, **LOGS), tmp_path / "run"
    moment = Moment(step=step, when=when, number=signal.SIGTERM, rank=processes - 1)
    assert launch(folder, moment, processes=processes, **LOGS) == [128 + signal.SIGTERM] * processes
    assert complete_checkpoints(folder)[-1].name == f"checkpoint-{saved}"
    assert f"Stopped by a signal after step {saved}, and saved" in output(folder)
    run.check(folder)


def test_the_rows_are_those_that_were_asked_for(whole: Any) -> None:
    rows = whole(processes=1, **LOGS).losses
    expected = [(0, False), (5, True), (5, False), (10, True), (10, False), (12, False)]
    assert [(row["step"], "loss" in row) for row in rows] == expected


def test_the_workers_of_the_dataloader_are_told_too(whole: Any, tmp_path: Path) -> None:
    run, moment = whole(), Moment(step=2, number=-signal.SIGTERM)
    assert launch(tmp_path / "run", moment, dataloader_num_workers=2) == [128 + signal.SIGTERM]
    assert complete_checkpoints(tmp_path / "run")[-1].name == "checkpoint-2"
    run.check(tmp_path / "run")


@pytest.mark.parametrize(
    ("operation", "number", "rank"),
    [
        ("rename .metadata.tmp", 3, 0),  # checkpoint-6 has the shards of the weights, no optimizer
        ("open __0_0.distcp", 4, 0),
        ("", 16, 1),  # a shard of the other process
    ],
)
def test_killed_while_processes_write_their_shards(
    whole: Any, tmp_path: Path, operation: str, number: int, rank: int
) -> None:
    run, folder = whole(**SHARDED), tmp_path / "run"
    place = run.place(operation, number) if operation else number
    assert launch(folder, Moment(place, rank=rank), **SHARDED)[rank] == SIGKILLED
    assert [path.name for path in complete_checkpoints(folder)] == ["checkpoint-3"]
    run.check(folder)


@pytest.mark.parametrize(("kind", "processes"), [("full", 1), ("lora", 2), ("sharded lora", 2)])
def test_ten_kills(whole: Any, tmp_path: Path, kind: str, processes: int) -> None:
    run = whole(processes=processes, kind=kind)
    chance = random.Random(processes)
    count, inside, folder = 0, 0, tmp_path / "run"
    while count < 10:
        where = chance.choice(["operation", "operation", "step"])
        how, rank = chance.choice(["before", "within"]), chance.randrange(processes)
        if where == "operation":
            most = 120 if rank == 0 else 6
            moment = Moment(chance.randrange(1, most), how, rank=rank)
        else:
            moment = Moment(step=chance.randrange(1, 13), rank=rank)
        if set(launch(folder, moment, **run.options)) == {0}:  # it came to its end first
            assert losses(folder) == run.losses
            shutil.rmtree(folder)
            continue
        count += 1
        inside += where == "operation"
    assert inside >= 4
    run.check(folder)


@pytest.mark.parametrize(
    ("distilled", "kind", "processes"),
    [("positions", "full", 1), ("short", "full", 1), ("short", "lora", 2), ("positions", "sharded full", 2)],
)  # fmt: skip
def test_a_distilled_run_continues_as_if_nothing_had_happened(
    whole: Any, tmp_path: Path, distilled: str, kind: str, processes: int
) -> None:
    run, folder = whole(distilled=distilled, kind=kind, processes=processes), tmp_path / "run"
    for step in (5, 8):
        assert launch(folder, Moment(step=step, rank=processes - 1), **run.options)[-1] == SIGKILLED
    run.check(folder)


@pytest.mark.parametrize("processes", [1, 2])
def test_the_launcher_is_told_to_stop(tmp_path: Path, processes: int) -> None:
    """With one process, `accelerate launch` dies of the signal and does not pass it on; with two, it does."""
    model = tiny_checkpoint(tmp_path / "model", attention_dropout=0.1)
    texts = text_files(tmp_path / "texts", 4, 2000)
    config = ROOT / "scripts" / "configs" / LAUNCH[processes]
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    command += [str(ROOT / "scripts" / "finetune.py"), "--model", str(model), "--use_cpu"]
    command += ["--patch", "yarn:scale=2", "--text", str(texts), "--no_score", "--max_steps", "60"]
    command += ["--save_steps", "5", "--report_to", "none", "--output_dir"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def finish(folder: Path) -> tuple[bytes, list[Any]]:
        subprocess.run([*command, str(folder)], env=environment, check=True, capture_output=True)
        state = json.loads((folder / "checkpoint-60" / "trainer_state.json").read_text())
        rows = [(row["step"], row["loss"]) for row in state["log_history"] if "loss" in row]
        return (folder / "model.safetensors").read_bytes(), rows

    expected, folder = finish(tmp_path / "whole"), tmp_path / "stopped"
    nothing: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    launcher = subprocess.Popen([*command, str(folder)], env=environment, **nothing)
    while not list(folder.glob(f"checkpoint-*/{MANIFEST}")):
        assert launcher.poll() is None
        time.sleep(0.01)
    launcher.terminate()
    assert launcher.wait(60) != 0
    assert finish(folder) == expected
    assert len(expected[1]) == 60
