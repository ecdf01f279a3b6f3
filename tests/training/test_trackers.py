"""TensorBoard and Weights & Biases receive the losses and the perplexities of a training."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from hf_posenc.training import TrainingLog
from hf_posenc.training.run.arguments import parse_arguments
from hf_posenc.training.run.train import finetune
from tests.support.tiny_text import prose, tiny_checkpoint


def trained(folder: Path, tracker: str) -> list[dict[str, float]]:
    """A training of three steps that reports; the entries of its own log."""
    model = tiny_checkpoint(folder / "model")
    for name in ("text", "held_out"):
        (folder / f"{name}.txt").write_text(prose(2_000, seed=len(name)))
    given = (
        f"--model {model} --patch yarn:scale=2 --text {folder}/text.txt --score_text {folder}/held_out.txt "
        f"--max_steps 3 --eval_strategy steps --eval_steps 3 --score_lengths 64 128 --tail_tokens 32 --use_cpu "
        f"--output_dir {folder}/run --report_to {tracker}"
    )
    finetune(parse_arguments(given.split()))
    history = TrainingLog.read(folder / "run").log_history
    assert sum("loss" in entry for entry in history) == 3
    assert any("eval_tail_perplexity_128" in entry for entry in history)
    return history


@pytest.mark.slow
@pytest.mark.usefixtures("no_plots")
def test_tensorboard(tmp_path: Path) -> None:
    reader = "tensorboard.backend.event_processing.event_accumulator"
    accumulator = pytest.importorskip(reader).EventAccumulator
    history = trained(tmp_path, "tensorboard")
    (written,) = (tmp_path / "run" / "runs").iterdir()
    events = accumulator(str(written)).Reload()
    perplexity = "eval_tail_perplexity_128", "eval/tail_perplexity_128"
    for name, tag in (("loss", "train/loss"), perplexity):
        expected = [(entry["step"], entry[name]) for entry in history if name in entry]
        found = [(event.step, event.value) for event in events.Scalars(tag)]
        assert [step for step, _ in found] == [step for step, _ in expected]
        assert [value for _, value in found] == pytest.approx([value for _, value in expected])


@pytest.mark.slow
def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    history = trained(tmp_path, "wandb")
    wandb.finish()
    (written,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    tags = {"loss": b"train/loss", "eval_tail_perplexity_128": b"eval/tail_perplexity_128"}
    numbers = [(tags[k], entry[k]) for entry in history for k in tags if k in entry]
    deadline = (
        time.monotonic() + 60
    )  # another process writes it: records of names and numbers as text
    while missing := [pair for pair in numbers if not in_record(*pair, written.read_bytes())]:
        assert time.monotonic() < deadline, missing
        time.sleep(0.1)


def in_record(tag: bytes, number: float, content: bytes) -> bool:
    return bool(
        re.search(tag + b".{0,8}" + re.escape(repr(number)[:8].encode()), content, re.DOTALL)
    )
