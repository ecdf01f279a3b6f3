"""The folder of a training run: its checkpoints and its result, either complete or not loaded; its lock and settings.

The Trainer writes a checkpoint in place, file by file, each process its own. A kill in between leaves a folder that
looks complete and that `resume_from_checkpoint=True` would choose. Here a manifest is written last, once every process
is done and every file is on the disk. A folder without a manifest is partial and is removed at the next start.

The folder's `settings.json` holds everything that determines the losses. The same command resumes a run. Another
command in the same folder is refused with the differences, since its results would not show that they mix two runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator, PartialState
from filelock import FileLock, Timeout
from torch.distributed.checkpoint.api import CheckpointException
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.measuring.identity import environment
from hf_posenc.files import WEIGHT_FILES, disk_errors, finite, to_json, write_atomically
from hf_posenc.training.callbacks import ExactResume, SaveOnSignal, configs_of_both_styles
from hf_posenc.training.processes import barrier, gather, leave_group

MANIFEST = "complete.json"
CONFIGS = ("config.json", "adapter_config.json")
"""The files that loading a model begins with."""
LOST_PEER = "another process of the run ended"

_NAME = re.compile(r"checkpoint-(\d+)")
SETTINGS = "settings.json"
_FORMAT = 1
_PATIENCE = 60.0
"""Seconds to wait for a process that still trains in the folder: after a signal it saves first."""
# The output, the reports, the frequency of saves and the loading of batches: no loss depends on them.
_FREE_NAMES = """output_dir logging_dir run_name project report_to disable_tqdm log_level log_level_replica
    log_on_each_node logging_strategy logging_steps logging_first_step logging_nan_inf_filter
    include_num_input_tokens_seen save_strategy save_steps save_total_limit save_on_each_node enable_jit_checkpoint
    resume_from_checkpoint push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
    trackio_space_id trackio_bucket_id trackio_static_space_id skip_memory_metrics debug ddp_timeout local_rank
    dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
    dataloader_multiprocessing_context dataloader_in_order restore_callback_states_from_checkpoint
    do_train do_eval do_predict fresh"""
_FREE = frozenset(_FREE_NAMES.split())
_LAUNCH = ("FSDP_", "ACCELERATE_DEEPSPEED_", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_DYNAMO_")


def checkpoints(folder: Path | str) -> list[Path]:
    """Return all checkpoints of a run, complete or partial, by step; none if the folder does not exist."""
    paths = [path for path in Path(folder).glob("checkpoint-*") if _NAME.fullmatch(path.name)]
    return sorted((path for path in paths if path.is_dir()), key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the step after which a checkpoint was written, from its name."""
    if (match := _NAME.fullmatch(checkpoint.name)) is None:
        raise PosencError(f"{checkpoint} is no checkpoint: its name is not checkpoint-<step>.")
    return int(match[1])


def mark_complete(folder: Path) -> None:
    """Flush a checkpoint to disk, then write its manifest. One process calls it, after all have written."""
    flush(folder)
    written = sorted(file for file in folder.rglob("*") if file.is_file())
    files = {file.relative_to(folder).as_posix(): file.stat().st_size for file in written}
    write_atomically(folder / MANIFEST, to_json({"kind": "checkpoint", "files": files}))
    _sync(folder)
    _sync(folder.parent)


def complete_checkpoints(folder: Path | str) -> list[Path]:
    """Return the checkpoints with a manifest, by step."""
    return [path for path in checkpoints(folder) if _manifest(path) is not None]


def last_complete_checkpoint(folder: Path | str) -> Path | None:
    """Return the complete checkpoint of the highest step; `None` without one.

    Args:
        folder: The output folder of a training.

    Returns:
        The folder `checkpoint-STEP`.

    Raises:
        PosencError: One of its files is missing or has another size, which no kill of a run explains.

    Examples:
        >>> from hf_posenc.training import last_complete_checkpoint
        >>> last_complete_checkpoint("longer") is None
        True
    """
    checkpoint = next(reversed(complete_checkpoints(folder)), None)
    manifest = checkpoint and _manifest(checkpoint)
    for name, size in manifest["files"].items() if checkpoint and manifest else ():
        file = checkpoint / name
        if not file.is_file() or file.stat().st_size != size:
            state = "has another size" if file.is_file() else "is missing"
            raise PosencError(
                f"{checkpoint} was complete, but {name} {state} now. Restore the file, or remove the folder: the run "
                "then resumes from the checkpoint before it."
            )
    return checkpoint


def clear_partial(folder: Path | str) -> list[Path]:
    """Remove partial checkpoints and return their paths. Call it in one process, while no run writes to the folder."""
    partial = [path for path in checkpoints(folder) if _manifest(path) is None]
    for path in partial:
        discard(path)
    return partial


def discard(checkpoint: Path) -> None:
    """Remove a checkpoint, its manifest first: after a kill, the rest counts as partial."""
    with disk_errors(f"{checkpoint} cannot be removed"):
        (checkpoint / MANIFEST).unlink(missing_ok=True)
        _sync(checkpoint)
        shutil.rmtree(checkpoint)


def rotate(folder: Path | str, limit: int | None, best: Path | str | None = None) -> None:
    """Remove the oldest complete checkpoints beyond `limit` (`None` or 0: none), but never the last or the `best`."""
    complete = complete_checkpoints(folder)
    if not limit or limit < 0 or not complete:
        return
    kept = {complete[-1].name, Path(best or "").name}
    old = [path for path in complete if path.name not in kept]
    # `limit` counts those that are kept in any case.
    room = max(0, limit - (len(complete) - len(old)))
    for path in old[: max(0, len(old) - room)]:
        discard(path)


class SafeCheckpoints(TrainerCallback):
    """Marks each checkpoint complete once it is on the disk, and only then removes older ones.

    The Trainer itself removes older checkpoints before the new one is complete. Therefore its `save_total_limit` is
    unset during the training and applied here. Add this callback behind `SaveOnSignal`, whose saves it marks.
    """

    def __init__(self) -> None:
        self._limit: int | None = None
        self._saved: int | None = None

    def on_train_begin(self, args: Any, state: TrainerState, *_: Any, **__: Any) -> None:
        if state.is_hyper_param_search:
            raise PosencError(
                "SafeCheckpoints supports one folder, and hyperparameter_search writes one per trial: leave it out."
            )
        if args.save_total_limit is not None:
            self._limit, args.save_total_limit = args.save_total_limit, None
        self._saved = None
        # A kill may have come between a manifest and the removal that follows it.
        if args.should_save:
            rotate(args.output_dir or ".", self._limit, state.best_model_checkpoint)

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        # A complete checkpoint is not written again: a kill would leave its manifest beside torn files.
        if control.should_save and self._saved == state.global_step:
            control.should_save = False

    on_epoch_end = on_step_end

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        checkpoint = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
        complete_together(checkpoint, marks=args.should_save)
        self._saved = state.global_step
        if args.should_save:
            rotate(args.output_dir or ".", self._limit, state.best_model_checkpoint)

    def on_train_end(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        if self._limit is not None:
            args.save_total_limit = self._limit


def complete_together(checkpoint: Path, *, marks: bool) -> None:
    """Mark a checkpoint complete once all processes have written their parts. All of them call it.

    The process that `marks` writes the manifest: one per disk.
    """
    barrier()
    if PartialState().is_local_main_process and not marks:  # the files of another machine
        flush(checkpoint)
    barrier()
    if marks:
        mark_complete(checkpoint)
    barrier()


def save_result(folder: Path, write: Callable[[str], object], *, keeper: bool = True) -> None:
    """Save a result into a temporary folder, flush it to disk, then move it into place.

    Loading begins with `config.json` or `adapter_config.json`. These are removed first and moved last. A kill in
    between leaves a folder that does not load, never new weights with an old config or the reverse. Weights of an
    earlier result with other names (two shards instead of one file) are removed. Checkpoints stay: the same command
    resumes from the last one and saves again.

    All processes call it, as sharded weights are gathered from all of them. One `keeper` per disk moves the files. If
    the save fails, an earlier result is still complete.
    """
    unfinished = folder / ".saving"
    try:
        if keeper:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        barrier()
        write(str(unfinished))
        barrier()
        if keeper:
            flush(unfinished)
            _move_into_place(unfinished, folder)
        barrier()
    except Exception as error:
        if keeper:
            with contextlib.suppress(OSError):
                shutil.rmtree(unfinished)
        if isinstance(error, PosencError) and not isinstance(error.__cause__, OSError):
            raise
        raise PosencError(
            f"The result could not be saved in {folder}: {reason_of(error)}. The checkpoints there are complete: make "
            "room and run the same command again."
        ) from error


def _move_into_place(unfinished: Path, folder: Path) -> None:
    names = sorted((path.name for path in unfinished.iterdir()), key=lambda n: (n in CONFIGS, n))
    for name in CONFIGS:
        (folder / name).unlink(missing_ok=True)
    _sync(folder)
    for path in [path for pattern in WEIGHT_FILES for path in folder.glob(pattern)]:
        if path.name not in names:
            path.unlink(missing_ok=True)
    for name in names:
        if name in CONFIGS:  # the others are on the disk first
            _sync(folder)
        if (folder / name).is_dir():
            shutil.rmtree(folder / name)
        (unfinished / name).replace(folder / name)
    _sync(folder)
    unfinished.rmdir()


def reason_of(error: BaseException) -> str:
    """Return why a save failed, in one line."""
    if isinstance(error, CheckpointException):  # of shards: the processes that failed
        error = next(iter(error.failures.values()))[0]
    text = " ".join(str(error).split()).rstrip(".")
    if "inline_container" in text:  # torch.save on a full disk
        return "torch.save could not write a file to its end"
    if "by peer" in text:  # gloo: "Connection closed by peer", "Connection reset by peer"
        return LOST_PEER
    return text[:200]


def flush(folder: Path) -> None:
    """Flush every file below a folder to disk."""
    with disk_errors(f"{folder} cannot be written"):
        for path in (folder, *folder.rglob("*")):
            _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _manifest(checkpoint: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError):
        return None


# The run that a folder holds.


def settings_of(arguments: TrainingArguments, **more: Any) -> dict[str, Any]:
    """Return everything that determines the losses of a training, JSON-ready.

    That is the Trainer's arguments, except those that only affect output and the frequency of saves, the processes, and
    `more`: the model, its patch, the data, the positions.
    """
    options = {name: value for name, value in arguments.to_dict().items() if name not in _FREE}
    launched = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_LAUNCH) and value.lower() not in ("", "no", "false", "0")
    }
    sharding = PartialState().distributed_type.value
    processes = {"count": arguments.world_size, "distributed_type": sharding, **launched}
    settings = {**more, "arguments": options, "processes": processes}
    return dict(json.loads(json.dumps(finite(settings), default=str)))


def resume_point(
    folder: Path,
    settings: Mapping[str, Any],
    *,
    explicit: Path | None = None,
    fresh: bool = False,
    device: str | None = None,
) -> Path | None:
    """Return the checkpoint that a run resumes from (`None` if it begins), and remove partial ones.

    Call it in one process per disk, while no other run writes to the folder. Other `settings` are refused, or with
    `fresh` their checkpoints removed. From an `explicit` checkpoint a run resumes under any settings; once it has saved
    a later one, the same command resumes from that. Another `device` is warned of.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before, others = _read_settings(folder), checkpoints(folder)
    if before is None and others and not fresh:
        raise PosencError(
            f"{folder} holds {others[-1].name}, and no {SETTINGS} identifies its run. Choose another --output-dir "
            "(--resume-from-checkpoint can name a checkpoint in this one), or remove them with --fresh."
        )
    if before is None and not others and any((folder / name).exists() for name in CONFIGS):
        raise PosencError(f"{folder} holds a model that no run wrote: choose another --output-dir.")
    clear_partial(folder)
    changed = differences(before["settings"], settings) if before else ["its settings are unknown"]
    complete = complete_checkpoints(folder)
    occupied = bool(complete) or any((folder / name).exists() for name in CONFIGS)
    if changed and occupied and fresh:
        for path in complete:
            discard(path)
        complete = []
    elif changed and occupied and explicit is None:
        raise PosencError(
            f"{folder} holds a run with other settings: {_list(changed)}. Repeat its command to resume it, choose "
            "another --output-dir, or begin again in this one with --fresh. With --resume-from-checkpoint CHECKPOINT "
            "it resumes from there, but with other losses than an uninterrupted run."
        )
    named = None if explicit is None else str(explicit)
    resumed = before and not changed and before.get("continued") == named
    if explicit is None or (complete and resumed):
        point = last_complete_checkpoint(folder)
        if point is not None and settings.get("arguments", {}).get("save_only_model"):
            raise PosencError(
                f"{point} holds no optimizer (--save-only-model), so the run cannot resume from it exactly. Name it in "
                "--resume-from-checkpoint to resume with a new one, or choose another --output-dir."
            )
    else:
        point = explicit
        if not (explicit / "trainer_state.json").is_file():
            raise PosencError(f"{explicit} is no whole checkpoint: it has no trainer_state.json.")
        ahead = [path for path in complete if step_of(path) > step_of(explicit)]
        if explicit.resolve().parent == folder.resolve() and ahead:
            raise PosencError(
                f"{ahead[-1].name} lies ahead of {explicit.name}, and the run would overwrite it. Give another "
                f"--output-dir, remove {ahead[-1].name}, or leave --resume-from-checkpoint out to resume from it."
            )
        origin = _read_settings(explicit.parent)
        changed = differences(origin["settings"], settings) if origin else ["they are unknown"]
        if changed:
            warnings.warn(
                f"{explicit.name} has other settings, so the run is no exact continuation: {_list(changed)}.",
                stacklevel=2,
            )
    now: dict[str, Any] = {
        "kind": "training",
        "format": _FORMAT,
        "settings": dict(settings),
        "continued": named or (before or {}).get("continued"),
        "environment": {**environment(), "device": device},
    }
    then = before or now  # earlier versions wrote the device beside the environment
    then = {"device": then.get("device"), **then.get("environment", {})}
    moved = differences(then, now["environment"])
    if point is not None and moved:
        warnings.warn(
            f"The run resumes, but its losses may differ in their last bits: {_list(moved)}.",
            stacklevel=2,
        )
    write_atomically(folder / SETTINGS, to_json(now))
    return point


def _read_settings(folder: Path) -> dict[str, Any] | None:
    if not (path := folder / SETTINGS).exists():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PosencError(f"{path} cannot be read: {error}.") from error
    if (values.get("kind"), values.get("format")) != ("training", _FORMAT):
        raise PosencError(f"{path} is not of this version's training. Choose another --output-dir.")
    return dict(values)


def differences(before: Any, now: Any, name: str = "") -> list[str]:
    """Return the differences between two JSON values, as `name was before, is now`."""
    if isinstance(before, dict) and isinstance(now, dict):
        lines = []
        # Another version of transformers has other options; the common ones are compared.
        keys = {*before} & {*now} if name == "arguments" else {*before, *now}
        for key in sorted(keys):
            path = f"{name}.{key}" if name else str(key)
            lines += differences(before.get(key), now.get(key), path)
        return lines
    if before == now:
        return []
    texts = (json.dumps(value) for value in (before, now))
    was, becomes = (text if len(text) <= 60 else f"{text[:57]}..." for text in texts)
    return [f"{name.removeprefix('arguments.')} was {was}, is {becomes}"]


def _list(changed: list[str]) -> str:
    return "; ".join(changed[:4]) + (f"; and {len(changed) - 4} more" if len(changed) > 4 else "")


class TrainingFolder:
    """The folder of one run, locked by it: a context manager around the training and the final save.

    All processes of the run enter it. The same command resumes where a run was killed, with bit-identical losses;
    another command is refused. A failed save, on a full disk for instance, raises an error of one line and keeps
    everything older.

    Args:
        arguments: The Trainer's.
        settings: Everything that determines the losses, from `settings_of`.
        fresh: Remove the checkpoints of another command instead of refusing them.

    Attributes:
        path: The folder.
        checkpoint: The checkpoint that the run resumes from; `None` if it begins.

    Raises:
        PosencError: On entering, in the first process (the others exit): the folder holds another run, or another
            process trains in it. On leaving: a save failed.

    Examples:
        >>> from transformers import Trainer, TrainingArguments
        >>> from hf_posenc.training import TrainingFolder
        >>> from hf_posenc.training.checkpoints import settings_of
        >>> data = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}]
        >>> arguments = TrainingArguments("run", max_steps=1, save_steps=1, report_to=[], disable_tqdm=True)
        >>> with TrainingFolder(  # doctest: +ELLIPSIS
        ...     arguments, settings_of(arguments, model="my-model")
        ... ) as folder:
        ...     trainer = Trainer(model, arguments, train_dataset=data)
        ...     folder.train(trainer)  # the same lines again resume
        ...     folder.save(trainer.save_model)
        {'train_...
        >>> (folder.path / "model.safetensors").exists()
        True
    """

    def __init__(
        self, arguments: TrainingArguments, settings: Mapping[str, Any], *, fresh: bool = False
    ) -> None:
        self._arguments, self._settings, self._fresh = arguments, settings, fresh
        self._interruption = SaveOnSignal()
        self.path = Path(arguments.output_dir or ".")
        self._lock = FileLock(self.path / ".lock")
        self.checkpoint: Path | None = None

    def __enter__(self) -> TrainingFolder:
        problem, named = None, self._arguments.resume_from_checkpoint
        # One process, or one per machine if each has its own disk.
        if self._arguments.should_save:
            try:
                self._acquire_lock()
                self.checkpoint = resume_point(
                    self.path,
                    self._settings,
                    # "true" is the last one, as by default
                    explicit=Path(named) if named and named.lower() != "true" else None,
                    fresh=self._fresh,
                    device=self._arguments.device.type,
                )
            except PosencError as error:
                problem = str(error)
            except OSError as error:
                problem = f"{self.path} cannot be written to: {error.strerror or error}."
        self._agree(problem)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if isinstance(error, Exception | CheckpointException):
                self._explain(error)
        finally:
            self._lock.release()
        if error is None:
            leave_group()

    def train(self, trainer: Trainer) -> None:
        """Train to the end. After a signal, exit once everything is saved, with 128 plus its number, as in shells."""
        exact = ExactResume(trainer, self.checkpoint)
        for callback in (self._interruption, exact, SafeCheckpoints()):
            trainer.add_callback(callback)
        checkpoint = None if self.checkpoint is None else str(self.checkpoint)
        with configs_of_both_styles():
            trainer.train(resume_from_checkpoint=checkpoint)
        step, first = trainer.state.global_step, self._arguments.process_index == 0
        if first and self.checkpoint is not None and step == step_of(self.checkpoint):
            sys.stderr.write(f"Nothing is left to train: step {step:,} was the last.\n")
        # Checkpoints may be in shards, the result is whole.
        if (sharding := getattr(trainer.accelerator.state, "fsdp_plugin", None)) is not None:
            sharding.set_state_dict_type("FULL_STATE_DICT")
        if self._interruption.received:
            if first:
                done = f"step {step:,}, and saved: the same command resumes."
                sys.stderr.write(f"Stopped by a signal after {done}\n")
            leave_group()
            sys.exit(128 + self._interruption.received)

    def save(self, write: Callable[[str], object]) -> None:
        """Save the result: `write` saves into the folder that it is called with. See `save_result`."""
        save_result(self.path, write, keeper=self._arguments.should_save)

    def _acquire_lock(self) -> None:
        """Lock the folder; the system releases the lock when the process ends, even if killed."""
        self.path.mkdir(parents=True, exist_ok=True)
        for patience in (0, _PATIENCE):
            with contextlib.suppress(Timeout):
                self._lock.acquire(timeout=patience)
                return
            if not patience:
                sys.stderr.write(f"Another process trains in {self.path}: waiting for it to end.\n")
        raise PosencError(
            f"Another process still trains in {self.path} after {_PATIENCE:.0f} seconds. Stop it, wait for it, or "
            "choose another --output-dir."
        )

    def _agree(self, problem: str | None) -> None:
        """Agree with the other processes, each on the disk that it sees, on a problem or a checkpoint."""
        arguments = self._arguments
        steps = [step_of(path) for path in complete_checkpoints(self.path)] if not problem else []
        states = gather((problem, self.checkpoint, steps))
        self._raise_on_all(next((each for each, *_ in states if each), None))
        if arguments.save_on_each_node and arguments.resume_from_checkpoint is None:
            common = set.intersection(*(set(theirs) for *_, theirs in states))
            for path in complete_checkpoints(self.path) if arguments.should_save else ():
                if step_of(path) > max(common, default=0):
                    discard(path)  # a kill came before the other machines had marked theirs
            self.checkpoint = self.path / f"checkpoint-{max(common)}" if common else None
        else:
            self.checkpoint = states[0][1]
        # Processes write their shards to the disk that they see, the first one this file to its own.
        point = self.checkpoint
        visible = gather(point is None or (point / "trainer_state.json").is_file())
        if not all(visible):
            self._raise_on_all(
                f"Process {visible.index(False)} does not see {self.checkpoint}. Give an --output-dir that all "
                "machines share, or --save-on-each-node."
            )

    def _raise_on_all(self, problem: str | None) -> None:
        if problem is not None:
            self._lock.release()
            leave_group()
            if self._arguments.process_index == 0:
                raise PosencError(problem)
            sys.exit(2)  # the first process raises the error

    def _explain(self, error: BaseException) -> None:
        """Replace the error of a failed save by one line; other errors are unchanged."""
        complete = complete_checkpoints(self.path)
        partial = [path for path in checkpoints(self.path) if path not in complete]
        if not partial and not isinstance(error, CheckpointException):
            if reason_of(error) == LOST_PEER:  # the other process reported the actual error
                raise PosencError(f"{LOST_PEER.capitalize()}: see its message.") from error
            return
        name = partial[-1].name if partial else "The checkpoint"  # removed by the first process
        free = shutil.disk_usage(self.path).free
        kept = f"{complete[-1].name} is complete" if complete else "there is no earlier one"
        if self._arguments.should_save:
            with contextlib.suppress(PosencError):  # else the next start removes it
                clear_partial(self.path)
        raise PosencError(
            f"{name} could not be saved: {reason_of(error)} ({free / 2**20:,.1f} MiB were free). "
            f"{kept[0].upper()}{kept[1:]}: make room and run the same command again."
        ) from error


# The frame of a bare accelerate loop.


def resume(accelerator: Accelerator, folder: Path | str, settings: Mapping[str, Any]) -> int:
    """Load the last complete checkpoint into what the accelerator has prepared, and return its number of steps.

    All processes call it. `settings` is everything else that determines the losses, JSON-ready.
    """
    folder = Path(folder)
    if accelerator.is_main_process:
        everything = {**settings, "processes": accelerator.num_processes}
        resume_point(folder, everything, device=accelerator.device.type)
    barrier()
    if (checkpoint := last_complete_checkpoint(folder)) is None:
        return 0
    accelerator.load_state(str(checkpoint))
    return step_of(checkpoint)


def save(accelerator: Accelerator, folder: Path | str, step: int) -> None:
    """Write a checkpoint, and mark it complete last. All processes call it."""
    path = Path(folder) / f"checkpoint-{step}"
    accelerator.save_state(str(path))
    complete_together(path, marks=accelerator.is_main_process)
