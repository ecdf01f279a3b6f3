"""Checkpoints and results that are complete or absent, whose run a folder holds, and where it resumes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerState, TrainingArguments

from hf_posenc.errors import PosencError
from hf_posenc.files import write_atomically
from hf_posenc.training import checkpoints as folder_module
from hf_posenc.training.checkpoints import (
    MANIFEST,
    SETTINGS,
    SafeCheckpoints,
    TrainingFolder,
    checkpoints,
    clear_partial,
    complete_checkpoints,
    differences,
    discard,
    last_complete_checkpoint,
    mark_complete,
    resume_point,
    rotate,
    save_result,
    settings_of,
)
from tests.support.file_operations import Moment
from tests.support.killing import launch
from tests.support.processes import running

LR = {"arguments": {"learning_rate": 1e-3, "seed": 1}, "patch": {"method": "yarn"}}


def make(folder: Path, step: int, *, complete: bool = True, age: float = 0.0) -> Path:
    path = folder / f"checkpoint-{step}"
    (path / "global_step").mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"weights" * step)
    (path / "trainer_state.json").write_text("{}")
    (path / "global_step" / "shard_0.pt").write_bytes(b"optimizer")  # DeepSpeed's and FSDP's
    if complete:
        mark_complete(path)
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def test_the_newest_whole_one_is_chosen_by_step_and_the_partial_one_goes(tmp_path: Path) -> None:
    whole = make(tmp_path, 10, age=500)
    make(tmp_path, 9)  # touched later
    partial = make(tmp_path, 12, complete=False)
    (tmp_path / "checkpoint-final").mkdir()
    assert last_complete_checkpoint(tmp_path) == whole
    assert clear_partial(tmp_path) == [partial]
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-9", "checkpoint-10"]
    assert (tmp_path / "checkpoint-final").exists()
    assert last_complete_checkpoint(tmp_path / "nothing") is None


def test_a_whole_one_that_lost_a_file_since_is_an_error_and_never_removed(tmp_path: Path) -> None:
    make(tmp_path, 3)
    path = make(tmp_path, 6)
    (path / "global_step" / "shard_0.pt").unlink()
    with pytest.raises(PosencError, match=r"checkpoint-6 was complete, but .*0.pt is missing"):
        last_complete_checkpoint(tmp_path)
    assert clear_partial(tmp_path) == []
    (path / "global_step" / "shard_0.pt").write_bytes(b"x")
    with pytest.raises(PosencError, match="has another size"):
        last_complete_checkpoint(tmp_path)


def test_a_torn_manifest_is_a_partial_checkpoint(tmp_path: Path) -> None:
    (make(tmp_path, 3) / MANIFEST).write_text('{"kind": "checkp')
    assert complete_checkpoints(tmp_path) == []


ALL = [2, 4, 6, 10]


@pytest.mark.parametrize(
    ("limit", "best", "kept"),
    [
        *((None, None, ALL), (0, None, ALL), (2, None, [6, 10]), (1, None, [10])),
        *((1, 4, [4, 10]), (2, 4, [4, 10]), (3, 4, [4, 6, 10]), (2, 99, [6, 10])),
        *((4, None, ALL), (5, None, ALL), (6, 4, ALL)),
    ],
)
def test_rotation_goes_by_step_and_keeps_the_best(
    tmp_path: Path, limit: int | None, best: int | None, kept: list[int]
) -> None:
    for step in (10, 6, 4, 2):  # the oldest is touched last
        make(tmp_path, step, age=step)
    rotate(tmp_path, limit, None if best is None else tmp_path / f"checkpoint-{best}")
    assert [int(path.name.split("-")[1]) for path in checkpoints(tmp_path)] == kept


def test_a_killed_removal_is_partial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path, 3)
    monkeypatch.setattr(shutil, "rmtree", lambda *_: (_ for _ in ()).throw(OSError("killed")))
    with pytest.raises(PosencError, match="checkpoint-3 cannot be removed"):
        discard(path)
    monkeypatch.undo()
    assert complete_checkpoints(tmp_path) == []
    assert clear_partial(tmp_path) == [path]


def test_other_settings_are_refused_with_what_differs(tmp_path: Path) -> None:
    assert resume_point(tmp_path, LR) is None
    path = make(tmp_path, 3)
    assert resume_point(tmp_path, LR) == path
    other = {**LR, "arguments": {"learning_rate": 1e-4, "seed": 1}, "patch": {"method": "pi"}}
    message = r"learning_rate was 0.001, is 0.0001; patch.method was .*--fresh"
    with pytest.raises(PosencError, match=message):
        resume_point(tmp_path, other)
    assert path.exists()
    assert resume_point(tmp_path, other, fresh=True) is None
    assert not path.exists()
    newer = make(tmp_path, 6)
    assert resume_point(tmp_path, other, fresh=True) == newer  # the same command continues


def test_other_settings_may_begin_where_nothing_was_saved_yet(tmp_path: Path) -> None:
    resume_point(tmp_path, LR)
    make(tmp_path, 3, complete=False)
    assert resume_point(tmp_path, {"arguments": {}}) is None
    (tmp_path / "config.json").write_text("{}")  # a result
    with pytest.raises(PosencError, match="other settings"):
        resume_point(tmp_path, LR)


def test_a_model_that_no_run_wrote_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(PosencError, match="holds a model that no run wrote"):
        resume_point(tmp_path, LR, fresh=True)


def test_checkpoints_of_an_unknown_run_are_neither_continued_nor_removed(tmp_path: Path) -> None:
    foreign = make(tmp_path, 3, complete=False)  # as the plain Trainer leaves them
    for explicit in (None, foreign):
        with pytest.raises(PosencError, match=f"no {SETTINGS} identifies its run"):
            resume_point(tmp_path, LR, explicit=explicit)
    assert foreign.exists()
    with pytest.warns(UserWarning, match="other settings.*: they are unknown"):
        assert resume_point(tmp_path / "new", LR, explicit=foreign) == foreign
    own = make(tmp_path / "new", 9)
    assert resume_point(tmp_path / "new", LR, explicit=foreign) == own  # the same command
    assert resume_point(tmp_path, LR, fresh=True) is None
    assert not foreign.exists()


def test_a_named_checkpoint_continues_under_other_settings_with_a_warning(tmp_path: Path) -> None:
    resume_point(tmp_path, LR)
    first, last = make(tmp_path, 3), make(tmp_path, 6)
    more = {**LR, "arguments": {"learning_rate": 1e-4, "seed": 1}}
    with pytest.raises(PosencError, match="checkpoint-6 lies ahead of checkpoint-3"):
        resume_point(tmp_path, more, explicit=first)
    with pytest.warns(UserWarning, match="no exact continuation: learning_rate was 0.001"):
        assert resume_point(tmp_path, more, explicit=last) == last
    later = make(tmp_path, 9)
    assert resume_point(tmp_path, more, explicit=last) == later
    assert resume_point(tmp_path, more) == later
    with pytest.raises(PosencError, match=r"no trainer_state\.json"):
        resume_point(tmp_path, more, explicit=tmp_path / "checkpoint-99")


def test_a_checkpoint_without_an_optimizer_is_no_continuation(tmp_path: Path) -> None:
    settings = {"arguments": {"save_only_model": True}}
    resume_point(tmp_path, settings)
    path = make(tmp_path, 3)
    with pytest.raises(PosencError, match="checkpoint-3 holds no optimizer"):
        resume_point(tmp_path, settings)
    assert resume_point(tmp_path, settings, explicit=path) == path


def test_other_processes_are_refused_and_another_device_is_said(tmp_path: Path) -> None:
    two, one = ({**LR, "processes": {"count": count}} for count in (2, 1))
    resume_point(tmp_path, two, device="cuda")
    path = make(tmp_path, 3)
    with pytest.raises(PosencError, match=r"other settings: processes.count was 2, is 1\."):
        resume_point(tmp_path, one)
    with pytest.warns(UserWarning, match='last bits: device was "cuda", is "cpu"'):
        resume_point(tmp_path, two, device="cpu")
    with pytest.warns(UserWarning, match="no exact continuation: processes.count was 2, is 1"):
        assert resume_point(tmp_path, one, explicit=path, device="cpu") == path


def test_a_folder_of_an_earlier_version_resumes(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """The device was beside the environment, which the first versions did not write."""
    resume_point(tmp_path, LR, device="cpu")
    path, file = make(tmp_path, 3), tmp_path / SETTINGS
    before = json.loads(file.read_text())
    before["device"] = before["environment"].pop("device")
    file.write_text(json.dumps(before))
    assert resume_point(tmp_path, LR, device="cpu") == path
    assert not recwarn.list
    before["device"] = "cuda"
    file.write_text(json.dumps(before))
    with pytest.warns(UserWarning, match='last bits: device was "cuda", is "cpu"'):
        resume_point(tmp_path, LR, device="cpu")
    del before["environment"]
    file.write_text(json.dumps(before))
    with pytest.warns(UserWarning, match="last bits"):
        resume_point(tmp_path, LR, device="cpu")


def test_settings_are_what_the_losses_depend_on(tmp_path: Path) -> None:
    def of(**options: Any) -> dict[str, Any]:
        return settings_of(_arguments(tmp_path, **options), model={"name": "tiny"})

    plain = of()
    assert plain["processes"]["count"] == 1
    free = {"save_steps": 7, "logging_steps": 2, "dataloader_num_workers": 2, "run_name": "other"}
    assert differences(plain, of(**free)) == []
    assert differences(plain, of(learning_rate=1e-3)) == ["learning_rate was 5e-05, is 0.001"]
    dropped = ["dataloader_drop_last was false, is true"]
    assert differences(plain, of(dataloader_drop_last=True)) == dropped
    newer = {**plain, "arguments": {**plain["arguments"], "an_option_of_tomorrow": 1}}
    assert differences(plain, newer) == []
    both = ["a.b was 1, is null", "c was null, is 2"]
    assert differences({"a": {"b": 1}}, {"a": {}, "c": 2}) == both


def test_a_launch_file_has_settings_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = settings_of(_arguments(tmp_path))
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "false")  # as accelerate says that it is off
    assert settings_of(_arguments(tmp_path)) == plain
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    assert differences(plain, settings_of(_arguments(tmp_path))) == [
        'processes.FSDP_OFFLOAD_PARAMS was null, is "true"'
    ]


def _held(folder: Path) -> None:
    with TrainingFolder(_arguments(folder), {}):
        (folder / "held").touch()
        time.sleep(60)


def _arguments(folder: Path, **options: Any) -> TrainingArguments:
    return TrainingArguments(str(folder), use_cpu=True, report_to=[], **options)


@pytest.mark.slow
def test_a_folder_is_held_by_one_run_and_let_go_by_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with running(_held, tmp_path) as process:
        while process.is_alive() and not (tmp_path / "held").exists():
            time.sleep(0.01)
        monkeypatch.setattr(folder_module, "_PATIENCE", 0.2)
        with pytest.raises(PosencError, match="Another process still trains"):
            TrainingFolder(_arguments(tmp_path), {}).__enter__()
    assert "waiting for it to end" in capfd.readouterr().err
    with TrainingFolder(_arguments(tmp_path), {}) as folder:
        assert folder.checkpoint is None


def test_one_folder_holds_no_search_over_hyperparameters(tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), report_to=[])
    SafeCheckpoints().on_train_begin(arguments, TrainerState())
    with pytest.raises(PosencError, match="writes one per trial"):
        SafeCheckpoints().on_train_begin(arguments, TrainerState(is_hyper_param_search=True))


# The final save: the old result or the new one, never a mixture that loads.

NAMES = ("config.json", "model.safetensors", "tokenizer.json")


def _result(folder: Path, moment: Moment | None, *, text: str = "new") -> None:
    def write(path: str) -> None:
        for name in NAMES:
            (Path(path) / name).write_text(text)

    save_result(folder, write)


@pytest.mark.slow
def test_a_kill_in_the_final_save_never_leaves_a_mixture_that_loads(tmp_path: Path) -> None:
    assert launch(tmp_path / "whole", work=_result, log=tmp_path / "operations") == [0]
    count = len((tmp_path / "operations").read_text().splitlines())
    seen = set()
    for operation in range(1, count + 1):
        folder = tmp_path / str(operation)
        folder.mkdir()
        (folder / "config.json").write_text("old")
        for shard in (1, 2):
            (folder / f"model-0000{shard}-of-00002.safetensors").write_text("old")
        (folder / "model.safetensors.index.json").write_text("old")
        assert launch(folder, Moment(operation), work=_result) == [-signal.SIGKILL]
        texts = {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}
        if "config.json" in texts:
            assert len(set(texts.values())) == 1, (operation, texts)
            assert len(texts) == (4 if texts["config.json"] == "old" else 3)
        seen.add(texts.get("config.json"))
        if operation % 5 == 0:
            _result(folder, None)
            assert sorted(path.name for path in folder.iterdir()) == [*NAMES]
    assert seen == {"old", None, "new"}


def test_a_final_save_that_fails_leaves_the_old_result_and_says_so(tmp_path: Path) -> None:
    _result(tmp_path, None, text="old")

    def full(path: str) -> None:
        (Path(path) / "config.json").write_text("new")
        raise OSError(28, "No space left on device")

    def of_ours(path: str) -> None:
        write_atomically(Path(path) / "nothing" / "card.md", "new")

    for write, reason in ((full, "No space left"), (of_ours, "card.md cannot be written")):
        message = f"could not be saved.*{reason}.*make room and run the same command"
        with pytest.raises(PosencError, match=message):
            save_result(tmp_path, write)
    assert {path.read_text() for path in tmp_path.iterdir()} == {"old"}
