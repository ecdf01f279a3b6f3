"""Which method, at which scale, for these documents: successive halving, and a search of factors of its own."""

from hf_posenc.evaluation.sweep.result import SweepResult
from hf_posenc.evaluation.sweep.search_result import SearchResult

__all__ = ["SearchResult", "SweepResult"]
