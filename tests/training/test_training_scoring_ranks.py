"""Held-out scores in several processes and in a folder: shared out or together, complete after an interruption."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from hf_posenc import from_pretrained
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.training.processes import group_shard
from hf_posenc.training.scoring import FILE, Scores, stages_of
from tests.evaluation.retrieval.test_retrieval_scoring import forwards
from tests.support.killing import in_two_processes
from tests.support.tiny_text import byte_tokenizer, prose
from tests.training.test_training_scoring import (
    HELD_OUT,
    LENGTHS,
    STEPS,
    make_scores,
    make_trainer,
    patched_model,
    records,
    scored_trainer,
    tiny_model,
    trained,
)

ROOT = Path(__file__).parents[2]
RATE = 0.1


def stored(folder: Path) -> PerplexityResult:
    return PerplexityResult.from_dict(json.loads((folder / FILE).read_text()))


def lines(folder: Path) -> dict[str, int]:
    """Count the records that each process has written."""
    files = folder.glob("records/*/shard-*.jsonl")
    return {path.stem: len(path.read_text().splitlines()) for path in files}


def one_step(model: Any) -> None:
    ids = torch.tensor([byte_tokenizer()(prose(48, 70))["input_ids"]])
    model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(RATE * parameter.grad)
            parameter.grad = None


def train_together(folder: Path) -> None:
    options: dict[str, Any] = {"per_device_train_batch_size": 1, "ddp_backend": "gloo"}
    alone = trained(make_trainer(patched_model(attention_dropout=0.2), folder, **options))
    scores = make_scores(folder)
    trainer = scored_trainer(patched_model(attention_dropout=0.2), folder, scores, **options)
    losses, weights = trained(trainer)
    assert trainer.args.world_size == 2
    assert losses == alone[0]
    assert all(torch.equal(weights[name], alone[1][name]) for name in weights)
    result = scores.measure(trainer.model_wrapped, STEPS)
    assert [stage.step for stage in stages_of(result)] == [0, 2, 4]  # in both processes
    if group_shard().index == 0:
        torch.save(trainer.model.state_dict(), folder / "weights.pt")  # type: ignore[union-attr]


@pytest.mark.slow
def test_two_processes_share_the_windows_and_give_the_sums_of_one(tmp_path: Path) -> None:
    in_two_processes(train_together, tmp_path)
    assert lines(tmp_path) == {"shard-1-of-2": 3 * 2, "shard-2-of-2": 3 * (len(HELD_OUT) - 2)}
    model = patched_model()
    model.load_state_dict(torch.load(tmp_path / "weights.pt"))
    assert records(make_scores().measure(model, STEPS), 0) == records(stored(tmp_path), -1)


def score_sharded(folder: Path) -> None:
    model = patched_model()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    scores = make_scores(folder)
    # Before any other forward: nothing may be left that training cannot write to.
    scores.measure(model)
    one_step(model)
    scores.measure(model, 1)
    assert [stage.step for stage in stages_of(make_scores(folder).measure(model, 1))] == [0, 1]
    one_step(model)
    scores.measure(model, 2)


@pytest.mark.slow
def test_a_sharded_model_is_scored_by_all_together(tmp_path: Path) -> None:
    in_two_processes(score_sharded, tmp_path)
    assert lines(tmp_path) == {"shard-1-of-1": 3 * len(HELD_OUT)}  # and nothing was measured twice
    result, model = stored(tmp_path), patched_model()
    for step in range(3):
        if step:
            one_step(model)
        expected = records(make_scores().measure(model, step), 0)
        for found, wanted in zip(records(result, step), expected, strict=True):
            assert found[:3] == wanted[:3]
            assert found[3] == pytest.approx(wanted[3], rel=1e-5)


@pytest.mark.slow
def test_zero_3_is_scored_by_all_together_and_trains_the_same(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    config = ROOT / "scripts" / "configs" / "zero3.yaml"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    for way in ("scored", "alone"):
        command = [*launch, "-m", "tests.support.score_zero3", str(tmp_path / way), way]
        options: Any = {"capture_output": True, "text": True, "check": False}
        environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
        done = subprocess.run(command, cwd=ROOT, env=environment, **options)
        assert done.returncode == 0, done.stderr[-3000:]
    one, other = ((tmp_path / way / "losses.json").read_text() for way in ("scored", "alone"))
    assert one == other
    result = stored(tmp_path / "scored")
    assert [stage.step for stage in stages_of(result)] == [0, 2, 4]
    assert lines(tmp_path / "scored") == {"shard-1-of-1": 3 * len(HELD_OUT)}
    saved = from_pretrained(tmp_path / "scored" / "made", dtype=torch.float32)
    for model, row in ((patched_model(), 0), (saved, 2)):
        expected = records(make_scores().measure(model), 0)
        for found, wanted in zip(records(result, row), expected, strict=True):
            assert found[3] == pytest.approx(wanted[3], rel=1e-5)


def interrupted(folder: Path) -> None:
    def stop(label: str, done: int, total: int) -> None:
        if group_shard().index == 1:
            raise InterruptedError

    with contextlib.suppress(InterruptedError):
        make_scores(folder).measure(patched_model(), progress=stop)


@pytest.mark.slow
def test_what_two_processes_began_one_finishes(tmp_path: Path) -> None:
    with contextlib.suppress(RuntimeError):  # the process that waits for the other one
        in_two_processes(interrupted, tmp_path)
    begun = lines(tmp_path)
    assert begun == {"shard-1-of-2": 2, "shard-2-of-2": 0}
    make_scores(tmp_path).measure(patched_model())
    assert lines(tmp_path) == {**begun, "shard-1-of-1": 1}
    assert records(stored(tmp_path), 0) == records(make_scores().measure(patched_model()), 0)


def test_launched_processes_that_are_apart_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(PosencError, match="TrainingArguments"):
        make_scores().measure(patched_model())


# Held-out scores in a folder: what an interruption leaves, another training there, and other documents.
class StoppedError(Exception):
    pass


def test_damaged_rows_are_reported_and_not_used(tmp_path: Path) -> None:
    scores, model = make_scores(tmp_path), patched_model()
    whole = scores.measure(model)
    text = (tmp_path / FILE).read_text()
    for found in list(re.finditer(r'"(nats|fingerprint|checksum)": "?', text))[::9]:
        at = found.end()
        (tmp_path / FILE).write_text(text[:at] + ("8" if text[at] == "7" else "7") + text[at + 1 :])
        with pytest.warns(UserWarning, match="is damaged, or not a training's. It is replaced"):
            assert make_scores(tmp_path).measure(model).to_dict() == whole.to_dict()
        assert (tmp_path / FILE).read_text() == text


def test_an_interruption_loses_and_repeats_nothing(tmp_path: Path) -> None:
    whole = make_scores(tmp_path / "whole").measure(patched_model())

    def stop(label: str, done: int, total: int) -> None:
        if done * 2 > total:
            raise StoppedError

    folder = tmp_path / "cut"
    with pytest.raises(StoppedError):
        make_scores(folder).measure(patched_model(), progress=stop)
    kept = [line for path in folder.glob("records/*/*.jsonl") for line in path.open()]
    assert 0 < len(kept) < len(HELD_OUT)
    model = patched_model()
    seen = forwards(model)
    assert make_scores(folder).measure(model).to_dict() == whole.to_dict()
    assert (folder / FILE).read_text() == (tmp_path / "whole" / FILE).read_text()
    assert seen.count(LENGTHS[-1]) == 2 * (len(HELD_OUT) - len(kept))  # a prefix and a tail each
    seen.clear()
    assert make_scores(folder).measure(model).to_dict() == whole.to_dict()
    assert not seen


def test_another_training_in_the_same_folder_takes_the_place_of_later_rows(tmp_path: Path) -> None:
    def steps(model: Any, scores: Scores, seeds: Sequence[int]) -> PerplexityResult:
        result = scores.measure(model)
        for step, seed in enumerate(seeds, 1):
            torch.manual_seed(seed)
            with torch.no_grad():
                model.lm_head.weight.add_(torch.randn_like(model.lm_head.weight), alpha=0.1)
            result = scores.measure(model, step)
        return result

    first = steps(patched_model(), make_scores(tmp_path), [1, 2, 3])
    again = steps(patched_model(), make_scores(tmp_path), [1, 2])
    assert again.to_dict() == first.to_dict()  # the later row is of this very training
    other = steps(patched_model(), make_scores(tmp_path), [1, 9])
    assert [stage.step for stage in stages_of(other)] == [0, 1, 2]
    assert records(other, 1) == records(first, 1)
    assert records(other, 2) != records(first, 2)


def test_other_documents_are_another_table(tmp_path: Path) -> None:
    make_scores(tmp_path).measure(tiny_model())
    texts = [*HELD_OUT[1:], prose(170, 9)]
    other = Scores(byte_tokenizer(), texts, lengths=LENGTHS, output=tmp_path)
    result = other.measure(patched_model())
    assert [entry.label for entry in result.candidates] == ["yarn (scale 2), before"]
