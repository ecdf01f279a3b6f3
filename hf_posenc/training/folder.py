"""The folder of a training run: who writes to it, where the run continues, what a failed save means."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout
from transformers import Trainer, TrainingArguments

from hf_posenc.errors import PosencError
from hf_posenc.training import together
from hf_posenc.training.checkpoints import (
    SafeCheckpoints,
    checkpoints,
    clear_partial,
    complete_checkpoints,
    discard,
    manifest_of,
    step_of,
)
from hf_posenc.training.exact_resume import ExactResume, configs_of_both_styles
from hf_posenc.training.interruption import SaveOnSignal
from hf_posenc.training.ranks import from_all
from hf_posenc.training.result_saving import ENDED, reason_of, save_result
from hf_posenc.training.settings_guard import resume_point

_LOCK = ".lock"
_PATIENCE = 60.0
"""Seconds to wait for a process that still trains in the folder: one that was told to stop needs to save first."""


class TrainingFolder:
    """The folder of one run, held by it alone: a context manager around the training and the final save.

    All processes of the run enter it. The same command continues where a run was killed, bit for bit; another one is
    refused. A save that fails, on a full disk for instance, becomes one line, and loses nothing older.

    Args:
        arguments: The Trainer's.
        settings: Everything that determines the losses, as `settings_guard.settings_of` gives it.
        fresh: Remove what another command left instead of refusing it.

    Attributes:
        checkpoint: Where the run continues; `None` when it begins.

    Raises:
        PosencError: On entering, in the first process (the others exit): the folder holds another run, or another
            process trains in it. On leaving: a save failed.
    """

    def __init__(
        self, arguments: TrainingArguments, settings: Mapping[str, Any], *, fresh: bool = False
    ) -> None:
        self._arguments = arguments
        self._settings = settings
        self._fresh = fresh
        self._interruption = SaveOnSignal()
        self._lock: FileLock | None = None
        self.path = Path(arguments.output_dir or ".")
        self.checkpoint: Path | None = None

    def __enter__(self) -> TrainingFolder:
        problem = None
        # One process, or one per machine where each has a disk of its own.
        if self._arguments.should_save:
            try:
                self._hold()
                self.checkpoint = resume_point(
                    self.path,
                    self._settings,
                    explicit=_named(self._arguments.resume_from_checkpoint),
                    fresh=self._fresh,
                    device=self._arguments.device.type,
                )
            except PosencError as error:
                problem = str(error)
            except OSError as error:
                problem = f"{self.path} cannot be written to: {error.strerror or error}."
        self._agree(problem)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if isinstance(error, Exception):
                self._explain(error)
        finally:
            if self._lock is not None:
                self._lock.release()

    def train(self, trainer: Trainer) -> None:
        """Trains to the end; ends the program after a signal, when everything is saved.

        Raises:
            SystemExit: SIGTERM or SIGUSR1 came: 128 plus its number, as shells have it.
        """
        for callback in (
            self._interruption,
            ExactResume(trainer, self.checkpoint),
            SafeCheckpoints(),
        ):
            trainer.add_callback(callback)
        where = None if self.checkpoint is None else str(self.checkpoint)
        with configs_of_both_styles():
            trainer.train(resume_from_checkpoint=where)
        if self._interruption.received:
            if self._arguments.process_index == 0:
                step = trainer.state.global_step
                sys.stderr.write(
                    f"Stopped by a signal after step {step:,}, and saved: the same command continues.\n"
                )
            together.leave()
            sys.exit(128 + self._interruption.received)

    def save(self, write: Callable[[str], object]) -> None:
        """Saves the result: `write` saves into the folder that it is given. See `save_result`."""
        save_result(self.path, write, keeper=self._arguments.should_save)

    def _hold(self) -> None:
        """Takes the folder's lock; the system lets it go when the process ends, however it ends."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self.path / _LOCK)
        try:
            self._lock.acquire(timeout=0)
            return
        except Timeout:
            sys.stderr.write(f"Another process trains in {self.path}: waiting for it to end.\n")
        try:
            self._lock.acquire(timeout=_PATIENCE)
        except Timeout:
            raise PosencError(
                f"Another process still trains in {self.path} after {_PATIENCE:.0f} seconds. Stop it, wait for it, or "
                "choose another --output_dir."
            ) from None

    def _agree(self, problem: str | None) -> None:
        """Makes one answer of what the processes found, each on the disk that it sees."""
        steps = [step_of(path) for path in complete_checkpoints(self.path)] if not problem else []
        point = None if self.checkpoint is None else str(self.checkpoint)
        found = from_all((problem, point, steps))
        self._raise_together(next((each for each, *_ in found if each), None))
        if self._arguments.save_on_each_node and self._arguments.resume_from_checkpoint is None:
            common = set.intersection(*(set(theirs) for *_, theirs in found))
            for path in complete_checkpoints(self.path) if self._arguments.should_save else ():
                if step_of(path) > max(common, default=0):
                    discard(path)  # a kill came before the other machines had marked theirs
            self.checkpoint = self.path / f"checkpoint-{max(common)}" if common else None
        else:
            self.checkpoint = None if found[0][1] is None else Path(found[0][1])
        seen = from_all(self.checkpoint is None or self.checkpoint.is_dir())
        if not all(seen):
            self._raise_together(
                f"Process {seen.index(False)} does not see {self.checkpoint}. Give an --output_dir that all machines "
                "share, or --save_on_each_node."
            )

    def _raise_together(self, problem: str | None) -> None:
        if problem is None:
            return
        if self._lock is not None:
            self._lock.release()
        if self._arguments.process_index == 0:
            together.leave()
            raise PosencError(problem)
        together.leave()
        sys.exit(2)  # the first process says it

    def _explain(self, error: Exception) -> None:
        """Turns what a save was ended by into one line; other errors go on as they are."""
        partial = [path for path in checkpoints(self.path) if manifest_of(path) is None]
        if not partial:
            if reason_of(error) == ENDED:  # the connection is what is left of the other's own error
                raise PosencError(f"{ENDED.capitalize()}: see what it says.") from error
            return
        free = shutil.disk_usage(self.path).free
        complete = complete_checkpoints(self.path)
        kept = f"{complete[-1].name} is whole" if complete else "there is no earlier one"
        if self._arguments.should_save:
            with contextlib.suppress(PosencError):  # else the next start does it
                clear_partial(self.path)
        raise PosencError(
            f"{partial[-1].name} could not be saved: {reason_of(error)} ({free / 2**20:,.1f} MiB were free). "
            f"{kept[0].upper()}{kept[1:]}: make room and run the same command again."
        ) from error


def _named(given: str | None) -> Path | None:
    """What `--resume_from_checkpoint` names; the Trainer's own True stands for the last one, as leaving it out does."""
    return None if given is None or str(given).lower() == "true" else Path(given)
