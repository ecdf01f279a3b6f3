"""Held-out scores in a folder: what an interruption leaves, another training there, and other documents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.training.scoring import FILE, Scores, stages_of
from tests.support.tiny_text import byte_tokenizer, prose
from tests.training.test_training_scoring import (
    HELD_OUT,
    LENGTHS,
    make_scores,
    patched_model,
    records,
    tiny_model,
)


class StoppedError(Exception):
    pass


def forwards_of(model: nn.Module) -> list[int]:
    """Counts the tokens of every forward of a model from now on."""
    seen: list[int] = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    return seen


def test_a_damaged_table_is_reported_and_not_used(tmp_path: Path) -> None:
    scores, model = make_scores(tmp_path), patched_model()
    whole = scores.measure(model)
    text = (tmp_path / FILE).read_text()
    (tmp_path / FILE).write_text(text[: len(text) // 2])
    with pytest.warns(UserWarning, match="is not a training's. It is replaced"):
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
    seen = forwards_of(model)
    result = make_scores(folder).measure(model)
    assert result.to_dict() == whole.to_dict()
    assert (folder / FILE).read_text() == (tmp_path / "whole" / FILE).read_text()
    assert seen.count(LENGTHS[-1]) == 2 * (len(HELD_OUT) - len(kept))  # a prefix and a tail each
    seen.clear()
    again = make_scores(folder).measure(model)
    assert again.to_dict() == whole.to_dict()
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
