"""Evolutionary search of LongRoPE (Ding et al. 2024, arXiv 2402.13753, algorithm 1), for any objective.

A generator yields individuals and receives their scores. All randomness comes from one seeded generator and all
decisions from the scores: the same seed and the same scores give the same path. A search that is resumed over stored
scores therefore repeats its path without measuring anything.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.measuring.candidates import Candidate, Part
from hf_posenc.methods import RopeScaling, get_method
from hf_posenc.model.discovery import original_length, read_spec, select, tables_of
from hf_posenc.model.unwrapping import unwrap
from hf_posenc.rope import RopeSpec

STARTS = ("pi", "ntk", "yarn")
"""The methods that the population begins with: LongRoPE, arXiv 2402.13753, section 3.2."""

LABEL = "search"
SHORT_TEXTS = ("same", "native")

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
    """One individual.

    Attributes:
        factors: The divisor of each pair's frequency, from the fastest pair to the slowest; never decreasing.
        attention_factor: The factor on cos and sin.
    """

    factors: tuple[float, ...]
    attention_factor: float

    @property
    def monotone(self) -> bool:
        """True if the divisors never decrease: a slow pair is never interpolated less than a faster one."""
        return all(a <= b for a, b in zip(self.factors, self.factors[1:], strict=False))

    def candidate(self, scale: float, short_texts: str, beside: dict[str, Any]) -> Candidate:
        """Return the individual as a candidate to measure.

        Args:
            scale: Target context as a multiple of the original one; it only determines the reach of the patch.
            short_texts: `"same"`: the same divisors at every length; `"native"`: none up to the original length.
            beside: Arguments of `patch_model` beside the method's options.
        """
        native = short_texts == "native"
        factors = list(self.factors)
        options: dict[str, Any] = {
            "short_factor": [1.0] * len(factors) if native else factors,
            "long_factor": factors,
            "scale": scale,
            "attention_factor": self.attention_factor,
        }
        if native:
            options["short_mscale"] = 1.0
        return Candidate.of([Part("longrope", options)], beside, LABEL)


Individuals = list[tuple[str, Genome]]
"""Individuals, each with its origin: a method's name, `mutation` or `crossover`."""


def rope_of(model: nn.Module, *, replace: bool) -> RopeSpec:
    """Return the rotary table that the search starts from.

    Args:
        model: The model, unpatched.
        replace: Drop the scaling of a checkpoint that is scaled already.

    Raises:
        UnsupportedModelError: A model without rotary embedding.
        PosencError: Tables of different sizes, which one list of divisors does not fit.
    """
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
    """Return the tables of the methods that a search begins with as divisors, by method.

    Args:
        rope: The table.
        scale: Scale of the methods.
        attention_factor: Replaces the methods' own factors on cos and sin.
    """
    genomes = {}
    for name in STARTS:
        method = get_method(name).from_options(scale=scale)
        assert isinstance(method, RopeScaling)
        plain, changed = rope.default_inv_freq(), method.inv_freq(rope)
        rotating = changed > 0  # a proportional table ends in pairs that do not rotate
        factors = torch.where(rotating, plain / torch.where(rotating, changed, 1.0), 1.0)
        # corrects an order that only rounding disturbs, and that of the pairs that do not rotate
        ordered = torch.cummax(factors, dim=0).values.clamp(min=1.0)
        own = float(method.cos_sin_factor(rope))
        attention = own if attention_factor is None else attention_factor
        genomes[name] = Genome(tuple(ordered.tolist()), attention)
    return genomes


@dataclass(frozen=True)
class Plan:
    """Sizes of a search. The paper's are 64 individuals, 16 mutations, 16 crossovers, 32 parents, 40 rounds.

    Attributes:
        budget: Total number of individuals.
        population: Individuals of the first round.
        parents: The best ones, which have children.
        mutations: Children of one parent in a round.
        crossovers: Children of two parents in a round.
    """

    budget: int
    population: int
    parents: int
    mutations: int
    crossovers: int

    @classmethod
    def of(cls, budget: int) -> Plan:
        """Return the paper's proportions for a budget: a twentieth of it first, of 8 to 64 individuals.

        Raises:
            PosencError: A budget below 8.
        """
        if budget < 8:
            raise PosencError(f"--budget {budget}: a search needs at least 8 evaluations.")
        population = min(64, max(8, budget // 20))
        return cls(budget, population, population // 2, population // 4, population // 4)


@dataclass(frozen=True)
class Space:
    """Bounds of the search.

    Attributes:
        highest: The largest divisor.
        attention: The lowest and the highest factor on cos and sin; equal if it is fixed.
    """

    highest: float
    attention: tuple[float, float]

    @classmethod
    def of(cls, scale: float, attention_factor: float | None) -> Space:
        """Return the paper's space; the factor on cos and sin from 1 to twice as far as YaRN's `0.1 ln s + 1`."""
        if attention_factor is not None:
            return cls(scale * CEILING, (attention_factor, attention_factor))
        return cls(scale * CEILING, (1.0, 1.0 + 0.2 * math.log(scale)))


def evolve(
    starts: Mapping[str, Genome], plan: Plan, space: Space, seed: int
) -> Generator[Individuals, Sequence[float], None]:
    """Search for the individual with the lowest score.

    Args:
        starts: The first individuals, by name; the rest of the first round are their mutations.
        plan: The sizes.
        space: The bounds.
        seed: Seed of everything random.

    Yields:
        New individuals; the caller sends their scores in the same order. A score that is not finite counts as
        infinite.
    """
    random = np.random.default_rng(seed)
    scored: dict[Genome, float] = {}

    batch: Individuals = list(starts.items())[: plan.budget]
    parents = [genome for _, genome in batch]
    seen = set(parents)
    for index in range(plan.population - len(batch)):
        _add(batch, seen, "mutation", mutated(parents[index % len(parents)], space, random, seen))
    while batch:
        scores = yield batch
        for (_, genome), score in zip(batch, scores, strict=True):
            scored[genome] = score if math.isfinite(score) else math.inf
        # sorted is stable: the older of two equals is kept
        best = sorted(scored, key=lambda genome: scored[genome])[: plan.parents]
        room = plan.budget - len(scored)
        batch = []
        for _ in range(plan.mutations):
            parent = best[random.integers(len(best))]
            _add(batch, seen, "mutation", mutated(parent, space, random, seen))
        for _ in range(plan.crossovers):
            first, second = sorted(random.choice(len(best), 2, replace=False).tolist())
            child = crossed(best[first], best[second], random, seen)
            if child is None:
                _add(batch, seen, "mutation", mutated(best[first], space, random, seen))
            else:
                _add(batch, seen, "crossover", child)
        batch = batch[:room]


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


def _add(batch: Individuals, seen: set[Genome], kind: str, child: Genome | None) -> None:
    if child is not None:
        seen.add(child)
        batch.append((kind, child))
