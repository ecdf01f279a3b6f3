"""Sweep of methods times scales by successive halving, and search of a factor for every pair of features."""

from hf_posenc.evaluation.tuning.search import SearchResult
from hf_posenc.evaluation.tuning.sweep import SweepResult

__all__ = ["SearchResult", "SweepResult"]
