"""scripts/finetune_loop.py: the losses of the Trainer, bit for bit the same after a kill, short enough to be read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import AutoTokenizer, Trainer, TrainingArguments, set_seed

from hf_posenc import from_pretrained, get_patch
from hf_posenc.errors import PosencError
from hf_posenc.evaluation import read_paths
from hf_posenc.training import (
    PositionCollator,
    choose_parameters,
    chunk_loss,
    last_complete_checkpoint,
    prepare_blocks,
)
from hf_posenc.training.checkpoints import mark_complete
from hf_posenc.training.collator import DRAWS
from hf_posenc.training.train import apply_patch, resolve_lengths
from scripts import finetune_loop
from tests.support.selection import late
from tests.support.tiny_text import prose, tiny_checkpoint

pytestmark = pytest.mark.slow  # whole trainings or graphs

ROOT = Path(__file__).parents[2]
STEPS, SAVED = 9, 2
BATCH = 4
"""Blocks in a batch. 33 blocks of 128 tokens make epochs of 3 steps of 3 batches, 66 of 64 epochs of 6 steps, the last
of which has 2."""


class KilledError(Exception):
    """Stands for a killed process."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "text.txt").write_text(prose(33 * 128))
    return tiny_checkpoint(folder, attention_dropout=0.1)


@pytest.fixture(autouse=True)
def _own_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    AcceleratorState._reset_state(reset_partial_state=True)


def command(checkpoint: Path, output: Path, **more: Any) -> list[str]:
    options: dict[str, Any] = {"model": checkpoint, "text": checkpoint / "text.txt"}
    options |= {"output_dir": output, "patch": "yarn:scale=2", "learning_rate": 5e-3}
    options |= {"warmup_steps": 2, "max_steps": STEPS, "per_device_train_batch_size": BATCH}
    options |= {"gradient_accumulation_steps": 3, "save_steps": SAVED, **more}
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]


def losses_of_loop(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], *, killed_at: int = 0
) -> list[float]:
    """Runs the loop in this process, to its end or to the step at which it is killed; the losses that it reports."""
    losses: list[float] = []

    def log(self: Accelerator, values: dict[str, float], step: int) -> None:
        losses.append(values["loss"])
        if step == killed_at:
            raise KilledError(losses)

    monkeypatch.setattr(Accelerator, "log", log)
    monkeypatch.setattr(sys, "argv", ["finetune_loop.py", *arguments])
    AcceleratorState._reset_state(reset_partial_state=True)
    finetune_loop.main()
    return losses


def losses_of_trainer(
    checkpoint: Path,
    output: Path,
    positions: str,
    train: Any,
    *,
    patch: str = "yarn:scale=2",
    target_length: int | None = None,
    **more: Any,
) -> list[float]:
    """The same training by transformers.Trainer, which saves the result too."""
    set_seed(42)
    model = from_pretrained(checkpoint, dtype="float32")
    apply_patch(model, patch, target_length)
    lengths = resolve_lengths(model, positions, target_length)
    model = choose_parameters(model, train)
    chunk_loss(model)
    target = lengths.target if positions in DRAWS else None
    collator = PositionCollator(positions, target_length=target, seed=42)
    texts = read_paths([str(checkpoint / "text.txt")])
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    blocks = prepare_blocks(texts, tokenizer, length=lengths.block, positions=positions)
    more.setdefault("gradient_accumulation_steps", 3)
    arguments = TrainingArguments(
        output_dir=str(output), use_cpu=True, report_to=[], remove_unused_columns=False,
        disable_tqdm=True, save_strategy="no", logging_steps=1, max_steps=STEPS, learning_rate=5e-3,
        warmup_steps=2, per_device_train_batch_size=BATCH, adam_beta2=0.95, **more,
    )  # fmt: skip
    trainer = Trainer(model, arguments, collator, blocks.dataset, callbacks=[collator])
    trainer.train()
    trainer.save_model()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize(("positions", "train"), [*late(["packed"], ["full"]), ("pose", "lora")])
def test_the_losses_are_those_of_the_trainer(
    positions: str, train: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = command(checkpoint, tmp_path / "loop", positions=positions, train=train)
    losses = losses_of_loop(monkeypatch, arguments)
    expected = losses_of_trainer(checkpoint, tmp_path / "trainer", positions, train)
    assert len(losses) == STEPS
    assert losses == pytest.approx(expected, rel=2e-6)
    assert losses[-1] < losses[0] - 0.5  # in ten runs of other seeds, 1.5 at least
    assert get_patch(from_pretrained(tmp_path / "loop")) is not None


@pytest.mark.parametrize("patch", ["dynamic_yarn", *late(["rerope:window=16", "kerple_log"])])
def test_mixed_precision_gives_the_result_of_the_trainer(
    patch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moving frequencies, a band and a bias."""
    model = tiny_checkpoint(tmp_path / "model")  # no dropout, under which no fused path computes
    (model / "text.txt").write_text(prose(33 * 128))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    own: dict[str, Any] = {"patch": patch, "target_length": 128, "gradient_accumulation_steps": 1}
    losses = losses_of_loop(monkeypatch, command(model, tmp_path / "loop", **own))
    own |= {"bf16": True, "optim": "adamw_torch"}
    expected = losses_of_trainer(model, tmp_path / "trainer", "contiguous", "full", **own)
    assert losses == pytest.approx(expected, rel=2e-6)
    assert losses[-1] < losses[0] - 0.5  # in ten runs of other seeds, 3.8 at least


def test_killed_between_checkpoints_it_goes_on_bit_for_bit(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = losses_of_loop(monkeypatch, command(checkpoint, tmp_path / "whole", positions="pose"))
    assert len(set(whole)) == STEPS
    arguments = command(checkpoint, tmp_path / "killed", positions="pose")
    done = 0
    for killed_at in (4, 7, 9):  # it goes on within an epoch, between two, within a later one
        with pytest.raises(KilledError) as killed:
            losses_of_loop(monkeypatch, arguments, killed_at=killed_at)
        assert killed.value.args == (whole[done:killed_at],)
        done = (killed_at - 1) // SAVED * SAVED
    assert losses_of_loop(monkeypatch, arguments) == whole[done:]
    weights = [tmp_path / name / "model.safetensors" for name in ("whole", "killed")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_killed_inside_a_save_it_goes_on_from_the_one_before(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = command(checkpoint, tmp_path)
    with monkeypatch.context() as patch:

        def killed(path: Path) -> None:
            if path.name == "checkpoint-4":
                raise KilledError
            mark_complete(path)

        patch.setattr("hf_posenc.training.checkpoints.mark_complete", killed)
        with pytest.raises(KilledError):
            losses_of_loop(patch, arguments)
    assert (tmp_path / "checkpoint-4" / "model.safetensors").is_file()
    assert last_complete_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    assert len(losses_of_loop(monkeypatch, arguments)) == STEPS - 2
    assert last_complete_checkpoint(tmp_path) == tmp_path / f"checkpoint-{STEPS}"
    assert losses_of_loop(monkeypatch, arguments) == []  # it is done
    with pytest.raises(PosencError, match=r"learning_rate was 0\.005, is 0\.1"):
        losses_of_loop(monkeypatch, command(checkpoint, tmp_path, learning_rate=0.1))


@pytest.mark.slow
def test_two_processes_report_what_one_does(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    model = tiny_checkpoint(tmp_path)  # without dropout, which each process draws for its rows
    (tmp_path / "text.txt").write_text(prose(32 * 128))  # as many for each
    expected = losses_of_loop(monkeypatch, command(model, tmp_path / "one", max_steps=4))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("ACCELERATE_USE_CPU", None)  # the launch file alone must do
    config = "scripts/configs/two_cpu_processes.yaml"
    launch = ["accelerate.commands.launch", "--config_file", config]
    given = command(model, tmp_path / "two", max_steps=4, per_device_train_batch_size=BATCH // 2)
    script = [sys.executable, "-m", *launch, "scripts/finetune_loop.py", *given]
    options: Any = {"env": environment, "cwd": ROOT, "capture_output": True, "text": True}
    done = subprocess.run(script, timeout=300, check=False, **options)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if "loss" in line]
    assert [float(line[3]) for line in lines] == pytest.approx(expected, abs=2e-6)
    printed = capsys.readouterr().out.splitlines()
    norms = [float(line.split()[5]) for line in printed if "loss" in line]
    assert [float(line[5]) for line in lines] == pytest.approx(norms, rel=1e-3)  # as printed


def test_it_is_short_enough_to_be_read() -> None:
    assert len((ROOT / "scripts" / "finetune_loop.py").read_text().splitlines()) <= 105
