"""Times a piece of work and says how much memory it took at its peak."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

ON_GPU = "allocated by PyTorch on the GPU at the peak, weights included"
ON_CPU = (
    "resident in memory at the peak, of the whole process: Python, libraries and weights included"
)

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


class Clock:
    """Times work on the devices of a model.

    The clock is read when the devices have done all that was asked of them, before and after. Peaks of memory: on GPUs
    PyTorch's own count; on a CPU under Linux the kernel's high-water mark of this process, which is set back first;
    elsewhere none.

    Args:
        model: Where its weights are, the work is done.

    Attributes:
        memory: What the peaks are; `None` where there are none.
    """

    def __init__(self, model: nn.Module) -> None:
        devices = {parameter.device for parameter in model.parameters()}
        self._devices = sorted(devices, key=str)
        self._gpus = [device for device in self._devices if device.type == "cuda"]
        self.memory: str | None = ON_GPU if self._gpus else None
        if all(device.type == "cpu" for device in self._devices) and _set_back():
            self.memory = ON_CPU

    def time(self, work: Callable[[], Any]) -> tuple[float, int | None]:
        """Does the work.

        Returns:
            Seconds, and the peak of memory in bytes.
        """
        for gpu in self._gpus:
            torch.cuda.reset_peak_memory_stats(gpu)
        if self.memory == ON_CPU:
            _set_back()
        self._synchronize()
        began = time.perf_counter()
        work()
        self._synchronize()
        seconds = time.perf_counter() - began
        return seconds, self._peak()

    def machine(self) -> dict[str, Any]:
        """What does the work: its name, and the number of threads of a CPU."""
        if self._gpus:
            names = [torch.cuda.get_device_name(gpu) for gpu in self._gpus]
            kinds = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
            return {"device": ", ".join(kinds), "threads": None}
        kind = self._devices[0].type
        return {"device": _cpu_name() or kind, "threads": torch.get_num_threads()}

    def _synchronize(self) -> None:
        for device in self._devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            elif device.type not in ("cpu", "meta"):
                torch.accelerator.synchronize(device)

    def _peak(self) -> int | None:
        if self._gpus:
            return sum(torch.cuda.max_memory_allocated(gpu) for gpu in self._gpus)
        return _resident_peak() if self.memory == ON_CPU else None


def _set_back() -> bool:
    """Sets the kernel's high-water mark back to what is resident now; whether that can be done here."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return _resident_peak() is not None


def _resident_peak() -> int | None:
    for line in _lines(_STATUS):
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def _cpu_name() -> str | None:
    for line in _lines(Path("/proc/cpuinfo")):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
