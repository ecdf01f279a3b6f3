"""Held-out scores before, during and after a training: true, complete after any interruption, and without a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments

from hf_posenc import patch_model
from hf_posenc.evaluation import measure_perplexity
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.patch.config import parse_method
from hf_posenc.training.callbacks import PerplexityCallback
from hf_posenc.training.chunked_loss import chunk_loss
from hf_posenc.training.scoring import FILE, Scores, before_and_after, label_of, score, stages_of
from tests.support import zoo
from tests.support.selection import late
from tests.support.tiny_text import VOCABULARY, byte_tokenizer, prose

pytestmark = pytest.mark.slow  # whole trainings or graphs

LENGTHS = (32, 64)
HELD_OUT = [prose(150 + 31 * n, n) for n in range(3)]
TOKENS = 64
STEPS = 4


def tiny_model(**config: Any) -> Any:
    torch.manual_seed(0)
    return zoo.build("llama", vocab_size=VOCABULARY, num_hidden_layers=2, **config)


def patched_model(**config: Any) -> Any:
    return patch_model(tiny_model(**config), "yarn", scale=2)


def make_scores(output: Path | None = None, **options: Any) -> Scores:
    return Scores(byte_tokenizer(), HELD_OUT, lengths=LENGTHS, output=output, **options)


def records(result: PerplexityResult, row: int) -> list[tuple[Any, ...]]:
    rows = [r for r in result.records if r.method == result.candidates[row].label]
    return [(r.protocol, r.length, r.document, r.nats, r.tokens) for r in rows]


def measured(model: Any, **options: Any) -> PerplexityResult:
    return measure_perplexity(model, byte_tokenizer(), HELD_OUT, lengths=LENGTHS, **options)


def blocks(count: int = 16) -> Any:
    words = byte_tokenizer()
    ids = [words(prose(TOKENS, 50 + n))["input_ids"] for n in range(count)]
    return Dataset.from_dict({"input_ids": ids, "labels": ids})


def make_trainer(model: Any, folder: Path, **options: Any) -> Trainer:
    fixed: Any = {"use_cpu": True, "logging_steps": 1, "report_to": [], "disable_tqdm": True}
    usual: dict[str, Any] = {"max_steps": STEPS, "per_device_train_batch_size": 2}
    usual["learning_rate"] = 3e-3
    usual |= {"save_strategy": "no", **options}
    arguments = TrainingArguments(str(folder), **fixed, **usual)
    return Trainer(model=model, args=arguments, train_dataset=blocks(), eval_dataset=[])


def scored_trainer(model: Any, folder: Path, scores: Scores, **options: Any) -> Trainer:
    trainer = make_trainer(model, folder, eval_strategy="steps", eval_steps=2, **options)
    trainer.add_callback(PerplexityCallback(scores, trainer))
    return trainer


def trained(trainer: Trainer) -> tuple[list[float], dict[str, torch.Tensor]]:
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == STEPS
    assert trainer.model is not None
    return losses, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def same(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    return one[0] == other[0] and all(torch.equal(one[1][n], other[1][n]) for n in one[1])


def test_before_is_what_the_command_measures() -> None:
    scores, model = make_scores(), tiny_model()
    scores.measure(model)
    result = scores.measure(patch_model(model, "yarn", scale=2))
    expected = measured(tiny_model(), methods=["none", "yarn:scale=2"])
    assert [entry.label for entry in result.candidates] == ["none", "yarn (scale 2), before"]
    assert [entry.method for entry in result.candidates] == [None, "yarn"]
    for row in (0, 1):
        assert records(result, row) == records(expected, row)
    ratios = [[cell.ratio_interval for cell in each.cells] for each in (result, expected)]
    assert ratios[0] == ratios[1]


@pytest.mark.parametrize("method", ["dynamic_ntk:scale=2,update=sequence", "dynamic_yarn"])
def test_a_method_that_follows_the_text_is_read_anew_at_every_length(method: str) -> None:
    name, options = parse_method(method)
    result = make_scores().measure(patch_model(tiny_model(), name, **options))
    assert records(result, 0) == records(measured(tiny_model(), methods=[method]), 0)


def test_training_adds_rows_and_numbers_to_the_log(tmp_path: Path) -> None:
    scores, model = make_scores(tmp_path), tiny_model()
    scores.measure(model)
    patch_model(model, "yarn", scale=2)
    trainer = scored_trainer(model, tmp_path, scores, include_num_input_tokens_seen="all")
    trainer.train()
    result = scores.measure(model, STEPS)
    assert [(stage.label, stage.step, stage.tokens_seen) for stage in stages_of(result)] == [
        ("none", 0, None),
        ("yarn (scale 2), before", 0, None),
        ("yarn (scale 2), after 2 steps", 2, 2 * 2 * TOKENS),
        ("yarn (scale 2), after 4 steps", 4, 4 * 2 * TOKENS),
    ]
    logged = [entry for entry in trainer.state.log_history if "eval_tail_perplexity_64" in entry]
    assert [entry["step"] for entry in logged] == [0, 2, 4]
    for entry, row in zip(logged, (1, 2, 3), strict=True):
        for protocol in ("prefix", "tail"):
            for length in LENGTHS:
                cell = result.cell(result.candidates[row].label, protocol, length)
                assert cell is not None
                assert entry[f"eval_{protocol}_perplexity_{length}"] == cell.perplexity
    tails = [entry["eval_tail_perplexity_64"] for entry in logged]
    assert tails == sorted(tails, reverse=True)
    assert tails[-1] < tails[0] / 2
    stored = PerplexityResult.from_dict(json.loads((tmp_path / FILE).read_text()))
    assert stored.to_dict() == result.to_dict()
    labels = [entry.label for entry in before_and_after(result).candidates]
    assert labels == [result.candidates[row].label for row in (0, 1, 3)]


START = {"eval_on_start": True, "gradient_accumulation_steps": 2}


@pytest.mark.parametrize(
    ("options", "config"),
    [
        *late([{}, {"gradient_checkpointing": True}, START, {"bf16": True}], [{}]),
        # a table that follows the longest text so far, which transformers keeps as state
        (START, {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}),
    ],
)
def test_the_training_is_the_same_bit_for_bit(
    tmp_path: Path, options: dict[str, Any], config: dict[str, Any]
) -> None:
    def build() -> Any:
        settings = {"attention_dropout": 0.2, "max_position_embeddings": 48, **config}
        model = tiny_model(**settings)
        return model if config else patch_model(model, "yarn", scale=4)

    alone = {name: value for name, value in options.items() if name != "eval_on_start"}
    expected = trained(make_trainer(build(), tmp_path, **alone))
    scores = Scores(byte_tokenizer(), HELD_OUT, lengths=(32, 128))
    assert same(trained(scored_trainer(build(), tmp_path, scores, **options)), expected)


@pytest.mark.parametrize("chunked", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_lora_is_scored_and_its_training_the_same(tmp_path: Path, chunked: bool) -> None:
    def build() -> Any:
        lora = LoraConfig(target_modules=["q_proj", "v_proj"], lora_dropout=0.2)
        model = get_peft_model(patched_model(), lora)
        if chunked:
            chunk_loss(model, 16)
        return model

    expected, scores = trained(make_trainer(build(), tmp_path)), make_scores()
    trainer = scored_trainer(build(), tmp_path, scores)
    assert same(trained(trainer), expected)
    assert trainer.model is not None
    after = scores.measure(trainer.model, STEPS)
    merged = trainer.model.merge_and_unload()  # type: ignore[operator]
    numbers = score(merged, byte_tokenizer(), HELD_OUT, lengths=LENGTHS)
    for one, other in zip(records(after, -1), records(numbers, 0), strict=True):
        assert one[3] == pytest.approx(other[3], rel=1e-5)


def test_the_precision_of_the_training_is_that_of_every_row(tmp_path: Path) -> None:
    model = patched_model()
    exact = make_scores().measure(model)
    before = make_scores(autocast=torch.bfloat16).measure(model)
    make_trainer(model, tmp_path, bf16=True, max_steps=1, learning_rate=0.0).train()
    during = make_scores(autocast=torch.bfloat16).measure(model, 1)
    assert records(during, 0) == records(before, 0) != records(exact, 0)
    assert before.model["autocast"] == "bfloat16"


def test_the_lowest_perplexity_is_the_best_model(tmp_path: Path) -> None:
    name = "eval_tail_perplexity_64"
    options: Any = {"metric_for_best_model": name, "load_best_model_at_end": True}
    options |= {"save_strategy": "steps", "save_steps": 2}
    trainer = scored_trainer(patched_model(), tmp_path, make_scores(), **options)
    trainer.train()
    tails = {row["step"]: row[name] for row in trainer.state.log_history if name in row}
    assert trainer.state.best_metric == min(tails[2], tails[4])


def test_labels() -> None:
    model = tiny_model()
    assert (label_of(model), label_of(model, 1)) == ("none", "none, after 1 step")
    patch_model(model, "longrope", scale=2.0, short_factor=[1.0] * 8, long_factor=[2.0] * 8)
    assert "short_factor of 8 numbers" in label_of(model, 1200)
    assert label_of(model, 1200).endswith(", after 1,200 steps")
