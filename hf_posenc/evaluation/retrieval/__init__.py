"""Retrieval: what a model finds in a long context, by length and depth, method by method."""

from hf_posenc.evaluation.retrieval.catalogue import TASKS, get_task
from hf_posenc.evaluation.retrieval.measuring import measure_retrieval
from hf_posenc.evaluation.retrieval.result import RetrievalResult
from hf_posenc.evaluation.retrieval.run import RetrievalRun
from hf_posenc.evaluation.retrieval.settings import RetrievalSettings, even_depths

__all__ = [
    "TASKS",
    "RetrievalResult",
    "RetrievalRun",
    "RetrievalSettings",
    "even_depths",
    "get_task",
    "measure_retrieval",
]
