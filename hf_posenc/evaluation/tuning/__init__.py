"""The ladder from a question to an answer: advice (`recommend`), a race (`sweep`, `search`), a proof (`extend`).

All rungs measure tail perplexity at the original and the target length over the same records, so that none measures
what another has measured.
"""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Generic, TypeVar

from torch import nn

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents import special_prefix
from hf_posenc.evaluation.documents.source import Source
from hf_posenc.evaluation.measuring import identity
from hf_posenc.evaluation.measuring.candidates import Candidate, agreed
from hf_posenc.evaluation.measuring.execute import (
    Measurement,
    Progress,
    Value,
    execute,
    silent,
    wait_for_all,
)
from hf_posenc.evaluation.measuring.statistics import Record
from hf_posenc.evaluation.measuring.store import ALONE, Key, Records, Shard, fingerprint_of
from hf_posenc.evaluation.options import TailOptions
from hf_posenc.evaluation.perplexity.protocols import Settings
from hf_posenc.evaluation.perplexity.run import PerplexityRun
from hf_posenc.evaluation.tuning.board import Board

ResultT = TypeVar("ResultT")
RunT = TypeVar("RunT", bound=PerplexityRun)


class Course(contextlib.ExitStack):
    """Measurements one after the other: processes share each of them, and all wait for its end.

    Attributes:
        total: Tokens of the whole course, for the progress.
        seconds: Time that the records of the course took, whenever they were measured.
    """

    def __init__(
        self,
        folder: Path | None = None,
        shard: Shard = ALONE,
        progress: Progress = silent,
        waiting: Callable[[int], None] = silent,
    ) -> None:
        super().__init__()
        self.folder, self.shard, self.total, self.seconds = folder, shard, 0, 0.0
        self._progress, self._waiting = progress, waiting
        self._stores: dict[str, Records] = {}
        self._costs: dict[Key, int] = {}

    def __call__(self, run: Measurement[Any, ResultT]) -> ResultT:
        """Return the result of a measurement."""
        return run.collect(self.values(run))

    def values(self, run: Measurement[Any, Any]) -> dict[Key, Value]:
        """Measure what no process has measured yet; return the values of the items."""
        fingerprint, folder = fingerprint_of(run.decisive), self.folder
        if fingerprint not in self._stores:
            opened = (
                Records() if folder is None else self.enter_context(run.open(folder, self.shard))
            )
            self._stores[fingerprint] = opened
        store = self._stores[fingerprint]
        run.fingerprint = None if folder is None else fingerprint
        new = {item.key: item.cost for item in run.items if item.key not in self._costs}
        mine = [item.key for item in self.shard.mine(run.items) if item.key in new]
        found = sum(new[key] for key in mine if store.get(key) is not None)
        left = sum(new[key] for key in mine) - found
        before = sum(self._costs.values())
        total = max(self.total, before + sum(new.values()))

        def report(label: str, work: int, whole: int = 1) -> None:
            # the other processes do as much meanwhile
            done = before + (found + left * work // max(1, whole)) * self.shard.count
            self._progress(label, min(done, total), total)

        report("", 0)
        execute(run, store, self.shard, report)
        wait_for_all(run, store, self.shard, self._waiting, everyone=True, patience=0)
        values: dict[Key, Value] = {item.key: store.get(item.key) or {} for item in run.items}
        self._costs |= new
        self.seconds += sum(values[key].get("seconds") or 0 for key in new)
        return values


@dataclass(kw_only=True)
class Rung(abc.ABC, Generic[ResultT]):
    """A rung whose model and documents are ready: measurements that depend on those before them.

    `whole` has the original and the target length, and all documents; parts of it are measured.
    """

    # no process ends before the others: nothing is ever missing
    missing: ClassVar[int] = 0
    total: ClassVar[int] = 0

    whole: PerplexityRun

    @property
    def settings(self) -> Settings:
        """The settings of the protocol `tail`."""
        return self.whole.settings

    @abc.abstractmethod
    def conduct(self, course: Course) -> ResultT:
        """Measure step by step, and return the result."""

    def run(
        self,
        folder: Path | None = None,
        shard: Shard = ALONE,
        progress: Progress = silent,
        waiting: Callable[[int], None] = silent,
    ) -> ResultT | None:
        """Measure, together with the other processes; only the first has the result."""
        with Course(folder, shard, progress, waiting) as course:
            result = self.conduct(course)
        return None if shard.index else result


@dataclass(kw_only=True)
class Race(Rung[ResultT]):
    """Sweep or search; the candidates of `whole` are those of each batch."""

    result: ClassVar[type[Any]]

    max_regression: float | None = None

    @abc.abstractmethod
    def course(self, board: Board) -> tuple[Sequence[tuple[Candidate, bool]], dict[str, Any]]:
        """Measure batch by batch by `board.measure`, each depending on those before it.

        Returns:
            The candidates of the table, each with True for a control, the unpatched model first; and the fields that
            only this kind of result has.
        """

    def conduct(self, course: Course) -> ResultT:
        course.total = self.forwarded
        board = Board(self.settings, self.max_regression)
        board.measured = lambda *batch: course(self.whole.part(*batch))
        result: ResultT = self.result.measured(self, *self.course(board), board)
        return result

    @functools.cached_property
    def planned(self) -> tuple[int, dict[str, Any]]:
        """The tokens that the model reads if no method fails, and the fields of a course that measures nothing."""
        costs: dict[Key, int] = {}

        def count(*batch: Any) -> Any:
            records = []
            for item in self.whole.part(*batch).items:
                costs[item.key] = item.cost
                for protocol, length in item.cells:
                    # each is better than those before it, and the same on short texts: a search never returns to one
                    nats = -float(len(costs) * (length == self.settings.lengths[-1]))
                    about = item.label, str(protocol), int(length), item.document
                    records.append(Record(*about, nats, 1, None, None, nats, 1.0))
            return SimpleNamespace(records=records, failures=())

        _, own = self.course(Board(self.settings, self.max_regression, measured=count))
        return sum(costs.values()), own

    @property
    def forwarded(self) -> int:
        """Tokens that the model reads in the whole course."""
        return self.planned[0]

    @abc.abstractmethod
    def cost_line(self) -> str:
        """Return the cost in one sentence."""


def tried(
    model: nn.Module, candidates: Sequence[tuple[Candidate, bool]], original: int | None = None
) -> list[tuple[Candidate, bool]]:
    """Check the candidates on a model; unless it refuses all, a refused one becomes a cell without a number."""
    checked, errors = [], []
    for candidate, control in candidates:
        try:
            checked.append(candidate.checked(model))
        except PosencError as error:
            checked.append(candidate)
            errors += [] if control else [error]
    controls = [control for _, control in candidates]
    if errors and len(errors) == controls.count(False):
        raise errors[0]
    return list(zip(agreed(model, checked, original), controls, strict=True))


def prepared(
    model: nn.Module,
    tokenizer: Any,
    source: Source,
    options: TailOptions,
    original: int | None,
    *,
    embedded_limit: int,
    kind: type[RunT],
    candidates: Sequence[Candidate] = (),
    name: str | None = None,
    command: str | None = None,
) -> RunT:
    """Read documents of at least the target length; return the run of all of them.

    `original` is the original length in tokens, `embedded_limit` the default number of the held-out modules, `name` the
    model's in results, and `command` gives this result again. The default target is four times the original length.
    """
    if original is None:
        raise PosencError(
            "The model's config names no context length that it was trained on; give it with a method, as in "
            "--patch yarn:original_max_position_embeddings=4096."
        )
    target = options.target_length or 4 * original
    if target <= original:
        raise PosencError(
            f"--target-length {target}: the model was trained at {original} tokens already. Give a longer one."
        )
    identity.check_weights(model)
    windows, policy = options.windows_per_document, options.bos or "auto"
    settings = Settings(
        (original, target),
        ("tail",),
        options.tail_tokens,
        windows_per_document=None if windows == 1 else windows,
        chunk=options.chunk,
        prefill=options.prefill,
    )
    special = special_prefix(tokenizer, policy)
    documents, skipped, about = source.load(
        tokenizer,
        options,
        min_tokens=target - len(special),
        embedded_limit=embedded_limit,
        embedded_tokens=target * windows,
    )
    metadata = {
        "model": identity.describe_model(name, model, tokenizer, special, policy),
        "source": about,
        "original": original,
        "skipped": skipped,
        "command": command,
    }
    return kind(model, documents, candidates, settings, special=special, metadata=metadata)
