"""Searches of a factor for every pair of features: individuals, the space, and the three published algorithms.

All randomness comes from one seeded generator and all decisions from the scores. A search that is resumed over stored
scores therefore repeats its path without measuring anything.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.measuring.candidates import Candidate, Part
from hf_posenc.methods import RopeScaling, get_method
from hf_posenc.rope import RopeSpec

STARTS = ("pi", "ntk", "yarn")
"""The methods that the population begins with: LongRoPE, arXiv 2402.13753, section 3.2."""

LABEL = "search"

ALGORITHMS = {
    "longrope": "LongRoPE (Ding et al. 2024, arXiv 2402.13753, algorithm 1)",
    "longrope2": "LongRoPE2 (Shang et al. 2025, arXiv 2502.20082, algorithms 1 and 2)",
    "dcis": "DCIS (Yang et al. 2024, arXiv 2412.18811)",
}
"""The algorithms of a search, with their sources."""

CHANCE = 0.3
"""Probability that a gene changes (the authors' code, microsoft/LongRoPE)."""
STEP = 0.01
"""Factors are drawn from a grid of this step (section 3.2, table 4)."""
CEILING = 1.25
"""Largest factor as a multiple of the scale: a slow pair may be interpolated more than by PI (section 3.2, table 4)."""
CEILING_SLOW = 2.0
"""The same in LongRoPE2, which draws from the scale to twice the scale (algorithms 1 and 2)."""
TURNS = 10
"""Turns in training of the fastest pair that LongRoPE2 considers as the critical one (algorithm 1)."""
REACH = 5.0
"""First increments of DCIS: from `-REACH` to `REACH`, `INCREMENTS` of them (the authors' code, whatever the scale)."""
INCREMENTS, KEPT = 10, 3
"""DCIS: increments that a segment is tried with, and those of the best around which its halves are tried."""
LEAST = 1e-4
"""Smallest divisor (DCIS, the authors' code)."""
TRIES = 20
"""Number of times that a child is drawn if it is not monotone or not new."""


@dataclass(frozen=True)
class Genome:
    """One individual: a factor on cos and sin, and the divisors of the pairs' frequencies from the fastest pair on.

    `critical` is LongRoPE2's critical pair: only the divisors from it on are genes. `None`: all are.
    """

    factors: tuple[float, ...]
    attention_factor: float
    critical: int | None = None

    @classmethod
    def of(
        cls, factors: Sequence[float], attention_factor: float, critical: int | None = None
    ) -> Genome:
        """Return an individual; the divisors of the pairs before the critical one follow from its own.

        They are those of NTK scaling, whose base is such that the critical pair has its divisor (algorithm 2, line 7).
        """
        whole = list(factors)
        if critical is not None:
            whole[:critical] = [whole[critical] ** (pair / critical) for pair in range(critical)]
        return cls(tuple(whole), attention_factor, critical)

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


def critical_starts(rope: RopeSpec, scale: float, space: Space, seed: int) -> dict[str, Genome]:
    """Return the first individuals of LongRoPE2, one for every pair that may be the critical one (algorithm 1).

    The last of these pairs is the theoretical one, the first whose period exceeds the original length: the paper's
    `ceil(d/2 log_b(L / (2 pi)))`. The first is the one with `TURNS` turns. From the critical pair on, all divisors are
    one drawn number. The pairs before it follow the text, as in algorithm 2: their base is that of the critical pair,
    where line 6 of algorithm 1 writes that of the first of all candidates.
    """
    random = np.random.default_rng((seed, 2))
    table = rope.default_inv_freq().double()
    turns = rope.original_max_position_embeddings * table / (2 * math.pi)
    first, last = (int((turns > least).sum()) for least in (TURNS, 1))
    pairs = range(max(1, first), min(last, len(table) - 1) + 1)
    if not pairs:
        raise PosencError(
            f"--algorithm longrope2 searches from the pair that makes {TURNS} turns in the original length of "
            f"{rope.original_max_position_embeddings:,} tokens; all {len(table)} pairs make more. Give --algorithm "
            "longrope or dcis."
        )
    genomes = {}
    for pair in pairs:
        divisor = float(random.integers(math.ceil(scale), math.floor(CEILING_SLOW * scale) + 1))
        attention = _drawn(*space.attention, random)
        genomes[f"critical pair {pair}"] = Genome.of([divisor] * len(table), attention, pair)
    return genomes


@dataclass(frozen=True)
class Space:
    """Bounds of the search."""

    highest: float  # the largest divisor
    attention: tuple[float, float]  # the ends of the factor on cos and sin; equal if it is fixed
    lowest: float = 1.0  # the smallest divisor

    @classmethod
    def of(cls, scale: float, attention_factor: float | None, algorithm: str = "longrope") -> Space:
        """Return the paper's space; the factor on cos and sin from 1 to twice as far as YaRN's `0.1 ln s + 1`."""
        bounds = (1.0, 1.0 + 0.2 * math.log(scale))
        if attention_factor is not None:
            bounds = (attention_factor, attention_factor)
        if algorithm == "longrope2":
            return cls(scale * CEILING_SLOW, bounds, scale)
        return cls(scale * CEILING, bounds)


def evolve(
    starts: Mapping[str, Genome],
    budget: int,
    space: Space,
    seed: int,
    score: Callable[[Sequence[Genome]], Sequence[float]],
) -> list[Step]:
    """Search for the individual with the lowest score, from named ones and their mutations; `budget` are scored.

    `score` is called with the new individuals of every round; a score that is not finite counts as infinite. If any of
    the starts has a critical pair, the others are scored for comparison, and have no children.
    """
    # the paper's proportions: a first round of 64, then 16 mutations and 16 crossovers of the best 32
    population = min(64, max(8, budget // 20))
    random = np.random.default_rng(seed)
    steps: list[Step] = []
    batch = list(starts.items())[:budget]
    critical = any(genome.critical is not None for genome in starts.values())
    parents = [genome for _, genome in batch if critical == (genome.critical is not None)]
    seen = set(starts.values())

    def add(kind: str, child: Genome | None) -> None:
        if child is not None:
            seen.add(child)
            batch.append((kind, child))

    for index in range(population - len(batch)):
        add("mutation", mutated(parents[index % len(parents)], space, random, seen))
    while batch:
        steps += _scored(batch, score)
        able = [step for step in steps if critical == (step.genome.critical is not None)]
        # sorted is stable: the older of two equals is kept
        ranked = sorted(able, key=lambda step: step.score)
        best, batch = [step.genome for step in ranked[: population // 2]], []
        for _ in range(population // 4):
            parent = best[random.integers(len(best))]
            add("mutation", mutated(parent, space, random, seen))
        for _ in range(population // 4):
            first, second = sorted(random.choice(len(best), 2, replace=False).tolist())
            child = crossed(best[first], best[second], random, seen)
            add("crossover", child)
            if child is None:
                add("mutation", mutated(best[first], space, random, seen))
        batch = batch[: budget - len(steps)]
    return steps


def divide(
    starts: Mapping[str, Genome], budget: int, score: Callable[[Sequence[Genome]], Sequence[float]]
) -> list[Step]:
    """Search from YaRN's divisors as DCIS does; no order of the divisors is kept.

    An increment is added to all divisors of a segment, the best of `INCREMENTS` is kept, and each half of the segment
    is later searched around the best `KEPT` of them: first the halves of the table, the slower one first, in the end
    single pairs. From the authors' code. Like there, the best increment is kept even if none improves. Here a score
    only has to be finite (there, below a perplexity of 100), and a segment of an odd number of pairs can be halved too.
    The search ends before the segment that would exceed the budget.
    """
    steps = _scored(list(starts.items()), score)
    start = starts["yarn"]
    factors = np.array(start.factors)
    segments = [(*ends, -REACH, REACH) for ends in _halves(0, len(factors))]
    while segments:
        halves: list[tuple[int, int, float, float]] = []
        for first, stop, low, high in reversed(segments):
            if len(steps) + INCREMENTS > budget:
                return steps
            increments = np.linspace(low, high, INCREMENTS)
            tried = []
            for increment in increments:
                moved = factors.copy()
                moved[first:stop] += increment
                divisors = np.maximum(moved, LEAST).round(10).tolist()
                tried.append(("increment", Genome(tuple(divisors), start.attention_factor)))
            steps += (found := _scored(tried, score))
            ranked = sorted(range(INCREMENTS), key=lambda index: found[index].score)
            kept = [increments[i] for i in ranked[:KEPT] if math.isfinite(found[i].score)]
            if kept:
                factors[first:stop] += kept[0]
                step = (high - low) / (INCREMENTS - 1)
                low, high = (min(kept) - step - kept[0], max(kept) + step - kept[0])
            halves[:0] = [(*ends, float(low), float(high)) for ends in _halves(first, stop)]
        segments = halves
    return steps


def _halves(first: int, stop: int) -> list[tuple[int, int]]:
    """Return the ends of both halves of a segment; none of a single pair."""
    middle = (first + stop) // 2
    return [(first, middle), (middle, stop)] if stop - first > 1 else []


def _scored(
    batch: Sequence[tuple[str, Genome]], score: Callable[[Sequence[Genome]], Sequence[float]]
) -> list[Step]:
    scores = score([genome for _, genome in batch])
    return [
        Step(kind, genome, value if math.isfinite(value) else math.inf)
        for (kind, genome), value in zip(batch, scores, strict=True)
    ]


def mutated(
    parent: Genome, space: Space, random: np.random.Generator, seen: set[Genome]
) -> Genome | None:
    """Return a child with some new genes, each divisor between its neighbours; `None` if no try was new."""
    for _ in range(TRIES):
        factors = list(parent.factors)
        first = parent.critical or 0
        for pair in range(first, len(factors)):
            if random.random() < CHANCE:
                low = factors[pair - 1] if pair > first else space.lowest
                high = factors[pair + 1] if pair + 1 < len(factors) else space.highest
                factors[pair] = _drawn(low, max(low, high), random)
        attention = parent.attention_factor
        if random.random() < CHANCE:
            attention = _drawn(*space.attention, random)
        child = Genome.of(factors, attention, parent.critical)
        if child not in seen:
            return child
    return None


def crossed(
    one: Genome, other: Genome, random: np.random.Generator, seen: set[Genome]
) -> Genome | None:
    """Return one parent with some genes of the other; `None` if no try was monotone and new.

    A pair before the critical one of either parent has no gene to take.
    """
    for _ in range(TRIES):
        taken = random.random(len(one.factors) + 1) < CHANCE
        taken[: max(one.critical or 0, other.critical or 0)] = False
        factors = np.where(taken[:-1], other.factors, one.factors).tolist()
        attention = other.attention_factor if taken[-1] else one.attention_factor
        child = Genome.of(factors, attention, one.critical)
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
    """One scored individual: its `kind` is the method or critical pair of a start, or the operation that made it.

    Operations are `mutation`, `crossover` and `increment`. The score is the log perplexity, of the tails of the search
    documents or of the needles in them; infinite if it failed or exceeded the bound.
    """

    kind: str
    genome: Genome
    score: float

    def to_dict(self) -> dict[str, Any]:
        """Return the values of the JSON file."""
        genome = dataclasses.asdict(self.genome)
        if genome["critical"] is None:
            del genome["critical"]
        return {"kind": self.kind, **genome, "score": self.score}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Step:
        """Read the values of the JSON file."""
        about = values["attention_factor"], values.get("critical")
        genome = Genome(tuple(values["factors"]), *about)
        return cls(values["kind"], genome, math.inf if values["score"] is None else values["score"])


def best_of(steps: Sequence[Step]) -> Step | None:
    """Return the step with the lowest score, the first of equals; `None` if none is finite."""
    working = [step for step in steps if math.isfinite(step.score)]
    return min(working, key=lambda step: step.score, default=None)
