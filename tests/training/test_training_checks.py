"""Impossible runs are refused at the start with the reason; possible ones are not."""

from __future__ import annotations

import copy
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
from hf_posenc.training.checks import check_run
from hf_posenc.training.chunked_loss import ChunkedLoss
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
    refused(model, given, rf"{reason} parallelism \(size 2\) .* dropped in silence")
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
def test_frequencies_that_follow_the_longest_text_of_a_batch_need_one_length(
    method: str, positions: str, tmp_path: Path
) -> None:
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
    given = arguments(tmp_path)
    for positions in ("contiguous", "packed", "pose", "random", "cream"):
        check_run(patched("dynamic_ntk", scale=2), positions=positions, arguments=given)
        check_run(patched("yarn", scale=4), positions=positions, arguments=given)
    rows = patched(DynamicNTK(scale=2, update="request"))
    check_run(rows, positions="pose", arguments=given)
    refused(rows, given, "update='request'", "packed")


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


def test_processes_that_start_from_different_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, given, norm = patched("yarn", scale=2), arguments(tmp_path), "model.norm.weight"
    monkeypatch.setattr(checks, "gather", lambda value: [value, value])
    check_run(model, positions="contiguous", arguments=given)
    monkeypatch.setattr(checks, "gather", lambda value: [value, {**value, norm: "0"}])
    refused(model, given, f"Process 1 starts from another {norm} .* same seed")
