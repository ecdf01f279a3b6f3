"""The generated parts of docs/gpu.md: measured GPUs, and the backends of each method on an NVIDIA GPU.

The backends are as they declare themselves, chosen on tensors without values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pandas
import torch

from hf_posenc.attention import engine
from hf_posenc.attention.call import Call, Mask, Run
from hf_posenc.attention.checks.comparison import HEADS, KEY_HEADS, encoding_of, methods
from hf_posenc.attention.encoding import Encoding, GrowingPlan
from hf_posenc.evaluation.device.result import GpuResult
from hf_posenc.evaluation.grid import markdown_table
from hf_posenc.methods import Method
from scripts.results import DOCS

RESULTS = DOCS / "data" / "gpu"
"""Folder of the measured GPUs, by the GPU's name: a file of `scripts.benchmark_gpu`, or of `hf-posenc bench`."""
LENGTH, FEATURES = 512, 64
META = torch.device("meta")
PHASES: dict[str, tuple[int, torch.dtype, bool]] = {
    "prefill": (LENGTH, torch.bfloat16, False),
    "prefill, float32": (LENGTH, torch.float32, False),
    "step": (1, torch.bfloat16, False),
    "training": (LENGTH, torch.bfloat16, True),
    "training, float32": (LENGTH, torch.float32, True),
}
"""By name: queries, dtype, and whether a backward follows; halves where no dtype is named."""
NAMES = {
    "triton decode": "Triton",
    "triton biased": "Triton",
    "cudnn": "cuDNN",
    "cuda flash, triton": "flash",
    "cuda flash": "flash",
    "few": "PyTorch, one product",
    "moving": "PyTorch, one product",
    "exact": "PyTorch, in blocks",
}
"""By backend, what the table calls it; another backend is called by its own name."""


class _Causal(Mask):
    """One causal sequence whose positions count up, without values to read that from."""

    def __init__(self, queries: int) -> None:
        self.queries = queries

    def runs(self, positions: torch.Tensor) -> tuple[Run, ...]:
        every = slice(None)
        return (Run(every, slice(0, self.queries), slice(0, LENGTH), LENGTH - self.queries),)

    def decided(self, question: object, answer: object) -> object:  # type: ignore[override]
        return self.runs(torch.empty(0)) if question == "runs" else True


def _call(queries: int, dtype: torch.dtype, training: bool) -> Call:
    def tensor(heads: int, length: int) -> torch.Tensor:
        made = torch.empty(1, heads, length, FEATURES, dtype=dtype, device=META)
        return made.requires_grad_(training)

    n = torch.empty(1, LENGTH, dtype=torch.int64, device=META)
    key = tensor(KEY_HEADS, LENGTH)
    return Call(tensor(HEADS, queries), key, key, n[:, -queries:], n, _Causal(queries), 0.125)


def _encoding(method: Method) -> Encoding:
    encoding = encoding_of(method, FEATURES, torch.device("cpu"))
    if isinstance(encoding.plan, GrowingPlan):
        encoding = encoding.at_length(LENGTH)
    trained = torch.is_grad_enabled()
    parameters = (encoding.parameters or {}).items()
    moved = {name: value.to(META).requires_grad_(trained) for name, value in parameters}
    return encoding.with_parameters(moved)


def backends(method: Method) -> tuple[str, ...]:
    """Return the backend of each phase, chosen as if tensors without values were on a GPU with Triton."""
    chosen = []
    with ExitStack() as stack:
        for module in ("decode", "biased", "parts"):
            name = f"hf_posenc.attention.kernels.{module}.available"
            stack.enter_context(patch(name, lambda device: True))
        name = "hf_posenc.attention.fused.pytorch.serves"
        stack.enter_context(patch(name, lambda device, dtype: dtype != torch.float32))
        for queries, dtype, training in PHASES.values():
            with torch.set_grad_enabled(training):
                call = _call(queries, dtype, training)
                name = engine.choose(call, _encoding(method)).name
            chosen.append(NAMES.get(name, name))
    return tuple(chosen)


def rows() -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table: methods of equal backends, and these."""
    by_backends: dict[tuple[str, ...], list[str]] = {}
    for method in methods():
        by_backends.setdefault(backends(method), []).append(f"`{method.name}`")
    for chosen, names in by_backends.items():
        yield ", ".join(names), *chosen


def table() -> str:
    """Return the table in Markdown."""
    return markdown_table(("methods", *PHASES), rows())


def measured() -> str:
    """Return the tables of all measured GPUs in Markdown."""
    pages = []
    for path in sorted(RESULTS.glob("*.json")):
        values = json.loads(path.read_text("utf-8"))
        if values["kind"] == "layers":
            pages.append(_layers(values))
            continue
        page = GpuResult.from_dict(values)._repr_markdown_().rstrip()
        page = "\n".join(f"##{x}" if x.startswith("#") else x for x in page.split("\n"))
        pages.append(f"{page}\n\n{values['note']}" if "note" in values else page)
    return "\n\n".join(pages)


COLUMNS = {
    "flash attention 4": "FlashAttention-4",
    "flash attention 4, table": "FlashAttention-4",
    "cudnn": "cuDNN",
    "cuda flash, triton": "PyTorch's flash",
    "cuda flash": "PyTorch's flash, without Triton",
    "triton biased": "Triton",
    "triton decode": "Triton",
    **dict.fromkeys(("moving", "few", "exact"), "PyTorch"),
}
"""The columns of `benchmark_gpu`'s backends."""
KINDS = {
    "device_ms": "The device's own time (a CUDA graph)",
    "ms": "Called one by one, by events of the device; of short calls, the host's time counts too",
}


def _layers(values: dict[str, Any]) -> str:
    """Return the tables of `benchmark_gpu`: times of plain attention, by phase and clock."""
    machine, sizes = values["machine"], values["sizes"]
    versions = ", ".join(f"{x} {machine[x]}" for x in ("torch", "triton", "cudnn", "flash-attn-4"))
    lines = [
        f"### {machine['device']}",
        f"One layer of Llama 3 8B's sizes ({sizes['heads']} heads, {sizes['key_heads']} key heads, {sizes['features']} "
        f"features, {sizes['dtype']}), in multiples of the time of plain attention as SDPA runs it, in the same "
        f"rounds; {versions}. {values.get('note', '')}".rstrip(),
    ]
    for phase in ("prefill", "training", "step"):
        for kind, title in KINDS.items():
            if rows := [row for row in values["rows"] if row["phase"] == phase and kind in row]:
                lines += [f"**{phase.capitalize()}.** {title}.", _ratios(rows, kind)]
    compared = [row for row in values["rows"] if row.get("error")]
    worst = max((max(row["error"].values()) for row in compared), default=0.0)
    phases = ", ".join(dict.fromkeys(row["phase"] for row in compared))
    outputs = (
        f"Outputs above ({phases}) differ from float64 by {worst:.1e} at most (root mean square of some rows, "
        "relative), as those of one attention in bfloat16."
    )
    lines += [outputs] * bool(compared)
    return "\n\n".join(lines)


def _ratios(rows: list[dict[str, Any]], kind: str) -> str:
    lines = []
    for row in rows:
        plain = row[kind]["plain"]
        options = "".join(f", {name} {value:,}" for name, value in row["options"].items())
        about = {"method": f"`{row['method']}`{options}", "tokens": f"{row['length']:,}"}
        others = {COLUMNS[k]: f"{v / plain:.2f}" for k, v in row[kind].items() if k != "plain"}
        lines.append(about | {"plain, ms": f"{plain:.3g}"} | others)
    frame = pandas.DataFrame(lines).fillna("")
    return markdown_table([*frame], frame.to_numpy().tolist(), numeric=True)
