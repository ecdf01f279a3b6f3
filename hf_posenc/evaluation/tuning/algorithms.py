"""Search of a factor for every pair of features: individuals, the space, and the published algorithm.

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

from hf_posenc.evaluation.measuring.candidates import Candidate, Part
from hf_posenc.methods import RopeScaling, get_method
from hf_posenc.rope import RopeSpec

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
    budget: int,
    space: Space,
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
        add("mutation", mutated(parents[index % len(parents)], space, random, seen))
    while batch:
        scores = score([genome for _, genome in batch])
        steps += [
            Step(kind, genome, value if math.isfinite(value) else math.inf)
            for (kind, genome), value in zip(batch, scores, strict=True)
        ]
        # sorted is stable: the older of two equals is kept
        ranked = sorted(steps, key=lambda step: step.score)
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
