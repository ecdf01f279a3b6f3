"""Layers of an 8B model on a GPU, every backend beside plain attention: calls, their host time, and the device alone.

    python -m scripts.benchmark_gpu --output docs/data/gpu/NAME.json     # about two minutes
    python -m scripts.make_readme                                        # docs/gpu.md shows it

Rows come in the order of their value, and each is written when it is measured; none begins after `--seconds`. Calls
alternate with plain attention in one process, and medians are kept. The device's own time is that of a CUDA graph: what
a model takes whose host is ahead of its GPU. Errors are those of a few rows against float64.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_posenc.attention import engine
from hf_posenc.attention.call import Call, CausalMask
from hf_posenc.attention.checks import verdicts
from hf_posenc.attention.checks.comparison import encoding_of
from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.exact import exact
from hf_posenc.evaluation.device import Layer
from hf_posenc.files import to_json, write_atomically
from hf_posenc.methods import get_method

HEADS, FEATURES, ORIGINAL = (32, 8), 128, 8192
LENGTHS = 32768, 8192, 131072
BANDS: dict[str, dict[str, Any]] = {
    "rerope": {"window": 4096},
    "dual_chunk": {},
    "dynamic_yarn": {},
    "self_extend": {"window": 4096, "group": 8},
    "sliding_window": {"window": 4096},
}
BIASES = "t5", "kerple_log", "sandwich", "alibi", "kerple_power"
PLAIN = "plain"
Calls = dict[str, Callable[[], Tensor]]
Times = dict[str, float]


def cases() -> Iterator[tuple[str, str, int]]:
    """Yield phase, method and length, the most telling first."""
    for length in LENGTHS:
        for method in ("rerope", "dynamic_yarn", "t5"):
            for phase in ("prefill", "step", "training"):
                if phase != "training" or (length <= ORIGINAL * 4 and method != "t5"):
                    yield phase, method, length
    for length in LENGTHS[:2]:
        yield from (("prefill", method, length) for method in (*BANDS, *BIASES))
        yield from (("step", method, length) for method in ("dual_chunk", "alibi"))


def calls_of(call: Call, encoding: Encoding, layer: Layer) -> tuple[Calls, dict[str, float]]:
    """Return plain attention and every backend that computes a call, and the errors of these."""
    calls: Calls = {PLAIN: layer.plain}
    errors = {}
    rows = [row for row in (0, 1, 4095, 4096, 8191, 20000) if row < layer.query.shape[2]]
    rows = [*rows, layer.query.shape[2] - 1]
    for backend in engine.BACKENDS:
        if not (backend.fused or backend.name == "moving") or not backend.accepts(call, encoding):
            continue

        def forced(name: str = backend.name) -> Tensor:
            with engine.forced(name):
                return engine.attend(call, encoding)[0]

        with engine.forced(backend.name):
            if engine.choose(call, encoding).name != backend.name:  # its check failed
                continue
        with torch.no_grad():
            expected = _reference(call, encoding, rows)
            off = forced().detach()[:, :, rows].double() - expected
        errors[backend.name] = float(off.norm() / expected.norm())
        calls[backend.name] = forced
    return calls, errors


def _reference(call: Call, encoding: Encoding, rows: list[int]) -> Tensor:
    """Some rows in float64, by the general path; each sees the keys up to its own."""
    before, found = call.key.shape[2] - call.query.shape[2], []
    for row in rows:
        keys, own = slice(0, before + row + 1), slice(row, row + 1)
        one = replace(
            call,
            query=call.query[:, :, own].double(),
            key=call.key[:, :, keys].double(),
            value=call.value[:, :, keys].double(),
            query_position=call.query_position[:, own],
            key_position=call.key_position[:, keys],
            mask=CausalMask(1, keys.stop, call.query.device),
            rotated=None,
        )
        found.append(exact(one, encoding)[0])
    return torch.cat(found, 2)


def milliseconds(works: dict[str, Callable[[], object]], rounds: int) -> Times:
    """Return the median time of each, which alternate, by events of the device."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds + 1):  # the first is not counted
        for name, work in works.items():
            times[name].append(_timed(work))
    return {name: round(statistics.median(each[1:]), 4) for name, each in times.items()}


def _timed(work: Callable[[], object]) -> float:
    if not torch.cuda.is_available():
        began = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - began)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def host(work: Callable[[], object]) -> float:
    """Return the milliseconds after which the host goes on."""
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return round(1e3 * statistics.median(times), 4)


def graph(work: Callable[[], object]) -> Callable[[], None]:
    """Return the replay of a call as a CUDA graph."""
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        work()
    return captured.replay


def row_of(
    phase: str, method: str, length: int, device: torch.device, rounds: int
) -> dict[str, Any]:
    """Measure one method in one phase at one length."""
    options = BANDS.get(method, {})
    encoding = encoding_of(
        get_method(method).from_options(**options), FEATURES, device, ORIGINAL, HEADS
    )
    layer = Layer.of(length, FEATURES, torch.bfloat16, device, HEADS).of_phase(phase)
    training = phase == "training"
    row: dict[str, Any] = {"phase": phase, "method": method, "options": options, "length": length}
    with torch.set_grad_enabled(training):
        calls, row["error"] = calls_of(layer.call(), encoding, layer)
        works: dict[str, Callable[[], object]] = {
            name: layer.work(forward) for name, forward in calls.items()
        }
        row["ms"] = milliseconds(works, rounds)
        if not training and device.type == "cuda":
            row["host_ms"] = {name: host(work) for name, work in works.items()}
            replays = {name: graph(work) for name, work in works.items()}
            row["device_ms"] = milliseconds({**replays}, rounds)
    return row


def main(arguments: list[str] | None = None) -> None:
    """Measure, and write after each row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=120, help="begin no row after so many")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--longest", type=int, default=max(LENGTHS), help="tokens; shorter ones")
    given = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = {"heads": HEADS[0], "key_heads": HEADS[1], "features": FEATURES, "dtype": "bfloat16"}
    machine = {**verdicts.fingerprint(device), "python": platform.python_version()}
    rows: list[dict[str, Any]] = []
    began = time.monotonic()
    for phase, method, length in dict.fromkeys(cases()):
        if rows and time.monotonic() - began > given.seconds:
            break
        rows.append(row_of(phase, method, min(length, given.longest), device, given.rounds))
        found = {"kind": "layers", "format": 1, "machine": machine, "sizes": sizes, "rows": rows}
        write_atomically(given.output, to_json(found))
        print(json.dumps(rows[-1]), flush=True)


if __name__ == "__main__":
    main()
