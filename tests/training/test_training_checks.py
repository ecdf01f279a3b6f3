"""Impossible runs and launches are refused at the start with the reason; possible ones are not."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import TrainingArguments

from hf_posenc import PosencError, patch_model
from hf_posenc.methods import DynamicNTK, LongRoPE
from hf_posenc.training import checks, chunk_loss
from hf_posenc.training import processes as launching
from hf_posenc.training.checks import check_run
from hf_posenc.training.chunked_loss import ChunkedLoss
from hf_posenc.training.processes import check_launch, join_on_cpu, launched_processes
from tests.support import zoo
from tests.support.selection import covering

PLAIN = zoo.build("llama")


@pytest.fixture(autouse=True)
def _own_processes() -> Iterator[None]:
    """Reset the global state that TrainingArguments set up."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def patched(method: Any = None, **options: Any) -> Any:
    model = copy.deepcopy(PLAIN)
    return model if method is None else patch_model(model, method, **options)


def native_dynamic() -> Any:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    return zoo.build("llama", rope_parameters=rope)


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    given = {"use_cpu": True, "report_to": [], "remove_unused_columns": False, **options}
    return TrainingArguments(output_dir=str(folder), **given)


def refused(
    model: Any, given: TrainingArguments, message: str, positions: str = "contiguous"
) -> None:
    with pytest.raises(PosencError, match=message):
        check_run(model, positions=positions, arguments=given)


def context_parallel(monkeypatch: pytest.MonkeyPatch, kind: str = "CP", size: int = 2) -> None:
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv(f"PARALLELISM_CONFIG_{kind}_SIZE", str(size))


METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "bias": ("alibi", {}),
    "learned bias": ("fire", {}),
    "bands": ("rerope", {"window": 16}),
    "log_n": ("log_n", {}),
    "dynamic, row by row": ("dynamic_yarn", {}),
}


@pytest.mark.filterwarnings("ignore:fire starts untrained")
@pytest.mark.parametrize(("name", "kind"), covering(METHODS, ["CP", "SP", "TP"]))
def test_methods_inside_attention_in_parts_of_a_text_or_of_the_heads(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, options = METHODS[name]
    model, given = patched(method, **options), arguments(tmp_path)
    check_run(model, positions="contiguous", arguments=given)
    context_parallel(monkeypatch, kind)
    if kind == "TP":
        check_run(model, positions="contiguous", arguments=given)
        return
    reason = {"CP": "Context", "SP": "Sequence"}[kind]
    refused(model, given, rf"{reason} parallelism \(size 2\) .* lost silently")
    context_parallel(monkeypatch, kind, size=1)
    check_run(model, positions="contiguous", arguments=given)


@pytest.mark.parametrize("kind", ["CP", "SP"])
def test_packing_and_moving_frequencies_in_parts_of_a_text(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context_parallel(monkeypatch, kind)
    given, model = arguments(tmp_path), patched("yarn", scale=4)
    for positions in ("contiguous", "pose", "random", "cream"):
        check_run(model, positions=positions, arguments=given)
    refused(model, given, "packed documents would attend", "packed")
    moving = patched(DynamicNTK(scale=2, update="sequence"))
    refused(moving, given, "dynamic_ntk, which scales with the positions")
    refused(native_dynamic(), given, "model's own dynamic RoPE, which scales with")


def test_a_parallelism_config_of_the_arguments_counts_too(tmp_path: Path) -> None:
    given = arguments(tmp_path)
    given.parallelism_config = SimpleNamespace(cp_size=2, sp_size=1, tp_size=1)
    refused(patched("alibi"), given, "Context parallelism")


@pytest.mark.parametrize("positions", ["packed", "pose", "random", "cream"])
@pytest.mark.parametrize("method", ["dynamic_ntk", "longrope", "native"])
def test_moving_frequencies_need_one_length(method: str, positions: str, tmp_path: Path) -> None:
    ones = (1.0,) * 8
    model = {
        "dynamic_ntk": lambda: patched(DynamicNTK(scale=2, update="sequence")),
        "longrope": lambda: patched(LongRoPE(short_factor=ones, long_factor=(4.0,) * 8)),
        "native": native_dynamic,
    }[method]()
    given = arguments(tmp_path)
    check_run(model, positions="contiguous", arguments=given)
    refused(model, given, "the same weights would be trained with different freq", positions)


def test_each_row_by_itself_or_each_position_needs_no_length(tmp_path: Path) -> None:
    given, lists = arguments(tmp_path), {"short_factor": [4.0] * 8, "long_factor": [4.0] * 8}
    own = {"rope_type": "longrope", "factor": 4.0, "rope_theta": 1e4, **lists}
    for positions in ("contiguous", "packed", "pose", "random", "cream"):
        check_run(patched("longrope", scale=4, **lists), positions=positions, arguments=given)
        check_run(zoo.build("llama", rope_parameters=own), positions=positions, arguments=given)
        check_run(patched("dynamic_ntk", scale=2), positions=positions, arguments=given)
        check_run(patched("yarn", scale=4), positions=positions, arguments=given)
    rows = patched(DynamicNTK(scale=2, update="request"))
    check_run(rows, positions="pose", arguments=given)
    refused(rows, given, "update='request'", "packed")
    table = patch_model(zoo.build("gpt2"), "interpolate", scale=2, update="request")
    check_run(table, positions="contiguous", arguments=given)
    for positions in ("packed", "pose"):  # one table for all rows, chosen by their number of tokens
        refused(table, given, "interpolate follows the longest text", positions)


def test_liger_may_leave_the_rotation_alone(tmp_path: Path) -> None:
    given = arguments(tmp_path)
    given.use_liger_kernel = True
    check_run(patched(), positions="contiguous", arguments=given)
    refused(patched("yarn", scale=2), given, "replaces the rotation by a kernel of its own")
    given.liger_kernel_config = {"rms_norm": True}
    refused(patched("rerope", window=16), given, "Liger")
    given.liger_kernel_config = {"rope": False}
    check_run(patched("yarn", scale=2), positions="contiguous", arguments=given)


def test_half_precision_weights_that_a_step_does_not_move(tmp_path: Path) -> None:
    model, small = patched("yarn", scale=2).bfloat16(), arguments(tmp_path, learning_rate=2e-5)
    refused(model, small, r"weights are bfloat16, and for \d\d% of them a step")
    check_run(model, positions="contiguous", arguments=arguments(tmp_path, learning_rate=0.1))
    mixed = arguments(tmp_path, bf16=True, learning_rate=2e-5)
    check_run(patched(), positions="contiguous", arguments=mixed)
    model.requires_grad_(False)  # an adapter in float32 on weights that stay as they are
    check_run(model, positions="contiguous", arguments=small)


def test_what_the_refusal_of_half_precision_says_is_what_adam_does() -> None:
    model = patched().bfloat16()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), 2e-5, weight_decay=0.0)
    model(torch.arange(9)[None], labels=torch.arange(9)[None]).loss.backward()
    optimizer.step()
    moved, seen = 0, 0
    for name, now in model.named_parameters():
        felt = torch.zeros_like(now, dtype=torch.bool) if now.grad is None else now.grad != 0
        moved, seen = moved + int((felt & (now != before[name])).sum()), seen + int(felt.sum())
    assert moved < seen / 2


def test_columns_that_packing_needs_and_a_loss_outside_the_model(tmp_path: Path) -> None:
    model = patched("yarn", scale=2)
    dropping = arguments(tmp_path, remove_unused_columns=True)
    check_run(model, positions="contiguous", arguments=dropping)
    refused(model, dropping, "document_lengths", "packed")
    smoothed = arguments(tmp_path, label_smoothing_factor=0.1)
    check_run(model, positions="contiguous", arguments=smoothed)
    assert isinstance(chunk_loss(model), ChunkedLoss)
    refused(model, smoothed, "loss in chunks would not be used")


def test_processes_with_different_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, given, norm = patched("yarn", scale=2), arguments(tmp_path), "model.norm.weight"
    monkeypatch.setattr(checks, "gather", lambda value: [value, value])
    check_run(model, positions="contiguous", arguments=given)
    monkeypatch.setattr(checks, "gather", lambda value: [value, {**value, norm: "0"}])
    refused(model, given, f"Process 1 starts from another {norm} .* same seed")


# A launcher that did not do what it was asked, which accelerate keeps to itself, and sharding that leaves no model.


@pytest.fixture
def given(tmp_path: Path) -> TrainingArguments:
    made = arguments(tmp_path)
    check_launch(made)
    return made


def test_sharding_is_not_done(given: TrainingArguments, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_how_many_processes_were_asked_for(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    yaml = Path(__file__).parents[2] / "scripts" / "configs" / "two_cpu_processes.yaml"
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    process = SimpleNamespace(pid=1, cmdline=lambda: line.format(yaml=yaml).split())
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
