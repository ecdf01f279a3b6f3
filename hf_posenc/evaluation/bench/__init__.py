"""The maintainers' table: methods against lengths, by perplexity, retrieval, speed and memory."""

from hf_posenc.evaluation.bench.measuring import bench
from hf_posenc.evaluation.bench.result import BenchResult
from hf_posenc.evaluation.bench.suites import SUITES, Suite

__all__ = ["SUITES", "BenchResult", "Suite", "bench"]
