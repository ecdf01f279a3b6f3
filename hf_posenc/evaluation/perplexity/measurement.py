"""Runs every candidate over the same tokens and keeps the sums."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.evaluation.documents import TokenizedDocument
from hf_posenc.evaluation.measuring.candidates import Candidate
from hf_posenc.evaluation.measuring.identity import check_vocabulary
from hf_posenc.evaluation.measuring.statistics import Record
from hf_posenc.evaluation.measuring.store import ALONE, Key, Memory, Records, Shard, unfinished
from hf_posenc.evaluation.perplexity.protocols import Settings
from hf_posenc.evaluation.perplexity.windows import Span, Window, plan
from hf_posenc.evaluation.scoring.head_replay import FrugalScorer, TokenScorer, evaluation_mode
from hf_posenc.evaluation.scoring.memory import reason_of

# Pieces of work: some windows of one document under one patch, and the sums that come out of them.


@dataclass(frozen=True, eq=False)
class Item:
    """A piece of work: some windows of one document under one patch.

    Attributes:
        candidate: What is patched in.
        lengths: The lengths that it serves.
        document: Index of the document.
        windows: What is run.
        key: What the result is stored under.
    """

    candidate: Candidate
    lengths: tuple[int, ...]
    document: int
    windows: tuple[Window, ...]
    key: Key

    @property
    def forwarded(self) -> int:
        """Tokens that the model reads."""
        return sum(window.forwarded for window in self.windows)


@dataclass
class Sum:
    """What tokens add up to; the fields of a `Record`."""

    nats: float = 0.0
    tokens: int = 0
    bytes: int | None = 0
    words: int | None = 0
    weighted: float = 0.0
    weight: float = 0.0

    def add(
        self,
        nats: float | None,
        tokens: int,
        size: int | None,
        words: int | None,
        weighted: float | None,
        weight: float,
    ) -> None:
        """Adds what one window, or a part of a document, contributes."""
        self.nats += math.nan if nats is None else nats
        self.tokens += tokens
        self.bytes = None if size is None or self.bytes is None else self.bytes + size
        self.words = None if words is None or self.words is None else self.words + words
        self.weighted += math.nan if weighted is None else weighted
        self.weight += weight


class Worker:
    """Runs the windows of one item."""

    def __init__(self, run: Run, item: Item, scorer: FrugalScorer) -> None:
        self._run, self._item, self._scorer = run, item, scorer
        self._sums: dict[tuple[str, int], Sum] = {}
        self._failed: dict[tuple[str, int], str] = {}
        self._curve: dict[str, list[Any]] | None = None
        self._forwarded = 0
        self._seconds = 0.0
        self._peak: int | None = None

    def run(self) -> Iterator[int]:
        """Runs them; yields the tokens forwarded so far, or no longer needed, after every forward."""
        waiting, done = list(self._item.windows), 0
        while waiting:
            batch = [self._wanted(window) for window in waiting[: self._run.settings.batch]]
            same = list(next(itertools.groupby(batch, key=lambda window: window.shape))[1])
            waiting, taken = waiting[len(same) :], waiting[: len(same)]
            if same[0].spans:
                shorter = self._score(same)
                waiting = [*shorter, *waiting]
                done -= sum(window.forwarded for window in shorter)
            done += sum(window.forwarded for window in taken)
            yield done

    def _wanted(self, window: Window) -> Window:
        """The window without what is lost already, no longer than the rest needs."""
        spans = tuple(span for span in window.spans if not self._is_lost(span))
        if not spans or len(spans) == len(window.spans):
            return dataclasses.replace(window, spans=spans)
        # Only a prefix has spans that end before the window does.
        excess = window.tokens - max(span.stop for span in spans)
        return dataclasses.replace(window, spans=spans, end=window.end - excess)

    def _is_lost(self, span: Span) -> bool:
        failed = (span.protocol, span.length) in self._failed
        return failed or self._run.hopeless(self._item, span)

    def _score(self, windows: Sequence[Window]) -> list[Window]:
        """Runs windows of one shape and adds up their spans; gives what to try instead of one that failed."""
        ids = [self._run.ids(self._item, window) for window in windows]
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        try:
            if self._item.candidate.moves and self._item.candidate.to_patch is None:
                # two tokens reset transformers' stateful dynamic RoPE
                self._scorer([ids[0][:2]], 1)
            first, read_last = windows[0].first_scored, windows[0].read_last
            losses = self._scorer(ids, first, read_last=read_last)
        except Exception as error:
            # A family may fail in its own way past its length; the run goes on without it.
            if self._run.strict:
                raise
            return self._give_up(windows, error)
        self._seconds += time.perf_counter() - began
        self._forwarded += sum(window.forwarded for window in windows)
        if cuda:
            self._peak = max(self._peak or 0, torch.cuda.max_memory_allocated())
        for window, part in zip(windows, losses, strict=True):
            self._add(window, part)
        return []

    def _give_up(self, windows: Sequence[Window], error: Exception) -> list[Window]:
        """Notes the longest length as failed; the shorter prefixes of the same window are tried without it."""
        reason = reason_of(error)
        for window in windows:
            for span in window.spans:
                if span.stop == window.tokens:
                    self._failed[span.protocol, span.length] = reason
        return [shorter for shorter in map(self._wanted, windows) if shorter.spans]

    def _add(self, window: Window, losses: Tensor) -> None:
        document = self._run.documents[self._item.document]
        offset = window.begin - window.special
        for span in window.spans:
            part = losses[span.first - window.first_scored : span.stop - window.first_scored]
            first, stop = offset + span.first, offset + span.stop
            size, words = document.bytes_between(first, stop), document.words_between(first, stop)
            weight = span.weight
            key = self._run.is_key(self._item, window, span)
            if key is not None:
                part, size, words, weight = part[key], None, None, float(key.sum())
            nats = float(part.sum())
            weighted = nats if weight == len(part) else nats / max(1, len(part)) * weight
            total = self._sums.setdefault((span.protocol, span.length), Sum())
            total.add(nats, len(part), size, words, weighted, weight)
            if span.protocol == "prefix" and span.length == self._run.settings.lengths[-1]:
                self._curve = curve(part, span.first, span.length, self._run.settings.buckets)

    def value(self) -> dict[str, Any]:
        """What is stored."""
        return {
            "sums": [
                [*cell, *vars(total).values()]
                for cell, total in self._sums.items()
                if cell not in self._failed
            ],
            "failed": [[*cell, reason] for cell, reason in self._failed.items()],
            "curve": self._curve,
            "forwarded": self._forwarded,
            "seconds": self._seconds,
            "peak_bytes": self._peak,
            "at_once": self._scorer.reduced,
        }


def edges(length: int, buckets: int) -> list[int]:
    """Where the buckets of the longest prefix begin, and its end: equal parts, of whole tokens."""
    count = min(buckets, length)
    return [length * index // count for index in range(count + 1)]


def curve(losses: Tensor, first: int, length: int, buckets: int) -> dict[str, list[Any]]:
    """Nats and tokens per bucket, of losses that begin at token `first` of the prefix."""
    bounds = [max(0, edge - first) for edge in edges(length, buckets)]
    parts = [losses[begin:end] for begin, end in itertools.pairwise(bounds)]
    return {"nats": [float(part.sum()) for part in parts], "tokens": [len(part) for part in parts]}


Progress = Callable[[str, int, int], None]
"""Called with the candidate's label, the tokens forwarded so far and those of this process's share."""

WINDOWS_PER_ITEM = 64
"""A long document is measured in parts of so many windows, so that an interrupted run loses little."""


@dataclass(frozen=True)
class Failure:
    """A number that could not be measured, and why."""

    method: str
    protocol: str
    length: int
    reason: str


@dataclass
class Measurement:
    """What came out of a run.

    Attributes:
        records: Sums per candidate, protocol, length and document.
        failures: Cells without a number.
        curves: For each candidate's label, the nats and the tokens of every bucket of the longest prefix.
        shared_prefix: For each candidate's label, whether its prefix curve came from one forward per document.
        head_replay: `"bit-exact"`, `"up to rounding"` or `"off"`: how the scorer's probe compared with full logits.
    """

    records: list[Record] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    curves: dict[str, tuple[list[float], list[int]]] = field(default_factory=dict)
    shared_prefix: dict[str, bool] = field(default_factory=dict)
    head_replay: str = "off"


class Run:
    """A measurement of every candidate on every document.

    Args:
        model: A causal language model, unpatched or with a saved patch.
        documents: Documents of at least `settings.shortest_document` tokens, special tokens in front included.
        candidates: What to compare, each `checked` against the model.
        settings: Lengths, protocols and their numbers.
        special: Token ids in front of the windows.
        key_tokens: For `longppl`: which tokens of a document, given by its index, are key, shape (n,), bool. Called
            while nothing is patched in.
        strict: Whether what a window fails with is raised, and not noted as a number that is missing. Where processes
            run one sharded model together, one that went on by itself would leave the others waiting for ever.

    Attributes:
        items: All the work, in the order in which it is done.

    Raises:
        PosencError: The model is not a causal language model, or the tokens are another model's.
    """

    def __init__(
        self,
        model: nn.Module,
        documents: Sequence[TokenizedDocument],
        candidates: Sequence[Candidate],
        settings: Settings,
        *,
        special: Sequence[int] = (),
        key_tokens: Callable[[int], Tensor] | None = None,
        strict: bool = False,
    ) -> None:
        self.model, self.documents, self.candidates = model, documents, candidates
        self.settings, self._find_key_tokens, self.strict = settings, key_tokens, strict
        self._key_tokens: dict[int, Tensor] = {}
        self.special = torch.tensor(list(special), dtype=torch.int64)
        self.items = self._items()
        check_vocabulary(model, max(document.largest() for document in documents))
        with evaluation_mode(model):
            self._scorer = TokenScorer(
                model,
                torch.cat([self.special, documents[0].tokens(0, 16)]),
                chunk=settings.chunk,
                prefill=settings.prefill,
            )
        # the first document that a cell failed at
        self._failed: dict[tuple[str, str, int], int] = {}

    @property
    def forwarded(self) -> int:
        """Tokens that the model reads in the whole run."""
        return sum(item.forwarded for item in self.items)

    @property
    def replays(self) -> bool:
        """Whether head replay is in use; otherwise the logits of a whole window are held."""
        return self._scorer.replays

    def _items(self) -> list[Item]:
        names = [_document_key(document) for document in self.documents]
        special = len(self.special)

        @cache  # most candidates have the same windows, and there may be many
        def windows(index: int, lengths: tuple[int, ...], shared: bool) -> tuple[Window, ...]:
            tokens = len(self.documents[index].ids)
            return tuple(
                plan(tokens, self.settings, special=special, shared_prefix=shared, lengths=lengths)
            )

        items = []
        for candidate in self.candidates:
            lengths = self.settings.lengths
            groups = [(length,) for length in lengths] if candidate.auto_scale else [lengths]
            for group, (index, name) in itertools.product(groups, enumerate(names)):
                planned = windows(index, group, not candidate.length_dependent)
                for block, begin in enumerate(range(0, len(planned), WINDOWS_PER_ITEM)):
                    key = (candidate.key, group[0], group[-1], name, block)
                    part = planned[begin : begin + WINDOWS_PER_ITEM]
                    items.append(Item(candidate, group, index, part, key))
        return items

    def measure(
        self,
        store: Records,
        shard: Shard = ALONE,
        progress: Progress = lambda label, done, total: None,
    ) -> None:
        """Measures what is missing of this process's share; at the end the model is what it was.

        Args:
            store: What was measured before, and where to put the rest.
            shard: This process's place among those of the run.
            progress: Called after every forward.
        """
        for item in self.items:
            self._note_failures(item, store.get(item.key))
        wanted = [item for item in shard.mine(self.items) if store.get(item.key) is None]
        self._prepare_key_tokens(store, wanted)
        total, done = sum(item.forwarded for item in wanted), 0
        scorer = FrugalScorer(self._scorer, self.settings.batch, patient=not self.strict)
        with evaluation_mode(self.model):
            for _, group in itertools.groupby(
                wanted, key=lambda item: (item.candidate.key, item.lengths)
            ):
                items = list(group)
                candidate = items[0].candidate
                scorer.pieces = not candidate.length_dependent
                with candidate.applied(self.model, items[0].lengths[-1]):
                    for item in items:
                        measured = Worker(self, item, scorer)
                        for forwarded in measured.run():
                            progress(candidate.label, done + forwarded, total)
                        done += item.forwarded
                        store.append(item.key, measured.value())
                        self._note_failures(item, store.get(item.key))

    def _prepare_key_tokens(self, store: Records, items: Sequence[Item]) -> None:
        if self._find_key_tokens is None:
            return
        for index in dict.fromkeys(item.document for item in items):
            key = ("key tokens", _document_key(self.documents[index]))
            stored = store.get(key)
            if stored is None:
                mask = self._find_key_tokens(index)
                store.append(key, {"tokens": len(mask), "key": mask.nonzero()[:, 0].tolist()})
                stored = store.get(key)
            assert stored is not None
            mask = torch.zeros(stored["tokens"], dtype=torch.bool)
            mask[stored["key"]] = True
            self._key_tokens[index] = mask

    def collect(self, store: Records) -> Measurement | None:
        """Puts the stored values together; `None` while some are missing."""
        if unfinished(store, self):
            return None
        sums: dict[tuple[str, str, int, int], Sum] = {}
        failures: dict[tuple[str, str, int], tuple[int, str]] = {}
        made = Measurement()
        for item in self.items:
            value, label = store.get(item.key) or {}, item.candidate.label
            for protocol, length, *numbers in value["sums"]:
                sums.setdefault((label, protocol, length, item.document), Sum()).add(*numbers)
            for protocol, length, reason in value["failed"]:
                cell = (label, protocol, length)
                failures[cell] = min(
                    failures.get(cell, (item.document, reason)), (item.document, reason)
                )
            if value["curve"]:
                self._add_curve(made, label, value["curve"])
        for (label, protocol, length, index), total in sorted(sums.items(), key=self._place):
            if (label, protocol, length) not in failures:
                name = self.documents[index].name
                made.records.append(Record(label, protocol, length, name, **vars(total)))
        labels = [candidate.label for candidate in self.candidates]
        made.failures = [
            Failure(*cell, reason)
            for cell, (_, reason) in sorted(
                failures.items(), key=lambda entry: (labels.index(entry[0][0]), entry[0])
            )
        ]
        for label, protocol, length in failures:
            if (protocol, length) == ("prefix", self.settings.lengths[-1]):
                made.curves.pop(label, None)  # of some documents only
        made.shared_prefix = {
            c.label: not (c.length_dependent or c.auto_scale) for c in self.candidates
        }
        if self._scorer.replays:
            made.head_replay = "bit-exact" if self._scorer.exact else "up to rounding"
        return made

    def _place(self, entry: tuple[tuple[str, str, int, int], Any]) -> tuple[int, ...]:
        label, protocol, length, index = entry[0]
        labels = [candidate.label for candidate in self.candidates]
        return labels.index(label), self.settings.protocols.index(protocol), length, index

    def _add_curve(self, made: Measurement, label: str, curve: Mapping[str, Any]) -> None:
        nats, tokens = made.curves.setdefault(
            label, ([0.0] * len(curve["nats"]), [0] * len(curve["nats"]))
        )
        for bucket, (loss, count) in enumerate(zip(curve["nats"], curve["tokens"], strict=True)):
            nats[bucket] += math.nan if loss is None else loss
            tokens[bucket] += count

    def _note_failures(self, item: Item, value: Mapping[str, Any] | None) -> None:
        for protocol, length, _ in (value or {}).get("failed", ()):
            cell = (item.candidate.label, protocol, length)
            self._failed[cell] = min(self._failed.get(cell, item.document), item.document)

    def hopeless(self, item: Item, span: Span) -> bool:
        """Whether the span's cell has failed at an earlier document, so that this one need not be run.

        Only an earlier one counts: then the first document that fails is the same, whoever measures what.
        """
        failed = self._failed.get((item.candidate.label, span.protocol, span.length))
        return failed is not None and failed < item.document

    def ids(self, item: Item, window: Window) -> Tensor:
        """The token ids of a window, shape (n,)."""
        body = self.documents[item.document].tokens(window.begin, window.end)
        return torch.cat([self.special[: window.special], body])

    def is_key(self, item: Item, window: Window, span: Span) -> Tensor | None:
        """Which tokens of a span count: all, or the key tokens."""
        if span.protocol != "longppl":
            return None
        offset = window.begin - window.special
        return self._key_tokens[item.document][offset + span.first : offset + span.stop]


def measure(
    model: nn.Module,
    documents: Sequence[TokenizedDocument],
    candidates: Sequence[Candidate],
    settings: Settings,
    *,
    special: Sequence[int] = (),
    progress: Progress = lambda label, done, total: None,
) -> Measurement:
    """Measures every candidate on every document, in memory and by this process alone; see `Run`."""
    run, store = Run(model, documents, candidates, settings, special=special), Memory()
    run.measure(store, progress=progress)
    measurement = run.collect(store)
    assert measurement is not None
    return measurement


def _document_key(document: TokenizedDocument) -> str:
    # The text too: with unknown tokens or a normalizer, texts of other bytes and words have the same tokens.
    known = document.to_dict()
    hashes = [known[name][:16] for name in ("tokens_sha256", "text_sha256") if known[name]]
    return " ".join([document.name, *hashes])
