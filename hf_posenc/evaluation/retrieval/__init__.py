"""Retrieval: what a model finds in a long context, by length and depth, method by method."""

from hf_posenc.evaluation.options import even_depths as even_depths
from hf_posenc.evaluation.retrieval.result import RetrievalResult as RetrievalResult
from hf_posenc.evaluation.retrieval.run import RetrievalRun as RetrievalRun
from hf_posenc.evaluation.retrieval.run import measure_retrieval as measure_retrieval
from hf_posenc.evaluation.retrieval.tasks import TASKS as TASKS
from hf_posenc.evaluation.retrieval.tasks import RetrievalSettings as RetrievalSettings
from hf_posenc.evaluation.retrieval.tasks import get_task as get_task
