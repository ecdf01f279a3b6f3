"""The ladder from a question to an answer: advice (`recommend`), a race (`sweep`, `search`), a proof (`extend`).

All rungs measure tail perplexity at the original and the target length over the same records, so that none measures
what another has measured.
"""

from __future__ import annotations

import abc
import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import nn

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents import special_prefix
from hf_posenc.evaluation.documents.source import Source
from hf_posenc.evaluation.measuring import identity
from hf_posenc.evaluation.measuring.candidates import UNPATCHED, Candidate, agreed
from hf_posenc.evaluation.measuring.execute import (
    Measurement,
    Progress,
    Value,
    execute,
    silent,
    wait_for_all,
)
from hf_posenc.evaluation.measuring.statistics import (
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
from hf_posenc.evaluation.perplexity.result import PerplexityResult
from hf_posenc.evaluation.perplexity.run import PerplexityRun
from hf_posenc.patch.patching import get_patch

ResultT = TypeVar("ResultT")


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
            held = Records() if folder is None else self.enter_context(run.open(folder, self.shard))
            self._stores[fingerprint] = held
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

    @abc.abstractmethod
    def estimate(self, device: torch.device) -> dict[str, Any]:
        """Return the amounts, the `seconds` that they take on a device, and both as a line: the `cost`."""

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


def check_unpatched(model: nn.Module) -> None:
    """Raise for a model with a patch, which no method can be compared on."""
    if (patch := get_patch(model)) is not None:
        raise PosencError(
            f"This model carries a patch ({str(patch).splitlines()[0]}), and methods are compared on the checkpoint "
            "that it was made from: give that. `hf-posenc perplexity --patch none` measures a patched one as it is."
        )


def tried(
    model: nn.Module, candidates: Sequence[tuple[Candidate, bool]], original: int | None = None
) -> list[tuple[Candidate, bool]]:
    """Check the candidates on a model; unless it refuses all, a refused one becomes a cell without a number.

    A control that is a method reads as many tokens as truncation, which follows the options of the others.
    """
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
    checked = agreed(model, checked, original)
    window = next(each.original for each in checked if each.truncates)
    for index in (n for n, each in enumerate(checked) if controls[n] and each.parts):
        # a long list of its own is scaled by compose=True alone
        for compose in ({}, {"compose": True}) if checked[index].original != window else ():
            beside = {"original_max_position_embeddings": window, **compose}
            with contextlib.suppress(PosencError):
                own = Candidate.of(checked[index].parts, beside, checked[index].label)
                checked[index] = own.checked(model)
                break
    return list(zip(checked, controls, strict=True))


def prepared(
    model: nn.Module,
    tokenizer: Any,
    source: Source,
    options: TailOptions,
    original: int | None,
    *,
    embedded_limit: int,
    candidates: Sequence[Candidate] = (),
    name: str | None = None,
    command: str | None = None,
) -> PerplexityRun:
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
    return PerplexityRun(model, documents, candidates, settings, special=special, metadata=metadata)


# Comparisons of methods by tail perplexity, for every rung.


@dataclass(frozen=True)
class Row:
    """Row of the table: a method over so many documents, or the reason why it `failed`.

    Attributes:
        perplexity: At the target length, with its 95 % interval over documents; NaN if it failed.
        ratio: Its perplexity at the target length by that of the best method, over the documents of this row. The
            interval is one of the board's `comparisons`; there is none on too few documents, or if it left early.
        needed: Documents with which a ratio of 1.01 would be significant in 80 % of samples.
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
    needed: int | None = None

    @property
    def significant(self) -> bool:
        """True if it differs significantly from the best method, all comparisons of the table considered."""
        return side_of_one(self.ratio_interval) != 0


@dataclass
class Board:
    """Comparisons of everything measured so far; methods have their labels, documents their names.

    Attributes:
        max_regression: The accepted growth of the perplexity of short texts, against `control` there.
        comparisons: Comparisons with the best method that could have been made: their intervals hold together.
        measured: Measures candidates on documents at lengths; its result has `records` and `failures`.
    """

    settings: Settings
    max_regression: float | None = None
    comparisons: int = 1
    control: str = UNPATCHED
    measured: Callable[..., Any] | None = None
    records: dict[tuple[str, int, str], Record] = field(default_factory=dict)
    failures: dict[tuple[str, int], str] = field(default_factory=dict)

    @classmethod
    def of(cls, result: PerplexityResult, *bounds: Any) -> Board:
        """Return the comparisons of a result; `bounds` are the other arguments."""
        board = cls(result.settings, *bounds)
        board.add(result.records, result.failures)
        return board

    def add(self, records: Iterable[Record], failures: Iterable[Failure]) -> None:
        """Add what was measured."""
        for record in records:
            self.records.setdefault((record.method, record.length, record.document), record)
        for failure in failures:
            self.failures.setdefault((failure.method, failure.length), failure.reason)

    def measure(self, *batch: Any) -> None:
        """Measure candidates on documents at lengths, and add what was measured."""
        assert self.measured is not None
        result = self.measured(*batch)
        self.add(result.records, result.failures)

    def records_of(self, label: str, length: int, documents: Sequence[str]) -> list[Record]:
        """Return the records of a method at a length on some documents, as far as there are any."""
        found = (self.records.get((label, length, document)) for document in documents)
        return [record for record in found if record is not None]

    def failure(self, label: str, length: int, documents: Sequence[str]) -> str | None:
        """Return the reason why there is no perplexity; `None` if there is one."""
        if len(self.records_of(label, length, documents)) < len(documents):
            return self.failures.get((label, length), "not measured")
        finite = math.isfinite(self.loss(label, length, documents))
        return None if finite else "the loss is not a finite number"

    def loss(self, label: str, length: int, documents: Sequence[str]) -> float:
        """Return total nats by total tokens; NaN without any."""
        records = self.records_of(label, length, documents)
        tokens = sum(record.tokens for record in records)
        return math.fsum(record.nats for record in records) / tokens if tokens else math.nan

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
        records = self.records_of(label, length, documents)
        if other is not None and self.failure(other, length, documents) is None:
            records += self.records_of(other, length, documents)
        return summarize(records, baseline=other or "", comparisons=comparisons)[0]

    def past(self, label: str, documents: Sequence[str]) -> float:
        """Return 0 within the bound on short texts, else the ratio there; infinite if there is none."""
        if self.max_regression is None:
            return 0.0
        short = self.cell(label, self.settings.lengths[0], documents, self.control)
        if short is None or short.ratio is None:
            return math.inf
        return short.ratio if short.ratio > 1 + self.max_regression else 0.0

    def rank(self, labels: Iterable[str], documents: Sequence[str]) -> list[str]:
        """Rank the methods that gave numbers on some documents, the best first.

        Methods past the bound follow those within it, the nearest to the bound first: few documents then do not
        exclude a method that more of them would admit.
        """
        target = self.settings.lengths[-1]
        order = {
            label: (self.past(label, documents), self.loss(label, target, documents))
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
        control: bool = False,
        left: bool = False,
    ) -> Row:
        """Return the row of a method over some documents, compared with the best one."""
        original, target = self.settings.lengths
        cell = self.cell(label, target, documents, best, self.comparisons)
        near = self.cell(label, original, documents, self.control)
        ratio = None if cell is None or label == best else cell.ratio
        told = ratio is not None and not left
        return Row(
            label=label,
            control=control,
            documents=len(documents),
            perplexity=math.nan if cell is None else cell.perplexity,
            interval=None if cell is None else cell.interval,
            ratio=ratio,
            ratio_interval=cell.ratio_interval if cell is not None and told else None,
            short=None if near is None or label == self.control else near.ratio,
            failed=self.failure(label, target, documents),
            left=left,
            needed=None if cell is None else cell.needed,
        )
