"""Search of a factor for every pair of features, judged on documents that the search has not read.

The evolutionary search of LongRoPE (Ding et al. 2024, arXiv 2402.13753, algorithm 1). The score of a list of factors is
the perplexity of the search documents' tails. All randomness comes from one seeded generator and all decisions from the
scores. A search that is resumed over stored scores therefore repeats its path without measuring anything.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.documents.source import Source
from hf_posenc.evaluation.grid import number
from hf_posenc.evaluation.measuring.candidates import CONTROLS, Candidate, Part
from hf_posenc.evaluation.measuring.statistics import FEW_DOCUMENTS, FEW_NOTE, TOO_FEW, exp_or_inf
from hf_posenc.evaluation.options import SearchSettings, TailOptions
from hf_posenc.evaluation.plots import search_figure
from hf_posenc.evaluation.tuning import Board, Row, check_unpatched, prepared, tried
from hf_posenc.evaluation.tuning.sweep import Race, TuningResult
from hf_posenc.methods import RopeScaling, get_method
from hf_posenc.model.context import context_of
from hf_posenc.model.discovery import read_spec, select, tables_of
from hf_posenc.model.unwrapping import unwrap
from hf_posenc.rope import RopeSpec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEARCH_DOCUMENTS = 8
STARTS = ("pi", "ntk", "yarn")
"""The methods that the population begins with: LongRoPE, arXiv 2402.13753, section 3.2."""

LABEL = "search"

CHANCE = 0.3
"""Probability that a gene changes (the authors' code, microsoft/LongRoPE)."""
STEP = 0.01
"""Factors are drawn from a grid of this step (section 3.2, table 4)."""
CEILING = 1.25
"""Largest factor as a multiple of the scale: a slow pair may be interpolated more than by PI (section 3.2, table 4)."""
TRIES = 20
"""Number of times that a child is drawn if it is not monotone or not new."""


@dataclass(frozen=True)
class Genome:
    """One individual: a factor on cos and sin, and the divisors of the pairs' frequencies from the fastest pair on."""

    factors: tuple[float, ...]
    attention_factor: float

    @property
    def monotone(self) -> bool:
        """True if the divisors never decrease: a slow pair is never interpolated less than a faster one."""
        return all(a <= b for a, b in zip(self.factors, self.factors[1:], strict=False))

    def candidate(self, scale: float, short_texts: str, name: str = LABEL) -> Candidate:
        """Return the individual as a candidate to measure; the scale only determines the reach of the patch."""
        factors = list(self.factors)
        options: dict[str, Any] = {"short_factor": factors, "long_factor": factors, "scale": scale}
        options["attention_factor"] = self.attention_factor
        if short_texts == "native":
            options |= {"short_factor": [1.0] * len(factors), "short_mscale": 1.0}
        return Candidate.of([Part("longrope", options)], {}, name)


def starts(rope: RopeSpec, scale: float) -> dict[str, Genome]:
    """Return the tables of `STARTS` as divisors, and their factors on cos and sin, by method."""
    genomes = {}
    for name in STARTS:
        method = get_method(name).from_options(scale=scale)
        assert isinstance(method, RopeScaling)
        plain, changed = rope.default_inv_freq(), method.inv_freq(rope)
        rotating = changed > 0  # a proportional table ends in pairs that do not rotate
        factors = torch.where(rotating, plain / torch.where(rotating, changed, 1.0), 1.0)
        # corrects an order that only rounding disturbs, and that of the pairs that do not rotate
        ordered = torch.cummax(factors, dim=0).values.clamp(min=1.0)
        genomes[name] = Genome(tuple(ordered.tolist()), float(method.cos_sin_factor(rope)))
    return genomes


def evolve(
    starts: Mapping[str, Genome],
    budget: int,
    scale: float,
    seed: int,
    score: Callable[[Sequence[Genome]], Sequence[float]],
) -> list[Step]:
    """Search for the individual with the lowest score, from named ones and their mutations; `budget` are scored.

    `score` is called with the new individuals of every round; a score that is not finite counts as infinite.
    """
    # the paper's proportions: a first round of 64, then 16 mutations and 16 crossovers of the best 32
    population = min(64, max(8, budget // 20))
    random = np.random.default_rng(seed)
    steps: list[Step] = []
    batch = list(starts.items())[:budget]
    parents = [genome for _, genome in batch]
    seen = set(starts.values())

    def add(kind: str, child: Genome | None) -> None:
        if child is not None:
            seen.add(child)
            batch.append((kind, child))

    for index in range(population - len(batch)):
        add("mutation", mutated(parents[index % len(parents)], scale, random, seen))
    while batch:
        values = score([genome for _, genome in batch])
        for (kind, genome), value in zip(batch, values, strict=True):
            steps.append(Step(kind, genome, value if math.isfinite(value) else math.inf))
        # sorted is stable: the older of two equals is kept
        ranked = sorted(steps, key=lambda step: step.score)
        best, batch = [step.genome for step in ranked[: population // 2]], []
        for _ in range(population // 4):
            parent = best[random.integers(len(best))]
            add("mutation", mutated(parent, scale, random, seen))
        for _ in range(population // 4):
            first, second = sorted(random.choice(len(best), 2, replace=False).tolist())
            child = crossed(best[first], best[second], random, seen)
            add("crossover", child)
            if child is None:
                add("mutation", mutated(best[first], scale, random, seen))
        batch = batch[: budget - len(steps)]
    return steps


def mutated(
    parent: Genome, scale: float, random: np.random.Generator, seen: set[Genome]
) -> Genome | None:
    """Return a child with some new genes; `None` if no try was new.

    A divisor is drawn between its neighbours, from 1 to `CEILING` times the scale; the factor on cos and sin from 1 to
    twice as far as YaRN's `0.1 ln s + 1`.
    """
    for _ in range(TRIES):
        factors = list(parent.factors)
        for pair in range(len(factors)):
            if random.random() < CHANCE:
                low = factors[pair - 1] if pair else 1.0
                high = factors[pair + 1] if pair + 1 < len(factors) else scale * CEILING
                factors[pair] = _drawn(low, max(low, high), random)
        attention = parent.attention_factor
        if random.random() < CHANCE:
            attention = _drawn(1.0, 1.0 + 0.2 * math.log(scale), random)
        child = Genome(tuple(factors), attention)
        if child not in seen:
            return child
    return None


def crossed(
    one: Genome, other: Genome, random: np.random.Generator, seen: set[Genome]
) -> Genome | None:
    """Return one parent with some genes of the other; `None` if no try was monotone and new."""
    for _ in range(TRIES):
        taken = random.random(len(one.factors) + 1) < CHANCE
        factors = np.where(taken[:-1], other.factors, one.factors).tolist()
        attention = other.attention_factor if taken[-1] else one.attention_factor
        child = Genome(tuple(factors), attention)
        if child.monotone and child not in seen:
            return child
    return None


def _drawn(low: float, high: float, random: np.random.Generator) -> float:
    """Draw a point of the grid within the bounds; the lower bound if the grid has none there."""
    first, last = math.ceil(low / STEP - 1e-9), math.floor(high / STEP + 1e-9)
    if last < first:
        return low
    return min(high, max(low, round(int(random.integers(first, last + 1)) * STEP, 10)))


@dataclass(frozen=True)
class Step:
    """One scored individual: its `kind` is the method of a start, `mutation` or `crossover`.

    The score is the log perplexity of the tails of the search documents; infinite if it failed or exceeded the bound.
    """

    kind: str
    genome: Genome
    score: float

    def to_dict(self) -> dict[str, Any]:
        """Return the values of the JSON file."""
        return {"kind": self.kind, **dataclasses.asdict(self.genome), "score": self.score}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Step:
        """Read the values of the JSON file."""
        genome = Genome(tuple(values["factors"]), values["attention_factor"])
        return cls(values["kind"], genome, math.inf if values["score"] is None else values["score"])


def best_of(steps: Sequence[Step]) -> Step | None:
    """Return the step with the lowest score, the first of equals; `None` if none is finite."""
    working = [step for step in steps if math.isfinite(step.score)]
    return min(working, key=lambda step: step.score, default=None)


def rope_of(model: nn.Module) -> RopeSpec:
    """Return the rotary table of an unpatched model that the search starts from."""
    check_unpatched(model)
    tables = select(tables_of(unwrap(model)), "full", whole=True)
    if tables[0].scaled:
        raise PosencError(
            f"This checkpoint is already scaled, by rope_type {tables[0].rope_type} in its config, and a search starts "
            "from an unscaled one. `hf-posenc sweep` takes it: --patch yarn:replace=true drops the scaling first (with "
            "original_max_position_embeddings= too, where the config has no original length)."
        )
    named = "max_position_embeddings in config.json"  # no option names it
    lengths = [context_of(each, argument=named).original for each in tables]
    specs = [read_spec(*each, compose=False) for each in zip(tables, lengths, strict=True)]
    if len({spec.dim for spec in specs}) > 1:
        raise PosencError(
            f"This model has rotary tables of different sizes ({', '.join(str(s.dim // 2) for s in specs)} pairs): one "
            "list of factors does not fit them all."
        )
    return specs[0]


@dataclass(repr=False, kw_only=True)
class SearchResult(TuningResult):
    """Result of `hf-posenc search`; the rows are of the held-out documents.

    Attributes:
        race: The bound and the search's own settings: budget, short texts, ...
        steps: Every individual in the order in which it was scored.
        searched: Indices of the documents that the search read; the others are `held_out`.
        best: The step with the lowest score; `None` if none gave a number within the bound.
    """

    kind = "search"
    title = "Search, held-out documents"
    _stored = (*TuningResult._stored, "searched")

    steps: Sequence[Step]
    searched: Sequence[int]
    held_out: list[int] = field(init=False)
    best: Step | None = field(init=False)

    def _compare(self) -> dict[str, Sequence[str]]:
        self.held_out = [n for n in range(len(self.documents)) if n not in self.searched]
        self.best = best_of(self.steps)
        self.winner = None if self.best is None else LABEL
        labels = [entry.label for entry in self.candidates]
        names = [self.documents[index]["name"] for index in self.held_out]
        self.rows = [
            self.board.row(label, names, self.winner, control=label in self.controls)
            for label in labels
        ]
        return dict.fromkeys(labels, names)

    @property
    def comparisons(self) -> int:
        """Number of the other methods; other documents have chosen the best one."""
        return len(self.candidates) - 1

    def best_start(self) -> Row | None:
        """Return the best of the published starts within the bound, by the perplexity of the held-out documents."""
        names = [self.documents[index]["name"] for index in self.held_out]
        started = {step.kind for step in self.steps if step.kind in STARTS}
        rows = [r for r in self.rows if self.entry(r.label).method in started and r.failed is None]
        within = (row for row in rows if not self.board.past(row.label, names))
        return min(within, key=lambda row: row.perplexity, default=None)

    @property
    def kept(self) -> Row | None:
        """The best published start, unless the search is significantly better on the held-out documents."""
        start = self.best_start()
        if self.best is None or start is None or start.ratio is None:
            return None
        return None if start.significant and start.ratio > 1 else start

    def _values(self) -> dict[str, Any]:
        return {
            **super()._values(),
            "searched": self.searched,
            "best": self.best,
            "kept": None if self.kept is None else self.kept.label,
            "steps": self.steps,
        }

    @classmethod
    def _fields_of(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        steps = [Step.from_dict(step) for step in values["steps"]]
        return {**super()._fields_of(values), "steps": steps}

    def plot(self) -> Figure:
        """Draw the path of the search, and the factors found beside those it began with. Needs matplotlib."""
        scores = [step.score for step in self.steps]
        perplexities = [math.exp(score) if score < 700 else math.nan for score in scores]
        begun = {step.kind: step.genome.factors for step in self.steps if step.kind in STARTS}
        best = None if self.best is None else self.best.genome.factors
        return search_figure(perplexities, begun, best, self.target)

    def notes(self) -> Iterator[str]:
        searched, count = len(self.searched), len(self.held_out)
        yield (
            f"{len(self.steps)} evaluations on {searched} document{'s' * (searched != 1)}; the table is of the other "
            f"{count}. Ranges: 95 % intervals over documents; {self._family()}."
        )
        if count < FEW_DOCUMENTS:
            yield FEW_NOTE
        if self.best is None:
            yield "No individual gave a number within the bound: there is no recipe."
            return
        begun, found = best_of([s for s in self.steps if s.kind in STARTS]), self.row(LABEL)
        began = "" if begun is None else f" from {number(exp_or_inf(begun.score))} ({begun.kind})"
        yield (
            f"On its own documents the search went{began} to {number(exp_or_inf(self.best.score))}; on the others it "
            f"is at {number(found.perplexity)}{self._on_short(found)}."
        )
        start = self.best_start()
        if start is not None and start.ratio is None:
            yield f"There is no number to compare with {start.label}."
        elif start is not None and start.ratio:  # on documents that neither was fitted to
            verdict = f"is worse than {start.label}: keep that"
            if start.documents < FEW_DOCUMENTS:
                verdict = f"has {TOO_FEW} to be told from {start.label}: keep that"
            elif not start.significant:
                verdict = f"is not significantly different from {start.label}: keep that"
            elif start.ratio > 1:
                gain = 100 * (1 - 1 / start.ratio)
                verdict = f"beats {start.label} by {gain:.1f} % of its perplexity"
            yield f"On documents that it has not read, the search {verdict}."
        yield from self._against(self.rows)

    def origin(self) -> tuple[str, str]:
        row, start = self.row(LABEL), self.best_start()
        beside = "" if start is None else f", {start.label} {start.perplexity:.5g}"
        source = (
            "hf-posenc search, after LongRoPE (Ding et al. 2024, arXiv 2402.13753, algorithm 1)"
        )
        return source, (
            f"Tail perplexity {row.perplexity:.5g} at {self.target:,} tokens on {row.documents} "
            f"document{'s' * (row.documents != 1)} that the search has not read{beside}; {len(self.steps)} "
            f"evaluations, seed {self.race['seed']}."
        )


def split(documents: int, requested: int) -> list[int]:
    """Return indices of the documents to search on, spread evenly over all of them; at least one is held out."""
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
class SearchJob(Race[SearchResult]):
    """Search on a loaded model and its documents."""

    result = SearchResult

    own: SearchSettings

    @functools.cached_property
    def named(self) -> list[tuple[Candidate, bool]]:
        """The controls and the methods that a search starts from, with the keys that a sweep stores them under."""
        original, target = self.settings.lengths
        scale = {"scale": target / original}
        methods = [(Candidate.of([Part(name, scale)], {}), False) for name in STARTS]
        controls = [(Candidate.parse(spec), True) for spec in CONTROLS]
        return tried(self.whole.model, [*controls, *methods], original)

    def course(self, board: Board) -> tuple[Sequence[tuple[Candidate, bool]], dict[str, Any]]:
        own, documents, (original, target) = self.own, self.whole.documents, self.settings.lengths
        searched = split(len(documents), own.search_documents)
        near = [documents[index] for index in searched]
        rest = [document for n, document in enumerate(documents) if n not in searched]
        bounded = [original] if self.max_regression is not None else []
        scale, evaluations = target / original, itertools.count(1)
        names = [document.name for document in near]

        def score(genomes: Sequence[Genome]) -> list[float]:
            candidates = [
                genome.candidate(scale, own.short_texts, f"evaluation {next(evaluations)}")
                for genome in genomes
            ]
            board.measure(candidates, near, [*bounded, target])
            if bounded:
                board.measure([self.named[0][0]], near, bounded)
            labels = [candidate.label for candidate in candidates]
            lost = (
                board.failure(each, target, names) or board.past(each, names) for each in labels
            )
            return [
                math.inf if out else board.loss(label, target, names)
                for label, out in zip(labels, lost, strict=True)
            ]

        begin = starts(rope_of(self.whole.model), scale)
        steps = evolve(begin, own.budget, scale, own.seed, score)
        compared = list(self.named)
        if (best := best_of(steps)) is not None:
            compared.append((best.genome.candidate(scale, own.short_texts), False))
        board.measure([each for each, _ in compared], rest, self.settings.lengths)
        race = {"max_regression": self.max_regression, **dataclasses.asdict(own)}
        return compared, {"race": race, "steps": steps, "searched": searched}

    def cost_line(self) -> str:
        _, own = self.planned
        return f"{self.forwarded:,} tokens for {len(own['steps']):,} evaluations."


def prepare_search(
    model: nn.Module,
    tokenizer: Any,
    source: Source,
    options: TailOptions,
    own: SearchSettings,
    **about: Any,
) -> SearchJob:
    """Check the model's rotary table, and read documents of at least the target length; `about` as for `prepared`."""
    original = rope_of(model).original_max_position_embeddings
    whole = prepared(model, tokenizer, source, options, original, embedded_limit=24, **about)
    return SearchJob(whole=whole, own=own, max_regression=options.max_regression)
