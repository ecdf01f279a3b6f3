"""What a run says while it trains, and when it must not go on."""

from __future__ import annotations

import math
import time
from typing import Any

from rich.console import Console
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_posenc.errors import PosencError

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
