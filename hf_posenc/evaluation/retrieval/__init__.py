"""Retrieval: what a model finds in a long context, by length and depth, method by method."""

from hf_posenc.evaluation.options import even_depths
from hf_posenc.evaluation.retrieval.result import RetrievalResult
from hf_posenc.evaluation.retrieval.run import RetrievalRun, measure_retrieval
from hf_posenc.evaluation.retrieval.tasks import TASKS, RetrievalSettings, get_task

__all__ = [
    "TASKS",
    "RetrievalResult",
    "RetrievalRun",
    "RetrievalSettings",
    "even_depths",
    "get_task",
    "measure_retrieval",
]
