"""The evolutionary search of LongRoPE (Ding et al. 2024, arXiv 2402.13753, algorithm 1), on any objective.

A generator: it yields individuals and is sent what they score. All chance comes from one seeded generator and all
decisions from the scores, so the same seed and the same scores give the same path; a search that is started again over
stored scores walks it anew without measuring anything.
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
from hf_posenc.evaluation.measuring.candidates import Candidate, Part, Request
from hf_posenc.evaluation.tuning.trials import spec_of
from hf_posenc.methods import RopeScaling, get_method
from hf_posenc.model.discovery import original_length, read_spec, select, tables_of
from hf_posenc.model.unwrapping import unwrap
from hf_posenc.rope import RopeSpec

# What a search varies: a divisor for every pair of features, and the factor on cos and sin.


STARTS = ("pi", "ntk", "yarn")
"""The population begins with these: LongRoPE, arXiv 2402.13753, section 3.2."""

LABEL = "search"
SHORT_TEXTS = ("same", "native")


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
        """Whether the divisors never decrease: a slow pair is never interpolated less than a faster one."""
        return all(a <= b for a, b in zip(self.factors, self.factors[1:], strict=False))

    def candidate(self, scale: float, short_texts: str, beside: dict[str, Any]) -> Candidate:
        """The individual as something to measure.

        Args:
            scale: Target context as a multiple of the original one; it only says how far the patch reaches.
            short_texts: `"same"`: the same divisors at every length; `"native"`: none up to the original length.
            beside: What `patch_model` takes beside the method's options.
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
        request = Request((Part("longrope", options),), beside)
        return Candidate(spec_of(request), LABEL, request)


def rope_of(model: nn.Module, *, replace: bool) -> RopeSpec:
    """The rotary table that the search starts from.

    Args:
        model: The model, unpatched.
        replace: On a checkpoint that is scaled already: drop its scaling.

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


def genome_of(rope: RopeSpec, method: str, scale: float, attention_factor: float | None) -> Genome:
    """A method's table as divisors.

    Args:
        rope: The table.
        method: A static frequency method that takes a scale.
        scale: Its scale.
        attention_factor: Instead of the method's own factor on cos and sin.
    """
    built = get_method(method).from_options(scale=scale)
    assert isinstance(built, RopeScaling)
    plain, changed = rope.default_inv_freq(), built.inv_freq(rope)
    moving = changed > 0  # a proportional table ends in pairs that do not rotate
    factors = torch.where(moving, plain / torch.where(moving, changed, 1.0), 1.0)
    # an order that rounding alone disturbs is put right, for the last pairs too
    ordered = torch.cummax(factors, dim=0).values.clamp(min=1.0)
    own = float(built.cos_sin_factor(rope))
    return Genome(tuple(ordered.tolist()), own if attention_factor is None else attention_factor)


def starts(rope: RopeSpec, scale: float, attention_factor: float | None) -> dict[str, Genome]:
    """The individuals that a search begins with, by the method that they are."""
    return {name: genome_of(rope, name, scale, attention_factor) for name in STARTS}


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
