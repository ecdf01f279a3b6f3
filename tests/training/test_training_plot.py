"""The loss plot: which points are drawn, and that every line is what was logged or measured."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hf_posenc import patch_model
from hf_posenc.errors import PosencError
from hf_posenc.evaluation import plots
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.training.log import loss_figure, loss_points, score_points
from hf_posenc.training.scoring import Scores
from tests.support.tiny_text import byte_tokenizer
from tests.training.test_training_scoring import HELD_OUT, LENGTHS, patched_model, tiny_model

pytest.importorskip("matplotlib")

LOG: list[dict[str, Any]] = [
    {"eval_tail_perplexity_64": 9.0, "step": 0},
    *({"loss": 5 - 0.01 * n, "step": n, "num_input_tokens_seen": 100 * n} for n in range(1, 41)),
    {"loss": math.nan, "step": 41, "num_input_tokens_seen": 4100},
    {"train_runtime": 3.0, "train_loss": 4.7, "step": 40},
]


@pytest.fixture(scope="module")
def table() -> PerplexityResult:
    scores = Scores(byte_tokenizer(), HELD_OUT, lengths=(*LENGTHS, 96))
    model = tiny_model()
    scores.measure(model)
    patch_model(model, "yarn", scale=2)
    for step in (0, 10, 20):
        torch.manual_seed(step)
        with torch.no_grad():
            model.lm_head.weight.add_(torch.randn_like(model.lm_head.weight), alpha=0.1)
        made = scores.measure(model, step)
    return made


def test_the_right_half_is_the_table(table: PerplexityResult) -> None:
    lines = score_points(table)
    assert list(lines) == [*LENGTHS, 96]
    for length, points in lines.items():
        assert [step for step, _ in points] == [0, 10, 20]
        for (_, value), row in zip(points, table.candidates[1:], strict=True):
            cell = table.cell(row.label, "tail", length)
            assert cell is not None
            assert value == cell.perplexity


def test_what_is_drawn(table: PerplexityResult) -> None:
    """The logged losses, their mean, which is the line itself for a straight one, and the table."""
    assert loss_points(LOG) == [(n, 5 - 0.01 * n) for n in range(1, 41)]
    left, right = loss_figure(LOG, table).axes
    logged, mean = (line.get_xydata().tolist() for line in left.get_lines())  # type: ignore[union-attr]
    assert logged == [list(point) for point in loss_points(LOG)]
    assert [step for step, _ in mean] == pytest.approx([*range(3, 39)])
    assert [loss for _, loss in mean] == pytest.approx([5 - 0.01 * step for step, _ in mean])
    assert left.get_lines()[1].get_label() == "mean of 5"
    drawn = {str(line.get_label()): line.get_xydata().tolist() for line in right.get_lines()}  # type: ignore[union-attr]
    expected = score_points(table)
    assert drawn == {f"{n:,} tokens": [list(each) for each in expected[n]] for n in expected}


def test_with_one_measurement_or_none_there_is_one_panel(table: PerplexityResult) -> None:
    assert len(loss_figure(LOG).axes) == 1
    scores = Scores(byte_tokenizer(), HELD_OUT, lengths=LENGTHS)
    assert len(loss_figure(LOG, scores.measure(patched_model())).axes) == 1
    with pytest.raises(PosencError, match="No finite loss"):
        loss_figure(LOG[-2:])


@pytest.mark.parametrize(("low", "high"), [(9.0, 10.5), (1.0, 1.001), (99.0, 101.0), (3.0, 900.0)])
def test_an_axis_has_enough_ticks_and_not_too_many(low: float, high: float) -> None:
    with plots.styled_panels(3, 3) as (_, (panel,)):
        panel.set_ylim(low, high)
        plots.value_axis(panel)
        ticks = [value for value in panel.get_yticks() if low <= value <= high]
    assert 3 <= len(ticks) <= 8
    assert len({f"{value:g}" for value in ticks}) == len(ticks)  # as the axis writes them
