"""Memory of a device: how much is left, and errors that mean there was too little."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from hf_posenc.errors import PosencError, one_line

OUT_OF_MEMORY = "out of memory"
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def free_memory(device: torch.device | str) -> int | None:
    """Bytes that a program can still take on a device.

    On CUDA what the driver has and what PyTorch keeps for itself; on a CPU under Linux what the kernel calls available,
    or what is left of a container's limit where that is less.

    Returns:
        `None` where nothing tells, as on the meta device.
    """
    device = torch.device(device)
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    if device.type != "cpu":
        return None
    known = [found for found in (_available(), _left_in_container()) if found is not None]
    return min(known, default=None)


def _available() -> int | None:
    found = _fields(_MEMINFO).get("MemAvailable")
    return None if found is None else found * 1024


def _left_in_container() -> int | None:
    """What is left of the limit of control groups, version 2; pages of files can be given back and count as free."""
    try:
        limit = int((_CGROUP / "memory.max").read_text(encoding="ascii"))
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):  # there is none, or it is "max"
        return None
    return max(0, limit - used + _fields(_CGROUP / "memory.stat").get("inactive_file", 0))


def _fields(path: Path) -> dict[str, int]:
    """The numbers of a file of lines such as `MemAvailable: 123 kB`."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    words = [line.replace(":", " ").split() for line in lines]
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdecimal()}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is a lack of memory: CUDA's, the system's, or that of PyTorch's allocator for CPUs."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    said = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        words in said for words in ("not enough memory", "out of memory", "can't allocate memory")
    )


def reason_of(error: Exception) -> str:
    """Why there is no number, in the words of the results and reports."""
    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    said = one_line(error)
    return said if isinstance(error, PosencError) else f"{type(error).__name__}: {said}"


def release(error: Exception) -> None:
    """Gives back the memory of what an error ended."""
    error.__traceback__ = None  # its frames hold the tensors that are to be freed
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
