"""The result of a training, in a folder that is the old one or the new one, never a mixture."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

from hf_posenc.errors import PosencError
from hf_posenc.training import together
from hf_posenc.training.checkpoints import flush, sync

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
