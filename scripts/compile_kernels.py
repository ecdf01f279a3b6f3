"""Compile every Triton kernel ahead of time and compare what it needs with docs/data/kernels.json; no GPU is needed.

    python -m scripts.compile_kernels            # exits 1 if a number rose: registers, stack or shared memory
    python -m scripts.compile_kernels --write    # after an improvement, or for a kernel that is new

Run it from the checkout with the Triton that the file names (scripts/check_kernels.sh has it). The operators are called
as a model calls them; only the launch is replaced by a compilation for another device, so that the specialization is
the real one. A stack above zero means that registers are spilled to memory.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from hf_posenc.attention.kernels import biased, decode, parts
from hf_posenc.attention.kernels.biases import operands_of
from hf_posenc.attention.parts import Part
from hf_posenc.attention.rotation import Layout
from tests.support.kernel_cases import Case

RECORD = Path(__file__).parents[1] / "docs/data/kernels.json"
CUOBJDUMP = Path(nvidia.__file__).parent / "bin/cuobjdump"
DEVICES: tuple[int, ...] = (80, 90, 100)
SPLITS = 32
"""Shares of the keys, as a GPU with a hundred multiprocessors has them at this size."""
Needs = dict[str, int]


class Offline:
    """A driver without a device, for one compute capability."""

    capability = DEVICES[0]

    def get_current_device(self) -> int:
        return self.capability  # compiled kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", self.capability, 32)


def step(case: Case) -> Callable[[], object]:
    """Return a call of the decode operator, with the shapes of an 8B model unless the case has others."""
    call, encoding = case.made()
    return lambda: decode.run(call, encoding)


def text(case: Case, *, training: bool = False) -> Callable[[], object]:
    """Return a call of the operator for whole texts; with `training`, and one of its backward."""
    case = replace(case, queries=case.length)
    call, encoding = case.made()
    bias = operands_of(encoding, 0, case.length, call.query.device)
    assert bias is not None
    tensors = (call.query, call.key, call.value, call.query_position, call.key_position)
    inputs = (*tensors, *bias, call.scaling)

    def calls() -> None:
        results = biased.biased(*inputs, training)
        if training:
            biased.biased_backward(results[0], *inputs, *results, bool(encoding.parameters))

    return calls


def turned(case: Case) -> Callable[[], object]:
    """Return a call of the operator that turns the queries of two bands, and keys."""
    case = replace(case, queries=case.length)
    call, encoding = case.made()
    rotation = encoding.rotation
    assert rotation is not None
    tables = rotation.tables(torch.stack((call.query_position,) * 2), case.dtype)
    of_keys = rotation.tables(call.key_position[None], case.dtype)
    turns = (rotation, call.query, tables), (rotation, call.key, of_keys)
    return lambda: parts.turned(turns)


def merged(case: Case, merge: bool = True) -> Callable[[], object]:
    """Return a call of the operator that merges two parts of a softmax, into a third or alone."""
    query = replace(case, queries=case.length).call(case.encoding()).query
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    part = Part((0, case.length), (0, 0), merge=merge, mirrored=True)
    return lambda: parts.merge(query, lse, [(part, query, lse)] * 2)


WHOLE, WIDE = (Layout(0, features, interleaved=False) for features in (128, 256))
PAIRS = Layout(0, 64, interleaved=True)
SIZES: dict[str, Any] = {"heads": 32, "key_heads": 8, "head_dim": 128, "value_dim": 128}
LLAMA = Case("rerope", **SIZES, length=1024, layout=WHOLE, dtype=torch.bfloat16, original=512)
CALLS: dict[str, Callable[[], object]] = {
    "rerope": step(LLAMA),
    "rerope, float32": step(replace(LLAMA, dtype=torch.float32)),
    "rerope, head_dim 256": step(replace(LLAMA, head_dim=256, value_dim=256, layout=WIDE)),
    "self_extend, half of 128 features in pairs, 4 queries": step(
        replace(LLAMA, method="self_extend", layout=PAIRS, queries=4)
    ),
    "dual_chunk": step(replace(LLAMA, method="dual_chunk")),
    "alibi": step(replace(LLAMA, method="alibi")),
    "sandwich, soft cap": step(replace(LLAMA, method="sandwich", softcap=30.0)),
    "a text, alibi": text(replace(LLAMA, method="alibi")),
    "a text, alibi, float32": text(replace(LLAMA, method="alibi", dtype=torch.float32)),
    "a text, kerple_log": text(replace(LLAMA, method="kerple_log")),
    "a text, t5": text(replace(LLAMA, method="t5")),
    "training, kerple_log": text(replace(LLAMA, method="kerple_log"), training=True),
    "training, t5": text(replace(LLAMA, method="t5"), training=True),
    "training, t5, float32": text(replace(LLAMA, method="t5", dtype=torch.float32), training=True),
    "a text, rerope": turned(LLAMA),
    "two bands": merged(LLAMA),
    "rows of no part before": merged(LLAMA, merge=False),
    "a text, half of 128 features in pairs": turned(replace(LLAMA, layout=PAIRS)),
    "a text, rerope, float32": turned(replace(LLAMA, dtype=torch.float32)),
}
DIFFERENT = (
    "rerope, float32",
    "self_extend, half of 128 features in pairs, 4 queries",
    "dual_chunk",
    "sandwich, soft cap",
    "a text, alibi, float32",
    "training, kerple_log",
    "training, t5, float32",
    "a text, rerope",
    "a text, half of 128 features in pairs",
    "two bands",
    "rows of no part before",
)
"""Calls that together take every branch that all of them take."""


def needs(kernel: Any) -> Needs:
    """Return the registers of a thread, its stack in bytes, and the shared memory of a program in bytes."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.check_output([CUOBJDUMP, "--dump-resource-usage", file.name], text=True)
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", text)[0]
    return {"registers": int(registers), "stack": int(stack), "shared": kernel.metadata.shared}


def compiled(
    calls: Iterable[str] = CALLS, devices: Sequence[int] = DEVICES
) -> dict[str, dict[str, Needs]]:
    """Compile what calls launch, for each device; by kernel and call, then by device."""
    offline = Offline()
    found: dict[str, dict[str, Needs]] = {}
    driver.set_active(offline)
    launched: list[tuple[str, Any]] = []

    def launch(kernel: Any, grid: Any) -> Callable[..., None]:
        def run(*arguments: Any, **constants: Any) -> None:
            done = kernel.run(*arguments, grid=grid, warmup=True, **constants)
            launched.append((kernel.__name__, done))

        return run

    JITFunction.__getitem__ = launch
    decode._splits = lambda device, programs, blocks: SPLITS
    for name in calls:
        for Offline.capability in devices:
            launched.clear()
            CALLS[name]()
            for kernel, done in launched:
                of_call = found.setdefault(f"{kernel}: {name}", {})
                of_call[f"sm_{offline.capability}"] = needs(done)
        print(f"{name}: compiled", flush=True)
    return found


def main() -> int:
    """Compare with the record, or write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="record the numbers")
    parser.add_argument("--only-compile", action="store_true", help="few, by any Triton")
    given = parser.parse_args()
    if given.only_compile:  # 3.4 fails in a pass of its own for 10.0: the backward under a bias
        compiled(DIFFERENT, DEVICES[:2] if triton.__version__.startswith("3.4.") else DEVICES)
        print(f"Every kernel compiles on Triton {triton.__version__}.")
        return 0
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if not given.write and recorded.get("triton") != triton.__version__:
        print(f"{RECORD.name} is of Triton {recorded.get('triton')}, not {triton.__version__}.")
        return 1
    found = compiled()
    if given.write:
        text = json.dumps({"triton": triton.__version__, "kernels": found}, indent=1)
        # One line for each device.
        numbers = re.compile(r"\{\s+(\"registers[^}]*?)\s+\}")
        RECORD.write_text(numbers.sub(lambda row: f"{{{' '.join(row[1].split())}}}", text) + "\n")
        return 0
    worse = differences(recorded["kernels"], found)
    print("\n".join(worse) or "Nothing needs more than recorded.")
    return int(bool(worse))


def differences(
    recorded: dict[str, dict[str, Needs]], found: dict[str, dict[str, Needs]]
) -> list[str]:
    """Return a line for each number that rose, and for each kernel that only one of the two has."""
    lines = [f"{name}: only in one of the two; run with --write" for name in {*recorded} ^ {*found}]
    for name in recorded.keys() & found.keys():
        for device, numbers in found[name].items():
            for what, number in numbers.items():
                before = recorded[name][device][what]
                if number > before:
                    lines.append(f"{name}, {device}: {what} rose from {before} to {number}")
    return sorted(lines)


if __name__ == "__main__":
    sys.exit(main())
