"""How much memory a device has left."""

from __future__ import annotations

from pathlib import Path

import torch

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
