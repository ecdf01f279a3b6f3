"""What the Trainer forgets when it goes on from a checkpoint, and what it does then that it should not: a callback."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import (
    IntervalStrategy,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from hf_posenc.evaluation.files import write_atomically
from hf_posenc.training.interruption import ends_epoch
from hf_posenc.training.ranks import from_all

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
