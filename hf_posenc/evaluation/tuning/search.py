"""Search of a factor for every pair of features, judged on documents that the search has not read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents.source import Source
from hf_posenc.evaluation.grid import number
from hf_posenc.evaluation.measuring.candidates import Candidate
from hf_posenc.evaluation.measuring.statistics import exp_or_inf
from hf_posenc.evaluation.options import SearchSettings, TailOptions
from hf_posenc.evaluation.perplexity.result import FEW_DOCUMENTS
from hf_posenc.evaluation.plots.tuning import search_figure
from hf_posenc.evaluation.tuning.evolution import (
    LABEL,
    STARTS,
    Genome,
    Individuals,
    Plan,
    Space,
    evolve,
    rope_of,
    starts,
)
from hf_posenc.evaluation.tuning.objective import (
    Batch,
    Board,
    Row,
    TailJob,
    prepared,
)
from hf_posenc.evaluation.tuning.results import CONTROLS, TuningResult, against, on_short

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEARCH_DOCUMENTS = 8
_CHILDREN = ("mutation", "crossover")


@dataclass(frozen=True)
class Step:
    """One scored individual.

    Attributes:
        kind: The method that it starts from, or `mutation`, or `crossover`.
        genome: Its factors.
        score: Log tail perplexity at the target length over the search documents; infinite if it failed or exceeded
            the bound.
    """

    kind: str
    genome: Genome
    score: float

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        score = self.score if math.isfinite(self.score) else None
        return {"kind": self.kind, **dataclasses.asdict(self.genome), "score": score}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Step:
        """Read the values of `to_dict`."""
        genome = Genome(tuple(values["factors"]), values["attention_factor"])
        score = values["score"]
        return cls(values["kind"], genome, math.inf if score is None else score)


@dataclass(repr=False, kw_only=True)
class SearchResult(TuningResult):
    """Result of `hf-posenc search`; losses and rows are of the held-out documents.

    Attributes:
        search: The search's own settings: budget, short texts, a fixed factor on cos and sin.
        steps: Every individual in the order in which it was scored.
        searched: Indices of the documents that the search read; the others are held out.
        best: The step with the lowest score; `None` if none gave a number within the bound.
    """

    kind = "search"
    title = "Search, held-out documents"
    recipe_source = (
        "hf-posenc search, after LongRoPE (Ding et al. 2024, arXiv 2402.13753, algorithm 1)"
    )

    search: dict[str, Any]
    steps: Sequence[Step]
    searched: Sequence[int]
    best: Step | None = field(init=False)

    def __repr__(self) -> str:
        return f"SearchResult({len(self.steps)} evaluations, {len(self.documents)} documents)"

    def __post_init__(self) -> None:
        self.best = best_of(self.steps)
        self.rows = [
            self.board.row(trial.label, self.held_out, self.chosen, control=trial.control)
            for trial in self.trials
        ]

    @property
    def chosen(self) -> str | None:
        return None if self.best is None else LABEL

    @property
    def held_out(self) -> list[int]:
        """Indices of the documents that the search has not read."""
        return [index for index in range(len(self.documents)) if index not in self.searched]

    def best_start(self) -> Row | None:
        """Return the published method among the starts with the lowest perplexity on the held-out documents."""
        names = {step.kind for step in self.steps if step.kind not in _CHILDREN}
        methods = {trial.label: trial.method for trial in self.trials}
        rows = [r for r in self.rows if methods[r.label] in names and r.failed is None]
        return min(rows, key=lambda row: row.perplexity, default=None)

    def _own(self) -> dict[str, Any]:
        return {
            "settings": self.search,
            "searched": list(self.searched),
            "best": None if self.best is None else self.best.to_dict(),
            "steps": [step.to_dict() for step in self.steps],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SearchResult:
        """Read the values of `to_dict`."""
        common, own = cls._fields(values)
        steps = [Step.from_dict(step) for step in values["steps"]]
        return cls(**common, search=own, steps=steps, searched=values["searched"])

    def plot(self) -> Figure:
        """Draw the path of the search, and the factors found beside those it began with. Needs matplotlib."""
        perplexities = [
            math.exp(step.score) if step.score < 700 else math.nan for step in self.steps
        ]
        begun = {s.kind: s.genome.factors for s in self.steps if s.kind not in _CHILDREN}
        best = None if self.best is None else self.best.genome.factors
        return search_figure(perplexities, begun, best, self.settings.target)

    def notes(self) -> Iterator[str]:
        settings, count = self.settings, len(self.held_out)
        yield (
            f"{len(self.steps)} evaluations on {len(self.searched)} documents; the table is of the other {count}. "
            f"Ranges and ratios: 95 % bootstrap over documents, paired, seed {settings.seed}."
        )
        if count < FEW_DOCUMENTS:
            yield f"Fewer than {FEW_DOCUMENTS} held-out documents: the ranges mean little."
        if self.best is None:
            yield "No individual gave a number within the bound: there is no recipe."
            return
        begun = best_of([step for step in self.steps if step.kind not in _CHILDREN])
        found = self.row(LABEL)
        began = "" if begun is None else f" from {number(exp_or_inf(begun.score))} ({begun.kind})"
        yield (
            f"On its own documents the search went{began} to {number(exp_or_inf(self.best.score))}; on the others it "
            f"is at {number(found.perplexity)}{on_short(found, settings)}."
        )
        start = self.best_start()
        if start is not None:
            yield _to_start(start)
        for row in (row for row in self.rows if row.control):
            yield against(row, settings)

    def _description(self) -> str:
        row, settings = self.row(LABEL), self.settings
        start = self.best_start()
        beside = "" if start is None else f", {start.label} {start.perplexity:.5g}"
        return (
            f"Tail perplexity {row.perplexity:.5g} at {settings.target:,} tokens on {row.documents} documents that the "
            f"search has not read{beside}; {len(self.steps)} evaluations, seed {settings.seed}."
        )


def best_of(steps: Sequence[Step]) -> Step | None:
    """Return the step with the lowest score, the first of equals; `None` if none is finite."""
    working = [step for step in steps if math.isfinite(step.score)]
    return min(working, key=lambda step: step.score, default=None)


def _to_start(start: Row) -> str:
    """Compare the search to the best published start, on documents that neither was fitted to."""
    if start.to_best is None:
        return f"There is no number to compare with {start.label}."
    if not start.to_best.significant:
        return (
            f"On documents that it has not read, the search is not significantly different from {start.label}: keep "
            "that."
        )
    if start.to_best.ratio > 1:
        gain = 100 * (1 - 1 / start.to_best.ratio)
        return f"On documents that it has not read, the search beats {start.label} by {gain:.1f} % of its perplexity."
    return f"On documents that it has not read, the search is worse than {start.label}: keep that."


def split(documents: int, requested: int) -> list[int]:
    """Return indices of the documents to search on, spread evenly over all of them; the others are held out.

    Raises:
        PosencError: Too few documents to leave one out.
    """
    if documents < 2:
        raise PosencError(
            "A search needs two documents at least: one to search on, and one that it has not read to measure the "
            "outcome on."
        )
    count = requested or min(SEARCH_DOCUMENTS, documents // 2)
    if not 1 <= count < documents:
        raise PosencError(
            f"--search-documents {requested}: there are {documents} documents, and one at least stays held out."
        )
    return [index * documents // count for index in range(count)]


@dataclass(kw_only=True)
class SearchJob(TailJob[SearchResult]):
    """Search whose model and documents are ready.

    Attributes:
        own: The search's own settings.
    """

    own: SearchSettings

    def run(self, measure: Batch) -> SearchResult:
        settings, own = self.settings, self.own
        searched = split(len(self.documents), own.search_documents)
        rope = rope_of(self.model, replace=own.replace)
        begin = starts(rope, settings.scale, own.attention_factor)
        beside = {"replace": True} if own.replace else {}

        def candidate(genome: Genome) -> Candidate:
            return genome.candidate(settings.scale, own.short_texts, beside)

        steps: list[Step] = []
        plan, space = Plan.of(own.budget), Space.of(settings.scale, own.attention_factor)
        path = evolve(begin, plan, space, settings.seed)
        batch: Individuals | None = next(path)
        while batch is not None:
            scores = self._scores([candidate(genome) for _, genome in batch], searched, measure)
            steps += [Step(kind, g, score) for (kind, g), score in zip(batch, scores, strict=True)]
            try:
                batch = path.send(scores)
            except StopIteration:
                batch = None
        best = best_of(steps)
        extra = "".join(f",{name}=true" for name in beside)
        compared = [(Candidate.parse(spec), True) for spec in CONTROLS]
        for name in begin:
            compared.append((Candidate.parse(f"{name}:scale={settings.scale!r}{extra}"), False))
        if best is not None:
            compared.append((candidate(best.genome), False))
        held_out = [index for index in range(len(self.documents)) if index not in searched]
        final = [candidate for candidate, _ in compared]
        losses = measure(final, held_out, settings.lengths)
        return SearchResult.measured(
            *(self, compared, losses),
            search=dataclasses.asdict(own),
            steps=steps,
            searched=searched,
        )

    def _scores(
        self, candidates: Sequence[Candidate], documents: Sequence[int], measure: Batch
    ) -> list[float]:
        """Log tail perplexity at the target length of every candidate; infinite past the bound on short texts."""
        plain = Candidate.parse(CONTROLS[0])
        losses = dict(measure(candidates, documents, self._lengths))
        if self.settings.max_regression is not None:
            losses |= measure([plain], documents, [self.settings.original])
        board = Board(losses, self.settings, plain.key)
        return [board.score(candidate.key, documents) for candidate in candidates]

    @property
    def _lengths(self) -> Sequence[int]:
        """Lengths that an individual is measured at: the original one only if it has a bound."""
        settings = self.settings
        return settings.lengths if settings.max_regression is not None else [settings.target]

    def cost(self) -> int:
        documents = range(len(self.documents))
        searched = split(len(self.documents), self.own.search_documents)
        once = sum(self.tokens(d, self._lengths) for d in searched)
        both = sum(self.tokens(d, self.settings.lengths) for d in documents if d not in searched)
        return self.own.budget * once + (len(CONTROLS) + len(STARTS) + 1) * both

    def cost_line(self) -> str:
        return f"{self.cost():,} tokens for {self.own.budget:,} evaluations."


def prepare_search(
    model: nn.Module,
    tokenizer: Any,
    source: Source,
    options: TailOptions,
    own: SearchSettings,
    **about: Any,
) -> SearchJob:
    """Check the model's rotary table, and read documents of at least the target length.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        source: The documents.
        options: The objective.
        own: The search's own settings.
        **about: `name` of the model in results, and the `command` line that gives the result again.

    Raises:
        PosencError: Options exclude each other, or no document can be used.
    """
    original = rope_of(model, replace=own.replace).original_max_position_embeddings
    fields = prepared(model, tokenizer, source, options, original, embedded_limit=24, **about)
    return SearchJob(**fields, own=own)
