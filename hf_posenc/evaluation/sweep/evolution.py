"""The evolutionary search of LongRoPE (Ding et al. 2024, arXiv 2402.13753, algorithm 1), on any objective.

A generator: it yields individuals and is sent what they score. All chance comes from one seeded generator and all
decisions from the scores, so the same seed and the same scores give the same path; a search that is started again over
stored scores walks it anew without measuring anything.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.sweep.factors import Genome

CHANCE = 0.3
"""A gene changes with this chance (the authors' code, microsoft/LongRoPE)."""
STEP = 0.01
"""Factors are drawn from a grid of this step (section 3.2, table 4)."""
CEILING = 1.25
"""Up to this multiple of the scale: a slow pair may be interpolated more than PI does (section 3.2, table 4)."""
TRIES = 20
"""How often a child is drawn again that is not monotone or was there before."""

Batch = list[tuple[str, Genome]]
"""Individuals, each with how it came about: a start's name, `mutation` or `crossover`."""


@dataclass(frozen=True)
class Plan:
    """The sizes of a search. The paper's are 64 individuals, 16 mutations, 16 crossovers, 32 parents, 40 rounds.

    Attributes:
        budget: Individuals scored in all.
        population: Those of the first round.
        parents: The best that have children.
        mutations: Children of one parent in a round.
        crossovers: Children of two.

    Raises:
        PosencError: A budget that the first round would exceed.
    """

    budget: int
    population: int
    parents: int
    mutations: int
    crossovers: int

    @classmethod
    def of(cls, budget: int) -> Plan:
        """The paper's proportions for a budget: a twentieth of it first, of 8 to 64 individuals.

        Raises:
            PosencError: A budget below 8.
        """
        if budget < 8:
            raise PosencError(f"--budget {budget}: a search needs at least 8 evaluations.")
        population = min(64, max(8, budget // 20))
        return cls(budget, population, population // 2, population // 4, population // 4)


@dataclass(frozen=True)
class Space:
    """Where individuals live.

    Attributes:
        highest: The largest divisor.
        attention: The lowest and the highest factor on cos and sin; equal where it is given.
    """

    highest: float
    attention: tuple[float, float]

    @classmethod
    def of(cls, scale: float, attention_factor: float | None) -> Space:
        """The paper's space for a scale; the factor on cos and sin from 1 to twice as far as YaRN's `0.1 ln s + 1`."""
        if attention_factor is not None:
            return cls(scale * CEILING, (attention_factor, attention_factor))
        return cls(scale * CEILING, (1.0, 1.0 + 0.2 * math.log(scale)))


def evolve(
    starts: Mapping[str, Genome], plan: Plan, space: Space, seed: int
) -> Generator[Batch, Sequence[float], None]:
    """Searches for the individual with the lowest score.

    Args:
        starts: The first individuals, by name; the rest of the first round are their mutations.
        plan: The sizes.
        space: The bounds.
        seed: Of everything that is drawn.

    Yields:
        Individuals that were not there before; what is sent back are their scores, in the same order. A score that is
        not finite counts as infinite.
    """
    chance = np.random.default_rng(seed)
    scored: dict[Genome, float] = {}

    batch: Batch = list(starts.items())[: plan.budget]
    parents = [genome for _, genome in batch]
    seen = set(parents)
    for index in range(plan.population - len(batch)):
        _add(batch, seen, "mutation", mutated(parents[index % len(parents)], space, chance, seen))
    while batch:
        scores = yield batch
        for (_, genome), score in zip(batch, scores, strict=True):
            scored[genome] = score if math.isfinite(score) else math.inf
        # sorted is stable: of equals the older stays
        best = sorted(scored, key=lambda genome: scored[genome])[: plan.parents]
        room = plan.budget - len(scored)
        batch = []
        for _ in range(plan.mutations):
            parent = best[chance.integers(len(best))]
            _add(batch, seen, "mutation", mutated(parent, space, chance, seen))
        for _ in range(plan.crossovers):
            first, second = sorted(chance.choice(len(best), 2, replace=False).tolist())
            child = crossed(best[first], best[second], chance, seen)
            if child is None:
                _add(batch, seen, "mutation", mutated(best[first], space, chance, seen))
            else:
                _add(batch, seen, "crossover", child)
        batch = batch[:room]


def mutated(
    parent: Genome, space: Space, chance: np.random.Generator, seen: set[Genome]
) -> Genome | None:
    """A child with some genes drawn anew, each divisor between its neighbours; `None` if no try was new."""
    for _ in range(TRIES):
        factors = list(parent.factors)
        for pair in range(len(factors)):
            if chance.random() < CHANCE:
                low = factors[pair - 1] if pair else 1.0
                high = factors[pair + 1] if pair + 1 < len(factors) else space.highest
                factors[pair] = _drawn(low, max(low, high), chance)
        attention = parent.attention_factor
        if chance.random() < CHANCE:
            attention = _drawn(*space.attention, chance)
        child = Genome(tuple(factors), attention)
        if child not in seen:
            return child
    return None


def crossed(
    one: Genome, other: Genome, chance: np.random.Generator, seen: set[Genome]
) -> Genome | None:
    """One parent with some genes of the other; `None` if no try was monotone and new."""
    for _ in range(TRIES):
        taken = chance.random(len(one.factors) + 1) < CHANCE
        factors = np.where(taken[:-1], other.factors, one.factors).tolist()
        attention = other.attention_factor if taken[-1] else one.attention_factor
        child = Genome(tuple(factors), attention)
        if child.monotone and child not in seen:
            return child
    return None


def _drawn(low: float, high: float, chance: np.random.Generator) -> float:
    """A point of the grid within the bounds, or the lower bound where the grid has none there."""
    first, last = math.ceil(low / STEP - 1e-9), math.floor(high / STEP + 1e-9)
    if last < first:
        return low
    return min(high, max(low, round(int(chance.integers(first, last + 1)) * STEP, 10)))


def _add(batch: Batch, seen: set[Genome], kind: str, child: Genome | None) -> None:
    if child is not None:
        seen.add(child)
        batch.append((kind, child))
