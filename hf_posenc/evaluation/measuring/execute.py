"""One machine for every kind of measurement: perplexity, retrieval, tail losses, speed, scores during a training.

A kind supplies its items, how one of them is measured, and how stored values become a result; `execute` does the rest.
Failures are deterministic. A cell is one number of the result, and several items contribute to it. The failure of its
first item, by `Item.order`, decides. An item is skipped only if an *earlier* item of the same cell has failed, so the
first failure is the same in any order, with any number of processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import nn

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.measuring import identity
from hf_posenc.evaluation.measuring.candidates import Candidate
from hf_posenc.evaluation.measuring.store import ALONE, Key, Records, Shard, Store
from hf_posenc.evaluation.scoring import reason_of, release
from hf_posenc.evaluation.scoring.decoder import evaluation_mode, position_limit
from hf_posenc.evaluation.scoring.estimate import ModelShape, forward_flops, read_shape
from hf_posenc.evaluation.scoring.head_replay import TokenScorer
from hf_posenc.model.weights import execution_device

Progress = Callable[[str, int, int], None]
"""Called with the candidate's label, the operations done so far and those of this process's share."""
Cell = tuple[str | int, ...]
"""One number of a candidate's results, such as `("tail", 4096)`."""
Value = Mapping[str, Any]
"""The stored value of an item, JSON-ready."""

POLL = 0.2
"""Seconds between two looks at the records of other processes."""
PATIENCE = 60.0
"""Seconds after which a waiting process reports that it waits."""


def silent(*_: Any) -> None:
    """Report nothing."""


RESUMED: ContextVar[Callable[[int, int], None]] = ContextVar("resumed", default=silent)
"""Called by every `execute`, however deep in a job, with the items found in records and those left to measure."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Item:
    """One piece of work, measured at a time and stored as one record; the kinds of measurement add fields.

    Attributes:
        candidate: The method that is patched in; `None`: the measurement patches by itself (`patched_in`).
        length: Context length in tokens, which an automatic scale is computed from.
        cost: Tokens that the model reads.
        cells: The numbers of the result that it contributes to.
        order: Its rank among the items of a cell; the failure of the lowest one decides.
    """

    key: Key
    candidate: Candidate | None = None
    length: int
    cost: int
    cells: tuple[Cell, ...]
    order: int = 0

    @property
    def label(self) -> str:
        """The candidate's label."""
        return "" if self.candidate is None else self.candidate.label

    def operations(self, shape: ModelShape) -> float:
        """Return the operations of its forwards over `cost` tokens, each of `length`."""
        return self.cost / self.length * forward_flops(shape, self.length, 1)


ItemT = TypeVar("ItemT", bound=Item)
ResultT = TypeVar("ResultT")
T = TypeVar("T")


class Measurement(Generic[ItemT, ResultT]):
    """A kind of measurement: all that `execute` does not do.

    Attributes:
        model: A causal language model, unpatched or with a saved patch.
        scorer: What runs its forwards; `execute` sets it for the candidate that is patched in. `None`: something else.
        items: All the work in a deterministic order, items of one candidate side by side.
        metadata: Description of model, source and command, which the result stores.
        fingerprint: Hash of `decisive`, once the records are in files.
        missing: Once `run` has returned: items that are not stored yet, by this process or by others.
        until: The `time.monotonic()` after which no item begins; the result then has what was measured so far.
    """

    model: nn.Module
    scorer: TokenScorer | None = None
    items: Sequence[ItemT]
    metadata: Mapping[str, Any]
    fingerprint: str | None = None
    missing: int = 0
    until: float | None = None

    @property
    def total(self) -> int:
        """Number of items."""
        return len(self.items)

    @property
    def forwarded(self) -> int:
        """Tokens that the model reads in the whole run."""
        return sum(item.cost for item in self.items)

    def work(self, items: Iterable[Item]) -> dict[Key, int]:
        """Return the operations of each item; its tokens where the model's sizes cannot be read."""
        try:
            shape = read_shape(self.model)
        except (PosencError, AttributeError, TypeError):
            return {item.key: item.cost for item in items}
        return {item.key: round(item.operations(shape)) for item in items}

    @property
    def decisive(self) -> Mapping[str, Any]:
        """Everything that determines a number and is not part of the keys, JSON-ready."""
        raise NotImplementedError

    def prepare(self, store: Records, items: Sequence[ItemT]) -> None:
        """Compute what the items to measure share. Called once, before anything is patched in."""

    def measure(self, item: ItemT, attempt: Attempt) -> Value:
        """Return the value of an item, JSON-ready; its candidate is patched in, and `attempt` runs the forwards."""
        raise NotImplementedError

    def collect(self, values: Mapping[Key, Value]) -> ResultT:
        """Compute the result from the stored values of all items, by key."""
        raise NotImplementedError

    def open(self, folder: Path, shard: Shard = ALONE) -> Store:
        """Open the records in a folder, under `decisive`."""
        store = Store(folder, self.decisive, shard, self.metadata.get("command"))
        self.fingerprint = store.fingerprint
        return store

    def run(
        self,
        folder: Path | None = None,
        shard: Shard = ALONE,
        progress: Progress = silent,
        waiting: Callable[[int], None] = silent,
    ) -> ResultT | None:
        """Measure this process's share; return the result, or `None` while others work or where another one has it.

        `waiting` is called once with the number of missing items when a launched process has waited long. Without a
        folder nothing is written.
        """
        with contextlib.ExitStack() as stack:
            store = stack.enter_context(self.open(folder, shard)) if folder else Records()
            execute(self, store, shard, progress)
            self.missing = wait_for_all(self, store, shard, waiting)
            if (shard.launched and shard.index) or (self.missing and self.until is None):
                return None  # the first one returns the result
            return collected(self, store)


class MethodsRun(Measurement[ItemT, ResultT]):
    """A measurement of methods under `settings`, whose result is a `MethodsResult`.

    `candidates` were `checked` against the model. `metadata` are further fields of the result: `model`, `original`,
    `command` and those of the kind; `about` names those that determine numbers.
    """

    scorer: TokenScorer
    candidates: Sequence[Candidate]
    settings: Any
    kind: ClassVar[str]
    undecided: ClassVar[Sequence[str]]
    """Settings that are parts of the keys, or determine no stored number."""

    @property
    def about(self) -> Mapping[str, Any]:
        """Values that determine the numbers, beside the model and the settings."""
        return {}

    @property
    def decisive(self) -> Mapping[str, Any]:
        settings = dataclasses.asdict(self.settings).items()
        return {
            "kind": self.kind,
            "model": self.metadata["model"],
            **self.about,
            "settings": {name: value for name, value in settings if name not in self.undecided},
            "environment": identity.environment(),
        }

    @property
    def described(self) -> dict[str, Any]:
        """Return the fields of the result that follow from no value."""
        return {
            "settings": self.settings,
            "head_replay": self.scorer.head_replay,
            "environment": identity.environment(),
            "fingerprint": self.fingerprint,
            **self.metadata,
        }


class Failures:
    """The first failure of every cell, whichever process measured it, by label and cell."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, Cell], tuple[int, str]] = {}

    @classmethod
    def of(cls, items: Iterable[Item], value_of: Callable[[Key], Value | None]) -> Failures:
        """Read the failures of all items from their stored values."""
        failures = cls()
        for item in items:
            failures.note(item, value_of(item.key))
        return failures

    def note(self, item: Item, value: Value | None) -> None:
        """Read the failures of one item from its stored value."""
        failed = (value or {}).get("failed") or ()
        if isinstance(failed, str):  # the item as a whole
            failed = [(*cell, failed) for cell in item.cells]
        for *cell, reason in failed:
            key, failure = (item.label, tuple(cell)), (item.order, reason)
            self._first[key] = min(self._first.get(key, failure), failure)

    def precede(self, item: Item, cell: Cell) -> bool:
        """Return whether an earlier item of the cell has failed."""
        return self._first.get((item.label, cell), (item.order, ""))[0] < item.order

    def reasons(self) -> dict[tuple[str, Cell], str]:
        """Return the reason of every failure, in the order in which they were noted."""
        return {key: reason for key, (_, reason) in self._first.items()}


class Attempt:
    """The measurement of one item: runs its forwards, times them, and records which cells fail.

    `advanced` counts tokens of the item that have been read, or are no longer needed.
    """

    def __init__(
        self, item: Item, failures: Failures, report: Callable[[int], None], strict: bool
    ) -> None:
        self.advanced = 0
        self._item, self._failures, self._report, self._strict = item, failures, report, strict
        self._failed: dict[Cell, str] = {}
        self._seconds = 0.0
        self._peak: int | None = None

    def advance(self, tokens: int) -> None:
        """Report how many tokens of the item have been read so far."""
        self.advanced = tokens
        self._report(tokens)

    def is_lost(self, cell: Cell) -> bool:
        """Return whether a cell has failed at an earlier item or in this attempt, and needs no more forwards."""
        return cell in self._failed or self._failures.precede(self._item, cell)

    def __call__(self, forward: Callable[[], T], cells: Iterable[Cell] | None = None) -> T | None:
        """Run a forward and return its result, or `None` after a failure of some cells (`None`: all of the item's).

        Any exception is a failure: a family may fail in its own way past its trained length, and the run continues.
        """
        if cuda := torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        try:
            result = forward()
        except Exception as error:
            if self._strict:
                raise
            self.fail(error, cells)
            release(error)
            return None
        self._seconds += time.perf_counter() - began
        if cuda:
            self._peak = max(self._peak or 0, torch.cuda.max_memory_allocated())
        return result

    def fail(self, error: Exception, cells: Iterable[Cell] | None = None) -> None:
        """Record a failure of some cells; `None`: of all of the item's."""
        cells = self._item.cells if cells is None else cells
        self._failed.update(dict.fromkeys(cells, reason_of(error)))

    def value(self, measured: Value, scorer: TokenScorer | None) -> dict[str, Any]:
        """Return the value to store: the measured one, with failures and timings."""
        failed: Any = [[*cell, reason] for cell, reason in self._failed.items()]
        if failed and len(self._item.cells) == 1:
            failed = failed[0][-1]
        return {
            **measured,
            **({"failed": failed} if failed else {}),
            "seconds": self._seconds,
            "peak_bytes": self._peak,
            "at_once": scorer and scorer.reduced,
        }


def execute(
    measurement: Measurement[ItemT, ResultT],
    store: Records,
    shard: Shard = ALONE,
    progress: Progress = silent,
    *,
    strict: bool = False,
) -> None:
    """Measure what is missing of this process's share; the model is unchanged at the end.

    New records are appended one by one, so that a kill repeats at most the item in flight. `progress` is called after
    every forward. `strict` raises failures and lack of memory instead of recording them. It is required where processes
    run one sharded model together: a process that continued by itself would leave the others waiting indefinitely.
    """
    model, scorer = measurement.model, measurement.scorer
    failures, mine = Failures.of(measurement.items, store.get), shard.mine(measurement.items)
    todo = [item for item in mine if store.get(item.key) is None]
    RESUMED.get()(len(mine) - len(todo), len(todo))
    work, done = measurement.work(todo), 0
    total = sum(work.values())
    if scorer is not None:
        scorer.patient = not strict
    on_cpu = bool(todo) and execution_device(model).type == "cpu"

    def report(item: Item, before: int, tokens: int) -> None:
        progress(item.label, before + work[item.key] * tokens // max(1, item.cost), total)

    def patch_of(item: Item) -> Any:
        candidate = item.candidate
        return candidate and (candidate.key, item.length if candidate.auto_scale else None)

    with _threads(store.threads if on_cpu else None), evaluation_mode(model):
        measurement.prepare(store, todo)
        for _, group in itertools.groupby(todo, key=patch_of):
            items, refusal = list(group), None
            with contextlib.ExitStack() as stack:
                patch = patched_in(model, scorer, items[0].candidate, items[0].length)
                try:
                    stack.enter_context(patch)
                except Exception as error:  # this architecture does not take the method
                    if strict:
                        raise
                    refusal = error
                for item in items:
                    if measurement.until is not None and time.monotonic() >= measurement.until:
                        return
                    attempt = Attempt(item, failures, partial(report, item, done), strict)
                    if item.cells and all(map(attempt.is_lost, item.cells)):
                        value: Value = {"skipped": True}
                    elif refusal is not None:
                        attempt.fail(refusal)
                        value = attempt.value({}, scorer)
                    else:
                        value = attempt.value(measurement.measure(item, attempt), scorer)
                    store.append(item.key, value)
                    failures.note(item, store.get(item.key))
                    if attempt.advanced != item.cost:
                        attempt.advance(item.cost)
                    done += work[item.key]


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Compute with so many threads, as all processes of a run do; `None`: as many as there are."""
    own = torch.get_num_threads()
    count = count or own
    if count != own:
        warnings.warn(
            f"These records were begun with {count} threads; the others are computed with as many, not with {own}, "
            "since the last digits depend on it. Another --output begins anew.",
            stacklevel=3,
        )
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(own)


@contextlib.contextmanager
def patched_in(
    model: nn.Module, scorer: TokenScorer | None, candidate: Candidate | None, length: int
) -> Iterator[None]:
    """Patch a candidate in (`None`: none) at a length, and set the scorer for it; undone on exit."""
    if candidate is None:
        yield
        return
    with candidate.applied(model, length):
        if scorer is not None:
            scorer.pieces, scorer.stateful = not candidate.length_dependent, candidate.stateful
            scorer.positions = position_limit(model)
        yield


def wait_for_all(
    measurement: Measurement[ItemT, ResultT],
    store: Records,
    shard: Shard = ALONE,
    waiting: Callable[[int], None] = silent,
    *,
    everyone: bool = False,
    patience: float = PATIENCE,
) -> int:
    """Return the number of missing items; the first of launched processes waits for the others until there is none.

    With `everyone`, all processes wait. `waiting` is called once with the number, after `patience` seconds.
    """
    began, reported = time.monotonic(), False
    while True:
        store.refresh()
        count = sum(store.get(item.key) is None for item in measurement.items)
        if not count or not (everyone or (shard.launched and shard.index == 0)):
            return count
        if not reported and time.monotonic() - began >= patience:
            waiting(count)
            reported = True
        time.sleep(POLL)


def collected(measurement: Measurement[ItemT, ResultT], store: Records) -> ResultT | None:
    """Return the result of the stored values; `None` while some are missing, unless time ended before."""
    values = {item.key: store.get(item.key) for item in measurement.items}
    if None in values.values() and measurement.until is None:
        return None
    return measurement.collect({key: x for key, x in values.items() if x is not None})
