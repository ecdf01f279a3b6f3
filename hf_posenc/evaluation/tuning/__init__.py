"""Common parts of sweep and search: tail perplexity at a target length, comparisons of methods, and the measurement."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import nn

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents import Skipped, TokenizedDocument, special_prefix
from hf_posenc.evaluation.documents.source import Source
from hf_posenc.evaluation.measuring import execute as machine
from hf_posenc.evaluation.measuring import identity
from hf_posenc.evaluation.measuring.candidates import Candidate
from hf_posenc.evaluation.measuring.execute import Attempt, Failures, Item, Progress, Value, silent
from hf_posenc.evaluation.measuring.result import nan_if_none
from hf_posenc.evaluation.measuring.statistics import (
    FEW_DOCUMENTS,
    Interval,
    estimate,
    exp_or_inf,
    side_of_one,
)
from hf_posenc.evaluation.measuring.store import ALONE, Key, Records, Shard, Store
from hf_posenc.evaluation.options import TailOptions
from hf_posenc.evaluation.perplexity.protocols import Settings, Window, plan
from hf_posenc.evaluation.scoring.decoder import evaluation_mode
from hf_posenc.evaluation.scoring.frugal import FrugalScorer
from hf_posenc.evaluation.scoring.head_replay import TokenScorer
from hf_posenc.files import finite

ResultT = TypeVar("ResultT")


# The objective, and what is measured of it.


@dataclass(frozen=True)
class TailSettings:
    """Tail perplexity at a target length, beside that of the same tokens at the original length.

    Lengths are in tokens, special tokens included; the other fields are those of `TailOptions`.
    """

    original: int
    target: int
    tail_tokens: int = 0
    windows_per_document: int = 1
    max_regression: float | None = None
    chunk: int | None = None
    prefill: int | None = None

    def __post_init__(self) -> None:
        if self.target <= self.original:
            raise PosencError(
                f"--target-length {self.target}: the model was trained at {self.original} tokens already. Give a "
                "longer one."
            )
        if self.max_regression is not None and not self.max_regression >= 0:
            raise PosencError(
                f"--max-regression is a fraction of at least 0, such as 0.02, not {self.max_regression}."
            )
        object.__setattr__(self, "tail_tokens", self.protocol.tail_tokens)  # checks the others too

    @classmethod
    def of(cls, options: TailOptions, original: int) -> TailSettings:
        """Return the objective of a command; the default target is four times the original length."""
        names = (each.name for each in dataclasses.fields(cls) if hasattr(options, each.name))
        given = {name: getattr(options, name) for name in names}
        return cls(original, options.target_length or 4 * original, **given)

    @property
    def lengths(self) -> tuple[int, int]:
        """The original and the target length."""
        return self.original, self.target

    @property
    def protocol(self) -> Settings:
        """The settings of the protocol `tail`."""
        windows = None if self.windows_per_document == 1 else self.windows_per_document
        return Settings(
            self.lengths,
            ("tail",),
            self.tail_tokens,
            windows_per_document=windows,
            chunk=self.chunk,
            prefill=self.prefill,
        )


@dataclass(frozen=True)
class Loss:
    """Loss of the tail tokens of one document, read at one length: their sum in nats, which may be NaN, and number.

    `failed` is the reason why there is no number.
    """

    nats: float
    tokens: int
    failed: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        values: dict[str, Any] = finite({"nats": self.nats, "tokens": self.tokens})
        return values if self.failed is None else {"failed": self.failed}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Loss:
        """Read the values of `to_dict`."""
        nats, tokens = nan_if_none(values.get("nats")), values.get("tokens", 0)
        return cls(nats, tokens, values.get("failed"))


Losses = Mapping[tuple[str, int, int], Loss]
"""Losses by label (or the candidate's key), length and the document's index."""
Batch = Callable[[Sequence[Candidate], Sequence[int], Sequence[int]], Losses]
"""Measures candidates on documents (by index) at lengths; losses by candidate's key, length and document."""
Course = tuple[Sequence[tuple[Candidate, bool]], Losses, dict[str, Any]]
"""Measured values of a job: candidates, each with True for a control; their losses; other fields of its result."""


# Comparisons.


@dataclass(frozen=True)
class Comparison:
    """Ratio of two perplexities over the same documents, and its paired interval, with two documents or more."""

    ratio: float
    interval: Interval | None


@dataclass(frozen=True)
class Row:
    """Row of the table: a method over so many documents, or the reason why it `failed`.

    Attributes:
        perplexity: At the target length, with its 95 % interval over documents; NaN if it failed.
        short: Its perplexity at the original length by that of the model as loaded, same tokens and documents: 1.02 is
            a regression of 2 %. `None` if one of them failed.
        to_best: Its perplexity at the target length by that of the best method, over the documents of this row. The
            interval is one of the board's `comparisons`; there is none on too few documents, or if it left early.
        left: True if it left a sweep before the last round: no verdict, since a bad start made it leave.
    """

    label: str
    control: bool
    documents: int
    perplexity: float
    interval: Interval | None
    short: Comparison | None
    to_best: Comparison | None
    failed: str | None
    left: bool = False

    @property
    def significant(self) -> bool:
        """True if it differs significantly from the best method, all comparisons of the table considered."""
        return self.to_best is not None and side_of_one(self.to_best.interval, self.documents) != 0


@dataclass(frozen=True)
class Board:
    """Comparisons of everything measured so far; the baseline is the model as loaded.

    Methods are named as in `losses`: by label, or by the candidate's key. `comparisons` is the number of those with the
    best method that could have been made: their intervals hold together.
    """

    losses: Losses
    settings: TailSettings
    baseline: str
    comparisons: int = 1

    def of(self, label: str, length: int, documents: Sequence[int]) -> list[Loss]:
        """Return the losses of a method at a length on some documents."""
        return [self.losses[label, length, document] for document in documents]

    def compare(
        self, label: str, other: str, length: int, documents: Sequence[int], comparisons: int = 1
    ) -> Comparison | None:
        """Return the paired ratio of two methods; `None` if one of them has no number."""
        losses, others = (self.of(name, length, documents) for name in (label, other))
        if failure_of(losses) is not None or failure_of(others) is not None:
            return None
        difference, interval = estimate(*_sums(losses), _sums(others), comparisons)
        return Comparison(exp_or_inf(difference), _powers(interval))

    def past(self, label: str, documents: Sequence[int]) -> float:
        """Return 0 within the bound on short texts, else the ratio there; infinite if there is none."""
        if self.settings.max_regression is None:
            return 0.0
        short = self.compare(label, self.baseline, self.settings.original, documents)
        if short is None:
            return math.inf
        return short.ratio if short.ratio > 1 + self.settings.max_regression else 0.0

    def score(self, label: str, documents: Sequence[int], short: Sequence[int]) -> float:
        """Return the log perplexity at the target length; infinite if it failed or exceeds the bound on `short`."""
        losses = self.of(label, self.settings.target, documents)
        if failure_of(losses) is not None or self.past(label, short):
            return math.inf
        return log_perplexity(losses)

    def rank(self, labels: Sequence[str], documents: Sequence[int]) -> list[str]:
        """Rank the methods that gave numbers on some documents, the best first.

        Methods past the bound follow those within it, the nearest to the bound first: few documents then do not
        exclude a method that more of them would admit.
        """
        losses = {label: self.of(label, self.settings.target, documents) for label in labels}
        order = {
            label: (self.past(label, documents), log_perplexity(own))
            for label, own in losses.items()
            if failure_of(own) is None
        }
        return sorted(order, key=order.__getitem__)  # stable: the first named wins a tie

    def row(
        self,
        label: str,
        documents: Sequence[int],
        best: str | None,
        *,
        control: bool,
        short: Sequence[int] | None = None,
        left: bool = False,
    ) -> Row:
        """Return the row of a method over some documents; `short` are others for the regression, `left` as in `Row`."""
        original, target = self.settings.lengths
        losses, to_best, regression = self.of(label, target, documents), None, None
        failed = failure_of(losses)
        if best and best != label:
            to_best = self.compare(label, best, target, documents, self.comparisons)
            if to_best is not None and (left or len(documents) < FEW_DOCUMENTS):
                to_best = Comparison(to_best.ratio, None)
        if label != self.baseline:
            read = documents if short is None else short
            regression = self.compare(label, self.baseline, original, read)
        return Row(
            label=label,
            control=control,
            documents=len(documents),
            perplexity=exp_or_inf(log_perplexity(losses)),
            interval=_powers(estimate(*_sums(losses))[1]) if failed is None else None,
            short=regression,
            to_best=to_best,
            failed=failed,
            left=left,
        )


def log_perplexity(losses: Sequence[Loss]) -> float:
    """Return total nats by total tokens; NaN if any document gave no number."""
    tokens = sum(loss.tokens for loss in losses)
    return math.fsum(loss.nats for loss in losses) / tokens if tokens else math.nan


def failure_of(losses: Sequence[Loss]) -> str | None:
    """Return the reason why there is no perplexity; `None` if there is one."""
    reason = next((loss.failed for loss in losses if loss.failed is not None), None)
    if reason is None and not math.isfinite(log_perplexity(losses)):
        return "the loss is not a finite number"
    return reason


def _sums(losses: Sequence[Loss]) -> tuple[list[float], list[float]]:
    return [loss.nats for loss in losses], [float(loss.tokens) for loss in losses]


def _powers(interval: Interval | None) -> Interval | None:
    return None if interval is None else (exp_or_inf(interval[0]), exp_or_inf(interval[1]))


# The measurement.


@dataclass(kw_only=True)
class TailJob(machine.Measurement[Item, Any], abc.ABC, Generic[ResultT]):
    """Sweep or search whose model and documents are ready; its items are the tails of one batch after the other.

    Documents are at least as long as the target; an item's `order` is the index of its own. `about` describes the
    model, the source of the documents, the versions and the command; `special` are the token ids in front of a window.
    """

    result: ClassVar[type[Any]]

    model: nn.Module
    settings: TailSettings
    documents: Sequence[TokenizedDocument]
    about: dict[str, Any]
    special: Sequence[int] = ()
    skipped: Sequence[Skipped] = ()
    scorer: FrugalScorer = field(init=False)

    def __post_init__(self) -> None:
        largest = max(document.largest() for document in self.documents)
        identity.check_vocabulary(self.model, largest)
        probe = torch.tensor([*self.special, *self.documents[0].tokens(0, 16).tolist()])
        chunk, prefill = self.settings.chunk, self.settings.prefill
        with evaluation_mode(self.model):
            self.scorer = FrugalScorer(TokenScorer(self.model, probe, chunk=chunk, prefill=prefill))
        self.texts = list(self.documents)
        self.hashes = [document.to_dict()["tokens_sha256"] for document in self.documents]
        self.items: Sequence[Item] = ()

    @abc.abstractmethod
    def course(self, measure: Batch) -> Course:
        """Measure batch by batch, each of which may depend on those before it."""

    def begin(self, store: Records) -> None:
        """Check the records of earlier runs before anything is measured."""

    @functools.cached_property
    def planned(self) -> tuple[int, Course]:
        """The tokens that the model reads if no method fails, and a course that counts them and measures nothing."""
        read: dict[tuple[str, int, int], int] = {}

        def count(
            candidates: Sequence[Candidate], documents: Sequence[int], lengths: Sequence[int]
        ) -> Losses:
            losses = {}
            for candidate, length, document in itertools.product(candidates, lengths, documents):
                cell = candidate.key, length, document
                read[cell] = self.tokens(document, length, candidate.most)
                # each is better than those before it, and the same on short texts: a search never returns to one
                losses[cell] = Loss(-float(len(read) * (length == self.settings.target)), 1)
            return losses

        course = self.course(count)
        return sum(read.values()), course

    @property
    def forwarded(self) -> int:
        return self.planned[0]

    @abc.abstractmethod
    def cost_line(self) -> str:
        """Return the cost in one sentence."""

    @property
    def decisive(self) -> Mapping[str, Any]:
        settings = {"protocol": "tail", **dataclasses.asdict(self.settings)}
        del settings["max_regression"]  # determines no loss
        about = {name: self.about[name] for name in ("model", "environment")}
        return {"kind": "tail", "settings": settings, **about}

    def run(
        self,
        folder: Path | None = None,
        shard: Shard = ALONE,
        progress: Progress = silent,
        waiting: Callable[[int], None] = silent,
    ) -> ResultT | None:
        """Measure this process's share of every batch, and wait for the others; only the first has the result."""
        done, total = 0, self.forwarded

        def batch(
            candidates: Sequence[Candidate], documents: Sequence[int], lengths: Sequence[int]
        ) -> Losses:
            nonlocal done
            self.items = [
                Item(
                    key=("tail", candidate.key, length, self.hashes[document]),
                    candidate=candidate,
                    length=length,
                    cost=self.tokens(document, length, candidate.most),
                    cells=(("tail", candidate.key, length),),
                    order=document,
                )
                for candidate in candidates
                for length in lengths
                for document in documents
            ]
            mine = shard.mine(self.items)
            before = done + sum(item.cost for item in mine if store.get(item.key) is not None)
            done += sum(item.cost for item in mine)

            def report(label: str, tokens: int, _: int = 0) -> None:
                # the other processes do as much meanwhile
                progress(label, min((before + tokens) * shard.count, total), total)

            report("", 0)
            machine.execute(self, store, shard, report)
            machine.wait_for_all(self, store, shard, waiting, everyone=True, patience=0)
            losses: Losses | None = machine.collected(self, store)
            assert losses is not None
            return losses

        with contextlib.ExitStack() as stack:
            store: Records = Records()
            if folder is not None:
                store = stack.enter_context(Store(folder, self.decisive, shard))
            self.begin(store)
            course = self.course(batch)
        return None if shard.index else self.result.measured(self, *course)

    def tokens(self, text: int, length: int, most: int | None = None) -> int:
        """Return the tokens that a candidate, which has so many in a window at most, reads of a text."""
        return sum(window.forwarded for window in self.windows(text, length, most))

    def windows(self, text: int, length: int, most: int | None) -> Sequence[Window]:
        """Return the forwards over a text, given by its index, at a length."""
        where: dict[str, Any] = {"special": len(self.special), "shared_prefix": False}
        tokens, settings = len(self.texts[text].ids), self.settings.protocol
        return plan(tokens, settings, **where, lengths=[length], most=most)

    def score(self, item: Item) -> Loss:
        """Return the loss of the tails of a document; the candidate is patched in."""
        nats, tokens = 0.0, 0
        most = None if item.candidate is None else item.candidate.most
        for window in self.windows(item.order, item.length, most):
            front = torch.tensor(list(self.special[: window.special]), dtype=torch.int64)
            body = self.texts[item.order].tokens(window.begin, window.end)
            losses = self.scorer([torch.cat([front, body])], window.first_scored)[0]
            nats += float(losses.sum())
            tokens += len(losses)
        return Loss(nats, tokens)

    def measure(self, item: Item, attempt: Attempt) -> Value:
        loss = attempt(lambda: self.score(item))
        return {} if loss is None else loss.to_dict()

    def collect(self, values: Mapping[Key, Value]) -> Losses:
        failures, losses = Failures.of(self.items, values.get), {}
        reasons = failures.reasons()
        for item in self.items:
            _, key, length = cell = item.cells[0]
            lost = failures.precede(item, cell)  # whether or not another process has measured it
            value = {"failed": reasons[item.label, cell]} if lost else values[item.key]
            losses[str(key), int(length), item.order] = Loss.from_dict(value)
        return losses


def prepared(
    model: nn.Module,
    tokenizer: Any,
    source: Source,
    options: TailOptions,
    original: int | None,
    *,
    embedded_limit: int,
    name: str | None = None,
    command: str | None = None,
) -> dict[str, Any]:
    """Read documents of at least the target length; return the fields of a `TailJob`.

    `original` is the original length in tokens, `embedded_limit` the default number of the held-out modules, `name` the
    model's in results, and `command` gives this result again.
    """
    if original is None:
        raise PosencError(
            "The model's config names no context length that it was trained on; give it with a method, as in "
            "--patch yarn:original_max_position_embeddings=4096."
        )
    identity.check_weights(model)
    settings, policy = TailSettings.of(options, original), options.bos or "auto"
    special = special_prefix(tokenizer, policy)
    documents, skipped, origin = source.load(
        tokenizer,
        options,
        min_tokens=settings.target - len(special),
        embedded_limit=embedded_limit,
        embedded_tokens=settings.target * settings.windows_per_document,
    )
    about = {
        "model": identity.describe_model(name, model, tokenizer, special, policy),
        "source": origin,
        "environment": identity.environment(),
        "command": command,
    }
    fields = {"model": model, "settings": settings, "documents": documents, "about": about}
    return {**fields, "special": special, "skipped": skipped}
