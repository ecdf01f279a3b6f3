"""The records of a measurement that several processes make together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_posenc.evaluation.perplexity import Run
from hf_posenc.evaluation.store import Key, Memory, Records
from hf_posenc.training.ranks import from_all


class Both:
    """Records that are looked up in one place and stored in two.

    Args:
        known: What any process has measured.
        store: Where a value outlives this one.
    """

    def __init__(self, known: Records, store: Records) -> None:
        self._known, self._store = known, store

    def get(self, key: Key) -> dict[str, Any] | None:
        """What any process has measured."""
        return self._known.get(key)

    def append(self, key: Key, value: Mapping[str, Any]) -> None:
        """Stores a value where it outlives the process, and where it is found."""
        self._store.append(key, value)
        self._known.append(key, value)


def known_to_all(run: Run, records: Records) -> Memory:
    """The records of a run that any process has, in every process. All must call it."""
    own = {item.key: records.get(item.key) for item in run.items}
    known = Memory()
    for part in from_all(own):
        for key, value in part.items():
            if value is not None:
                known.append(key, value)
    return known
