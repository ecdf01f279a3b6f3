"""The folder of a training run: who writes to it, where the run continues, what a failed save means."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout
from transformers import Trainer, TrainingArguments

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.measuring.identity import environment
from hf_posenc.files import finite, to_json, write_atomically
from hf_posenc.training import ranks as together
from hf_posenc.training.callbacks import ExactResume, SaveOnSignal, configs_of_both_styles
from hf_posenc.training.checkpoints import (
    CONFIGS,
    ENDED,
    SafeCheckpoints,
    checkpoints,
    clear_partial,
    complete_checkpoints,
    discard,
    flush,
    last_complete_checkpoint,
    manifest_of,
    mark_complete,
    reason_of,
    save_result,
    step_of,
)
from hf_posenc.training.checks import join_on_cpu
from hf_posenc.training.ranks import from_all

if TYPE_CHECKING:
    from accelerate import Accelerator


# The same command continues a run; another one in its folder is refused, with what differs.
#
# A run's folder holds `settings.json`: everything that determines its numbers. A run continued under other settings
# would be neither the old run nor the new one, and nothing in its results would say so.


SETTINGS = "settings.json"
_FORMAT = 1
# Where a run is, who watches it, how often it saves and how its batches are fetched: none of the losses depend on them.
_NAMES = """output_dir logging_dir run_name project report_to disable_tqdm log_level log_level_replica log_on_each_node
    logging_strategy logging_steps logging_first_step logging_nan_inf_filter include_num_input_tokens_seen
    save_strategy save_steps save_total_limit save_on_each_node enable_jit_checkpoint resume_from_checkpoint
    push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
    trackio_space_id trackio_bucket_id trackio_static_space_id skip_memory_metrics debug ddp_timeout local_rank
    dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
    dataloader_multiprocessing_context dataloader_in_order restore_callback_states_from_checkpoint
    do_train do_eval do_predict fresh verify_export"""
_FREE = frozenset(_NAMES.split())
_LAUNCH = ("FSDP_", "ACCELERATE_DEEPSPEED_", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_")


def settings_of(arguments: TrainingArguments, **more: Any) -> dict[str, Any]:
    """Everything about a training that determines its losses, JSON-ready.

    Args:
        arguments: The Trainer's; what only says where and how often things are written is left out.
        **more: The model, its patch, the data, the positions.
    """
    from accelerate import PartialState

    given = {name: value for name, value in arguments.to_dict().items() if name not in _FREE}
    launched = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_LAUNCH) and value.lower() not in ("", "no", "false", "0")
    }
    sharding = PartialState().distributed_type.value
    processes = {"count": arguments.world_size, "distributed_type": sharding, **launched}
    made = {**more, "arguments": given, "processes": processes}
    return dict(json.loads(json.dumps(finite(made), default=str)))


def resume_point(
    folder: Path,
    settings: Mapping[str, Any],
    *,
    explicit: Path | None = None,
    fresh: bool = False,
    device: str | None = None,
) -> Path | None:
    """Finds where a run continues, and removes what a kill left half written.

    Call it in one process per disk, while no other run writes to the folder.

    Args:
        folder: The run's folder; made where it does not exist.
        settings: Everything that determines the losses, as `settings_of` gives it.
        explicit: A checkpoint that the user names: the run continues from it under whatever settings. Once it has
            saved beyond it, the same command continues from its own last checkpoint.
        fresh: Remove checkpoints of other settings instead of refusing them.
        device: What the run computes on; another one than before is warned of.

    Returns:
        The checkpoint; `None`: the run begins.

    Raises:
        PosencError: The folder holds another run, a damaged checkpoint, or cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = _read(folder)
    others = checkpoints(folder)
    if before is None and others and not fresh:
        raise PosencError(
            f"{folder} holds {others[-1].name}, and no {SETTINGS} says what run it is of. Choose another --output_dir "
            "(--resume_from_checkpoint can name a checkpoint in this one), or remove them with --fresh."
        )
    clear_partial(folder)
    changed = ["its settings are unknown"]
    if before is not None:
        changed = differences(before["settings"], settings)
    complete = complete_checkpoints(folder)
    occupied = bool(complete) or any((folder / name).exists() for name in CONFIGS)
    if changed and occupied and fresh:
        for path in complete:
            discard(path)
        complete = []
    elif changed and occupied and explicit is None:
        raise PosencError(
            f"{folder} holds a run with other settings: {_list(changed)}. Repeat its command to continue it, choose "
            "another --output_dir, or begin again in this one with --fresh. With --resume_from_checkpoint CHECKPOINT "
            "it goes on from there, but not as it would have."
        )
    named = None if explicit is None else str(explicit)
    continued = before is not None and not changed and before.get("continued") == named
    if explicit is None or (complete and continued):
        point = last_complete_checkpoint(folder)
        if point is not None and settings.get("arguments", {}).get("save_only_model"):
            raise PosencError(
                f"{point} holds no optimizer (--save_only_model), so the run cannot continue from it as it was. Name "
                "it in --resume_from_checkpoint to go on with a new one, or choose another --output_dir."
            )
    else:
        point = _explicit(explicit, folder, complete, settings)
    if point is not None and before is not None:
        _warn_of_environment(before, device)
    written = {
        "kind": "training",
        "format": _FORMAT,
        "settings": dict(settings),
        "continued": named if before is None or named is not None else before.get("continued"),
        "environment": environment(),
        "device": device,
    }
    write_atomically(folder / SETTINGS, to_json(written))
    return point


def differences(before: Any, now: Any, name: str = "") -> list[str]:
    """What differs between two JSON values, as `name: before, now`."""
    if isinstance(before, dict) and isinstance(now, dict):
        found = []
        # Another version of transformers has other options; what both have is compared.
        keys = {*before} & {*now} if name == "arguments" else {*before, *now}
        for key in sorted(keys):
            path = f"{name}.{key}" if name else str(key)
            found += differences(before.get(key), now.get(key), path)
        return found
    if before == now:
        return []
    return [f"{name.removeprefix('arguments.')} was {_short(before)}, is {_short(now)}"]


def _list(changed: list[str]) -> str:
    more = f"; and {len(changed) - 4} more" if len(changed) > 4 else ""
    return "; ".join(changed[:4]) + more


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _read(folder: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise PosencError(f"{folder / SETTINGS} cannot be read: {error}.") from error
    if found.get("kind") != "training" or found.get("format") != _FORMAT:
        raise PosencError(
            f"{folder / SETTINGS} was not written by this version's training. Choose another --output_dir."
        )
    return dict(found)


def _explicit(
    explicit: Path, folder: Path, complete: list[Path], settings: Mapping[str, Any]
) -> Path:
    if not (explicit / "trainer_state.json").is_file():
        raise PosencError(
            f"{explicit} is no checkpoint, or one that was never finished: it has no trainer_state.json."
        )
    ahead = [path for path in complete if step_of(path) > step_of(explicit)]
    if explicit.resolve().parent == folder.resolve() and ahead:
        raise PosencError(
            f"{ahead[-1].name} lies ahead of {explicit.name}, and the run would write over it. Give another "
            f"--output_dir, remove {ahead[-1].name}, or leave --resume_from_checkpoint out to continue from it."
        )
    origin = _read(explicit.parent)
    changed = ["they are unknown"] if origin is None else differences(origin["settings"], settings)
    if changed:
        warnings.warn(
            f"{explicit.name} was written under other settings, so the run is no exact continuation: "
            f"{_list(changed)}.",
            stacklevel=2,
        )
    return explicit


def _warn_of_environment(before: Mapping[str, Any], device: str | None) -> None:
    then = {**before.get("environment", {}), "device": before.get("device")}
    if changed := differences(then, {**environment(), "device": device}):
        warnings.warn(
            f"The run continues, but its losses may differ in their last bits: {_list(changed)}.",
            stacklevel=2,
        )


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


# Around a bare accelerate loop: how it starts and fails, and checkpoints that are whole or not there.


def command(main: Callable[[], None]) -> Callable[[], None]:
    """Makes a script's function a command: a launcher's processes find each other, what goes wrong is one line."""

    @functools.wraps(main)
    def run() -> None:
        join_on_cpu()
        try:
            main()
        except PosencError as error:
            sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
            sys.exit(2)

    return run


def resume(accelerator: Accelerator, folder: Path | str, settings: Mapping[str, Any]) -> int:
    """Loads the last complete checkpoint of a run into what the accelerator has prepared. All processes call it.

    What a kill left half written is removed.

    Args:
        accelerator: With model, optimizer and loader prepared, and the scheduler registered for checkpointing.
        folder: The run's folder, seen by every process.
        settings: Everything that determines the losses, JSON-ready; the number of processes is added.

    Returns:
        The number of steps that are done.

    Raises:
        PosencError: In the first process: the folder holds a run with other settings.
    """
    folder = Path(folder)
    if accelerator.is_main_process:
        processes = {"processes": accelerator.num_processes}
        resume_point(folder, {**settings, **processes}, device=accelerator.device.type)
    together.wait()
    checkpoint = last_complete_checkpoint(folder)
    if checkpoint is None:
        return 0
    accelerator.load_state(str(checkpoint))
    return step_of(checkpoint)


def save(accelerator: Accelerator, folder: Path | str, step: int) -> None:
    """Writes a checkpoint, and last of all that it is complete. All processes call it.

    Args:
        accelerator: As for `resume`.
        folder: The run's folder.
        step: The number of steps that are done.

    Raises:
        PosencError: The disk cannot take it; older checkpoints are what they were.
    """
    path = Path(folder) / f"checkpoint-{step}"
    accelerator.save_state(str(path))
    together.wait()  # each process has written its part
    if accelerator.is_local_main_process:
        flush(path)
    together.wait()
    if accelerator.is_main_process:
        mark_complete(path, processes=accelerator.num_processes)
    together.wait()
