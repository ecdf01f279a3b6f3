"""The maintainers' table: methods against lengths, by perplexity, retrieval, speed and memory.

Suites load without torch, the rest on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_posenc.evaluation.bench.run import BenchResult as BenchResult
    from hf_posenc.evaluation.bench.run import bench as bench
    from hf_posenc.evaluation.bench.suites import SUITES as SUITES
    from hf_posenc.evaluation.bench.suites import Suite as Suite
    from hf_posenc.evaluation.device.result import GpuResult as GpuResult
    from hf_posenc.evaluation.device.run import GpuRun as GpuRun

_HOMES = {
    "BenchResult": ".run",
    "GpuResult": "..device.result",
    "GpuRun": "..device.run",
    "SUITES": ".suites",
    "Suite": ".suites",
    "bench": ".run",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name], __name__), name)
