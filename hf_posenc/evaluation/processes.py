"""Several processes on one run: each takes its share of the work items, and they meet in the run's folder only.

No collective, no port, no process group: the shares are dealt out by index, so processes may be started by a launcher,
as a Slurm array, or by hand in several terminals, and one that dies takes nothing down with it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from hf_posenc.errors import PosencError

T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    """One process's place among those of a run.

    Attributes:
        index: Its place, from 0.
        count: How many there are.
        launched: Whether a launcher started all of them together, so that the first may wait for the others.
    """

    index: int = 0
    count: int = 1
    launched: bool = False

    def mine(self, items: Sequence[T]) -> list[T]:
        """Every `count`-th item from `index` on: fixed by the items alone, whatever is done already."""
        return list(items[self.index :: self.count])


def current_shard(text: str | None = None) -> Shard:
    """This process's place: as given, else as the launcher says in the environment.

    Args:
        text: `"2/8"`, the second of eight; counted from 1.

    Raises:
        PosencError: `text` is of another form, or out of range.
    """
    if text is not None:
        found = re.fullmatch(r"\s*(\d+)\s*/\s*(\d+)\s*", text)
        index, count = (int(found[1]), int(found[2])) if found else (0, 0)
        if not 1 <= index <= count:
            raise PosencError(
                f"--shard {text}: give one of 1/N ... N/N, such as 2/8 for the second of eight processes."
            )
        return Shard(index - 1, count)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1:
        return Shard(int(os.environ["RANK"]), processes, launched=True)
    if "SLURM_ARRAY_TASK_ID" in os.environ:
        task = int(os.environ["SLURM_ARRAY_TASK_ID"])
        first = int(os.environ.get("SLURM_ARRAY_TASK_MIN", "0"))
        step = int(os.environ.get("SLURM_ARRAY_TASK_STEP", "1"))
        return Shard((task - first) // step, int(os.environ.get("SLURM_ARRAY_TASK_COUNT", "1")))
    return Shard()
