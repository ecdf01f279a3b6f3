"""Training of a patched model, resumed from a checkpoint: the stock Trainer, TRL's, and a bare loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import PreTrainedConfig, PreTrainedModel, Trainer, TrainingArguments

from hf_posenc import available_methods, from_pretrained, get_method, patch_model
from tests.patch.test_patching import OPTIONS
from tests.support import zoo
from tests.support.references import REQUIRED
from tests.support.selection import late, quick

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*starts untrained"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
STATIC = tuple(
    name
    for name in available_methods()
    if get_method(name).for_rotary and not get_method(name).length_dependent
)
FORMS = ("yarn", "llama3", "ntk_mixed", "alibi")
"""One method of each form on disk."""
STEPS = 2


def patched(method: str) -> PreTrainedModel:
    torch.manual_seed(0)
    options = REQUIRED[method](8) if method in REQUIRED else {}
    return patch_model(zoo.build("llama"), method, **options | OPTIONS.get(method, {}))


def settings(folder: Path, make: Any = TrainingArguments, **more: Any) -> Any:
    values: dict[str, Any] = {"per_device_train_batch_size": 2, "max_steps": STEPS}
    values |= {"learning_rate": 0.01, "save_strategy": "steps", "save_steps": STEPS // 2}
    values |= {"report_to": [], "disable_tqdm": True, "use_cpu": True}
    return make(str(folder), **values | more)


def equal(first: Any, second: Any) -> bool:
    pairs = zip(first.state_dict().items(), second.state_dict().items(), strict=True)
    return all(name == other and torch.equal(a, b) for (name, a), (other, b) in pairs)


@pytest.mark.parametrize("method", quick(STATIC, ["alibi"]))
def test_trainer(method: str, tmp_path: Path) -> None:
    rows = [{"input_ids": row, "labels": row} for row in zoo.tokens(80, batch=4).tolist()]

    def train(folder: str | None = None) -> Any:
        trainer = Trainer(patched(method), settings(tmp_path), train_dataset=rows)
        trainer.train(resume_from_checkpoint=folder)
        return trainer.model

    whole = train()
    checkpoint = tmp_path / f"checkpoint-{STEPS // 2}"
    assert equal(train(str(checkpoint)), whole)
    # transformers 5 reads it as it is, without knowing the model
    PreTrainedConfig.from_json_file(checkpoint / "config.json")
    loaded = from_pretrained(tmp_path / f"checkpoint-{STEPS}")
    assert zoo.in_force(loaded).config == zoo.in_force(whole).config
    assert equal(loaded, whole)


@pytest.mark.parametrize("method", [*FORMS, *late([m for m in STATIC if m not in FORMS])])
def test_bare_loop(method: str, tmp_path: Path) -> None:
    ids, accelerator = zoo.tokens(80, batch=2), Accelerator(cpu=True)

    def train(model: Any, steps: int, state: Any = None) -> Any:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer = accelerator.prepare(model, optimizer)
        if state is not None:
            optimizer.load_state_dict(state)
        for _ in range(steps):
            optimizer.zero_grad()
            accelerator.backward(model(input_ids=ids, labels=ids, use_cache=False).loss)
            optimizer.step()
        return optimizer.state_dict()

    whole, half = patched(method).train(), patched(method).train()
    train(whole, STEPS)
    state = train(half, STEPS // 2)
    weights = accelerator.get_state_dict(half)
    accelerator.unwrap_model(half).save_pretrained(tmp_path / "half", state_dict=weights)
    resumed = from_pretrained(tmp_path / "half").train()
    train(resumed, STEPS // 2, state)
    assert equal(resumed, whole)


def test_the_keys_of_transformers_4_are_in_every_other_folder(tmp_path: Path) -> None:
    model = patched("yarn")
    scaling = {}
    for folder in ("checkpoint-2", "checkpoint", "model"):
        model.save_pretrained(tmp_path / folder)
        values = json.loads((tmp_path / folder / "config.json").read_text(encoding="utf-8"))
        assert values["rope_parameters"]["rope_type"] == "yarn"
        scaling[folder] = values.get("rope_scaling")
    expected = values["rope_parameters"]
    assert scaling == {"checkpoint-2": None, "checkpoint": expected, "model": expected}
