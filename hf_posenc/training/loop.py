"""Around a bare accelerate loop: how it starts and fails, and checkpoints that are whole or not there."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_posenc.errors import PosencError
from hf_posenc.training import together
from hf_posenc.training.checkpoints import flush, last_complete_checkpoint, mark_complete, step_of
from hf_posenc.training.launching import join_on_cpu
from hf_posenc.training.settings_guard import resume_point

if TYPE_CHECKING:
    from accelerate import Accelerator


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
