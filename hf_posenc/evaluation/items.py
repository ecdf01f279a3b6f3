"""Pieces of work: some windows of one document under one patch, and the sums that come out of them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_posenc.evaluation.candidates import Candidate
from hf_posenc.evaluation.memory import FrugalScorer, reason_of
from hf_posenc.evaluation.store import Key
from hf_posenc.evaluation.windows import Span, Window

if TYPE_CHECKING:
    from hf_posenc.evaluation.perplexity import Run


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
