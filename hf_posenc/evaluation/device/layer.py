"""One layer of attention with random tensors: its phases, and a method's times beside plain attention's."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from hf_posenc.attention import engine
from hf_posenc.attention.call import Call, CausalMask, RotatedKeys
from hf_posenc.attention.checks.comparison import HEADS, KEY_HEADS, SCALE, encoding_of
from hf_posenc.attention.encoding import Encoding
from hf_posenc.evaluation.device.clock import Clock
from hf_posenc.methods import Method

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

    def drawn(self, phase: str, length: int) -> Layer:
        """Return a layer with random tensors."""
        layer = Layer.of(length, self.head_dim, self.dtype, self.device, self.heads)
        return layer.of_phase(phase)

    def encoding(self, method: Method, length: int) -> Encoding:
        """Return the encoding of a method."""
        original = max(1, length // int(SCALE))
        return encoding_of(method, self.head_dim, self.device, original, self.heads)

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
        layer, training = self.drawn(phase, length), phase == "training"
        forward, trained = layer.plain, list[Tensor]()
        backend = SDPBackend(layer.plain(torch._fused_sdp_choice)).name.lower()
        with torch.set_grad_enabled(training):
            if method is not None:
                encoding, call = self.encoding(method, length), layer.call()
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
