"""The project's scorer in the Trainer's own evaluations."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.result import PerplexityResult
from hf_posenc.training.ranks import without_wrapper
from hf_posenc.training.scoring import Scores, label_of
from hf_posenc.training.untouched import RandomState


class PerplexityCallback(TrainerCallback):
    """Measures held-out perplexity before the first step and whenever the Trainer evaluates.

    The numbers are in the Trainer's log as `eval_<protocol>_perplexity_<length>`, and so in TensorBoard and the like,
    and among the metrics of the evaluation, where `metric_for_best_model` finds them. The training goes on as if nobody
    had evaluated: no random number is drawn that was not put back, the Trainer's own evaluation included.

    The Trainer evaluates only with an `eval_dataset`; an empty list is enough for the perplexities alone.

    Args:
        scores: What to measure.
        trainer: The Trainer that it is a callback of.

    Raises:
        PosencError: The arguments take the highest perplexity for the best.
    """

    def __init__(self, scores: Scores, trainer: Trainer) -> None:
        self._scores, self._trainer = scores, trainer
        self._logged: int | None = None
        self._draws: RandomState | None = None
        _check_best(trainer.args)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **_: Any,
    ) -> None:
        if state.global_step == 0:
            self._log(self._measured(model, state), state)
            self._remember(args.eval_on_start)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._remember(control.should_evaluate)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._remember(control.should_evaluate)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        metrics: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        numbers = self._measured(model, state)
        self._log(numbers, state)
        if metrics is not None:
            metrics.update(numbers)
        if self._draws is not None:
            self._draws.restore()
            self._draws = None

    def _remember(self, evaluates: bool) -> None:
        """Keeps the generators as they are before an evaluation, whose data loader draws a seed."""
        self._draws = RandomState() if evaluates else None

    def _measured(self, model: Any, state: TrainerState) -> dict[str, float]:
        seen = state.num_input_tokens_seen or None
        result = self._scores.measure(model, state.global_step, tokens_seen=seen)
        return metrics_of(result, label_of(without_wrapper(model), state.global_step))

    def _log(self, numbers: dict[str, float], state: TrainerState) -> None:
        # One evaluation of several datasets is one measurement.
        if self._logged != state.global_step:
            self._logged = state.global_step
            self._trainer.log(dict(numbers))


def metrics_of(result: PerplexityResult, label: str) -> dict[str, float]:
    """The perplexities of one row under the names that the Trainer's log has for them."""
    return {
        f"eval_{cell.protocol}_perplexity_{cell.length}": cell.perplexity
        for cell in result.cells
        if cell.method == label
    }


def check_best(arguments: TrainingArguments, scores: Scores | None) -> None:
    """Whether the scores alone, without a loss of an `eval_dataset`, have what the best model is told by.

    Args:
        arguments: The Trainer's.
        scores: What is measured, if anything is.

    Raises:
        PosencError: There is no such number: the Trainer would end at its first evaluation.
    """
    metric = arguments.metric_for_best_model  # "loss" where it is needed and was not given
    if metric is None or arguments.eval_strategy == "no":
        return
    settings = None if scores is None else scores.settings
    names = [
        f"eval_{protocol}_perplexity_{length}"
        for protocol in (() if settings is None else reversed(settings.protocols))
        for length in sorted(() if settings is None else settings.lengths, reverse=True)
    ]
    if metric.removeprefix("eval_") in [name.removeprefix("eval_") for name in names]:
        return
    if not names:
        raise PosencError(
            "Without scores there is nothing to tell the best model by: leave --no_score out, or "
            "--load_best_model_at_end, --metric_for_best_model and reduce_lr_on_plateau."
        )
    raise PosencError(
        f"metric_for_best_model={metric} is not measured; there are {', '.join(names)}. Give --metric_for_best_model "
        f"{names[0]} --greater_is_better false."
    )


def _check_best(arguments: TrainingArguments) -> None:
    metric = arguments.metric_for_best_model or ""
    if "_perplexity_" in metric and arguments.greater_is_better:
        raise PosencError(
            f"metric_for_best_model={metric}: the best perplexity is the lowest, and transformers takes the highest of "
            "whatever does not end in loss. Add --greater_is_better false."
        )
