"""Checkpoints that are either whole or not there.

The Trainer writes a checkpoint in its place, file by file, each process its own; a kill in between leaves a folder that
looks like any other and that `resume_from_checkpoint=True` would choose. Here a manifest is written last, once every
process is done and every file is on the disk: a folder without it is what a kill left, and is cleared away.
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

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_posenc.errors import PosencError
from hf_posenc.files import to_json, write_atomically
from hf_posenc.training import ranks as together

MANIFEST = "complete.json"
_FORMAT = 1
_NAME = re.compile(r"checkpoint-(\d+)")


def mark_complete(path: Path | str, *, processes: int = 1) -> None:
    """Puts a checkpoint's files onto the disk, and then the manifest that says so.

    Call it in one process, after every process has written its files.

    Args:
        path: The checkpoint's folder.
        processes: How many processes wrote it.

    Raises:
        PosencError: The system refuses, on a full disk for instance; the checkpoint stays unmarked.
    """
    folder = Path(path)
    flush(folder)
    files = {
        file.relative_to(folder).as_posix(): file.stat().st_size
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
    made = {"kind": "checkpoint", "format": _FORMAT, "processes": processes, "files": files}
    write_atomically(folder / MANIFEST, to_json(made))
    sync(folder)
    sync(folder.parent)


def flush(folder: Path) -> None:
    """Waits until every file below a folder is on the disk.

    Raises:
        PosencError: The disk cannot take them.
    """
    try:
        for path in (folder, *folder.rglob("*")):
            sync(path)
    except OSError as error:
        raise PosencError(f"{folder} cannot be written: {error.strerror or error}.") from error


def checkpoints(folder: Path | str) -> list[Path]:
    """Every checkpoint of a run, whole or not, by step; empty where the folder does not exist."""
    found = [path for path in Path(folder).glob("checkpoint-*") if _NAME.fullmatch(path.name)]
    return sorted((path for path in found if path.is_dir()), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was written: the number in its name."""
    found = _NAME.fullmatch(checkpoint.name)
    if found is None:
        raise PosencError(f"{checkpoint} is no checkpoint: its name is not checkpoint-<step>.")
    return int(found[1])


def manifest_of(checkpoint: Path) -> dict[str, Any] | None:
    """What a checkpoint's manifest says; `None` for a partial one.

    Raises:
        PosencError: A newer version of this package wrote it.
    """
    try:
        found = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    if found.get("format") != _FORMAT:
        raise PosencError(
            f"{checkpoint / MANIFEST} has format {found.get('format')!r}, but this version of hf_posenc reads format "
            f"{_FORMAT}. Continue with the version that wrote it, or in another folder."
        )
    return dict(found)


def complete_checkpoints(folder: Path | str) -> list[Path]:
    """The checkpoints that were written to their end, by step.

    Raises:
        PosencError: A newer version of this package wrote one.
    """
    return [path for path in checkpoints(folder) if manifest_of(path) is not None]


def last_complete_checkpoint(folder: Path | str) -> Path | None:
    """The newest checkpoint that was written to its end, by step and not by time; `None` without one.

    Raises:
        PosencError: A file of it is missing or has another size, which no kill of a run explains.
    """
    complete = complete_checkpoints(folder)
    if not complete:
        return None
    check_files(complete[-1])
    return complete[-1]


def check_files(checkpoint: Path) -> None:
    """Makes sure that a complete checkpoint still has what its manifest lists.

    Raises:
        PosencError: A file is missing or has another size.
    """
    for name, size in (manifest_of(checkpoint) or {"files": {}})["files"].items():
        file = checkpoint / name
        if not file.is_file() or file.stat().st_size != size:
            state = "has another size" if file.is_file() else "is missing"
            raise PosencError(
                f"{checkpoint} was complete, but {name} {state} now. Bring the file back, or remove the folder: the "
                "run then continues from the checkpoint before it."
            )


def clear_partial(folder: Path | str) -> list[Path]:
    """Removes the checkpoints that were never finished, or whose removal was not; returns their paths.

    Call it in one process, while no run writes to the folder.

    Raises:
        PosencError: The system refuses.
    """
    partial = [path for path in checkpoints(folder) if manifest_of(path) is None]
    for path in partial:
        discard(path)
    return partial


def discard(checkpoint: Path) -> None:
    """Removes a checkpoint; killed meanwhile, what is left counts as partial.

    Raises:
        PosencError: The system refuses.
    """
    try:
        if (checkpoint / MANIFEST).exists():
            (checkpoint / MANIFEST).unlink()
            sync(checkpoint)
        shutil.rmtree(checkpoint)
    except OSError as error:
        raise PosencError(f"{checkpoint} cannot be removed: {error.strerror or error}.") from error


def rotate(folder: Path | str, limit: int | None, best: Path | None = None) -> list[Path]:
    """Removes the oldest complete checkpoints, by step and not by time.

    Args:
        folder: The run's folder.
        limit: How many stay; `None` or 0: all.
        best: One that stays whatever its age, as `load_best_model_at_end` needs it.

    Returns:
        What was removed.

    Raises:
        PosencError: The system refuses.
    """
    complete = complete_checkpoints(folder)
    if not limit or limit < 0 or not complete:
        return []
    kept = {complete[-1].name} | ({best.name} if best is not None else set())
    old = [path for path in complete if path.name not in kept]
    surplus = old[: max(0, len(complete) - max(limit, len(kept & {p.name for p in complete})))]
    for path in surplus:
        discard(path)
    return surplus


class SafeCheckpoints(TrainerCallback):
    """Marks a checkpoint complete once all of it is on the disk, and only then removes older ones.

    The Trainer itself removes older checkpoints while the new one is not yet whole: its own `save_total_limit` is taken
    off for the time of the training, and kept here. Put it behind `SaveOnSignal`, whose saves it marks.

    Args:
        limit: How many checkpoints stay beside the best one; `None`: as `save_total_limit` says.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._given = limit
        self._limit: int | None = None
        self._saved: int | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if state.is_hyper_param_search:
            raise PosencError(
                "SafeCheckpoints watches one folder; hyperparameter_search writes one per trial. Leave the "
                "callback out there."
            )
        if args.save_total_limit is not None:
            self._limit, args.save_total_limit = args.save_total_limit, None
        self._saved = None
        # A kill may have come between a manifest and the removal that follows it.
        if args.should_save:
            self._rotate(args, state)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._once(state, control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._once(state, control)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        checkpoint = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
        together.wait()  # each process has written its random state
        if args.local_process_index == 0 and not args.should_save:
            flush(checkpoint)  # what this machine wrote; the first one does it as it marks
        together.wait()
        if args.should_save:
            mark_complete(checkpoint, processes=args.world_size)
        together.wait()  # on every machine, where each has a disk of its own
        self._saved = state.global_step
        if args.should_save:
            self._rotate(args, state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self._limit is not None:
            args.save_total_limit = self._limit

    def _rotate(self, args: TrainingArguments, state: TrainerState) -> None:
        best = state.best_model_checkpoint
        limit = self._limit if self._given is None else self._given
        rotate(args.output_dir or ".", limit, None if best is None else Path(best))

    def _once(self, state: TrainerState, control: TrainerControl) -> None:
        """A complete checkpoint is not written again: a kill would then find its manifest beside torn files."""
        if control.should_save and self._saved == state.global_step:
            control.should_save = False


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# The result of a training, in a folder that is the old one or the new one, never a mixture.


BESIDE = ".saving"
ENDED = "another process of the run ended"
CONFIGS = ("config.json", "adapter_config.json")
"""What loading looks for first."""

_WEIGHTS = (
    "*model.safetensors",
    "*model-*-of-*.safetensors",
    "*model.safetensors.index.json",
    "*model.bin",
    "*model-*-of-*.bin",
    "*model.bin.index.json",
)


def save_result(folder: Path | str, write: Callable[[str], object], *, keeper: bool = True) -> None:
    """Lets `write` save into a folder beside, and puts what it wrote into place once all of it is on the disk.

    Loading looks for `config.json` or `adapter_config.json` first. They are taken away first and put back last, so a
    kill in between leaves a folder that does not load, and never new weights under an old config or the reverse.
    Weights of an earlier result that the new one has no name for (two shards where there is one file now) go too. The
    checkpoints are left alone: the same command continues from the last one and saves again.

    All processes call it, as sharded weights are gathered from all of them.

    Args:
        folder: Where the result goes.
        write: Saves the model, the tokenizer, ... into the folder that it is given.
        keeper: Whether this process moves the files: one per disk.

    Raises:
        PosencError: The disk is full, for instance. Nothing that was in the folder is lost by then.
    """
    folder = Path(folder)
    beside = folder / BESIDE
    try:
        if keeper:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
        together.wait()
        write(str(beside))
        together.wait()
        if keeper:
            flush(beside)
            _put_into_place(beside, folder)
        together.wait()
    except Exception as error:
        if keeper:
            with contextlib.suppress(OSError):
                shutil.rmtree(beside)
        if isinstance(error, PosencError) and not isinstance(error.__cause__, OSError):
            raise
        raise PosencError(
            f"The result could not be saved in {folder}: {reason_of(error)}. The checkpoints there are whole: make "
            "room and run the same command again."
        ) from error


def reason_of(error: Exception) -> str:
    """Why a save failed, in one line."""
    text = " ".join(str(error).split()).rstrip(".")
    if "inline_container" in text:  # torch.save, when the disk does not take all
        return "torch.save could not write a file to its end"
    if "by peer" in text:  # gloo: "Connection closed by peer", "Connection reset by peer"
        return ENDED
    return text[:200]


def _put_into_place(beside: Path, folder: Path) -> None:
    made = sorted(path.name for path in beside.iterdir())
    for name in CONFIGS:
        (folder / name).unlink(missing_ok=True)
    sync(folder)
    for path in [path for pattern in _WEIGHTS for path in folder.glob(pattern)]:
        if path.name not in made:
            path.unlink(missing_ok=True)
    for name in sorted(made, key=lambda name: name in CONFIGS):
        if name in CONFIGS:
            sync(folder)
        if (folder / name).is_dir():
            shutil.rmtree(folder / name)
        (beside / name).replace(folder / name)
    sync(folder)
    beside.rmdir()
