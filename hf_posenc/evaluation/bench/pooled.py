"""Retrieval over several tasks and lengths as one share."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass

from hf_posenc.evaluation.memory import OUT_OF_MEMORY
from hf_posenc.evaluation.retrieval import RetrievalResult
from hf_posenc.evaluation.retrieval.statistics import Cell, summarize


@dataclass(frozen=True)
class Pooled:
    """A share over several tasks and lengths, or why there is none.

    Attributes:
        cell: Over all samples; `None` where there are none, or one of them failed.
        failure: Why.
    """

    cell: Cell | None
    failure: str | None = None


def pooled(
    result: RetrievalResult,
    method: str,
    *,
    tasks: Collection[str] | None = None,
    lengths: Collection[int] | None = None,
) -> Pooled:
    """All samples of a method as one cell: every sample counts the same, as all tasks and lengths have as many.

    Where anything failed there is no number: a share of what is left would not be comparable.

    Args:
        result: The measured samples.
        method: The label of the method.
        tasks: Some of the tasks only.
        lengths: Some of the lengths only.
    """

    def wanted(task: str, length: int) -> bool:
        return (tasks is None or task in tasks) and (lengths is None or length in lengths)

    reasons = [f.reason for f in result.failures if f.method == method and wanted(f.task, f.length)]
    if reasons:
        return Pooled(None, OUT_OF_MEMORY if OUT_OF_MEMORY in reasons else reasons[0])
    records = [
        dataclasses.replace(record, task="", length=0)
        for record in result.records
        if record.method == method and wanted(record.task, record.length)
    ]
    if not records:
        return Pooled(None, "too short for the task")
    return Pooled(summarize(records, by_depth=False)[0])
