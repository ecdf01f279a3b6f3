"""Times of methods beside plain attention, host waits, graph capture and peak memory, for one layer."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from hf_posenc.attention import engine
from hf_posenc.attention.call import Call, RotatedKeys
from hf_posenc.attention.checks.samples import HEADS, KEY_HEADS, encoding_of
from hf_posenc.attention.encoding import Encoding
from hf_posenc.evaluation.selftest.result import PHASES, MethodFindings, Timing
from hf_posenc.methods import Method
from hf_posenc.model.masks import CausalMask

ENOUGH, MOST = 0.1, 20
"""Seconds after which a call is not repeated again, and the most repetitions."""


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

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.query.device

    def of_phase(self, phase: str) -> Layer:
        """Return the layer itself; with its last query alone for a step, with gradients for training."""
        if phase == "training":
            leaves = (x.detach().requires_grad_() for x in (self.query, self.key, self.value))
            return Layer(*leaves)
        return self if phase == "prefill" else replace(self, query=self.query[:, :, -1:])

    def call(self) -> Call:
        """Return the call of the engine."""
        rows, keys = self.query.shape[2], self.key.shape[2]
        every = torch.arange(keys, device=self.device)[None]
        mask = CausalMask(rows, keys, self.device)
        scaling = self.query.shape[-1] ** -0.5
        tensors, positions = (self.query, self.key, self.value), (every[:, keys - rows :], every)
        return Call(*tensors, *positions, mask, scaling, rotated=RotatedKeys())

    def plain(self) -> Tensor:
        """Compute plain causal attention by PyTorch."""
        causal = self.query.shape[2] > 1
        return F.scaled_dot_product_attention(
            self.query, self.key, self.value, is_causal=causal, enable_gqa=True
        )

    def work(self, forward: Callable[[], Tensor]) -> Callable[[], object]:
        """Return a forward, followed by a backward to the tensors if they get gradients."""
        inputs = [self.query, self.key, self.value]
        if not self.query.requires_grad:
            return forward

        def both() -> object:
            out = forward()
            return torch.autograd.grad(out, inputs, torch.ones_like(out), allow_unused=True)

        return both

    def plain_backend(self) -> str:
        """Return the backend that PyTorch chooses for plain attention."""
        causal = self.query.shape[2] > 1
        choice = torch._fused_sdp_choice(
            self.query, self.key, self.value, is_causal=causal, enable_gqa=True
        )
        return SDPBackend(choice).name.lower()


def plain_times(layer: Layer) -> dict[str, Any]:
    """Return the seconds and the backend of plain attention, by phase."""
    found = {}
    for phase in PHASES:
        part = layer.of_phase(phase)
        with torch.set_grad_enabled(phase == "training"):
            seconds = seconds_of(part.work(part.plain), layer.device)
        found[phase] = {"seconds": seconds, "backend": part.plain_backend()}
    return found


def times_of(method: Method, layer: Layer, plain: dict[str, Any]) -> MethodFindings:
    """Measure a method that was trained at a quarter of the layer's length."""
    length, head_dim = layer.key.shape[2], layer.query.shape[-1]
    heads = layer.query.shape[1], layer.key.shape[1]
    encoding = encoding_of(method, head_dim, layer.device, max(1, length // 4), heads)
    phases, errors = {}, {}
    for phase in PHASES:
        try:
            with torch.set_grad_enabled(phase == "training"):
                phases[phase] = _timing(layer.of_phase(phase), encoding, plain[phase]["seconds"])
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            errors[phase] = f"{type(error).__name__}: {text}"
    return MethodFindings(encoding.kind, phases, errors)


def _timing(layer: Layer, encoding: Encoding, plain: float) -> Timing:
    device, call = layer.device, layer.call()
    backend = engine.choose(call, encoding)  # checked here, and not while it is timed
    work = layer.work(lambda: engine.attend(call, encoding)[0])
    seconds = seconds_of(work, device)
    on_gpu = device.type == "cuda"
    return Timing(
        backend.name,
        seconds,
        seconds / plain,
        waits_of(work, device) if on_gpu else None,
        captured(work) if on_gpu and layer.query.shape[2] == 1 else None,
        peak_of(work, device) if on_gpu else None,
    )


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Return the least time of a call, after one that is not timed."""
    work()
    began, least = time.perf_counter(), float("inf")
    for _ in range(MOST):
        _synchronize(device)
        start = time.perf_counter()
        work()
        _synchronize(device)
        least = min(least, time.perf_counter() - start)
        if time.perf_counter() - began > ENOUGH:
            break
    return least


def waits_of(work: Callable[[], object], device: torch.device) -> int:
    """Return the times that the host waits for a CUDA device in a call."""
    _synchronize(device)
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


def peak_of(work: Callable[[], object], device: torch.device) -> int:
    """Return the bytes that a call allocates on a CUDA device at its peak."""
    _synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()
    _synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
