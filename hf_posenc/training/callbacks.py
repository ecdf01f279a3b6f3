"""Callbacks of the Trainer: saving on signals, exact resume, held-out perplexities, progress, time."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

from transformers import (
    IntervalStrategy,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.scoring.decoder import replaced
from hf_posenc.files import write_atomically
from hf_posenc.model.unwrapping import unwrap
from hf_posenc.training.processes import gather, launcher, random_state
from hf_posenc.training.scoring import Scores, label_of

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
LOSSES = "running_loss.json"


class SaveOnSignal(TrainerCallback):
    """On SIGTERM or SIGUSR1 to any process: save at the end of the step, in all processes, and stop.

    An evaluation that is due at that step, or running, is finished first, as without a signal: it draws random numbers,
    which the later losses depend on. Repeated signals have no effect, as launchers and schedulers both send them. The
    death of the launcher counts as a signal: `accelerate launch` with one process dies of a signal without passing it
    on, and its child process would continue unnoticed.

    Attributes:
        received: The number of the signal that ended the training, or 0. A program exits with 128 plus this number, as
            in shells, so that a scheduler does not consider the run finished.

    Examples:
        >>> from transformers import Trainer, TrainingArguments
        >>> from hf_posenc.training import SafeCheckpoints, SaveOnSignal
        >>> signals = SaveOnSignal()
        >>> arguments = TrainingArguments("run", report_to=[], save_total_limit=2)
        >>> trainer = Trainer(model, arguments, callbacks=[signals, SafeCheckpoints()])
        >>> signals.received  # after trainer.train(): exit with 128 plus this number, if it is not 0
        0
    """

    def __init__(self) -> None:
        self.received = 0
        self._pending = 0
        self._handlers: dict[signal.Signals, Any] = {}
        self._launcher: int | None = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        parent = launcher()
        self.received, self._pending = 0, 0
        self._launcher = None if parent is None else parent[0]
        if threading.current_thread() is threading.main_thread() and not self._handlers:
            self._handlers = {each: signal.signal(each, self._record) for each in SIGNALS}

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self._block(True)  # the Trainer starts the workers of its dataloader now

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._block(False)

    on_prediction_step = on_step_begin

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        self._stop_if_signalled(control)
        self._block(control.should_evaluate)

    def on_evaluate(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        self._block(False)
        if state.global_step > 0:
            self._stop_if_signalled(control)

    def on_epoch_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        # The Trainer treats every stop as the end of an epoch.
        if self.received and not _ends_epoch(state):
            control.should_log = control.should_evaluate = control.should_save = False
        elif not self.received:
            self._stop_if_signalled(control)
        self._block(control.should_evaluate)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._block(False)
        for each, handler in self._handlers.items():
            signal.signal(each, signal.SIG_DFL if handler is None else handler)
        self._handlers = {}

    def _record(self, number: int, frame: FrameType | None) -> None:
        self._pending = number

    def _block(self, on: bool) -> None:
        """Block or unblock the signals, for this process and for processes started meanwhile.

        A scheduler also signals the workers of a dataloader, and the death of a worker would end the run before it has
        saved. So signals are blocked while workers are started.
        """
        if self._handlers and hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_BLOCK if on else signal.SIG_UNBLOCK, SIGNALS)

    def _stop_if_signalled(self, control: TrainerControl) -> None:
        if self._launcher is not None and os.getppid() != self._launcher:
            self._pending = self._pending or signal.SIGTERM
        self.received = max(gather(self._pending))
        if self.received:
            control.should_save = control.should_training_stop = True


def _ends_epoch(state: TrainerState) -> bool:
    """Return whether the last step was the last of its epoch, or of all: the Trainer treats both as the end."""
    return float(state.epoch or 0.5).is_integer() or state.global_step >= state.max_steps


class ExactResume(TrainerCallback):
    """Gives an interrupted run the log of an uninterrupted one.

    Read in transformers 5.15 to 5.24 (`trainer.py`), and measured: the Trainer

    - discards the losses since its last log, so that with `logging_steps` above 1 the next average differs;
    - trains one step too many when it resumes from the checkpoint of its last step;
    - skips the evaluation at an epoch's end (`eval_strategy="epoch"`) when it resumes from the epoch's last step;
    - evaluates again at the start (`eval_on_start`), and keeps the checkpoint's intervals of logs and saves.

    Add it between `SaveOnSignal` and `SafeCheckpoints`: it decides on the saves of the former and writes files that the
    latter marks complete. `checkpoint` is the one that `train()` resumes from, if any.
    """

    def __init__(self, trainer: Trainer, checkpoint: Path | None) -> None:
        self._trainer: Any = trainer
        self._checkpoint = checkpoint
        self._finished = self._save_at_epoch_end = False
        self._eval_on_start: bool | None = None

    def on_train_begin(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        if not state.global_step:
            return
        state.compute_steps(args, state.max_steps)
        self._eval_on_start, args.eval_on_start = args.eval_on_start, False
        if self._checkpoint is not None and (self._checkpoint / LOSSES).exists():
            stored = json.loads((self._checkpoint / LOSSES).read_text(encoding="utf-8"))
            sums, trainer = stored["sums"], self._trainer
            if len(sums) == args.world_size:  # float32, which JSON stores exactly
                trainer._tr_loss += sums[args.process_index]
                trainer._globalstep_last_logged = stored["logged_at"]
        self._finished = state.global_step >= state.max_steps
        if self._finished:
            self._trainer.get_batch_samples = lambda *_: ([], None)

    def on_epoch_begin(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        if self._finished:
            control.should_training_stop = True

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        due_then = IntervalStrategy.EPOCH in (args.eval_strategy, args.logging_strategy)
        if control.should_save and due_then and _ends_epoch(state):
            control.should_save, self._save_at_epoch_end = False, True

    def on_epoch_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        if self._finished:
            control.should_log = control.should_evaluate = control.should_save = False
        if self._save_at_epoch_end:
            control.should_save, self._save_at_epoch_end = True, False

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        sums = gather(self._trainer._tr_loss.item())
        if args.should_save:
            values = {"logged_at": self._trainer._globalstep_last_logged, "sums": sums}
            folder = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
            write_atomically(folder / LOSSES, json.dumps(values) + "\n")  # keeps NaN

    def on_train_end(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        if self._finished:
            del self._trainer.get_batch_samples
        if self._eval_on_start is not None:
            args.eval_on_start = self._eval_on_start


def configs_of_both_styles() -> contextlib.AbstractContextManager[None]:
    """Let the Trainer resume from a checkpoint whose config has keys of both transformers 4 and 5.

    The Trainer reads only the version from a checkpoint's config, but through `PreTrainedConfig`. That class interprets
    `rope_scaling` of type yarn, longrope or llama3 as its own and requires a context length that it does not have: an
    AttributeError, in transformers 5.24, on every patched model that 4.57 can read too.
    """

    def version_of(path: str) -> SimpleNamespace:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        return SimpleNamespace(transformers_version=values.get("transformers_version"))

    module = importlib.import_module("transformers.trainer")
    return replaced(module, "PreTrainedConfig", SimpleNamespace(from_json_file=version_of))


class PerplexityCallback(TrainerCallback):
    """Measures held-out perplexity before the first step and whenever the Trainer evaluates.

    The Trainer's log has the numbers as `eval_<protocol>_perplexity_<length>`, and so do TensorBoard and other
    trackers. They are also among the metrics of the evaluation, for `metric_for_best_model`: the lowest is the best.
    The training is bit-identical to one without evaluations: the random generators are restored, also after the
    Trainer's own evaluation.

    The Trainer evaluates only with an `eval_dataset`; an empty list suffices for the perplexities alone.

    Args:
        scores: The perplexities to measure.
        trainer: The Trainer of this callback.

    Examples:
        >>> from transformers import Trainer, TrainingArguments
        >>> from hf_posenc.training import PerplexityCallback, Scores
        >>> trainer = Trainer(model, TrainingArguments("run", report_to=[]), eval_dataset=[])
        >>> scores = Scores(tokenizer, texts, lengths=[64, 128])
        >>> trainer.add_callback(PerplexityCallback(scores, trainer))
        >>> metrics = trainer.evaluate()  # doctest: +ELLIPSIS
        {'eval_...
        >>> list(metrics)[-1]
        'eval_tail_perplexity_128'
    """

    def __init__(self, scores: Scores, trainer: Trainer) -> None:
        self._scores, self._trainer = scores, trainer
        self._restore: Callable[[], None] | None = None
        if "_perplexity_" in (trainer.args.metric_for_best_model or ""):
            trainer.args.greater_is_better = False  # as transformers sets it for a loss alone

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == 0:
            self._measure(given["model"], state)
            self._restore = random_state() if args.eval_on_start else None

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        # Before an evaluation, whose data loader draws a seed.
        self._restore = random_state() if control.should_evaluate else None

    on_epoch_end = on_step_end

    def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        numbers = self._measure(given["model"], state)
        if given.get("metrics") is not None:
            given["metrics"].update(numbers)
        if self._restore is not None:
            self._restore()
            self._restore = None

    def _measure(self, model: Any, state: TrainerState) -> dict[str, float]:
        seen = state.num_input_tokens_seen or None
        result = self._scores.measure(model, state.global_step, tokens_seen=seen)
        label = label_of(unwrap(model, adapters=False), state.global_step)
        cells = [cell for cell in result.cells if cell.method == label]
        numbers = {f"eval_{x.protocol}_perplexity_{x.length}": x.perplexity for x in cells}
        self._trainer.log(dict(numbers))
        return numbers


class LossBar(ProgressCallback):
    """Shows the Trainer's progress with the loss and the time left, and a line for each evaluation, in a terminal.

    The Trainer's own writes all it logs as a line above the bar, at every step.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        super().on_train_begin(args, state, control, **given)  # type: ignore[no-untyped-call]
        self.current_step = state.global_step
        if (bar := self.training_bar) is not None:
            bar.initial = bar.n = state.global_step  # of a run that resumes
            bar.bar_format = (
                "{percentage:3.0f}%|{bar}| step {n_fmt} of {total_fmt}{postfix}, {remaining} left"
            )
            bar.refresh()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if self.training_bar is None:
            return
        if "loss" in logs:
            self.training_bar.set_postfix_str(f"loss {logs['loss']:.4g}")
        if scored := {name: value for name, value in logs.items() if "_perplexity_" in name}:
            texts = (f"{name[5:].replace('_', ' ')}: {value:.4g}" for name, value in scored.items())
            self.training_bar.write(f"step {state.global_step}: {', '.join(texts)}")


class StopOnNonFinite(TrainerCallback):
    """Raises from the Trainer's `train()` when loss or gradient norm are not finite, before anything is saved."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        for name in ("loss", "grad_norm"):
            if (value := (logs or {}).get(name)) is not None and not math.isfinite(float(value)):
                raise PosencError(
                    f"The {name} is {float(value)} at step {state.global_step}; nothing was saved from it. Lower "
                    "--learning-rate or raise --warmup-steps, and inspect the text; the same command resumes."
                )


class RunTime(TrainerCallback):
    """Adds the seconds since the run began to each entry of the Trainer's log, over all calls that resumed it.

    The Trainer's own summary describes its last call; after a resume only the time is left, that of the whole run.
    """

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self._before = max((entry.get("seconds", 0.0) for entry in state.log_history), default=0.0)
        self._begin = time.monotonic()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: Any, **_: Any) -> None:
        entry: dict[str, Any] = state.log_history[-1]
        seconds = entry["seconds"] = self._before + time.monotonic() - self._begin
        if "train_runtime" in entry and self._before:
            entry["train_runtime"] = seconds
            for name in ("train_loss", "train_steps_per_second", "train_samples_per_second"):
                entry.pop(name, None)
