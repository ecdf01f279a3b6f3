"""The collator in the Trainer and in accelerate's dataloaders: the same batches however a run is split up."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hf_posenc.training.collator import PositionCollator
from tests.support.killing import in_two_processes
from tests.support.selection import late
from tests.support.tiny_text import VOCABULARY
from tests.support.zoo_registry import quiet

pytestmark = pytest.mark.slow  # whole trainings or graphs

datasets = pytest.importorskip("datasets")

EXAMPLES, LENGTH, TARGET = 12, 8, 64
EPOCHS, BATCH = 2, 2
STEPS = EXAMPLES // BATCH
Batch = list[tuple[list[int], list[int]]]
"""Tokens and positions of its rows."""


def data() -> Any:
    rows = np.random.default_rng(0).integers(1, 32, (EXAMPLES, LENGTH))
    return datasets.Dataset.from_dict({"input_ids": rows.tolist()}).with_format("numpy")


CURRICULUM = (8, 16, 64)


def collator(curriculum: bool = False) -> PositionCollator:
    if curriculum:
        return PositionCollator("random", curriculum=CURRICULUM, seed=3)
    return PositionCollator("pose", target_length=TARGET, seed=3)


def tiny() -> LlamaForCausalLM:
    sizes: Any = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    torch.manual_seed(0)
    with quiet():
        return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=1, **sizes))


def rows_of(batch: Any) -> Batch:
    return list(zip(batch["input_ids"].tolist(), batch["position_ids"].tolist(), strict=True))


def trained(
    folder: Path, resume: Path | None = None, *, curriculum: bool = False, **options: Any
) -> list[Batch]:
    model, made, seen = tiny(), collator(curriculum), list[Batch]()
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(rows_of(kwargs)), with_kwargs=True
    )
    usual = {"per_device_train_batch_size": BATCH, "num_train_epochs": EPOCHS, "save_steps": 2}
    fixed: Any = {"report_to": [], "disable_tqdm": True, "use_cpu": True}
    arguments = TrainingArguments(str(folder), **fixed, **{**usual, **options})
    trainer = Trainer(model, arguments, made, data(), callbacks=[made])
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return seen


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], tuple[Path, list[Batch]]]:
    """Runs that nothing happened to, without and with a curriculum."""

    @cache
    def made(curriculum: bool) -> tuple[Path, list[Batch]]:
        folder = tmp_path_factory.mktemp("whole")
        return folder, trained(folder, curriculum=curriculum)

    return made


@pytest.mark.parametrize(
    ("curriculum", "step", "workers"),
    [(False, STEPS, 2), (True, 4, 2), *late([False, True], [2], [0]), *late([False, True], [STEPS + 2], [2])],
)  # fmt: skip
def test_a_resumed_run_sees_what_it_would_have_seen(
    whole: Any, tmp_path: Path, curriculum: bool, step: int, workers: int
) -> None:
    """Between epochs, within the first, within the second; also with workers that prepare batches early."""
    folder, seen = whole(curriculum)
    options: Any = {"dataloader_num_workers": workers, "curriculum": curriculum}
    options["dataloader_persistent_workers"] = bool(workers)
    assert trained(tmp_path, folder / f"checkpoint-{step}", **options) == seen[step:]


def test_workers_and_accumulation_change_nothing(whole: Any, tmp_path: Path) -> None:
    workers: Any = {"dataloader_num_workers": 2, "dataloader_persistent_workers": True}
    assert trained(tmp_path, gradient_accumulation_steps=2, **workers) == whole(False)[1]


def test_the_range_grows_over_the_run(whole: Any) -> None:
    """Each step has the draws of a collator that knows its length alone: 4 steps of 12 each, across two epochs."""
    seen = whole(True)[1]
    assert len(seen) == EPOCHS * STEPS
    for step, (batch, length) in enumerate(zip(seen, [8] * 4 + [16] * 4 + [64] * 4, strict=True)):
        alone = PositionCollator("random", target_length=length, seed=3)
        alone.set_epoch(step // STEPS)
        expected = alone([{"input_ids": ids} for ids, _ in batch])["position_ids"].tolist()
        assert [positions for _, positions in batch] == expected
    assert seen[3][0][1] == list(range(LENGTH))  # as many positions as tokens
    assert max(p for step in seen[8:] for _, positions in step for p in positions) > 16


def test_a_curriculum_counts_steps_not_batches(tmp_path: Path) -> None:
    seen = trained(tmp_path, curriculum=True, gradient_accumulation_steps=2)  # 6 steps of 2
    reached = [max(p for _, positions in batch for p in positions) for batch in seen]
    assert reached[:4] == [7] * 4
    assert all(7 < end < 16 for end in reached[4:8])
    assert all(16 <= end < 64 for end in reached[8:])


def _in_one_of_two(folder: Path, curriculum: bool) -> None:
    rank = torch.distributed.get_rank()
    seen = trained(folder, per_device_train_batch_size=BATCH // 2, curriculum=curriculum)
    (folder / f"seen-{rank}.json").write_text(json.dumps(seen))


@pytest.mark.slow
@pytest.mark.parametrize("curriculum", [False, True])
def test_two_trainers_see_what_one_sees(whole: Any, curriculum: bool, tmp_path: Path) -> None:
    in_two_processes(partial(_in_one_of_two, curriculum=curriculum), tmp_path)
    shards = [json.loads((tmp_path / f"seen-{rank}.json").read_text()) for rank in range(2)]
    together = [[tuple(row) for part in step for row in part] for step in zip(*shards, strict=True)]
    assert together == whole(curriculum)[1]
