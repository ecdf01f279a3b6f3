"""Retrieval: every candidate on the same prompts. Tasks and settings load without torch, the rest on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_posenc.evaluation.retrieval.run import RetrievalRun as RetrievalRun
    from hf_posenc.evaluation.retrieval.run import measure_retrieval as measure_retrieval
    from hf_posenc.evaluation.retrieval.run import prepare as prepare
    from hf_posenc.evaluation.retrieval.tasks import settings_of as settings_of

_HOMES = {
    "RetrievalRun": "run",
    "measure_retrieval": "run",
    "prepare": "run",
    "settings_of": "tasks",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
