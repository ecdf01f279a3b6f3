"""Measuring what a method does to long documents. Takes any causal language model, patched or not.

What a program or a notebook calls stands here and is imported on first use. Functions that share their name with a
module are in it: `hf_posenc.evaluation.bench.bench`, `hf_posenc.evaluation.extend.extend`,
`hf_posenc.evaluation.recommend.recommend`, `hf_posenc.evaluation.device.selftest.selftest`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hf_posenc.errors import naming_extras

if TYPE_CHECKING:
    from hf_posenc.evaluation.bench import BenchResult as BenchResult
    from hf_posenc.evaluation.device.result import GpuResult as GpuResult
    from hf_posenc.evaluation.documents import read_dataset as read_dataset
    from hf_posenc.evaluation.documents import read_paths as read_paths
    from hf_posenc.evaluation.extend.result import ExtendResult as ExtendResult
    from hf_posenc.evaluation.perplexity.result import PerplexityResult as PerplexityResult
    from hf_posenc.evaluation.perplexity.run import measure_perplexity as measure_perplexity
    from hf_posenc.evaluation.retrieval.result import RetrievalResult as RetrievalResult
    from hf_posenc.evaluation.retrieval.run import measure_retrieval as measure_retrieval
    from hf_posenc.evaluation.scoring.head_replay import TokenScorer as TokenScorer
    from hf_posenc.evaluation.tuning.search import SearchResult as SearchResult
    from hf_posenc.evaluation.tuning.sweep import SweepResult as SweepResult

# A command that only lists methods, or prints its help, must not wait for datasets, statistics and models.
_HOMES = {
    "BenchResult": "bench",
    "ExtendResult": "extend.result",
    "GpuResult": "device.result",
    "PerplexityResult": "perplexity.result",
    "RetrievalResult": "retrieval.result",
    "SearchResult": "tuning.search",
    "SweepResult": "tuning.sweep",
    "TokenScorer": "scoring.head_replay",
    "measure_perplexity": "perplexity.run",
    "measure_retrieval": "retrieval.run",
    "read_dataset": "documents",
    "read_paths": "documents",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with naming_extras():
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
