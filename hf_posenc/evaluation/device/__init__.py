"""This device: its clock (seconds, the peak of memory, its name), and one layer of attention that is timed on it.

A layer has random tensors, and is timed in a prefill, a step and a training step, beside plain attention.
`run` times whole models, `selftest` checks which backends are right here.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from hf_posenc.attention import engine
from hf_posenc.attention.call import Call, CausalMask, RotatedKeys
from hf_posenc.attention.checks.comparison import HEADS, KEY_HEADS, SCALE, encoding_of
from hf_posenc.attention.encoding import Encoding
from hf_posenc.errors import PosencError, one_line
from hf_posenc.methods import Method

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


LEAST, MOST = 0.005, 100
"""Seconds that a timing takes at least, by repeated calls, and the most calls."""
Formulation = Callable[[Call, Encoding], Tensor]
"""Attention of a call, whose keys all are visible but for causality, as others compute it."""


@dataclass(frozen=True)
class Layer:
    """The tensors of a layer: queries (1, heads, length, head_dim), keys and values of as many key heads."""

    query: Tensor
    key: Tensor
    value: Tensor

    @classmethod
    def of(
        cls,
        length: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        heads: tuple[int, int] = (HEADS, KEY_HEADS),
    ) -> Layer:
        """Draw the tensors, in the memory layout of transformers; `heads` of queries and of keys."""
        generator = torch.Generator(device).manual_seed(0)

        def normal(count: int) -> Tensor:
            sizes = 1, length, count, head_dim
            return torch.randn(sizes, generator=generator, device=device).to(dtype).transpose(1, 2)

        return cls(*(normal(count) for count in (heads[0], heads[1], heads[1])))

    def of_phase(self, phase: str) -> Layer:
        """Return the layer itself; with its last query alone for a step, with gradients for training."""
        if phase == "training":
            leaves = (x.detach().requires_grad_() for x in (self.query, self.key, self.value))
            return Layer(*leaves)
        return self if phase == "prefill" else replace(self, query=self.query[:, :, -1:])

    def call(self) -> Call:
        """Return the call of the engine."""
        rows, keys, device = self.query.shape[2], self.key.shape[2], self.query.device
        every = torch.arange(keys, device=device)[None]
        mask, scaling = CausalMask(rows, keys, device), self.query.shape[-1] ** -0.5
        tensors, positions = (self.query, self.key, self.value), (every[:, keys - rows :], every)
        return Call(*tensors, *positions, mask, scaling, rotated=RotatedKeys())

    def plain(self, compute: Callable[..., Any] = F.scaled_dot_product_attention) -> Any:
        """Compute plain causal attention by PyTorch, or whatever another function of its arguments returns."""
        causal = self.query.shape[2] > 1
        return compute(self.query, self.key, self.value, is_causal=causal, enable_gqa=True)

    def work(self, forward: Callable[[], Tensor], *trained: Tensor) -> Callable[[], object]:
        """Return a forward, followed in training by a backward to the tensors and to what is trained."""
        if not self.query.requires_grad:
            return forward
        inputs = [self.query, self.key, self.value, *trained]

        def both() -> object:
            out = forward()
            return torch.autograd.grad(out, inputs, torch.ones_like(out), allow_unused=True)

        return both


@dataclass
class Layers:
    """Layers of one size on one device, whose methods were trained at a quarter of the length.

    Attributes:
        heads: Heads of queries and of keys.
        rounds: Most rounds of a measurement, in which the method and plain attention alternate.
        enough: Seconds of one measurement after which no further round begins.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    heads: tuple[int, int]
    clock: Clock
    rounds: int
    enough: float

    @property
    def sizes(self) -> dict[str, int]:
        """Heads, heads of keys and features of a head."""
        return {"heads": self.heads[0], "key_heads": self.heads[1], "head_dim": self.head_dim}

    def measured(
        self,
        phase: str,
        length: int,
        method: Method | None = None,
        peer: Formulation | None = None,
        *,
        host: bool = False,
    ) -> dict[str, Any]:
        """Return the backend, times and memory of a method or of plain attention, as a `Row` has them.

        With `host`, also what the host of a GPU waits for, and whether a step can be captured.
        """
        layer = Layer.of(length, self.head_dim, self.dtype, self.device, self.heads)
        layer, training = layer.of_phase(phase), phase == "training"
        forward, trained = layer.plain, list[Tensor]()
        backend = SDPBackend(layer.plain(torch._fused_sdp_choice)).name.lower()
        with torch.set_grad_enabled(training):
            if method is not None:
                original, call = max(1, length // int(SCALE)), layer.call()
                encoding = encoding_of(method, self.head_dim, self.device, original, self.heads)
                trained = [x.requires_grad_(training) for x in (encoding.parameters or {}).values()]
                forward, backend = partial(peer or attended, call, encoding), "PyTorch"
                if peer is None:
                    backend = engine.choose(call, encoding).name  # checked here, and not timed
            work = layer.work(forward, *trained)
            found = {"backend": backend, **self.compared(work, layer.work(layer.plain))}
            if host and self.device.type == "cuda":
                found["waits"] = waits_of(work, self.device)
                found["captured"] = captured(work) if phase == "step" else None
        return found

    def compared(self, work: Callable[[], object], plain: Callable[[], object]) -> dict[str, Any]:
        """Return the seconds of a call of both, which alternate, round by round; on a GPU the memory of `work`."""
        on_gpu = self.device.type == "cuda"
        held = torch.cuda.memory_allocated(self.device) if on_gpu else 0
        began, calls = time.monotonic(), []
        for run in (plain, work):
            once = self.clock.time(run)[0]  # with tables, compilation and choices of libraries
            once = once if once > 1 else self.clock.time(run)[0]
            calls.append(max(1, min(MOST, math.ceil(LEAST / once))))
        found: dict[str, list[float]] = {"plain": [], "seconds": []}
        while not found["plain"] or (
            len(found["plain"]) < self.rounds and time.monotonic() - began < self.enough
        ):
            for name, run, count in zip(found, (plain, work), calls, strict=True):
                seconds, peak = self.clock.time(partial(_repeat, run, count))
                found[name].append(float(f"{seconds / count:.6g}"))
        return {**found, "peak_bytes": peak - held if on_gpu and peak is not None else None}


def attended(call: Call, encoding: Encoding) -> Tensor:
    """Compute a call by the engine."""
    return engine.attend(call, encoding)[0]


def _repeat(work: Callable[[], object], count: int) -> None:
    for _ in range(count):
        work()


def waits_of(work: Callable[[], object], device: torch.device) -> int:
    """Return the times that the host waits for a CUDA device in a call."""
    torch.cuda.synchronize(device)
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return sum("synchroniz" in str(warning.message) for warning in caught)


def captured(work: Callable[[], object]) -> bool:
    """Return whether a CUDA graph can be captured of a call, and replayed."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            work()
        graph.replay()
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
