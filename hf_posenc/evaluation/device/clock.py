"""The clock of a device: seconds and the peak of memory, and the name of the machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_posenc.errors import PosencError, one_line

ON_GPU = "allocated by PyTorch on the GPU at the peak, weights included"
ON_CPU = (
    "resident in memory at the peak, of the whole process: Python, libraries and weights included"
)


class Clock:
    """Measures time and peak memory on the devices of a model, where its weights are.

    The clock is read when the devices are idle, before and after the work. Peak memory: on GPUs PyTorch's own count; on
    a CPU under Linux the kernel's high-water mark of this process, which is reset first; elsewhere none. `memory` is
    the meaning of the peaks.
    """

    def __init__(self, model: nn.Module) -> None:
        devices = {parameter.device for parameter in model.parameters()}
        self._devices = sorted(devices, key=str)
        self._gpus = [device for device in self._devices if device.type == "cuda"]
        self.memory: str | None = ON_GPU if self._gpus else None
        if all(device.type == "cpu" for device in self._devices) and _reset_peak():
            self.memory = ON_CPU

    def time(self, work: Callable[[], Any]) -> tuple[float, int | None]:
        """Run the work; return seconds and the peak of memory in bytes."""
        for gpu in self._gpus:
            torch.cuda.reset_peak_memory_stats(gpu)
        if self.memory == ON_CPU:
            _reset_peak()
        self._synchronize()
        began = time.perf_counter()
        work()
        self._synchronize()
        seconds = time.perf_counter() - began
        if self._gpus:
            return seconds, sum(torch.cuda.max_memory_allocated(gpu) for gpu in self._gpus)
        return seconds, _peak() if self.memory == ON_CPU else None

    def machine(self) -> dict[str, Any]:
        """Return the name of the device, and the number of threads of a CPU."""
        if self._gpus:
            names = [torch.cuda.get_device_name(gpu) for gpu in self._gpus]
            kinds = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
            return {"device": ", ".join(kinds), "threads": None}
        cpu = _entry(Path("/proc/cpuinfo"), "model name")
        return {"device": cpu or self._devices[0].type, "threads": torch.get_num_threads()}

    def _synchronize(self) -> None:
        for device in self._devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            elif device.type not in ("cpu", "meta"):
                torch.accelerator.synchronize(device)


def _reset_peak() -> bool:
    """Reset the kernel's high-water mark to what is resident now; return whether that is possible here."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return _peak() is not None


def _peak() -> int | None:
    kibibytes = _entry(Path("/proc/self/status"), "VmHWM")
    return None if kibibytes is None else int(kibibytes.split()[0]) * 1024


def _entry(path: Path, name: str) -> str | None:
    """Return the first value of this name in a file of the kernel."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    values = (line.partition(":")[2].strip() for line in lines if line.startswith(name))
    return next(values, None)


def device_of(name: str | None) -> torch.device:
    """Return the device of a name, by default this process's GPU, or the CPU; refuse one that is not there."""
    if name is None:
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.empty(0, device=torch.device(name)).device  # "cuda" has a number then
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = one_line(error).partition(". ")[0].partition("device type at start")[0]
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise PosencError(
            f"The device {name!r} cannot be used ({reason:.120}). PyTorch {torch.__version__} sees cpu and {count} "
            "CUDA devices: give cpu, cuda or cuda:1."
        ) from error
    return torch.device("cpu") if device.type == "cpu" else device
