"""Several processes under `accelerate launch` or `torchrun`: each takes its share of the documents.

Only the records travel, once, at the end; so plain gloo does, on GPU machines too, whatever the launcher was told.
"""

from __future__ import annotations

import datetime
import os
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")

PATIENCE = datetime.timedelta(days=7)
"""How long a process waits for those with longer documents."""


def world() -> tuple[int, int]:
    """This process's rank, and how many there are; joins the others where there are several."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return 0, 1
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=PATIENCE)
    return dist.get_rank(), dist.get_world_size()


def gather(value: T) -> list[T]:
    """The value of every process, by rank; the processes part afterwards."""
    processes = world()[1]
    if processes == 1:
        return [value]
    values: list[T | None] = [None] * processes
    dist.all_gather_object(values, value)
    dist.destroy_process_group()
    return [entry for entry in values if entry is not None]
