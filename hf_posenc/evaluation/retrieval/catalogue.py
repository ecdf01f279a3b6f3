"""All tasks by name."""

from __future__ import annotations

from hf_posenc.errors import unknown
from hf_posenc.evaluation.retrieval.frequencies import FrequentWords
from hf_posenc.evaluation.retrieval.needles import NiahMultikey2, NiahMultikey3, NiahSingle1
from hf_posenc.evaluation.retrieval.tasks import Passkey, Task
from hf_posenc.evaluation.retrieval.tracking import VariableTracking

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Passkey(),
        NiahSingle1(),
        NiahMultikey2(),
        NiahMultikey3(),
        VariableTracking(),
        FrequentWords(),
    )
}


def get_task(name: str) -> Task:
    """A task by its name.

    Raises:
        PosencError: There is none of that name.
    """
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    return TASKS[name]
