"""Which method, at which scale, for these documents: successive halving, and a search of factors of its own."""

from hf_posenc.evaluation.tuning.search import SearchResult
from hf_posenc.evaluation.tuning.sweep import SweepResult

__all__ = ["SearchResult", "SweepResult"]
