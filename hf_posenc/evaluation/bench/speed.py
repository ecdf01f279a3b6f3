"""How fast a model reads a long text under every method, and with how much memory."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.evaluation.bench.clock import Clock
from hf_posenc.evaluation.bench.speed_result import SpeedResult
from hf_posenc.evaluation.candidates import Candidate
from hf_posenc.evaluation.documents import TokenizedDocument
from hf_posenc.evaluation.head_replay import TokenScorer, evaluation_mode
from hf_posenc.evaluation.identity import environment
from hf_posenc.evaluation.memory import FrugalScorer, reason_of
from hf_posenc.evaluation.perplexity import Progress
from hf_posenc.evaluation.processes import Shard
from hf_posenc.evaluation.store import ALONE, Key, Records, Store, missing


class SpeedRun:
    """Times the prefill of one window: a forward without a key-value cache, and the logits of its last token.

    A round times every method once, one after the other in this process, each after a warm-up forward of the same
    window: what a method builds when it meets a length, and what a library chooses at a first call, is not in the time.
    A round is stored whole, so two methods are always compared under the same conditions. Where memory runs out, the
    warm-up finds out how many tokens at a time fit, as for perplexity, and that is what is timed.

    Args:
        model: A causal language model, unpatched or with a saved patch.
        window: Token ids, shape (n,).
        candidates: What to compare, each `checked` against the model.
        rounds: How often every method is timed.
        chunk: Tokens whose logits are held at a time; `None`: by the size of the vocabulary.
        prefill: Tokens that are run at a time; `None`: all.

    Attributes:
        clock: What times it.
    """

    def __init__(
        self,
        model: nn.Module,
        window: Tensor,
        candidates: Sequence[Candidate],
        *,
        rounds: int,
        chunk: int | None = None,
        prefill: int | None = None,
    ) -> None:
        self.model, self.window, self.candidates = model, window, candidates
        self.rounds, self.clock = rounds, Clock(model)
        self._at_once = (chunk, prefill)
        with evaluation_mode(model):
            self._scorer = TokenScorer(model, window, chunk=chunk, prefill=prefill)
        self._limits = {c.label: (self._scorer.chunk, self._scorer.prefill) for c in candidates}

    @property
    def keys(self) -> list[Key]:
        """What the rounds are stored under."""
        return [("round", number) for number in range(self.rounds)]

    @property
    def forwarded(self) -> int:
        """Tokens that the model reads in the whole run, warm-ups included."""
        return 2 * len(self.window) * len(self.candidates) * self.rounds

    def open_store(
        self, folder: Path | str, described: dict[str, Any], shard: Shard = ALONE
    ) -> Store:
        """The records of a run in a folder.

        Args:
            folder: The run's folder.
            described: What the model is (`describe_model`).
            shard: This process's place.

        Raises:
            PosencError: The folder cannot be written to, or another process writes the same share.
        """
        settings = {
            "kind": "speed",
            "model": described,
            "window_sha256": hashlib.sha256(self.window.numpy().tobytes()).hexdigest(),
            "length": len(self.window),
            "methods": [candidate.key for candidate in self.candidates],
            "at_once": self._at_once,
            **self.clock.machine(),
            "environment": environment(),
        }
        return Store(Path(folder), settings, shard)

    def measure(self, store: Records, progress: Progress = lambda label, done, total: None) -> None:
        """Measures the rounds that are missing; at the end the model is what it was.

        Args:
            store: What was measured before, and where to put the rest.
            progress: Called after every method.
        """
        wanted = missing(store, self.keys)
        failed: dict[str, dict[str, Any]] = {}
        for key in self.keys:
            failed.update(_failures(store.get(key)))
        each, done = 2 * len(self.window), 0
        total = each * len(self.candidates) * len(wanted)
        with evaluation_mode(self.model):
            for key in wanted:
                made: dict[str, dict[str, Any]] = {}
                for candidate in self.candidates:
                    label = candidate.label
                    made[label] = failed.get(label) or self._timed(candidate)
                    done += each
                    progress(label, done, total)
                failed.update(_failures(made))
                store.append(key, made)

    def collect(self, store: Records) -> SpeedResult | None:
        """The result, from what is stored; `None` while something is missing."""
        if missing(store, self.keys):
            return None
        machine = self.clock.machine()
        return SpeedResult(
            length=len(self.window),
            device=machine["device"],
            threads=machine["threads"],
            memory=self.clock.memory,
            methods=[candidate.label for candidate in self.candidates],
            rounds=[store.get(key) or {} for key in self.keys],
        )

    def _timed(self, candidate: Candidate) -> dict[str, Any]:
        """Seconds and memory of one forward, after one that is not timed."""
        scorer = FrugalScorer(self._scorer)
        scorer.pieces = not candidate.length_dependent
        forward = self._forward(scorer)
        with self._limited(candidate.label), candidate.applied(self.model, len(self.window)):
            try:
                if candidate.moves and candidate.request is None:
                    self._scorer(self.window[:2])  # resets transformers' stateful dynamic RoPE
                forward()
                while True:
                    limits = scorer.reduced
                    seconds, peak = self.clock.time(forward)
                    if scorer.reduced == limits:  # otherwise memory ran out on the way
                        break
            except Exception as error:  # as in a run of perplexities
                return {"failed": reason_of(error)}
            prefill = self._scorer.prefill if scorer.pieces else None
        return {"seconds": seconds, "peak_bytes": peak, "prefill": prefill}

    def _forward(self, scorer: FrugalScorer) -> Callable[[], Any]:
        last = len(self.window) - 1
        return lambda: scorer([self.window], last)

    @contextlib.contextmanager
    def _limited(self, label: str) -> Any:
        """What a method has come down to is its own, and kept from one round to the next."""
        scorer = self._scorer
        before = scorer.chunk, scorer.prefill
        scorer.chunk, scorer.prefill = self._limits[label]
        try:
            yield
        finally:
            self._limits[label] = scorer.chunk, scorer.prefill
            scorer.chunk, scorer.prefill = before


def window_of(documents: Sequence[TokenizedDocument], length: int, special: Tensor) -> Tensor:
    """The first tokens of the documents, special tokens in front: a text to be read at a length.

    Args:
        documents: One after the other, and again from the first where they are too short together.
        length: How many tokens.
        special: Token ids, shape (k,).

    Returns:
        Token ids, shape (length,).
    """
    parts, missing_tokens, index = [special], length - len(special), 0
    while missing_tokens > 0:
        document = documents[index % len(documents)]
        parts.append(document.tokens(0, min(missing_tokens, len(document.ids))))
        missing_tokens -= len(parts[-1])
        index += 1
    return torch.cat(parts)[:length]


def _failures(made: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    return {label: dict(values) for label, values in (made or {}).items() if "failed" in values}
