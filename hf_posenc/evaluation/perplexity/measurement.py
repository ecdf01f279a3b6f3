"""Perplexity: every candidate on the same tokens, as sums per document."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.evaluation.documents import TokenizedDocument
from hf_posenc.evaluation.measuring import execute as machine
from hf_posenc.evaluation.measuring.candidates import Candidate
from hf_posenc.evaluation.measuring.execute import (
    Attempt,
    Failures,
    Measurement,
    Progress,
    Value,
    collected,
    execute,
    silent,
)
from hf_posenc.evaluation.measuring.identity import check_vocabulary
from hf_posenc.evaluation.measuring.statistics import Record
from hf_posenc.evaluation.measuring.store import Key, Memory, Records
from hf_posenc.evaluation.perplexity.protocols import Settings, Window, plan
from hf_posenc.evaluation.scoring.head_replay import FrugalScorer, TokenScorer, evaluation_mode

WINDOWS_PER_ITEM = 64
"""A long document is measured in parts of so many windows, so that an interrupted run loses little."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Item(machine.Item):
    """Some windows of one document under one patch; its cells are pairs of protocol and length.

    Attributes:
        lengths: The lengths that it serves.
        document: The document's name.
        windows: The forwards.
    """

    lengths: tuple[int, ...]
    document: str
    windows: tuple[Window, ...]

    @property
    def about(self) -> dict[str, Any]:
        """Return what identifies the item in `timings.json`, beside its method."""
        return {"lengths": list(self.lengths), "document": self.document}


@dataclass
class Sum:
    """Totals over tokens; the fields of a `Record`."""

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
        """Add the totals of one window, or of a part of a document."""
        self.nats += math.nan if nats is None else nats
        self.tokens += tokens
        self.bytes = None if size is None or self.bytes is None else self.bytes + size
        self.words = None if words is None or self.words is None else self.words + words
        self.weighted += math.nan if weighted is None else weighted
        self.weight += weight


@dataclass(frozen=True)
class Failure:
    """A number that could not be measured, and why."""

    method: str
    protocol: str
    length: int
    reason: str


@dataclass
class Measured:
    """The numbers of a run.

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


class PerplexityRun(Measurement[Item, Measured]):
    """The perplexity of every candidate on every document.

    Args:
        model: A causal language model, unpatched or with a saved patch.
        documents: Documents of at least `settings.shortest_document` tokens, special tokens in front included.
        candidates: The methods to compare, each `checked` against the model.
        settings: Lengths, protocols and their numbers.
        special: Token ids in front of the windows.
        key_tokens: For `longppl`: which tokens of a document, given by its index, are key, shape (n,), bool. Called
            while nothing is patched in.

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
    ) -> None:
        self.model, self.documents, self.candidates = model, documents, candidates
        self.settings, self._find_key_tokens = settings, key_tokens
        self._key_tokens: dict[int, Tensor] = {}
        self.special = torch.tensor(list(special), dtype=torch.int64)
        self.items = self._items()
        check_vocabulary(model, max(document.largest() for document in documents))
        with evaluation_mode(model):
            probe = torch.cat([self.special, documents[0].tokens(0, 16)])
            scorer = TokenScorer(model, probe, chunk=settings.chunk, prefill=settings.prefill)
        self.scorer = FrugalScorer(scorer, settings.batch)

    @property
    def forwarded(self) -> int:
        """Tokens that the model reads in the whole run."""
        return sum(item.cost for item in self.items)

    def _items(self) -> list[Item]:
        special = len(self.special)

        @cache  # most candidates have the same windows, and there may be many
        def windows(index: int, lengths: tuple[int, ...], shared: bool) -> tuple[Window, ...]:
            tokens = len(self.documents[index].ids)
            return tuple(
                plan(tokens, self.settings, special=special, shared_prefix=shared, lengths=lengths)
            )

        items = []
        keys = [_document_key(document) for document in self.documents]
        for candidate in self.candidates:
            lengths = self.settings.lengths
            groups = [(length,) for length in lengths] if candidate.auto_scale else [lengths]
            for group, index in itertools.product(groups, range(len(keys))):
                planned = windows(index, group, not candidate.length_dependent)
                for block, begin in enumerate(range(0, len(planned), WINDOWS_PER_ITEM)):
                    part = planned[begin : begin + WINDOWS_PER_ITEM]
                    item = Item(
                        key=(candidate.key, group[0], group[-1], keys[index], block),
                        candidate=candidate,
                        length=group[-1],
                        cost=sum(window.forwarded for window in part),
                        cells=tuple(
                            dict.fromkeys(span.cell for window in part for span in window.spans)
                        ),
                        order=index,
                        lengths=group,
                        document=self.documents[index].name,
                        windows=part,
                    )
                    items.append(item)
        return items

    def prepare(self, store: Records, items: Sequence[Item]) -> None:
        """Find the key tokens of the items' documents, or read them from the store."""
        if self._find_key_tokens is None:
            return
        for index in dict.fromkeys(item.order for item in items):
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

    def measure(self, item: Item, attempt: Attempt) -> Value:
        """Run the windows of an item, and add up their spans."""
        sums: dict[tuple[str, int], Sum] = {}
        longest: dict[str, list[Any]] | None = None
        waiting, advanced, forwarded = list(item.windows), 0, 0
        while waiting:
            batch = [_without_lost(window, attempt) for window in waiting[: self.settings.batch]]
            same = list(next(itertools.groupby(batch, key=lambda window: window.shape))[1])
            advanced += sum(window.forwarded for window in waiting[: len(same)])
            waiting = waiting[len(same) :]
            if same[0].spans:
                losses = self._losses(item, same, attempt)
                if (
                    losses is None
                ):  # the shorter prefixes of the same window are tried without the longest
                    shorter = [_without_lost(window, attempt) for window in same]
                    waiting = [*(window for window in shorter if window.spans), *waiting]
                    advanced -= sum(window.forwarded for window in shorter if window.spans)
                else:
                    forwarded += sum(window.forwarded for window in same)
                    for window, part in zip(same, losses, strict=True):
                        longest = self._add(sums, item, window, part) or longest
            attempt.advance(advanced)
        return {
            "sums": [
                [*cell, *vars(total).values()]
                for cell, total in sums.items()
                if not attempt.is_lost(cell)
            ],
            "curve": longest,
            "forwarded": forwarded,
        }

    def _losses(
        self, item: Item, windows: Sequence[Window], attempt: Attempt
    ) -> list[Tensor] | None:
        """Run windows of one shape; if that fails, the cells of their last tokens are lost."""
        document, first = self.documents[item.order], windows[0].first_scored
        ids = [
            torch.cat([self.special[: w.special], document.tokens(w.begin, w.end)]) for w in windows
        ]
        last = (span.cell for w in windows for span in w.spans if span.stop == w.tokens)
        forward = partial(self.scorer, ids, first, read_last=windows[0].read_last)
        return attempt(forward, last)

    def _add(
        self,
        sums: dict[tuple[str, int], Sum],
        item: Item,
        window: Window,
        losses: Tensor,
    ) -> dict[str, list[Any]] | None:
        """Add up the spans of a window; return the curve of the longest prefix if it is one of them."""
        document, longest = self.documents[item.order], None
        offset = window.begin - window.special
        for span in window.spans:
            part = losses[span.first - window.first_scored : span.stop - window.first_scored]
            first, stop = offset + span.first, offset + span.stop
            size, words = document.bytes_between(first, stop), document.words_between(first, stop)
            weight = span.weight
            if span.protocol == "longppl":
                key = self._key_tokens[item.order][first:stop]
                part, size, words, weight = part[key], None, None, float(key.sum())
            nats = float(part.sum())
            weighted = nats if weight == len(part) else nats / max(1, len(part)) * weight
            total = sums.setdefault(span.cell, Sum())
            total.add(nats, len(part), size, words, weighted, weight)
            if span.cell == ("prefix", self.settings.lengths[-1]):
                longest = curve(part, span.first, span.length, self.settings.buckets)
        return longest

    def collect(self, values: Mapping[Key, Value]) -> Measured:
        """Add up the parts of every document, and leave out the cells in which any document failed."""
        sums: dict[tuple[str, str, int, int], Sum] = {}
        labels = [candidate.label for candidate in self.candidates]
        measured = Measured(head_replay=self.scorer.head_replay)
        for item in self.items:
            value = values[item.key]
            for protocol, length, *numbers in value.get("sums", ()):
                sums.setdefault((item.label, protocol, length, item.order), Sum()).add(*numbers)
            if value.get("curve"):
                _add_curve(measured, item.label, value["curve"])
        reasons = Failures.of(self.items, values.get).reasons()
        failures = [
            Failure(label, str(protocol), int(length), reason)
            for (label, (protocol, length)), reason in reasons.items()
        ]
        measured.failures = sorted(
            failures, key=lambda each: (labels.index(each.method), each.protocol, each.length)
        )
        for failure in measured.failures:
            if (failure.protocol, failure.length) == ("prefix", self.settings.lengths[-1]):
                measured.curves.pop(failure.method, None)  # of some documents only
        protocols = self.settings.protocols
        for (label, protocol, length, index), total in sorted(
            sums.items(), key=lambda e: (labels.index(e[0][0]), protocols.index(e[0][1]), *e[0][2:])
        ):
            if (label, (protocol, length)) not in reasons:
                name = self.documents[index].name
                measured.records.append(Record(label, protocol, length, name, **vars(total)))
        measured.shared_prefix = {
            c.label: not (c.length_dependent or c.auto_scale) for c in self.candidates
        }
        return measured


def edges(length: int, buckets: int) -> list[int]:
    """Return the first token of every bucket of the longest prefix, and its end: equal parts, of whole tokens."""
    count = min(buckets, length)
    return [length * index // count for index in range(count + 1)]


def curve(losses: Tensor, first: int, length: int, buckets: int) -> dict[str, list[Any]]:
    """Return nats and tokens per bucket, of losses that begin at token `first` of the prefix."""
    bounds = [max(0, edge - first) for edge in edges(length, buckets)]
    parts = [losses[begin:end] for begin, end in itertools.pairwise(bounds)]
    return {"nats": [float(part.sum()) for part in parts], "tokens": [len(part) for part in parts]}


def _add_curve(measured: Measured, label: str, part: Mapping[str, Any]) -> None:
    count = len(part["nats"])
    nats, tokens = measured.curves.setdefault(label, ([0.0] * count, [0] * count))
    for bucket, (loss, scored) in enumerate(zip(part["nats"], part["tokens"], strict=True)):
        nats[bucket] += math.nan if loss is None else loss
        tokens[bucket] += scored


def _without_lost(window: Window, attempt: Attempt) -> Window:
    """Return the window without the spans of lost cells, no longer than the other spans need."""
    spans = tuple(span for span in window.spans if not attempt.is_lost(span.cell))
    if not spans or len(spans) == len(window.spans):
        return dataclasses.replace(window, spans=spans)
    # Only a prefix has spans that end before the window does.
    excess = window.tokens - max(span.stop for span in spans)
    return dataclasses.replace(window, spans=spans, end=window.end - excess)


def _document_key(document: TokenizedDocument) -> str:
    # The text too: with unknown tokens or a normalizer, texts of other bytes and words have the same tokens.
    metadata = document.to_dict()
    hashes = [metadata[name][:16] for name in ("tokens_sha256", "text_sha256") if metadata[name]]
    return " ".join([document.name, *hashes])


def measure(
    model: nn.Module,
    documents: Sequence[TokenizedDocument],
    candidates: Sequence[Candidate],
    settings: Settings,
    *,
    special: Sequence[int] = (),
    progress: Progress = silent,
) -> Measured:
    """Measure every candidate on every document, in memory and in this process alone; see `PerplexityRun`."""
    run, store = PerplexityRun(model, documents, candidates, settings, special=special), Memory()
    execute(run, store, progress=progress)
    measured = collected(run, store)
    assert measured is not None
    return measured
