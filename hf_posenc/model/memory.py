"""Memory of a device: how much is free."""

from __future__ import annotations

from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def free_memory(device: torch.device | str) -> int | None:
    """Return the bytes that a program can still allocate on a device.

    On CUDA these are the driver's free memory and PyTorch's unused reserve; on a CPU under Linux what the kernel calls
    available, or the rest of a container's limit if that is less. On other devices they are unknown.
    """
    device = torch.device(device)
    if device.type == "cuda":
        reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + reserve
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    if device.type != "cpu":
        return None
    available = _fields(_MEMINFO).get("MemAvailable")
    limits = (None if available is None else available * 1024, _left_in_container())
    return min((limit for limit in limits if limit is not None), default=None)


def _left_in_container() -> int | None:
    """Return the rest of the limit of control groups, version 2; cached pages of files count as free."""
    try:
        limit = int((_CGROUP / "memory.max").read_text(encoding="ascii"))
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):  # there is no limit, or it is "max"
        return None
    return max(0, limit - used + _fields(_CGROUP / "memory.stat").get("inactive_file", 0))


def _fields(path: Path) -> dict[str, int]:
    """Return the numbers of a file of lines such as `MemAvailable: 123 kB`."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    words = [line.replace(":", " ").split() for line in lines]
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdecimal()}
