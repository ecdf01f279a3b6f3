"""The maintainers' table: methods against lengths, by perplexity, retrieval, speed and memory."""

from hf_posenc.evaluation.bench.gpu import GpuRun
from hf_posenc.evaluation.bench.gpu_result import GpuResult
from hf_posenc.evaluation.bench.result import BenchResult
from hf_posenc.evaluation.bench.run import SUITES, Suite, bench

__all__ = ["SUITES", "BenchResult", "GpuResult", "GpuRun", "Suite", "bench"]
