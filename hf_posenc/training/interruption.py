"""A scheduler's warning: the run saves at the end of the step it is in, and stops."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_posenc.training import together
from hf_posenc.training.launching import launcher

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
