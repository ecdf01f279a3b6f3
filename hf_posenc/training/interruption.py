"""A scheduler's warning: the run saves at the end of the step it is in, and stops."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_posenc.training import together

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))


class Interruption:
    """Takes note of signals while it is open; a further one changes nothing.

    For a bare loop; `SaveOnSignal` uses it for the Trainer.

    Args:
        signals: Which ones.
    """

    def __init__(self, signals: Iterable[signal.Signals] = SIGNALS) -> None:
        self._signals = tuple(signals)
        self._before: dict[signal.Signals, Any] = {}
        self.received: signal.Signals | None = None

    def __enter__(self) -> Interruption:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Begins to listen; only a process's main thread can."""
        if threading.current_thread() is threading.main_thread() and not self._before:
            self._before = {each: signal.signal(each, self._note) for each in self._signals}

    def close(self) -> None:
        """What a signal did before, it does again."""
        for each, handler in self._before.items():
            signal.signal(each, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def agreed(self) -> bool:
        """Whether any process has received one: the same answer in all of them. All must call it."""
        return together.any_process(self.received is not None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)


class SaveOnSignal(TrainerCallback):
    """On SIGTERM or SIGUSR1 to any process: save at the end of this step, in all processes, and stop.

    An evaluation that is due at that step, or under way, comes first, as it does without a signal: it draws random
    numbers, and leaving it out would change the losses after it.

    Attributes:
        stopped: Whether the training ended because of a signal.
    """

    def __init__(self) -> None:
        self._interruption = Interruption()
        self.stopped = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.stopped = False
        self._interruption.received = None
        self._interruption.open()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._stop_if_asked(control)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if state.global_step > 0:
            self._stop_if_asked(control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._interruption.close()

    def _stop_if_asked(self, control: TrainerControl) -> None:
        if self._interruption.agreed():
            self.stopped = control.should_save = control.should_training_stop = True
