"""Launches and waits of the engine, per layer, counted on a device that computes nothing.

A launch is an operator that is no view; the emulated flash attention counts as one. A wait is a read by the host, or a
copy from it. Nothing here says how long a launch takes.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_posenc.attention import engine, windowed
from hf_posenc.attention.call import Call, CausalMask, Mask
from hf_posenc.attention.checks.comparison import encoding_of as encoding_of_kind
from hf_posenc.attention.checks.comparison import methods
from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.fused.pytorch import CudaFlash
from hf_posenc.attention.kernels import parts
from hf_posenc.attention.rotation import Layout, Rotation
from hf_posenc.methods import Method, get_method
from hf_posenc.rope import RopeSpec
from scripts.gpu_table import PHASES, backends
from tests.support.elsewhere import VIEWS
from tests.support.emulated import EmulatedFlash

HEADS, KEY_HEADS, FEATURES, LENGTH = 8, 2, 64, 650
WAITS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "lift_fresh"}
ORIGINAL = 128
SPEC = RopeSpec(FEATURES, 10_000.0, ORIGINAL)
METHODS: dict[str, dict[str, Any]] = {
    **{name: {"window": 64} for name in ("rerope", "leaky_rerope", "self_extend")},
    "string": {"window": 32},
    **{name: {"window": 64} for name in ("lm_infinite", "attention_sinks", "sliding_window")},
}
PREFILL = {
    **dict.fromkeys(("rerope", "leaky_rerope", "self_extend"), (4, 12)),
    "string": (4, 9),
    "attention_sinks": (5, 14),
    "lm_infinite": (5, 17),
    "sliding_window": (2, 2),
    "dual_chunk": (5, 14),
}
"""Launches of a layer in a prefill by flash attention: with kernels that turn and merge, and without."""
CUDNN_PREFILL = {
    **dict.fromkeys(("rerope", "leaky_rerope", "self_extend", "string"), (9, 10)),
    **dict.fromkeys(("attention_sinks", "lm_infinite"), (10, 9)),
    "sliding_window": (8, 8),
    "dual_chunk": (10, 8),
}
"""The same with cuDNN and the kernels: of a text alone, and behind a cache; the last chunk is a short one."""
STEP = {
    **dict.fromkeys(("rerope", "leaky_rerope", "self_extend", "lm_infinite"), 27),
    **dict.fromkeys(("string", "attention_sinks"), 24),
    "sliding_window": 18,
    "dual_chunk": 81,
}
"""Launches of a layer in a step, where neither flash attention nor a kernel serves (float32, older devices)."""
FLASH = EmulatedFlash.name
TURNED, CUDNN = f"{FLASH}, triton", "emulated cudnn, triton"

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"

_DispatchMode: Any = TorchDispatchMode


class Meter(_DispatchMode):  # type: ignore[misc]
    """Counts launches and waits by name."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        out = func(*args, **kwargs)
        tensors = [x for x in torch.utils._pytree.tree_leaves((args, out)) if torch.is_tensor(x)]
        devices = {x.device.type for x in tensors}
        if name in WAITS or devices == {"cpu", "meta"}:
            self.waits[name] += 1
        elif name not in VIEWS and "meta" in devices:
            self.launches[name] += 1
        return out


def call_of(queries: int, mask: Mask) -> Call:
    def tensor(heads: int, length: int) -> torch.Tensor:
        shape = 1, length, heads, FEATURES
        return torch.empty(shape, dtype=torch.bfloat16, device="meta").transpose(1, 2)

    n = torch.empty(1, LENGTH, dtype=torch.int64, device="meta")
    key = tensor(KEY_HEADS, LENGTH)
    return Call(tensor(HEADS, queries), key, key, n[:, LENGTH - queries :], n, mask, 0.1)


def method_of(name: str) -> Method:
    options = {**METHODS, "dual_chunk": {"chunk": 96}, "dynamic_yarn": {"bucket": 64}}
    return get_method(name).from_options(**options[name])


def encoding_of(method: Method, rotation: Rotation) -> Encoding:
    return Encoding(ORIGINAL, HEADS, rotation, method=method, spec=SPEC)


def rotation() -> Rotation:
    table = SPEC.default_inv_freq().float()  # on the CPU, as a model that was patched there
    return Rotation(table, Layout(0, FEATURES, interleaved=False))


@torch.no_grad()
def second_layer(name: str, queries: int, backend: str) -> Meter:
    """Meter one layer after another, which has answered what a forward asks once."""
    mask, shared, meter = CausalMask(queries, LENGTH, torch.device("meta")), rotation(), Meter()
    for start in (False, True):  # meta tensors have no values to answer from
        mask.decided(("count up", start), lambda: True)
    method = method_of(name)
    if name == "dynamic_yarn":
        there = replace(call_of(queries, mask), query_position=torch.arange(LENGTH)[None])
        encoding, runs = encoding_of(method, shared), there.runs() or ()
        question = "buckets", id(method), ORIGINAL
        mask.decided(question, lambda: windowed._buckets(there, encoding, runs))
    with engine.forced(backend):
        engine.attend(call_of(queries, mask), encoding_of(method, shared))
        call, encoding = call_of(queries, mask), encoding_of(method, shared)
        assert engine.choose(call, encoding).name == backend
        with meter:
            out, _ = engine.attend(call, encoding)
            out.transpose(1, 2).contiguous()
    assert out.device.type == "meta"
    return meter


@pytest.fixture(autouse=True)
def _with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "available", lambda device: True)


BANDS = [
    *((name, LENGTH, TURNED, launches) for name, (launches, _) in PREFILL.items()),
    *((name, LENGTH, FLASH, launches) for name, (_, launches) in PREFILL.items()),
    *((name, LENGTH, CUDNN, launches) for name, (launches, _) in CUDNN_PREFILL.items()),
    *((name, 300, CUDNN, launches) for name, (_, launches) in CUDNN_PREFILL.items()),
    *((name, 1, "exact" if name == "dual_chunk" else "few", STEP[name]) for name in STEP),
]


@pytest.mark.parametrize(("name", "queries", "backend", "launches"), BANDS)
def test_bands(name: str, queries: int, backend: str, launches: int) -> None:
    meter = second_layer(name, queries, backend)
    assert not meter.waits, meter.waits
    if backend == CUDNN:
        del meter.launches["clone"]  # copies of the emulation
    assert meter.launches.total() == launches, meter.launches


@pytest.mark.parametrize("name", METHODS)
def test_bands_of_a_step(name: str) -> None:
    """The price without a kernel that turns keys itself; most of it is turning."""
    meter = second_layer(name, 1, FLASH)
    assert not meter.waits, meter.waits
    assert meter.launches.total() <= 12, meter.launches


@pytest.mark.parametrize(("backend", "turns"), [(FLASH, 6), (TURNED, 1)])
def test_buckets_of_a_prefill(backend: str, turns: int) -> None:
    """For each bucket one call, its queries turned, and its keys by angles that no other bucket has.

    Angles, cos and sin of the keys are six launches: kept, they would be a matrix of queries times keys.
    """
    meter = second_layer("dynamic_yarn", LENGTH, backend)
    assert not meter.waits, meter.waits
    moved = -(-(LENGTH - ORIGINAL) // 64)
    assert meter.launches["emulated_flash"] == 1 + moved
    assert meter.launches.total() == 4 + moved * (1 + turns + 6), meter.launches


def test_the_page_has_these_numbers() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    numbers = {row[0]: row[1:] for row in rows}
    for name, (turned, plain) in PREFILL.items():
        (row,) = (
            found for names, found in numbers.items() if f"`{name}`" in names and len(found) == 2
        )
        assert row == [str(turned), f"{plain} |"]
    least, *_, most = sorted(STEP.values())[:-1]
    assert f"serves makes {least} to {most} (`dual_chunk`: {STEP['dual_chunk']})" in page


def test_frequencies_are_copied_to_a_device_once() -> None:
    """A model that is patched on the CPU and moved."""
    shared, meter = rotation(), Meter()
    x = torch.empty(1, 2, 5, FEATURES, device="meta")
    positions = torch.empty(1, 5, device="meta")
    shared.turn(x, positions)
    with meter:
        assert shared.turn(x, positions).device.type == "meta"
    assert not meter.waits


def test_the_meter_sees_waits() -> None:
    meter = Meter()
    with meter:
        bool(torch.ones(2).any())
        torch.ones(2).to("meta")
    assert meter.waits.total() == 2


# Further claims of docs/gpu.md


BATCH, COUNT, QUERIES, KEYS, WIDTH = 2, 4, 24, 40, 16
OPERATORS: Any = torch.ops.aten


def test_the_table_is_what_the_backends_declare(monkeypatch: pytest.MonkeyPatch) -> None:
    for method in methods():
        encoding = encoding_of_kind(method, FEATURES, torch.device("cpu"))
        assert encoding.in_blocks == (backends(method)[0] == "PyTorch, in blocks"), method.name
    phases = dict(zip(PHASES, backends(get_method("rerope").from_options()), strict=True))
    assert phases["prefill"] == phases["training"] == "cuDNN"
    assert phases["step"] == "Triton"
    assert phases["prefill, float32"] == "PyTorch, in blocks"
    monkeypatch.setattr(CudaFlash, "largest", 8)  # another declaration gives another table
    changed = dict(zip(PHASES, backends(get_method("rerope").from_options()), strict=True))
    assert changed["prefill"] == "PyTorch, in blocks"
    assert changed["step"] == "Triton"


def test_log_sum_exps_of_library_kernels() -> None:
    """Their shapes, on tensors without values."""
    sizes = ((BATCH, COUNT, length, WIDTH) for length in (QUERIES, KEYS, KEYS))
    tensors = [torch.empty(size, dtype=torch.bfloat16, device="meta") for size in sizes]
    rounded = math.ceil(QUERIES / 32) * 32
    found = OPERATORS._scaled_dot_product_cudnn_attention(*tensors, None, True)[1]
    assert (found.shape, found.dtype) == ((BATCH, COUNT, QUERIES, 1), torch.float32)
    found = OPERATORS._scaled_dot_product_efficient_attention(*tensors, None, True)[1]
    assert (found.shape, found.dtype) == ((BATCH, COUNT, rounded), torch.float32)
    rows = [x.transpose(1, 2) for x in tensors]
    none = (None,) * 5
    found = OPERATORS._efficient_attention_forward(*rows, *none, 0.0, 2, True, window_size=7)[1]
    assert (found.shape, found.dtype) == ((BATCH, COUNT, rounded), torch.float32)


def test_windows_of_library_kernels() -> None:
    names = {
        name: {argument.name for argument in getattr(OPERATORS, name).default._schema.arguments}
        for name in (
            "_flash_attention_forward",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_efficient_attention",
            "_efficient_attention_forward",
        )
    }
    windows = [sorted(n for n in every if "window" in n) for every in names.values()]
    assert windows == [["window_size_left", "window_size_right"], [], [], ["window_size"]]
    assert "custom_mask_type" in names["_efficient_attention_forward"]
