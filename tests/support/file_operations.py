"""The file operations of a process, counted, so that it can be killed at any of them.

Every operation that changes a file of a folder counts: Python's own (audit events), `os.fsync`, and the two that write
from C++ and Rust, `torch.save` and safetensors. A kill comes right before the chosen one, or in the middle of what it
writes; a refusal is the error of a full disk in its place.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass(frozen=True)
class Moment:
    """When a process ends, and how.

    Attributes:
        operation: The file operation, counted from 1 in each process; `None`: none.
        how: `"before"` or `"within"` it, by SIGKILL; `"full"`: the disk refuses this operation and all that write after
            it.
        step: The optimizer step in which it is sent `number`; `None`: none.
        when: In the `"step"` itself, in the `"evaluation"` after it, or as the `"epoch"` after it begins.
        number: A signal; negative: to the whole process group, as a scheduler sends it.
        rank: The process.
    """

    operation: int | None = None
    how: str = "before"
    step: int | None = None
    when: str = "step"
    number: int = signal.SIGKILL
    rank: int = 0


def count_operations(folder: Path, moment: Moment | None, log: Path | None) -> None:
    """Counts this process's file operations in a folder from now on, and ends the process at the chosen one."""
    done = 0
    refusing = False

    def before(name: str, path: Any, writes: Callable[[], None] | None = None) -> None:
        nonlocal done, refusing
        done += 1
        if log is not None:
            with log.open("a") as file:
                file.write(f"{name} {Path(os.fsdecode(path)).name}\n")
        if moment is not None and moment.how == "full":
            refusing = refusing or done == moment.operation
            if refusing and name in ("open", "torch.save", "safetensors", "fsync", "mkdir"):
                _write_half(path, writes)
                raise OSError(errno.ENOSPC, "No space left on device", os.fsdecode(path))
        elif moment is not None and done == moment.operation:
            if moment.how == "within":
                _write_half(path, writes)
            os.kill(os.getpid(), signal.SIGKILL)

    def ours(path: Any) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):
            return False
        return log != Path(os.fsdecode(path)) and str(folder) in os.path.abspath(os.fsdecode(path))  # noqa: PTH100

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and len(arguments) == 3 and ours(arguments[0]):
            mode, flags = arguments[1:]
            if (mode and set(mode) & set("wax+")) or (mode is None and (flags or 0) & _WRITING):
                before("open", arguments[0])
        elif event in ("os.rename", "os.mkdir") and ours(arguments[0]):
            before(event.removeprefix("os."), arguments[0])
        elif event in ("os.remove", "os.rmdir") and (arguments[-1] != -1 or ours(arguments[0])):
            # rmtree names a file by its folder's descriptor
            before(event.removeprefix("os."), arguments[0])

    sys.addaudithook(hear)
    weights: Any = safetensors.torch
    save, serialize, fsync = torch.save, weights.serialize_file, os.fsync

    def counted_save(value: Any, path: Any, *rest: Any, **more: Any) -> None:
        if ours(path):
            before("torch.save", path, lambda: save(value, path, *rest, **more))
        save(value, path, *rest, **more)

    def counted_serialize(tensors: Any, path: Any, *rest: Any, **more: Any) -> None:
        if ours(path):
            before("safetensors", path, lambda: serialize(tensors, path, *rest, **more))
        serialize(tensors, path, *rest, **more)

    def counted_fsync(descriptor: int) -> None:
        before("fsync", f"/{descriptor}")
        fsync(descriptor)

    patched = ((torch, "save", counted_save), (os, "fsync", counted_fsync))
    for module, name, counted in (*patched, (weights, "serialize_file", counted_serialize)):
        setattr(module, name, counted)


def _write_half(path: Any, writes: Callable[[], None] | None) -> None:
    if writes is not None:
        writes()
        os.truncate(path, Path(path).stat().st_size // 2)
