"""Speed and memory of the prefill of a long text, method by method."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.evaluation.device.clock import Clock
from hf_posenc.evaluation.device.result import Row
from hf_posenc.evaluation.documents import TokenizedDocument
from hf_posenc.evaluation.measuring.candidates import Candidate
from hf_posenc.evaluation.measuring.execute import (
    Attempt,
    Failures,
    Item,
    Measurement,
    Value,
    patched_in,
)
from hf_posenc.evaluation.measuring.identity import environment
from hf_posenc.evaluation.measuring.store import Key
from hf_posenc.evaluation.scoring.decoder import evaluation_mode
from hf_posenc.evaluation.scoring.head_replay import TokenScorer


@dataclass
class SpeedResult:
    """Prefill of one window, timed under every method in turn, the baseline first, in several rounds.

    Attributes:
        length: Tokens of the window.
        memory: Meaning of `peak_bytes`.
        rounds: For each round and method seconds, peak and tokens at a time, or the reason of a failure.
    """

    length: int
    device: str
    threads: int | None
    memory: str | None
    methods: Sequence[str]
    rounds: Sequence[Mapping[str, Mapping[str, Any]]]

    def row(self, method: str) -> Row:
        """Return the times of a method beside those of the first one; memory is the largest peak."""
        own, first = (
            [values[name] for values in self.rounds] for name in (method, self.methods[0])
        )
        reasons = (values["failed"] for values in own if "failed" in values)
        failed = next(reasons, None if own else "not measured")
        if failed is not None:
            return Row("prefill", method, self.length, failed=failed)
        peaks = [values["peak_bytes"] for values in own]
        alone = any("failed" in values for values in first)
        return Row(
            *("prefill", method, self.length),
            seconds=[values["seconds"] for values in own],
            plain=[] if alone else [values["seconds"] for values in first],
            peak_bytes=None if None in peaks else max(peaks),
        )

    def pieces(self, method: str) -> int | None:
        """Return the least tokens that were run at a time; `None`: all."""
        sizes = (values[method].get("prefill") for values in self.rounds)
        return min(filter(None, sizes), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        names = ("method", "tokens_per_second", "speedup", "peak_bytes", "failed")
        rows = [{name: getattr(self.row(each), name) for name in names} for each in self.methods]
        return {**asdict(self), "summary": rows}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SpeedResult:
        """Read the values of `to_dict`; the summary is computed again from the rounds."""
        return cls(**{name: value for name, value in values.items() if name != "summary"})


class SpeedRun(Measurement[Item, SpeedResult]):
    """Times the prefill of one window: a forward without a key-value cache, and the logits of its last token.

    A round times every method once, one after the other in this process, each after a warm-up forward of the same
    window: tables that a method builds at a new length, and choices of a library at its first call, are not in the
    time. An item is a whole round, so two methods are always compared under the same conditions. If memory runs out in
    the warm-up, less is run at a time, as for perplexity, and that is timed.

    `window` are token ids, shape (n,); the candidates are `checked` against the model, which `metadata` describes. The
    logits are those that score the tokens from the index `first` on; by default those of the last token.
    """

    scorer: TokenScorer

    def __init__(
        self,
        model: nn.Module,
        window: Tensor,
        candidates: Sequence[Candidate],
        *,
        rounds: int,
        chunk: int | None = None,
        prefill: int | None = None,
        first: int | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self.window, self.candidates = model, window, candidates
        self._first = len(window) - 1 if first is None else first
        self.metadata = metadata or {}
        self.clock, self._at_once = Clock(model), (chunk, prefill)
        with evaluation_mode(model):
            self.scorer = TokenScorer(model, window, chunk=chunk, prefill=prefill)
        self._limits = {c.label: (self.scorer.chunk, self.scorer.prefill) for c in candidates}
        self.items = [
            Item(
                key=("round", number),
                candidate=None,
                length=len(window),
                cost=2 * len(window) * len(candidates),
                cells=tuple((candidate.label,) for candidate in candidates),
                order=number,
            )
            for number in range(rounds)
        ]

    @property
    def decisive(self) -> Mapping[str, Any]:
        return {
            "kind": "speed",
            "format": 2,
            "model": self.metadata["model"],
            "window_sha256": hashlib.sha256(self.window.numpy().tobytes()).hexdigest(),
            "length": len(self.window),
            "methods": [candidate.key for candidate in self.candidates],
            "at_once": self._at_once,
            **self.clock.machine(),
            "environment": environment(),
        }

    def measure(self, item: Item, attempt: Attempt) -> Value:
        timed = {}
        for number, candidate in enumerate(self.candidates, 1):
            cell = (candidate.label,)
            if not attempt.is_lost(cell):
                values = attempt(partial(self.timed, candidate), [cell])
                if values is not None:
                    timed[candidate.label] = values
            attempt.advance(2 * len(self.window) * number)
        return {"methods": timed}

    def collect(self, values: Mapping[Key, Value]) -> SpeedResult:
        failures = Failures.of(self.items, values.get).reasons()
        reasons = {cell[0]: {"failed": reason} for (_, cell), reason in failures.items()}
        labels = [candidate.label for candidate in self.candidates]
        timed = [values[item.key].get("methods", {}) for item in self.items]
        return SpeedResult(
            length=len(self.window),
            **self.clock.machine(),
            memory=self.clock.memory,
            methods=labels,
            rounds=[{x: methods.get(x) or reasons[x] for x in labels} for methods in timed],
        )

    def timed(self, candidate: Candidate) -> dict[str, Any]:
        """Return seconds, memory and tokens at a time of one forward, after one that is not timed."""
        scorer = self.scorer
        before = scorer.chunk, scorer.prefill
        # reductions of a method are its own, and kept for the next round
        scorer.chunk, scorer.prefill = self._limits[candidate.label]
        try:
            # Truncation reads the end of the window only.
            cut = max(0, len(self.window) - (candidate.most or len(self.window)))
            with patched_in(self.model, scorer, candidate, len(self.window)):
                forward = partial(scorer, self.window[cut:], max(1, self._first - cut))
                forward()
                scorer.stateful = False  # the warm-up has reset the model
                while True:
                    limits = scorer.reduced
                    seconds, peak = self.clock.time(forward)
                    if scorer.reduced == limits:  # otherwise memory ran out on the way
                        break
            prefill = scorer.prefill if scorer.pieces else None
        finally:
            self._limits[candidate.label] = scorer.chunk, scorer.prefill
            scorer.chunk, scorer.prefill = before
        return {"seconds": seconds, "peak_bytes": peak, "prefill": prefill}


def window_of(documents: Sequence[TokenizedDocument], length: int, special: Tensor) -> Tensor:
    """Return the first tokens of the documents, shape (length,), special tokens in front.

    Documents that are too short together are repeated.
    """
    parts, missing, index = [special], length - len(special), 0
    while missing > 0:
        document = documents[index % len(documents)]
        parts.append(document.tokens(0, min(missing, len(document.ids))))
        missing -= len(parts[-1])
        index += 1
    return torch.cat(parts)[:length]
