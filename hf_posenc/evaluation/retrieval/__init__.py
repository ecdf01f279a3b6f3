"""Retrieval: every candidate on the same prompts. Tasks and settings load without torch, the rest on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_posenc.evaluation import on_first_use

if TYPE_CHECKING:
    from hf_posenc.evaluation.retrieval.run import RetrievalRun as RetrievalRun
    from hf_posenc.evaluation.retrieval.run import measure_retrieval as measure_retrieval
    from hf_posenc.evaluation.retrieval.run import prepare as prepare
    from hf_posenc.evaluation.retrieval.tasks import settings_of as settings_of

__getattr__ = on_first_use(
    __name__,
    {
        "run": "RetrievalRun measure_retrieval prepare",
        "tasks": "settings_of",
    },
)
