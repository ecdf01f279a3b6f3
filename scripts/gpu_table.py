"""The generated parts of docs/gpu.md: measured GPUs, and the backends of each method on an NVIDIA GPU.

The backends are as they declare themselves, chosen on tensors without values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import torch

from hf_posenc.attention import engine
from hf_posenc.attention.call import Call, Mask, Run
from hf_posenc.attention.checks.samples import HEADS, KEY_HEADS, encoding_of, methods
from hf_posenc.attention.encoding import Encoding
from hf_posenc.evaluation.bench import GpuResult
from hf_posenc.methods import Method

RESULTS = Path(__file__).parents[1] / "docs" / "data" / "gpu"
"""Folder of the measured GPUs, a `gpu.json` of `hf-posenc bench --suite gpu` each, by the GPU's name."""
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
    trained = torch.is_grad_enabled()
    parameters = (encoding.parameters or {}).items()
    moved = {name: value.to(META).requires_grad_(trained) for name, value in parameters}
    return encoding.with_parameters(moved)


def backends(method: Method) -> tuple[str, ...]:
    """Return the backend of each phase, chosen as if tensors without values were on a GPU with Triton."""
    chosen = []
    with ExitStack() as stack:
        for module in ("decode", "biased", "turning"):
            name = f"hf_posenc.attention.kernels.{module}.available"
            stack.enter_context(patch(name, lambda device: True))
        stack.enter_context(
            patch(
                "hf_posenc.attention.fused.cuda.serves",
                lambda device, dtype: dtype != torch.float32,
            )
        )
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
    head = ("methods", *PHASES)
    lines = (head, ("---",) * len(head), *rows())
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def measured() -> str:
    """Return the tables of all measured GPUs in Markdown."""
    files = sorted(RESULTS.glob("*.json"))
    results = [GpuResult.from_dict(json.loads(path.read_text("utf-8"))) for path in files]
    pages = [result._repr_markdown_().rstrip() for result in results]
    deeper = ("\n".join(f"##{x}" if x.startswith("#") else x for x in p.split("\n")) for p in pages)
    return "\n\n".join(deeper) or "None yet: no GPU has run this code."
