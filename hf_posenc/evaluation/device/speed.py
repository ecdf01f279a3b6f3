"""Speed and memory of the prefill of a long text, method by method."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.evaluation.device.clock import Clock
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


@dataclass(frozen=True)
class SpeedCell:
    """Speed and memory of a method.

    Attributes:
        tokens_per_second: Tokens of the window by the median of the seconds of all rounds; `None` if it failed. In the
            slowest round it is `lowest`, in the fastest one `highest`.
        ratio: Times as fast as the first method: the median over the rounds, both of the same round.
        peak_bytes: The largest peak of memory; `None` if it is unknown.
        prefill: Tokens that were run at a time; `None`: all.
    """

    method: str
    tokens_per_second: float | None = None
    lowest: float | None = None
    highest: float | None = None
    ratio: float | None = None
    peak_bytes: int | None = None
    prefill: int | None = None
    failed: str | None = None


@dataclass
class SpeedResult:
    """Prefill of one window, timed under every method in turn, the baseline first, in several rounds.

    Attributes:
        length: Tokens of the window.
        memory: Meaning of `peak_bytes`.
        rounds: For each round and method seconds, peak and tokens at a time, or the reason of a failure.
        cells: The summary, in the order of the methods.
    """

    length: int
    device: str
    threads: int | None
    memory: str | None
    methods: Sequence[str]
    rounds: Sequence[Mapping[str, Mapping[str, Any]]]
    cells: list[SpeedCell] = field(init=False)

    def __post_init__(self) -> None:
        self.cells = [self._cell(label) for label in self.methods]

    def cell(self, method: str) -> SpeedCell:
        """Return the summary of a method."""
        return self.cells[list(self.methods).index(method)]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        values = asdict(self)
        values["summary"] = values.pop("cells")
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SpeedResult:
        """Read the values of `to_dict`; the summary is computed again from the rounds."""
        return cls(**{name: value for name, value in values.items() if name != "summary"})

    def _cell(self, label: str) -> SpeedCell:
        own, first = ([values[name] for values in self.rounds] for name in (label, self.methods[0]))
        failed = next((values["failed"] for values in own if "failed" in values), None)
        if failed is not None or not own:
            return SpeedCell(label, failed=failed or "not measured")
        ratio, seconds = None, [values["seconds"] for values in own]
        if not any("failed" in values for values in first):
            pairs = zip(first, seconds, strict=True)
            ratio = statistics.median(theirs["seconds"] / ours for theirs, ours in pairs)
        peaks = [values["peak_bytes"] for values in own]
        pieces = [values["prefill"] for values in own if values["prefill"] is not None]
        return SpeedCell(
            label,
            tokens_per_second=self.length / statistics.median(seconds),
            lowest=self.length / max(seconds),
            highest=self.length / min(seconds),
            ratio=ratio,
            peak_bytes=None if None in peaks else max(peaks),
            prefill=min(pieces, default=None),
        )


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
