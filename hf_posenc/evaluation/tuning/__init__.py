"""Rungs of the ladder from a question to an answer: measurements that depend on those before them.

`sweep` and `search` race methods by tail perplexity at a target length, and `extend` proves one. All of them are
courses of perplexity runs over the same records, so that none measures what another has measured.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Generic, TypeVar

from torch import nn

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents import TokenizedDocument, special_prefix
from hf_posenc.evaluation.documents.source import Source
from hf_posenc.evaluation.measuring import identity
from hf_posenc.evaluation.measuring.candidates import UNPATCHED, Candidate
from hf_posenc.evaluation.measuring.execute import (
    Measurement,
    Progress,
    Value,
    execute,
    silent,
    wait_for_all,
)
from hf_posenc.evaluation.measuring.statistics import (
    FEW_DOCUMENTS,
    Cell,
    Failure,
    Interval,
    Record,
    side_of_one,
    summarize,
)
from hf_posenc.evaluation.measuring.store import ALONE, Key, Records, Shard, fingerprint_of
from hf_posenc.evaluation.options import TailOptions
from hf_posenc.evaluation.perplexity.protocols import Settings
from hf_posenc.evaluation.perplexity.run import PerplexityRun

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
        fingerprint = fingerprint_of(run.decisive)
        if fingerprint not in self._stores:
            self._stores[fingerprint] = (
                Records()
                if self.folder is None
                else self.enter_context(run.open(self.folder, self.shard))
            )
        store = self._stores[fingerprint]
        run.fingerprint = None if self.folder is None else fingerprint
        new = {item.key: item.cost for item in run.items if item.key not in self._costs}
        before, total = sum(self._costs.values()), self.total
        mine = [item.key for item in self.shard.mine(run.items) if item.key in new]
        found = sum(new[key] for key in mine if store.get(key) is not None)
        total = max(total, before + sum(new.values()))

        def report(label: str, tokens: int, _: int = 0) -> None:
            # the other processes do as much meanwhile
            done = before + (found + tokens) * self.shard.count
            self._progress(label, min(done, total), total)

        report("", 0)
        execute(run, store, self.shard, report)
        wait_for_all(run, store, self.shard, self._waiting, everyone=True, patience=0)
        values: dict[Key, Value] = {item.key: store.get(item.key) or {} for item in run.items}
        self._costs |= new
        self.seconds += sum(values[key].get("seconds") or 0 for key in new)
        return values


class Stepwise(abc.ABC, Generic[ResultT]):
    """A command whose measurements depend on each other."""

    # no process ends before the others: nothing is ever missing
    missing: ClassVar[int] = 0
    total: ClassVar[int] = 0

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


# Comparisons.


@dataclass(frozen=True)
class Row:
    """Row of the table: a method over so many documents, or the reason why it `failed`.

    Attributes:
        perplexity: At the target length, with its 95 % interval over documents; NaN if it failed.
        ratio: Its perplexity at the target length by that of the best method, over the documents of this row. The
            interval is one of the board's `comparisons`; there is none on too few documents, or if it left early.
        short: Its perplexity at the original length by that of the model as loaded, same tokens and documents: 1.02 is
            a regression of 2 %. `None` if one of them failed.
        left: True if it left a sweep before the last round: no verdict, since a bad start made it leave.
    """

    label: str
    control: bool
    documents: int
    perplexity: float
    interval: Interval | None
    ratio: float | None
    ratio_interval: Interval | None
    short: float | None
    failed: str | None
    left: bool = False

    @property
    def significant(self) -> bool:
        """True if it differs significantly from the best method, all comparisons of the table considered."""
        return side_of_one(self.ratio_interval, self.documents) != 0


Measure = Callable[[Sequence[Candidate], Sequence[TokenizedDocument], Sequence[int]], Any]
"""Measures candidates on documents at lengths; the result has `records` and `failures`."""


@dataclass
class Board:
    """Comparisons of everything measured so far; methods have their labels, documents their names.

    `max_regression` is the accepted growth of the perplexity of short texts, `comparisons` the number of those with the
    best method that could have been made: their intervals hold together.
    """

    settings: Settings
    max_regression: float | None = None
    comparisons: int = 1
    source: Measure | None = None
    records: dict[tuple[str, int, str], Record] = field(default_factory=dict)
    failures: dict[tuple[str, int], str] = field(default_factory=dict)

    def add(self, records: Iterable[Record], failures: Iterable[Failure]) -> None:
        """Add what was measured."""
        for record in records:
            self.records.setdefault((record.method, record.length, record.document), record)
        for failure in failures:
            self.failures.setdefault((failure.method, failure.length), failure.reason)

    def measure(
        self,
        candidates: Sequence[Candidate],
        documents: Sequence[TokenizedDocument],
        lengths: Sequence[int],
    ) -> None:
        """Measure candidates, and add what was measured."""
        assert self.source is not None
        measured = self.source(candidates, documents, lengths)
        self.add(measured.records, measured.failures)

    def of(self, label: str, length: int, documents: Sequence[str]) -> list[Record]:
        """Return the records of a method at a length on some documents, as far as there are any."""
        found = (self.records.get((label, length, document)) for document in documents)
        return [record for record in found if record is not None]

    def failure(self, label: str, length: int, documents: Sequence[str]) -> str | None:
        """Return the reason why there is no perplexity; `None` if there is one."""
        records = self.of(label, length, documents)
        if len(records) < len(documents):
            return self.failures.get((label, length), "not measured")
        return None if math.isfinite(_loss(records)) else "the loss is not a finite number"

    def cell(
        self,
        label: str,
        length: int,
        documents: Sequence[str],
        other: str | None = None,
        comparisons: int = 1,
    ) -> Cell | None:
        """Return the perplexity of a method, and its paired ratio to another; `None` if it failed."""
        if self.failure(label, length, documents) is not None:
            return None
        records = self.of(label, length, documents)
        if other is not None and self.failure(other, length, documents) is None:
            records += self.of(other, length, documents)
        return summarize(records, baseline=other or "", comparisons=comparisons)[0]

    def past(self, label: str, documents: Sequence[str]) -> float:
        """Return 0 within the bound on short texts, else the ratio there; infinite if there is none."""
        if self.max_regression is None:
            return 0.0
        short = self.cell(label, self.settings.lengths[0], documents, UNPATCHED)
        if short is None or short.ratio is None:
            return math.inf
        return short.ratio if short.ratio > 1 + self.max_regression else 0.0

    def score(self, label: str, documents: Sequence[str], short: Sequence[str]) -> float:
        """Return the log perplexity at the target length; infinite if it failed or exceeds the bound on `short`."""
        target = self.settings.lengths[-1]
        if self.failure(label, target, documents) is not None or self.past(label, short):
            return math.inf
        return _loss(self.of(label, target, documents))

    def rank(self, labels: Sequence[str], documents: Sequence[str]) -> list[str]:
        """Rank the methods that gave numbers on some documents, the best first.

        Methods past the bound follow those within it, the nearest to the bound first: few documents then do not
        exclude a method that more of them would admit.
        """
        target = self.settings.lengths[-1]
        order = {
            label: (self.past(label, documents), _loss(self.of(label, target, documents)))
            for label in labels
            if self.failure(label, target, documents) is None
        }
        return sorted(order, key=order.__getitem__)  # stable: the first named wins a tie

    def row(
        self,
        label: str,
        documents: Sequence[str],
        best: str | None,
        *,
        control: bool,
        short: Sequence[str] | None = None,
        left: bool = False,
    ) -> Row:
        """Return the row of a method over some documents; `short` are others for the regression, `left` as in `Row`."""
        original, target = self.settings.lengths
        cell = self.cell(label, target, documents, best, self.comparisons)
        near = self.cell(label, original, documents if short is None else short, UNPATCHED)
        ratio = None if cell is None or label == best else cell.ratio
        told = ratio is not None and not left and len(documents) >= FEW_DOCUMENTS
        return Row(
            label=label,
            control=control,
            documents=len(documents),
            perplexity=math.nan if cell is None else cell.perplexity,
            interval=None if cell is None else cell.interval,
            ratio=ratio,
            ratio_interval=cell.ratio_interval if cell is not None and told else None,
            short=None if near is None or label == UNPATCHED else near.ratio,
            failed=self.failure(label, target, documents),
            left=left,
        )


def _loss(records: Sequence[Record]) -> float:
    """Return total nats by total tokens; NaN without any."""
    tokens = sum(record.tokens for record in records)
    return math.fsum(record.nats for record in records) / tokens if tokens else math.nan


# The race.


@dataclass(kw_only=True)
class Race(Stepwise[ResultT]):
    """Sweep or search whose model and documents are ready.

    `whole` has the original and the target length, and all documents; its candidates are those of each batch.
    """

    result: ClassVar[type[Any]]

    whole: PerplexityRun
    max_regression: float | None = None

    @property
    def settings(self) -> Settings:
        """The settings of the protocol `tail`."""
        return self.whole.settings

    @abc.abstractmethod
    def course(self, board: Board) -> tuple[Sequence[tuple[Candidate, bool]], dict[str, Any]]:
        """Measure batch by batch by `board.measure`, each depending on those before it.

        Returns:
            The candidates of the table, each with True for a control, the unpatched model first; and the fields that
            only this kind of result has.
        """

    def conduct(self, course: Course) -> ResultT:
        def measure(*batch: Any) -> Any:
            return course(self.whole.part(*batch))

        course.total = self.forwarded
        board = Board(self.settings, self.max_regression, source=measure)
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

        _, own = self.course(Board(self.settings, self.max_regression, source=count))
        return sum(costs.values()), own

    @property
    def forwarded(self) -> int:
        """Tokens that the model reads in the whole course."""
        return self.planned[0]

    @abc.abstractmethod
    def cost_line(self) -> str:
        """Return the cost in one sentence."""


def prepared(
    model: nn.Module,
    tokenizer: Any,
    source: Source,
    options: TailOptions,
    original: int | None,
    *,
    embedded_limit: int,
    kind: type[RunT],
    name: str | None = None,
    command: str | None = None,
) -> RunT:
    """Read documents of at least the target length; return the run of all of them, without candidates.

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
    metadata: Mapping[str, Any] = {
        "model": identity.describe_model(name, model, tokenizer, special, policy),
        "source": about,
        "original": original,
        "skipped": skipped,
        "command": command,
    }
    return kind(model, documents, (), settings, special=special, metadata=metadata)
