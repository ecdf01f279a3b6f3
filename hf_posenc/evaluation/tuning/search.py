"""Search of a factor for every pair of features, judged on documents that the search has not read.

The evolutionary search of LongRoPE (Ding et al. 2024, arXiv 2402.13753, algorithm 1). All randomness comes from one
seeded generator and all decisions from the scores. A search that is resumed over stored scores therefore repeats its
path without measuring anything.
"""

from __future__ import annotations

import dataclasses
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
from hf_posenc.evaluation.measuring.candidates import Candidate, Part
from hf_posenc.evaluation.measuring.statistics import FEW_DOCUMENTS, FEW_NOTE, exp_or_inf
from hf_posenc.evaluation.options import SearchSettings, TailOptions
from hf_posenc.evaluation.plots.results import search_figure
from hf_posenc.evaluation.tuning import Batch, Board, Row, TailJob, prepared
from hf_posenc.evaluation.tuning.results import CONTROLS, TuningResult, against, on_short
from hf_posenc.methods import RopeScaling, get_method
from hf_posenc.model.discovery import original_length, read_spec, select, tables_of
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

    def candidate(self, scale: float, short_texts: str, beside: dict[str, Any]) -> Candidate:
        """Return the individual as a candidate to measure; the scale only determines the reach of the patch."""
        factors = list(self.factors)
        options: dict[str, Any] = {
            "short_factor": factors,
            "long_factor": factors,
            "scale": scale,
            "attention_factor": self.attention_factor,
        }
        if short_texts == "native":
            options |= {"short_factor": [1.0] * len(factors), "short_mscale": 1.0}
        return Candidate.of([Part("longrope", options)], beside, LABEL)


def rope_of(model: nn.Module, *, replace: bool) -> RopeSpec:
    """Return the rotary table of an unpatched model that the search starts from; `replace` drops its scaling."""
    tables = select(tables_of(unwrap(model)), "full", whole=True)
    specs = [read_spec(t, original_length(t, compose=False), compose=False) for t in tables]
    if len({spec.dim for spec in specs}) > 1:
        raise PosencError(
            f"This model has rotary tables of different sizes ({', '.join(str(s.dim // 2) for s in specs)} pairs): one "
            "list of factors does not fit them all."
        )
    if tables[0].scaled and not replace:
        raise PosencError(
            f"This checkpoint is already scaled (rope_type={tables[0].rope_type!r}). --replace drops its scaling and "
            "searches from its rope_theta and original length."
        )
    return specs[0]


def starts(rope: RopeSpec, scale: float, attention_factor: float | None) -> dict[str, Genome]:
    """Return the tables of `STARTS` as divisors, by method; a given factor on cos and sin replaces the methods' own."""
    genomes = {}
    for name in STARTS:
        method = get_method(name).from_options(scale=scale)
        assert isinstance(method, RopeScaling)
        plain, changed = rope.default_inv_freq(), method.inv_freq(rope)
        rotating = changed > 0  # a proportional table ends in pairs that do not rotate
        factors = torch.where(rotating, plain / torch.where(rotating, changed, 1.0), 1.0)
        # corrects an order that only rounding disturbs, and that of the pairs that do not rotate
        ordered = torch.cummax(factors, dim=0).values.clamp(min=1.0)
        own = float(method.cos_sin_factor(rope)) if attention_factor is None else attention_factor
        genomes[name] = Genome(tuple(ordered.tolist()), own)
    return genomes


@dataclass(frozen=True)
class Plan:
    """Sizes of a search. The paper's are 64 individuals, 16 mutations, 16 crossovers, 32 parents, 40 rounds."""

    budget: int  # of individuals in all rounds
    population: int  # individuals of the first round
    parents: int  # the best ones, which have children
    mutations: int  # children of one parent in a round
    crossovers: int  # children of two parents in a round

    @classmethod
    def of(cls, budget: int) -> Plan:
        """Return the paper's proportions for a budget: a twentieth of it first, of 8 to 64 individuals."""
        population = min(64, max(8, budget // 20))
        return cls(budget, population, population // 2, population // 4, population // 4)


@dataclass(frozen=True)
class Space:
    """Bounds of the search."""

    highest: float  # the largest divisor
    attention: tuple[float, float]  # the ends of the factor on cos and sin; equal if it is fixed

    @classmethod
    def of(cls, scale: float, attention_factor: float | None) -> Space:
        """Return the paper's space; the factor on cos and sin from 1 to twice as far as YaRN's `0.1 ln s + 1`."""
        bounds = (1.0, 1.0 + 0.2 * math.log(scale))
        if attention_factor is not None:
            bounds = (attention_factor, attention_factor)
        return cls(scale * CEILING, bounds)


def evolve(
    starts: Mapping[str, Genome],
    plan: Plan,
    space: Space,
    seed: int,
    score: Callable[[Sequence[Genome]], Sequence[float]],
) -> list[Step]:
    """Search for the individual with the lowest score, from named ones and their mutations.

    `score` is called with the new individuals of every round; a score that is not finite counts as infinite.
    """
    random = np.random.default_rng(seed)
    steps: list[Step] = []
    batch = list(starts.items())[: plan.budget]
    parents = [genome for _, genome in batch]
    seen = set(parents)

    def add(kind: str, child: Genome | None) -> None:
        if child is not None:
            seen.add(child)
            batch.append((kind, child))

    for index in range(plan.population - len(batch)):
        add("mutation", mutated(parents[index % len(parents)], space, random, seen))
    while batch:
        scores = score([genome for _, genome in batch])
        for (kind, genome), value in zip(batch, scores, strict=True):
            steps.append(Step(kind, genome, value if math.isfinite(value) else math.inf))
        # sorted is stable: the older of two equals is kept
        best = [step.genome for step in sorted(steps, key=lambda step: step.score)[: plan.parents]]
        batch = []
        for _ in range(plan.mutations):
            parent = best[random.integers(len(best))]
            add("mutation", mutated(parent, space, random, seen))
        for _ in range(plan.crossovers):
            first, second = sorted(random.choice(len(best), 2, replace=False).tolist())
            child = crossed(best[first], best[second], random, seen)
            add("crossover", child)
            if child is None:
                add("mutation", mutated(best[first], space, random, seen))
        batch = batch[: plan.budget - len(steps)]
    return steps


def mutated(
    parent: Genome, space: Space, random: np.random.Generator, seen: set[Genome]
) -> Genome | None:
    """Return a child with some new genes, each divisor between its neighbours; `None` if no try was new."""
    for _ in range(TRIES):
        factors = list(parent.factors)
        for pair in range(len(factors)):
            if random.random() < CHANCE:
                low = factors[pair - 1] if pair else 1.0
                high = factors[pair + 1] if pair + 1 < len(factors) else space.highest
                factors[pair] = _drawn(low, max(low, high), random)
        attention = parent.attention_factor
        if random.random() < CHANCE:
            attention = _drawn(*space.attention, random)
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
    """One scored individual: its `kind` is the method that it starts from, or `mutation`, or `crossover`.

    The score is the log tail perplexity on the search documents; infinite if it failed or exceeded the bound.
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

    @property
    def _begun(self) -> list[Step]:
        return [step for step in self.steps if step.kind in STARTS]

    def best_start(self) -> Row | None:
        """Return the published method among the starts with the lowest perplexity on the held-out documents."""
        names = {step.kind for step in self._begun}
        rows = [r for r in self.rows if self.trial(r.label).method in names and r.failed is None]
        return min(rows, key=lambda row: row.perplexity, default=None)

    def _own(self) -> dict[str, Any]:
        return {
            "settings": self.search,
            "searched": list(self.searched),
            "best": None if self.best is None else self.best.to_dict(),
            "steps": [step.to_dict() for step in self.steps],
        }

    @classmethod
    def _own_fields(cls, values: Mapping[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
        steps = [Step.from_dict(step) for step in values["steps"]]
        return {"search": settings, "steps": steps, "searched": values["searched"]}

    def plot(self) -> Figure:
        """Draw the path of the search, and the factors found beside those it began with. Needs matplotlib."""
        scores = [step.score for step in self.steps]
        perplexities = [math.exp(score) if score < 700 else math.nan for score in scores]
        begun = {step.kind: step.genome.factors for step in self._begun}
        best = None if self.best is None else self.best.genome.factors
        return search_figure(perplexities, begun, best, self.settings.target)

    def notes(self) -> Iterator[str]:
        settings, count = self.settings, len(self.held_out)
        yield (
            f"{len(self.steps)} evaluations on {len(self.searched)} documents; the table is of the other {count}. "
            f"Ranges and ratios: 95 % intervals over documents, ratios paired."
        )
        if count < FEW_DOCUMENTS:
            yield FEW_NOTE
        if self.best is None:
            yield "No individual gave a number within the bound: there is no recipe."
            return
        begun, found = best_of(self._begun), self.row(LABEL)
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
            f"search has not read{beside}; {len(self.steps)} evaluations, seed {self.search['seed']}."
        )


def best_of(steps: Sequence[Step]) -> Step | None:
    """Return the step with the lowest score, the first of equals; `None` if none is finite."""
    working = [step for step in steps if math.isfinite(step.score)]
    return min(working, key=lambda step: step.score, default=None)


def _to_start(start: Row) -> str:
    """Compare the search to the best published start, on documents that neither was fitted to."""
    if start.to_best is None:
        return f"There is no number to compare with {start.label}."
    verdict = f"is worse than {start.label}: keep that"
    if not start.significant:
        verdict = f"is not significantly different from {start.label}: keep that"
    elif start.to_best.ratio > 1:
        gain = 100 * (1 - 1 / start.to_best.ratio)
        verdict = f"beats {start.label} by {gain:.1f} % of its perplexity"
    return f"On documents that it has not read, the search {verdict}."


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
class SearchJob(TailJob[SearchResult]):
    """Search whose model and documents are ready."""

    own: SearchSettings

    def course(self, measure: Batch) -> SearchResult:
        settings, own = self.settings, self.own
        searched = split(len(self.documents), own.search_documents)
        rope = rope_of(self.model, replace=own.replace)
        begin = starts(rope, settings.scale, own.attention_factor)
        beside = {"replace": True} if own.replace else {}

        def candidate(genome: Genome) -> Candidate:
            return genome.candidate(settings.scale, own.short_texts, beside)

        def score(genomes: Sequence[Genome]) -> list[float]:
            candidates, plain = [candidate(genome) for genome in genomes], compared[0][0]
            losses = dict(measure(candidates, searched, self._lengths))
            if settings.max_regression is not None:
                losses |= measure([plain], searched, [settings.original])
            board = Board(losses, settings, plain.key)
            return [board.score(each.key, searched) for each in candidates]

        compared = [(Candidate.parse(spec), True) for spec in CONTROLS]
        plan, space = Plan.of(own.budget), Space.of(settings.scale, own.attention_factor)
        steps = evolve(begin, plan, space, own.seed, score)
        best = best_of(steps)
        extra = ",replace=true" if own.replace else ""
        for name in begin:
            compared.append((Candidate.parse(f"{name}:scale={settings.scale!r}{extra}"), False))
        if best is not None:
            compared.append((candidate(best.genome), False))
        held_out = [index for index in range(len(self.documents)) if index not in searched]
        losses = measure([each for each, _ in compared], held_out, settings.lengths)
        fields = {"search": dataclasses.asdict(own), "steps": steps, "searched": searched}
        return SearchResult.measured(self, compared, losses, **fields)

    @property
    def _lengths(self) -> Sequence[int]:
        """Lengths that an individual is measured at: the original one only if it has a bound."""
        settings = self.settings
        return settings.lengths if settings.max_regression is not None else [settings.target]

    @property
    def forwarded(self) -> int:
        documents = range(len(self.documents))
        searched = split(len(self.documents), self.own.search_documents)
        once = sum(self.tokens(d, self._lengths) for d in searched)
        both = sum(self.tokens(d, self.settings.lengths) for d in documents if d not in searched)
        return self.own.budget * once + (len(CONTROLS) + len(STARTS) + 1) * both

    def cost_line(self) -> str:
        return f"{self.forwarded:,} tokens for {self.own.budget:,} evaluations."


def prepare_search(
    model: nn.Module,
    tokenizer: Any,
    source: Source,
    options: TailOptions,
    own: SearchSettings,
    **about: Any,
) -> SearchJob:
    """Check the model's rotary table, and read documents of at least the target length; `about` as for `prepared`."""
    original = rope_of(model, replace=own.replace).original_max_position_embeddings
    fields = prepared(model, tokenizer, source, options, original, embedded_limit=24, **about)
    return SearchJob(**fields, own=own)
