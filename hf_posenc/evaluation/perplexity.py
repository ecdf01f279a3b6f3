"""Runs every candidate over the same tokens and keeps the sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hf_posenc.evaluation.candidates import Candidate
from hf_posenc.evaluation.documents import TokenizedDocument, one_line
from hf_posenc.evaluation.head_replay import TokenScorer, evaluation_mode
from hf_posenc.evaluation.protocols import Settings, Window, plan
from hf_posenc.evaluation.statistics import Record

Progress = Callable[[str, int, int], None]
"""Called with the candidate's label, the tokens forwarded so far and those of the whole run."""

SAME_LOSS = {torch.float64: 1e-6, torch.float32: 1e-4}
SAME_LOSS_HALF = 0.02
"""Mean difference, in nats per token, up to which a prefix on its own and within a longer text count as the same."""


@dataclass(frozen=True)
class Failure:
    """A number that could not be measured, and why."""

    method: str
    protocol: str
    length: int
    reason: str


@dataclass
class Measurement:
    """What came out of a run, or of one process's share of it.

    Attributes:
        records: Sums per candidate, protocol, length and document.
        failures: Cells without a number.
        shared_prefix: For each candidate's label, whether its prefix curve came from one forward per document.
        head_replay: `"bit-exact"`, `"up to rounding"` or `"off"`: how the scorer's probe compared with full logits.
    """

    records: list[Record] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    shared_prefix: dict[str, bool] = field(default_factory=dict)
    head_replay: str = "off"


def measure(
    model: nn.Module,
    documents: Sequence[TokenizedDocument],
    candidates: Sequence[Candidate],
    settings: Settings,
    *,
    special: Sequence[int] = (),
    progress: Progress = lambda label, done, total: None,
) -> Measurement:
    """Measures every candidate on every document.

    The model is patched and unpatched for each candidate; at the end its modes and its config are what they were.

    Args:
        model: A causal language model.
        documents: Documents of at least the longest length less the special tokens.
        candidates: What to compare, each `checked` against the model.
        settings: Lengths, protocols and their numbers.
        special: Token ids in front of every window.
        progress: Called after every forward.

    Raises:
        PosencError: The model is not a causal language model.
    """
    if not documents:  # a process of several that got no share
        return Measurement()
    with evaluation_mode(model):
        scorer = TokenScorer(model, documents[0].ids, chunk=settings.chunk)
        run = _Run(scorer, documents, settings, special, progress)
        run.total = sum(run.cost(candidate) for candidate in candidates)
        for candidate in candidates:
            run.measure(model, candidate)
    if scorer.replays:
        run.measurement.head_replay = "bit-exact" if scorer.exact else "up to rounding"
    return run.measurement


@dataclass
class _Sum:
    nats: float = 0.0
    tokens: int = 0
    bytes: int | None = 0


class _Run:
    """The state of `measure`: what was done so far, of how much."""

    def __init__(
        self,
        scorer: TokenScorer,
        documents: Sequence[TokenizedDocument],
        settings: Settings,
        special: Sequence[int],
        progress: Progress,
    ) -> None:
        self.scorer, self.documents, self.settings, self.progress = (
            scorer,
            documents,
            settings,
            progress,
        )
        self.special = torch.tensor(list(special), dtype=torch.int64)
        self.measurement = Measurement()
        self.done = self.total = 0
        self._sums: dict[tuple[str, int, int], _Sum] = {}
        self._failed: dict[tuple[str, int], str] = {}
        self._ahead: dict[Window, Tensor] = {}

    def cost(self, candidate: Candidate) -> int:
        """Tokens that a candidate forwards."""
        shared = not candidate.auto_scale and not candidate.length_dependent
        extra = self.settings.lengths[0] if shared and len(self.settings.lengths) > 1 else 0
        return extra + sum(map(len, self._plan(self.settings.lengths, shared=shared)))

    def measure(self, model: nn.Module, candidate: Candidate) -> None:
        """Measures one candidate; under an automatic scale, with a patch of its own for every length."""
        self._sums, self._failed, self._ahead = {}, {}, {}
        lengths, shared = self.settings.lengths, False
        if candidate.auto_scale:
            for length in lengths:
                with candidate.applied(model, length):
                    self._score_all(candidate, self._plan([length], shared=False))
        else:
            with candidate.applied(model, lengths[-1]):
                shared = not candidate.length_dependent and self._prefix_is_causal(candidate)
                self._score_all(candidate, self._plan(lengths, shared=shared), settle=not shared)
        self.measurement.shared_prefix[candidate.label] = shared
        self._keep(candidate)

    def _plan(self, lengths: Sequence[int], *, shared: bool) -> list[Window]:
        sizes = [len(document.ids) for document in self.documents]
        special = len(self.special)
        return plan(sizes, self.settings, special=special, shared_prefix=shared, lengths=lengths)

    def _prefix_is_causal(self, candidate: Candidate) -> bool:
        """Whether one long forward gives the losses of a short one, tried on the first document.

        Checked and not assumed: a checkpoint whose own config is dynamic or LongRoPE computes a short text in another
        way when more text follows. Where the long forward cannot be run, the shorter ones are run one by one too.
        """
        lengths = self.settings.lengths
        if len(lengths) == 1 or "prefix" not in self.settings.protocols:
            return True
        short, long = (
            next(w for w in self._plan(some, shared=True) if w.document == w.begin == 0)
            for some in (lengths[:1], lengths)
        )
        try:
            alone = self.scorer(self._ids(short), short.first_scored)
            within = self.scorer(self._ids(long), long.first_scored)
        except Exception:  # `_score` meets it again, and keeps the reason
            same = False
        else:
            difference = (alone - within[: len(alone)]).abs().mean()
            dtype = next(self.scorer.model.parameters()).dtype
            same = not bool(
                difference > SAME_LOSS.get(dtype, SAME_LOSS_HALF)
            )  # NaN in both is no difference
            self._advance(candidate, len(short))
        if same:
            self._ahead[long] = within
        else:
            self.total += sum(map(len, self._plan(lengths, shared=False)))
            self.total -= sum(map(len, self._plan(lengths, shared=True)))
        return same

    def _score_all(
        self, candidate: Candidate, windows: Sequence[Window], *, settle: bool = False
    ) -> None:
        for window in windows:
            if settle and candidate.method is None:
                self.scorer(
                    self._ids(window)[:2]
                )  # two tokens reset transformers' stateful dynamic RoPE
            self._score(window)
            self._advance(candidate, len(window))

    def _score(self, window: Window) -> None:
        """Runs a window and adds up its spans."""
        if all((span.protocol, span.length) in self._failed for span in window.spans):
            return
        try:
            losses = self._ahead.pop(window, None)
            if losses is None:
                losses = self.scorer(self._ids(window), window.first_scored)
        except (
            Exception
        ) as error:  # a family may fail in its own way past its length; the run goes on without it
            for span in window.spans:
                self._failed[span.protocol, span.length] = _reason(error)
            return
        document = self.documents[window.document]
        offset = window.begin - window.special
        for span in window.spans:
            part = losses[span.first - window.first_scored : span.stop - window.first_scored]
            size = document.bytes_between(offset + span.first, offset + span.stop)
            total = self._sums.setdefault((span.protocol, span.length, window.document), _Sum())
            total.nats += float(part.sum())
            total.tokens += len(part)
            total.bytes = None if size is None or total.bytes is None else total.bytes + size

    def _keep(self, candidate: Candidate) -> None:
        """Turns the sums of one candidate into records, in the order of protocol, length and document."""
        protocols = self.settings.protocols
        for protocol, length, index in sorted(
            self._sums, key=lambda key: (protocols.index(key[0]), key)
        ):
            if (protocol, length) not in self._failed:
                total = self._sums[protocol, length, index]
                name = self.documents[index].name
                self.measurement.records.append(
                    Record(
                        candidate.label,
                        protocol,
                        length,
                        name,
                        total.nats,
                        total.tokens,
                        total.bytes,
                    )
                )
        for (protocol, length), reason in self._failed.items():
            self.measurement.failures.append(Failure(candidate.label, protocol, length, reason))

    def _ids(self, window: Window) -> Tensor:
        return torch.cat(
            [self.special, self.documents[window.document].ids[window.begin : window.end]]
        )

    def _advance(self, candidate: Candidate, tokens: int) -> None:
        self.done += tokens
        self.progress(candidate.label, self.done, self.total)


def _reason(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error):
        return "out of memory"
    return f"{type(error).__name__}: {one_line(error)}"
