"""Trainer, PEFT and TRL each train a patched model, which stays patched, is saved and comes back; docs/trainers.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, Trainer, TrainingArguments

from hf_posenc import from_pretrained, get_method, patch_model
from hf_posenc.embedded import model_path
from hf_posenc.training.parameters import choose_parameters, lora_config
from tests.support import zoo
from tests.support.selection import late, quick

datasets: Any = pytest.importorskip("datasets")
peft: Any = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*starts untrained"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
PATCHES: dict[str, dict[str, Any]] = {
    "yarn": {"method": "yarn", "scale": 4},  # frequencies: attention stays the model's own
    "rerope": {"method": "rerope", "window": 16},  # bands
    "kerple": {"method": "kerple_log"},  # a bias with parameters of its own
    "list": {"method": [get_method("yarn").from_options(scale=4), get_method("log_n")()]},
}
STEPS, LENGTH = 4, 80  # past the 64 tokens that the model says it was trained on


@pytest.fixture
def base(tmp_path: Path) -> Path:
    zoo.build("llama").save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def ids() -> Tensor:
    return zoo.tokens(LENGTH, batch=2)


def patched(base: Path, name: str) -> Any:
    torch.manual_seed(0)
    return patch_model(from_pretrained(base), **PATCHES[name])


def loss_of(model: Any, ids: Tensor) -> float:
    with torch.no_grad():
        return float(model(input_ids=ids, labels=ids, use_cache=False).loss)


def settings(folder: Path, make: Any = TrainingArguments, **more: Any) -> Any:
    """Every step reads the whole data set, whatever the order."""
    values: dict[str, Any] = {"per_device_train_batch_size": 2, "max_steps": STEPS}
    values |= {"learning_rate": 0.02, "lr_scheduler_type": "constant", "logging_steps": 1}
    values |= {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True}
    return make(str(folder / "run"), **values | more)


def data(ids: Tensor, **columns: Any) -> Any:
    return datasets.Dataset.from_dict({"input_ids": ids.tolist(), **columns})


def check(trainer: Any, before: float, ids: Tensor, base: Path, folder: Path) -> Any:
    """Trains: the first loss is the patched model's, the last is lower, and what is saved comes back.

    Over ten seeds of weights, texts and adapters, with one thread, the loss falls by 3.87 or more, by 1.86 or more in
    a LoRA (`yarn`), and the patch alone moves it by 0.0009 (`kerple`) or more.

    Returns:
        The loaded model.
    """
    trained = trainer.model
    patch = zoo.in_force(trained)
    assert abs(loss_of(from_pretrained(base), ids) - before) > 1e-4  # without a patch it is another
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == STEPS
    assert losses[0] == pytest.approx(before, rel=1e-5)
    assert losses[-1] < losses[0] - 1
    assert zoo.in_force(trained).config == patch.config
    trainer.save_model(str(folder / "saved"))
    loaded: Any = from_pretrained(folder / "saved").eval()
    assert zoo.in_force(loaded).config == patch.config
    trained.eval()
    assert torch.equal(zoo.logits(loaded, ids), zoo.logits(trained, ids))
    return loaded


@pytest.mark.parametrize("name", quick(PATCHES, ["list"]))
def test_trainer(base: Path, ids: Tensor, tmp_path: Path, name: str) -> None:
    model, rows = choose_parameters(patched(base, name)), data(ids, labels=ids.tolist())
    before = loss_of(model, ids)
    trainer = Trainer(model, settings(tmp_path), train_dataset=rows)
    assert not hasattr(check(trainer, before, ids, base, tmp_path), "peft_config")


@pytest.mark.parametrize("name", ["rerope", *late(["kerple", "yarn"])])
def test_peft(base: Path, ids: Tensor, tmp_path: Path, name: str) -> None:
    model = patched(base, name)
    before = loss_of(model, ids)
    wrapped, rows = choose_parameters(model, "lora"), data(ids, labels=ids.tolist())
    trainer = Trainer(wrapped, settings(tmp_path), train_dataset=rows)
    assert isinstance(check(trainer, before, ids, base, tmp_path), peft.PeftModel)


@pytest.mark.slow
@pytest.mark.parametrize("train", ["lora", "encoding"])
def test_resumed_training_is_the_same(base: Path, ids: Tensor, tmp_path: Path, train: Any) -> None:
    """Also of what the method trains, which lies in the adapter or among the weights."""
    rows = data(ids, labels=ids.tolist())

    def run(folder: Path, resume: bool = False, **more: Any) -> list[float]:
        model = choose_parameters(patched(base, "kerple"), train)
        options = {"save_strategy": "steps", "save_steps": 2, "gradient_checkpointing": True}
        trainer = Trainer(model, settings(folder, **options, **more), train_dataset=rows)
        trainer.train(resume_from_checkpoint=resume)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    whole = run(tmp_path / "whole")
    assert run(tmp_path / "parts", max_steps=2) == whole[:2]
    assert run(tmp_path / "parts", resume=True) == whole


@pytest.mark.parametrize(
    ("name", "train"),
    [("yarn", "lora"), *late(["kerple", "rerope"], ["lora"]), *late(["list", "kerple"], ["full"])],
)
def test_sft_trainer(base: Path, ids: Tensor, tmp_path: Path, name: str, train: str) -> None:
    trl: Any = pytest.importorskip("trl")
    model = patched(base, name)
    before = loss_of(model, ids)
    trainer = trl.SFTTrainer(
        model=model,
        args=settings(tmp_path, trl.SFTConfig, max_length=None, bf16=False),
        train_dataset=data(ids),
        processing_class=AutoTokenizer.from_pretrained(model_path()),
        peft_config=lora_config(model) if train == "lora" else None,
    )
    loaded = check(trainer, before, ids, base, tmp_path)
    assert isinstance(loaded, peft.PeftModel) == (train == "lora")


# docs/trainers.md: its lines for TRL run, on shorter texts, and its callback patches a model in time.
PAGE = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.slow
def test_the_lines_run(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    pytest.importorskip("trl")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(BLOCKS[0].replace("max_length=512", "max_length=64"), names)
    assert "rerope" in capsys.readouterr().out
    assert names["trainer"].state.global_step == 2
    exec(BLOCKS[1], names)
    trainer = names["SFTTrainer"](
        model=from_pretrained(model_path()),
        args=names["SFTConfig"]("hooked", use_cpu=True, bf16=False, **names["settings"]),
        train_dataset=names["trainer"].train_dataset,
        processing_class=names["trainer"].processing_class,
        callbacks=[names["Patch"]()],
    )
    assert trainer.optimizer is None
    trainer.train()
    trainer.save_model("hooked/final")
    assert "yarn" in str(zoo.in_force(from_pretrained("hooked/final")))


def test_the_version_of_trl_is_the_pinned_one() -> None:
    constraints = (Path(__file__).parents[2] / "constraints.txt").read_text(encoding="utf-8")
    (version,) = re.findall(r"^trl==(.*)$", constraints, re.MULTILINE)
    assert f"(TRL {version})" in PAGE
