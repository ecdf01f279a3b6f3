"""The maintainers' table: methods against lengths, by perplexity, retrieval, speed and memory."""

from hf_posenc.evaluation.bench.result import BenchResult
from hf_posenc.evaluation.bench.run import SUITES, Suite, bench

__all__ = ["SUITES", "BenchResult", "Suite", "bench"]
