"""A measurement whose model and documents are loaded: records in a folder, shares of several processes, the result."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from hf_posenc.evaluation.measuring.execute import (
    Measurement,
    Progress,
    execute,
    silent,
    wait_for_all,
    write_timings,
)
from hf_posenc.evaluation.measuring.store import ALONE, Memory, Records, Shard, Store, missing

ResultT = TypeVar("ResultT")


@dataclass
class Job(abc.ABC, Generic[ResultT]):
    """A measurement that is ready; the kinds of measurement add its records and its result.

    Attributes:
        run: The work.
        metadata: Description of model, source and command that the result stores.
        missing: Once `measure` has returned `None`: items that other processes have not stored yet.
    """

    run: Measurement[Any, Any]
    metadata: dict[str, Any]
    missing: int = 0

    @property
    def total(self) -> int:
        """Number of items."""
        return len(self.run.items)

    @abc.abstractmethod
    def store(self, folder: Path, shard: Shard) -> Store:
        """Open the records in a folder, keyed by everything that determines a number.

        Raises:
            PosencError: The folder cannot be written to, or another process writes the same share.
        """

    @abc.abstractmethod
    def result(self, store: Records) -> ResultT | None:
        """Return the result of the stored values; `None` while some are missing."""

    def measure(
        self,
        folder: Path | None,
        shard: Shard = ALONE,
        progress: Progress = silent,
        waiting: Callable[[int], None] = silent,
    ) -> ResultT | None:
        """Measure whatever is missing of this process's share.

        Args:
            folder: Folder of records and timings; `None`: nothing is written.
            shard: This process's place among those of the run.
            progress: Called after every forward.
            waiting: Called once, with the number of missing items, when a launched process has waited long.

        Returns:
            The result; `None` while other processes are at work, or where another one returns it.

        Raises:
            PosencError: The folder cannot be written to, or another process writes the same share.
        """
        if folder is None:
            memory = Memory()
            execute(self.run, memory, shard, progress)
            return self.result(memory)
        with self.store(folder, shard) as store:
            execute(self.run, store, shard, progress)
            if not wait_for_all(self.run, store, shard, waiting):
                self.missing = len(missing(store, (item.key for item in self.run.items)))
                return None
            if shard.launched and shard.index:  # the first process returns the result
                return None
            write_timings(self.run, store, folder / "timings.json")
            return self.result(store)
