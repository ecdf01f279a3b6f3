"""The maintainers' table: methods against lengths, by perplexity, retrieval, speed and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_posenc.evaluation.bench.run import bench as bench


def __getattr__(name: str) -> Any:
    """Load `bench` on its first use: suites load without torch."""
    if name != "bench":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hf_posenc.evaluation.bench import run

    return run.bench
