"""Measures candidates on documents, one record per candidate, length and document, and never twice."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents import TokenizedDocument
from hf_posenc.evaluation.measuring.candidates import Candidate
from hf_posenc.evaluation.measuring.identity import check_vocabulary
from hf_posenc.evaluation.measuring.statistics import RESAMPLES
from hf_posenc.evaluation.measuring.store import ALONE, Key, Memory, Records, Shard, Store, missing
from hf_posenc.evaluation.perplexity.protocols import Settings
from hf_posenc.evaluation.perplexity.windows import Window, plan
from hf_posenc.evaluation.scoring.head_replay import FrugalScorer, TokenScorer, evaluation_mode
from hf_posenc.evaluation.scoring.memory import reason_of
from hf_posenc.evaluation.tuning.board import Loss

POLL = 0.5
"""Seconds between two looks at what other processes have written."""

Progress = Callable[[str, int], None]
"""Called with a candidate's label and the tokens just forwarded, or found measured."""


@dataclass(frozen=True)
class Item:
    """What one process does at a time: a candidate on a document, at every wanted length."""

    candidate: Candidate
    document: int


@dataclass
class Meter:
    """Measures the tail of documents, and keeps what was measured in a store.

    Attributes:
        model: A causal language model.
        documents: All documents of the run, each at least as long as the longest length.
        settings: Lengths and the tail; the protocol is `tail`.
        store: Where records go; its settings name everything that determines a number but candidate, length and
            document, which are the key.
        special: Token ids in front of every window.
        shard: Which of the items are this process's.
        progress: Called after every item.
        waiting: Called once with the number of records that other processes have still to write.

    Raises:
        PosencError: The model is not a causal language model, or the tokens are another model's.
    """

    model: nn.Module
    documents: Sequence[TokenizedDocument]
    settings: Settings
    store: Records = field(default_factory=Memory)
    special: Sequence[int] = ()
    shard: Shard = ALONE
    progress: Progress = lambda label, tokens: None
    waiting: Callable[[int], None] = lambda count: None
    _scorer: FrugalScorer = field(init=False)
    _hashes: list[str] = field(init=False)

    def __post_init__(self) -> None:
        check_vocabulary(self.model, max(document.largest() for document in self.documents))
        probe = torch.tensor([*self.special, *self.documents[0].tokens(0, 16).tolist()])
        with evaluation_mode(self.model):
            self._scorer = FrugalScorer(
                TokenScorer(
                    self.model, probe, chunk=self.settings.chunk, prefill=self.settings.prefill
                )
            )
        self._hashes = [document.to_dict()["tokens_sha256"] for document in self.documents]

    def loss(self, candidate: Candidate, length: int, document: int) -> Loss:
        """What was measured; only after `measure` with the same."""
        value = self.store.get(self._key(candidate, length, document))
        assert value is not None
        return Loss.from_dict(value)

    def measure(self, items: Sequence[Item], lengths: Sequence[int]) -> None:
        """Measures what has not been measured: this process's share; then waits for the others' shares."""
        mine = self.shard.mine(items)
        with evaluation_mode(self.model):
            for _, group in itertools.groupby(mine, key=lambda item: item.candidate.key):
                self._measure_one(list(group), lengths)
        self._wait([self._key(i.candidate, n, i.document) for i in items for n in lengths])

    def cost(self, document: int, lengths: Sequence[int]) -> int:
        """Tokens that one candidate forwards on a document."""
        return sum(window.forwarded for window in self._windows(document, lengths))

    def _measure_one(self, items: Sequence[Item], lengths: Sequence[int]) -> None:
        """Items of one candidate; the model is patched once."""
        candidate = items[0].candidate
        todo = [
            (item.document, length)
            for item in items
            for length in lengths
            if self.store.get(self._key(candidate, length, item.document)) is None
        ]
        if todo:
            with contextlib.ExitStack() as stack:
                refused = None
                self._scorer.pieces = not candidate.length_dependent
                try:
                    longest = self.settings.lengths[-1]
                    stack.enter_context(candidate.applied(self.model, longest))
                except Exception as error:  # this architecture does not take it
                    refused = reason_of(error)
                self._fill(candidate, todo, refused)
        for item in items:
            self.progress(candidate.label, self.cost(item.document, lengths))

    def _fill(
        self, candidate: Candidate, todo: Sequence[tuple[int, int]], refused: str | None
    ) -> None:
        failed = {length: refused for _, length in todo if refused is not None}
        for document, length in todo:
            if length not in failed:
                try:
                    loss = self._score(candidate, document, length)
                except Exception as error:  # a family may fail in its own way past its length
                    failed[length] = reason_of(error)
            if length in failed:  # nor would the next document of this length do better
                loss = Loss(math.nan, 0, failed[length])
            self.store.append(self._key(candidate, length, document), loss.to_dict())

    def _score(self, candidate: Candidate, document: int, length: int) -> Loss:
        nats, tokens = 0.0, 0
        for window in self._windows(document, [length]):
            front = torch.tensor(list(self.special[: window.special]), dtype=torch.int64)
            body = self.documents[document].tokens(window.begin, window.end)
            ids = torch.cat([front, body])
            if candidate.stateful:
                # resets transformers' own dynamic RoPE, which keeps a state
                self._scorer([ids[:2]], 1)
            losses = self._scorer([ids], window.first_scored)[0]
            nats += float(losses.sum())
            tokens += len(losses)
        return Loss(nats, tokens)

    def _windows(self, document: int, lengths: Sequence[int]) -> list[Window]:
        size = len(self.documents[document].ids)
        return plan(
            size, self.settings, special=len(self.special), shared_prefix=False, lengths=lengths
        )

    def _key(self, candidate: Candidate, length: int, document: int) -> Key:
        return ("tail", candidate.key, length, self._hashes[document])

    def _wait(self, keys: Sequence[Key]) -> None:
        """Until other processes have written their shares of a round: the next one depends on all of them."""
        if not isinstance(self.store, Store):
            return
        self.store.refresh()
        left = missing(self.store, keys)
        if left:
            self.waiting(len(left))
        while left:
            time.sleep(POLL)
            self.store.refresh()
            left = missing(self.store, left)


# What decides the numbers of a sweep or a search, apart from the model, the methods and the documents.


@dataclass(frozen=True)
class TailSettings:
    """The objective: tail perplexity at a target length, with that at the original length beside it.

    Attributes:
        original: The context length that the model was trained on, in tokens.
        target: The length to do well at, in tokens, special tokens included.
        tail_tokens: The K of `tail`, the same tokens at both lengths; 0: 1,024, but at most half of the original.
        windows_per_document: Tails scored in each document, evenly spaced.
        max_regression: How much the perplexity at the original length may grow, as a fraction; `None`: any.
        chunk: Tokens whose logits are held at a time; `None`: by the size of the vocabulary.
        prefill: Tokens that the model runs at a time, over a key-value cache; `None`: all at once.
        seed: Seed of all that is drawn.
        resamples: Number of bootstrap resamples.

    Raises:
        PosencError: Lengths or numbers that do not go together.
    """

    original: int
    target: int
    tail_tokens: int = 0
    windows_per_document: int = 1
    max_regression: float | None = None
    chunk: int | None = None
    prefill: int | None = None
    seed: int = 0
    resamples: int = RESAMPLES

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
        if self.windows_per_document < 1:
            raise PosencError(
                f"windows_per_document is at least 1, not {self.windows_per_document}."
            )
        object.__setattr__(self, "tail_tokens", self.protocol.tail_tokens)  # checks the others too

    @property
    def protocol(self) -> Settings:
        """The lengths and the tail as the protocol's own settings."""
        return Settings(
            lengths=(self.original, self.target),
            protocols=("tail",),
            tail_tokens=self.tail_tokens,
            windows_per_document=None
            if self.windows_per_document == 1
            else self.windows_per_document,
            chunk=self.chunk,
            prefill=self.prefill,
            seed=self.seed,
            resamples=self.resamples,
        )

    @property
    def scale(self) -> float:
        """The target as a multiple of the original length."""
        return self.target / self.original

    @property
    def decisive(self) -> dict[str, Any]:
        """What determines the loss of a candidate on a document at a length: part of the store's fingerprint."""
        names = ("original", "target", "tail_tokens", "windows_per_document", "chunk", "prefill")
        return {"protocol": "tail", **{name: getattr(self, name) for name in names}}

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TailSettings:
        """What `to_dict` wrote."""
        return cls(**values)
