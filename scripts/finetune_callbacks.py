"""Callbacks of scripts/finetune.py: the time over all calls of a run, and a stop at a loss that is not finite."""

from __future__ import annotations

import math
import time
from typing import Any

from transformers import TrainerCallback, TrainerState, TrainingArguments

from hf_posenc.errors import PosencError
from hf_posenc.training.callbacks import metric_name
from hf_posenc.training.scoring import Scores


class StopOnNonFinite(TrainerCallback):
    """Raises from the Trainer's `train()` when loss or gradient norm are not finite, before anything is saved."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        for name in ("loss", "grad_norm"):
            value = (logs or {}).get(name)
            if value is not None and not math.isfinite(float(value)):
                raise PosencError(
                    f"The {name} is {float(value)} at step {state.global_step}; nothing was saved from it. Lower "
                    "--learning_rate or raise --warmup_steps, and inspect the text; the same command resumes."
                )


class RunTime(TrainerCallback):
    """Adds the seconds since the run began to each entry of the Trainer's log, over all calls that resumed it.

    After a resume the Trainer's own summary describes its last call, with the loss of no step as 0.0; it is replaced.
    """

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self._before = max((entry.get("seconds", 0.0) for entry in state.log_history), default=0.0)
        self._begin = time.monotonic()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: Any, **_: Any) -> None:
        entry: dict[str, Any] = state.log_history[-1]
        seconds = entry["seconds"] = self._before + time.monotonic() - self._begin
        if "train_runtime" not in entry or not self._before:
            return
        logged = [each for each in state.log_history if "loss" in each]
        steps = [0, *(each["step"] for each in logged)]  # a loss is the mean since the entry before
        total = sum(
            each["loss"] * (b - a) for each, a, b in zip(logged, steps, steps[1:], strict=False)
        )
        batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        entry["train_runtime"] = seconds
        entry["train_loss"] = total / steps[-1] if steps[-1] else None
        entry["train_steps_per_second"] = state.global_step / seconds
        entry["train_samples_per_second"] = state.global_step * batch / seconds


def check_best(arguments: TrainingArguments, scores: Scores | None) -> None:
    """Check that the scores include the metric for the best model: the Trainer would fail at its first evaluation."""
    metric = arguments.metric_for_best_model  # "loss" if it is required and was not given
    if metric is None or arguments.eval_strategy == "no":
        return
    if scores is None:
        raise PosencError(
            "Without scores there is no metric for the best model: leave --no_score out, or "
            "--load_best_model_at_end, --metric_for_best_model and reduce_lr_on_plateau."
        )
    names = [
        metric_name(protocol, length)
        for protocol in reversed(scores.settings.protocols)
        for length in sorted(scores.settings.lengths, reverse=True)
    ]
    if f"eval_{metric.removeprefix('eval_')}" not in names:
        raise PosencError(
            f"metric_for_best_model={metric} is not measured; there are {', '.join(names)}. Give "
            f"--metric_for_best_model {names[0]} --greater_is_better false."
        )
