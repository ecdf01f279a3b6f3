"""A scheduler's warning: the run saves at the end of the step it is in, and stops."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from transformers import (
    IntervalStrategy,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.files import write_atomically
from hf_posenc.training import ranks as together
from hf_posenc.training.checks import launcher
from hf_posenc.training.ranks import RandomState, from_all, without_wrapper
from hf_posenc.training.scoring import Scores, label_of

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))


class Interruption:
    """Takes note of signals while it is open; further ones change nothing, as launchers and schedulers both send them.

    A launcher's death counts as well: `accelerate launch` with one process does not pass a signal on, it dies of it,
    and what it launched would go on unseen.

    For a bare loop; `SaveOnSignal` uses it for the Trainer.

    Args:
        signals: Which ones.
    """

    def __init__(self, signals: Iterable[signal.Signals] = SIGNALS) -> None:
        self._signals = tuple(signals)
        self._before: dict[signal.Signals, Any] = {}
        self._received: int = 0
        self._launcher: int | None = None

    def __enter__(self) -> Interruption:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Begins to listen, where this is the process's main thread; no other can."""
        found = launcher()
        self._received, self._launcher = 0, None if found is None else found[0]
        if threading.current_thread() is threading.main_thread() and not self._before:
            self._before = {each: signal.signal(each, self._note) for each in self._signals}

    def close(self) -> None:
        """What a signal did before, it does again."""
        self.hold(False)
        for each, handler in self._before.items():
            signal.signal(each, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def hold(self, on: bool) -> None:
        """Lets signals wait, until they are let through again.

        Processes that begin meanwhile never get them: a scheduler signals the workers of a dataloader as well, and the
        death of one of them would end the run before it has saved.
        """
        if self._before and hasattr(signal, "pthread_sigmask"):
            how = signal.SIG_BLOCK if on else signal.SIG_UNBLOCK
            signal.pthread_sigmask(how, self._signals)

    def agreed(self) -> int:
        """The number of a signal that any process has received, else 0: the same in all of them. All must call it."""
        if self._launcher is not None and os.getppid() != self._launcher:
            self._received = self._received or signal.SIGTERM
        return together.largest(self._received)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received = number


class SaveOnSignal(TrainerCallback):
    """On SIGTERM or SIGUSR1 to any process: save at the end of this step, in all processes, and stop.

    An evaluation that is due at that step, or under way, comes first, as it does without a signal: it draws random
    numbers, so the losses after it would be others without it.

    Attributes:
        received: The number of the signal that ended the training; 0 if none did. A program ends with 128 plus this
            number, as shells have it, so that a scheduler does not take the run for finished.
    """

    def __init__(self) -> None:
        self._interruption = Interruption()
        self.received = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.received = 0
        self._interruption.open()

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._interruption.hold(True)  # the Trainer makes the workers of its dataloader now

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._interruption.hold(False)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._stop_if_asked(control)
        self._interruption.hold(control.should_evaluate)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._interruption.hold(False)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._interruption.hold(False)
        if state.global_step > 0:
            self._stop_if_asked(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        # The Trainer takes every stop for the end of an epoch.
        if self.received and not ends_epoch(state):
            control.should_log = control.should_evaluate = control.should_save = False
        elif not self.received:
            self._stop_if_asked(control)
        self._interruption.hold(control.should_evaluate)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._interruption.close()

    def _stop_if_asked(self, control: TrainerControl) -> None:
        self.received = self._interruption.agreed()
        if self.received:
            control.should_save = control.should_training_stop = True


def ends_epoch(state: TrainerState) -> bool:
    """Whether the last step was the last one of its epoch, or of all: the Trainer takes both as the end."""
    whole = state.epoch is not None and float(state.epoch).is_integer()
    return whole or state.global_step >= state.max_steps


# What the Trainer forgets when it goes on from a checkpoint, and what it does then that it should not: a callback.


LOSSES = "running_loss.json"


@contextlib.contextmanager
def configs_of_both_styles() -> Iterator[None]:
    """Lets the Trainer continue from a checkpoint whose config has the keys of transformers 4 as well as those of 5.

    The Trainer reads a checkpoint's config for nothing but the version in it, and as `PreTrainedConfig` itself. That
    class takes `rope_scaling` with a type of yarn, longrope or llama3 for its own and asks for a context length that it
    does not have: an AttributeError, in transformers 5.23, on every patched model that 4.57 can read too.
    """
    module: Any = importlib.import_module("transformers.trainer")
    before = module.PreTrainedConfig
    module.PreTrainedConfig = _VersionOnly
    try:
        yield
    finally:
        module.PreTrainedConfig = before


class _VersionOnly:
    """What the Trainer reads of a config."""

    def __init__(self, version: str | None) -> None:
        self.transformers_version = version

    @classmethod
    def from_json_file(cls, path: str) -> _VersionOnly:
        return cls(json.loads(Path(path).read_text(encoding="utf-8")).get("transformers_version"))


class ExactResume(TrainerCallback):
    """Makes the log of a run that was cut anywhere the log of a run that was not.

    Read in transformers 5.15 to 5.23 (`trainer.py`), and measured: the Trainer

    - forgets the losses since its last log, so that with `logging_steps` above 1 the next average is another one;
    - trains one step too many when it goes on from the checkpoint of its last step;
    - leaves out what is due at an epoch's end (`eval_strategy="epoch"`) when it goes on from the epoch's last step;
    - evaluates again at the start (`eval_on_start`), and keeps to the checkpoint's intervals for logs and saves.

    Put it between `SaveOnSignal` and `SafeCheckpoints`: it decides on the saves of the one and writes what the other
    marks complete.

    Args:
        trainer: The Trainer that it is a callback of.
        checkpoint: What `train()` continues from, if anything.
    """

    def __init__(self, trainer: Trainer, checkpoint: Path | None) -> None:
        self._trainer: Any = trainer
        self._checkpoint = checkpoint
        self._finished = False
        self._save_at_epoch_end = False
        self._eval_on_start: bool | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if not state.global_step:
            return
        state.compute_steps(args, state.max_steps)
        self._eval_on_start, args.eval_on_start = args.eval_on_start, False
        if self._checkpoint is not None and (self._checkpoint / LOSSES).exists():
            self._restore(json.loads((self._checkpoint / LOSSES).read_text(encoding="utf-8")))
        self._finished = state.global_step >= state.max_steps
        if self._finished:
            self._trainer.get_batch_samples = lambda *_: ([], None)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self._finished:
            control.should_training_stop = True

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        due_then = IntervalStrategy.EPOCH in (args.eval_strategy, args.logging_strategy)
        if control.should_save and due_then and ends_epoch(state):
            control.should_save, self._save_at_epoch_end = False, True

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self._finished:
            control.should_log = control.should_evaluate = control.should_save = False
        if self._save_at_epoch_end:
            control.should_save, self._save_at_epoch_end = True, False

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        sums = from_all(self._trainer._tr_loss.item())
        if args.should_save:
            made = {"logged_at": self._trainer._globalstep_last_logged, "sums": sums}
            folder = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
            write_atomically(folder / LOSSES, json.dumps(made) + "\n")  # with NaN as it is

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self._finished:
            del self._trainer.get_batch_samples
        if self._eval_on_start is not None:
            args.eval_on_start = self._eval_on_start

    def _restore(self, stored: dict[str, Any]) -> None:
        """Goes on with the sum that each process had: a float32, which JSON holds exactly."""
        sums, trainer = stored["sums"], self._trainer
        if len(sums) != trainer.args.world_size:
            return
        trainer._tr_loss += sums[trainer.args.process_index]
        trainer._globalstep_last_logged = stored["logged_at"]
        trainer._total_loss_scalar -= sum(sums) / len(sums)  # `train_loss` is of this call alone


# What a run says while it trains, and when it must not go on.


_LINES = 30
"""About how many lines a run prints, however many steps are logged."""


class StopOnNonFinite(TrainerCallback):
    """Ends the training when the loss is not a number, before anything is saved from it.

    Raises:
        PosencError: From the Trainer's `train()`, in every process.
    """

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        for name in ("loss", "grad_norm"):
            value = (logs or {}).get(name)
            if value is not None and not math.isfinite(float(value)):
                raise PosencError(
                    f"The {name} is {float(value)} at step {state.global_step}; nothing was saved from it. Lower "
                    "--learning_rate or raise --warmup_steps, and look at the text; the same command goes on from the "
                    "last checkpoint."
                )


class Lines(TrainerCallback):
    """Prints a line about every thirtieth of the run, and one for every evaluation, in the first process."""

    def __init__(self) -> None:
        self._began = 0.0
        self._first = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._began, self._first = time.perf_counter(), state.global_step
        if state.is_world_process_zero and state.global_step:
            _say(f"going on after step {state.global_step:,} of {state.max_steps:,}")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        step, steps = state.global_step, state.max_steps
        if not state.is_world_process_zero or "loss" not in (logs or {}):
            return
        every = max(1, steps // _LINES)
        if step % every and step not in (1, steps):
            return
        assert logs is not None
        left = (time.perf_counter() - self._began) / max(1, step - self._first) * (steps - step)
        _say(
            f"step {step:,}/{steps:,}  loss {float(logs['loss']):.4f}  lr {float(logs.get('learning_rate', 0)):.2e}  "
            f"gradient {float(logs.get('grad_norm', 0)):.2f}  {left:,.0f} s left"
        )


def _say(text: str) -> None:
    Console(highlight=False, soft_wrap=True).print(text)


# The project's scorer in the Trainer's own evaluations.


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
