"""A launcher that did not do what it was asked, which accelerate keeps to itself, and sharding that leaves no model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import TrainingArguments

from hf_posenc import PosencError
from hf_posenc.training import processes as launching
from hf_posenc.training.processes import check_launch, join_on_cpu, launched_processes


@pytest.fixture
def given(tmp_path: Path) -> Iterator[TrainingArguments]:
    """Arguments of one process, whose state is no other test's."""
    AcceleratorState._reset_state(reset_partial_state=True)
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    check_launch(arguments)
    yield arguments
    AcceleratorState._reset_state(reset_partial_state=True)


def test_sharding_that_is_asked_for_and_not_done(
    given: TrainingArguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(PosencError, match=r"FSDP was requested, .* GPUs"):
        check_launch(given)
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(PosencError, match="DeepSpeed was requested"):
        check_launch(given)


def test_processes_that_do_not_know_of_each_other(
    given: TrainingArguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(PosencError, match="2 processes were requested, and accelerate connected 1"):
        check_launch(given)
    monkeypatch.delenv("WORLD_SIZE")
    check_launch(given)
    monkeypatch.setattr(launching, "launched_processes", lambda: 2)
    with pytest.raises(PosencError, match="2 processes were requested, and accelerate connected 1"):
        check_launch(given)


def test_several_gpus_in_one_process(given: TrainingArguments) -> None:
    given._n_gpu = 2
    with pytest.raises(PosencError, match=r"DataParallel.*--num_processes 2"):
        check_launch(given)


LAUNCHERS = {
    "accelerate launch --cpu --num_processes 2 scripts/finetune.py --num_processes 9": 2,
    "python -m accelerate.commands.launch --num_processes=3 train.py": 3,
    "python /venv/bin/accelerate-launch --config_file {yaml} train.py": 2,
    "python /venv/bin/accelerate launch --cpu train.py": 1,
    "python /home/accelerate/train.py --num_processes 4": 1,
    "bash": 1,
    "accelerate launch --num_processes two train.py": 1,
}


@pytest.mark.parametrize("line", LAUNCHERS)
def test_how_many_processes_a_launcher_was_asked_for(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import psutil

    yaml = Path(__file__).parents[2] / "scripts" / "configs" / "two_cpu_processes.yaml"
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    words = line.format(yaml=yaml).split()
    process = SimpleNamespace(pid=1, cmdline=lambda: words)
    monkeypatch.setattr(psutil, "Process", lambda pid: process)
    assert launched_processes() == LAUNCHERS[line]


def test_fsdp_that_leaves_no_model_or_no_checkpoint() -> None:
    def check(save_on_each_node: bool = False, **plugin: Any) -> None:
        given = {"fsdp_version": 2, "state_dict_type": "SHARDED_STATE_DICT", **plugin}
        arguments = SimpleNamespace(fsdp_plugin_args=given, save_on_each_node=save_on_each_node)
        launching._check_fsdp(arguments)  # type: ignore[arg-type]

    check()
    check(True, state_dict_type="FULL_STATE_DICT")
    with pytest.raises(PosencError, match="fsdp_version: 2"):
        check(fsdp_version=1)
    with pytest.raises(PosencError, match="read from one disk by all machines"):
        check(True)


def test_deepspeed_that_leaves_no_model_or_does_not_clip() -> None:
    def check(zero: dict[str, Any], clipping: Any) -> None:
        config = {"zero_optimization": zero, "gradient_clipping": clipping}
        plugin = SimpleNamespace(deepspeed_config=config)
        launching._check_deepspeed(SimpleNamespace(deepspeed_plugin=plugin, max_grad_norm=1.0))  # type: ignore[arg-type]

    saved = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
    check(saved, 1.0)
    check(saved, "auto")
    check({"stage": 2}, 1.0)
    with pytest.raises(PosencError, match="would write no model"):
        check({"stage": 3}, 1.0)
    for clipping in (None, 0.5):
        with pytest.raises(PosencError, match="clips gradients itself"):
            check(saved, clipping)


def test_a_launcher_without_a_gpu_is_told_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "")
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    join_on_cpu()
    assert "ACCELERATE_USE_CPU" not in os.environ
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    join_on_cpu()
    assert "ACCELERATE_USE_CPU" not in os.environ
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    join_on_cpu()
    assert os.environ["ACCELERATE_USE_CPU"] == "true"
