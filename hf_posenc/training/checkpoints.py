"""Checkpoints and results that are either complete or do not load.

The Trainer writes a checkpoint in place, file by file, each process its own. A kill in between leaves a folder that
looks complete and that `resume_from_checkpoint=True` would choose. Here a manifest is written last, once every process
is done and every file is on the disk. A folder without a manifest is partial and is removed at the next start.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import PartialState
from torch.distributed.checkpoint.api import CheckpointException
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_posenc.errors import PosencError
from hf_posenc.files import WEIGHT_FILES, disk_errors, to_json, write_atomically
from hf_posenc.training.processes import barrier

MANIFEST = "complete.json"
CONFIGS = ("config.json", "adapter_config.json")
"""The files that loading a model begins with."""
LOST_PEER = "another process of the run ended"

_NAME = re.compile(r"checkpoint-(\d+)")
_UNFINISHED = ".saving"


def checkpoints(folder: Path | str) -> list[Path]:
    """Return all checkpoints of a run, complete or partial, by step; none if the folder does not exist."""
    paths = [path for path in Path(folder).glob("checkpoint-*") if _NAME.fullmatch(path.name)]
    return sorted((path for path in paths if path.is_dir()), key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the step after which a checkpoint was written, from its name."""
    match = _NAME.fullmatch(checkpoint.name)
    if match is None:
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


def partial_checkpoints(folder: Path | str) -> list[Path]:
    """Return the checkpoints without a manifest, by step."""
    return [path for path in checkpoints(folder) if _manifest(path) is None]


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
    complete = complete_checkpoints(folder)
    if not complete:
        return None
    checkpoint = complete[-1]
    for name, size in (_manifest(checkpoint) or {"files": {}})["files"].items():
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
    partial = partial_checkpoints(folder)
    for path in partial:
        discard(path)
    return partial


def discard(checkpoint: Path) -> None:
    """Remove a checkpoint, its manifest first: after a kill, the rest counts as partial."""
    with disk_errors(f"{checkpoint} cannot be removed"):
        if (checkpoint / MANIFEST).exists():
            (checkpoint / MANIFEST).unlink()
            _sync(checkpoint)
        shutil.rmtree(checkpoint)


def rotate(folder: Path | str, limit: int | None, best: Path | None = None) -> None:
    """Remove the oldest complete checkpoints beyond `limit` (`None` or 0: none), but never the last or the `best`."""
    complete = complete_checkpoints(folder)
    if not limit or limit < 0 or not complete:
        return
    kept = {complete[-1].name, "" if best is None else best.name}
    old = [path for path in complete if path.name not in kept]
    # `limit` counts those that are kept in any case.
    room = max(0, limit - (len(complete) - len(old)))
    for path in old[: len(old) - room]:
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
            self._rotate(args, state)

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
            self._rotate(args, state)

    def on_train_end(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        if self._limit is not None:
            args.save_total_limit = self._limit

    def _rotate(self, args: TrainingArguments, state: TrainerState) -> None:
        best = state.best_model_checkpoint
        rotate(args.output_dir or ".", self._limit, None if best is None else Path(best))


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
    unfinished = folder / _UNFINISHED
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
