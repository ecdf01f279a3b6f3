"""Measuring what a method does to long documents. Takes any causal language model, patched or not.

What a program or a notebook calls stands here and is imported on first use. Functions that share their name with a
folder are in it: `hf_posenc.evaluation.bench.bench`, `hf_posenc.evaluation.extend.extend`,
`hf_posenc.evaluation.recommend.recommend`, `hf_posenc.evaluation.selftest.selftest`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hf_posenc.errors import naming_extras

if TYPE_CHECKING:
    from hf_posenc.evaluation.bench import BenchResult as BenchResult
    from hf_posenc.evaluation.bench import GpuResult as GpuResult
    from hf_posenc.evaluation.documents import read_dataset as read_dataset
    from hf_posenc.evaluation.documents import read_paths as read_paths
    from hf_posenc.evaluation.extend.result import ExtendResult as ExtendResult
    from hf_posenc.evaluation.perplexity import measure_perplexity as measure_perplexity
    from hf_posenc.evaluation.perplexity.result import PerplexityResult as PerplexityResult
    from hf_posenc.evaluation.retrieval import measure_retrieval as measure_retrieval
    from hf_posenc.evaluation.retrieval.result import RetrievalResult as RetrievalResult
    from hf_posenc.evaluation.scoring.head_replay import TokenScorer as TokenScorer
    from hf_posenc.evaluation.tuning.search import SearchResult as SearchResult
    from hf_posenc.evaluation.tuning.sweep import SweepResult as SweepResult


def on_first_use(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package whose names, by module, are imported on first use.

    A command that only lists methods, or prints its help, must not wait for datasets, statistics and models.
    """
    modules = {name: module for module, names in homes.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with naming_extras():
            return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)

    return get


_HOMES = {
    "bench": "BenchResult GpuResult",
    "documents": "read_dataset read_paths",
    "extend.result": "ExtendResult",
    "perplexity": "measure_perplexity",
    "perplexity.result": "PerplexityResult",
    "retrieval": "measure_retrieval",
    "retrieval.result": "RetrievalResult",
    "scoring.head_replay": "TokenScorer",
    "tuning.search": "SearchResult",
    "tuning.sweep": "SweepResult",
}
__all__ = sorted(name for names in _HOMES.values() for name in names.split())
__getattr__ = on_first_use(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
