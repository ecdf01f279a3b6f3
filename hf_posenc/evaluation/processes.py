"""Several processes under `accelerate launch` or `torchrun`: each takes its share of the documents.

Only the records travel, once, at the end; so the launcher's key-value store does, on GPU machines too, and no process
group with its threads and collectives is made.
"""

from __future__ import annotations

import datetime
import os
import pickle
from typing import TypeVar

from torch.distributed.rendezvous import rendezvous

T = TypeVar("T")

PATIENCE = datetime.timedelta(days=7)
"""How long the first process waits for those with longer documents."""


def world() -> tuple[int, int]:
    """This process's rank, and how many there are."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    return (int(os.environ["RANK"]), processes) if processes > 1 else (0, 1)


def gather(value: T) -> list[T] | None:
    """In the first process the value of every process, by rank; None in the others, which need not wait."""
    rank, processes = world()
    if processes == 1:
        return [value]
    store, _, _ = next(iter(rendezvous("env://", timeout=PATIENCE)))
    store.set(_key(rank), pickle.dumps(value))
    if rank:
        return None
    return [pickle.loads(store.get(_key(other))) for other in range(processes)]


def _key(rank: int) -> str:
    return f"hf_posenc/records/{rank}"
