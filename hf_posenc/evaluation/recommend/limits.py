"""What a rotary table says about lengths, in closed form: nothing is run.

Two things go wrong past the trained length, and each method trades one for the other. Slow pairs, which made less than
one turn in training, reach angles that the model has never met. Slowed-down fast pairs, which tell neighbouring tokens
apart, make neighbours look closer than they ever did.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_posenc.rope import RopeSpec

FAST_TURNS = 32
"""Pairs of at least so many turns in training are fast: YaRN's beta_fast (arXiv 2309.00071)."""

FIT_FACTOR, FIT_EXPONENT = 0.0424, 1.628
"""The fit `b >= 0.0424 L^1.628` of Men et al. 2024 (arXiv 2405.14591, figure 1), made for 128 rotary dimensions."""

_BLOCK = 1 << 14


@dataclass(frozen=True)
class RotaryLimits:
    """What a table and the length that it was trained at imply.

    Attributes:
        original: The trained length L, in tokens.
        theta: The base b.
        dim: Rotary dimension d.
        turns: Turns that each pair makes over L tokens, `L f_i / (2 pi)`; shape (d/2,).
        rotated: Pairs that rotate at all.
        full_turns: Pairs that made one whole turn in training.
        fast: Pairs that made `FAST_TURNS` of them.
        critical_dimension: Features of these whole-turn pairs, `2 ceil(d/2 log_b(L / (2 pi)))` for a plain table (Liu
            et al. 2023, arXiv 2310.05209); those past it have not seen all their angles.
        base_context: The length for which this base is the least, by the fit.
        similar_until: The first distance at which `sum_i cos(m f_i)` is negative, so that a similar token no longer
            gets more attention than a random one (arXiv 2405.14591, theorem 1); `None`: not up to the target.
    """

    original: int
    theta: float
    dim: int
    turns: tuple[float, ...]
    rotated: int
    full_turns: int
    fast: int
    critical_dimension: int
    base_context: int
    similar_until: int | None

    @property
    def slow(self) -> int:
        """Pairs that rotate, and made less than one turn in training."""
        return self.rotated - self.full_turns


def rotary_limits(spec: RopeSpec, target: int) -> RotaryLimits:
    """Reads a table.

    Args:
        spec: The table as it was trained.
        target: How far to look, in tokens.
    """
    table = spec.default_inv_freq()
    original = spec.original_max_position_embeddings
    turns = turns_of(table, original)
    full = int((turns >= 1).sum())
    return RotaryLimits(
        original=original,
        theta=spec.theta,
        dim=spec.dim,
        turns=tuple(turns.tolist()),
        rotated=int((table > 0).sum()),
        full_turns=full,
        fast=int((turns >= FAST_TURNS).sum()),
        critical_dimension=2 * full,
        base_context=math.floor((spec.theta / FIT_FACTOR) ** (1 / FIT_EXPONENT)),
        similar_until=similar_until(table, target),
    )


def turns_of(table: Tensor, length: int) -> Tensor:
    """Turns that each pair makes over so many tokens, shape (d/2,)."""
    return table * (length / (2 * math.pi))


def least_base(length: int) -> float:
    """The least base for a length, by the fit of arXiv 2405.14591."""
    return FIT_FACTOR * math.pow(length, FIT_EXPONENT)


def similar_until(table: Tensor, limit: int) -> int | None:
    """The first distance below `limit`, in tokens, at which `sum_i cos(m f_i) < 0`; `None`: there is none."""
    for start in range(0, limit, _BLOCK):
        distances = torch.arange(start, min(start + _BLOCK, limit), dtype=torch.float64)
        negative = (torch.outer(distances, table).cos().sum(1) < 0).nonzero()
        if len(negative):
            return start + int(negative[0])
    return None


def met_until(trained: Tensor, patched: Tensor, original: int) -> float:
    """The length in tokens up to which no slow pair of a changed table leaves the angles of training.

    The least of `L f_i / f'_i` over the pairs with `L f_i < 2 pi`; infinite where there is none.

    Args:
        trained: The frequencies f of training, shape (d/2,).
        patched: The changed ones f', of that shape.
        original: The trained length L, in tokens.
    """
    slow = (trained > 0) & (turns_of(trained, original) < 1) & (patched > 0)
    if not bool(slow.any()):
        return math.inf
    return original * float((trained[slow] / patched[slow]).min())


def slowed_by(trained: Tensor, patched: Tensor, original: int) -> float:
    """By how much the most slowed of the fast pairs turns slower than in training; at least 1.

    Args:
        trained: As for `met_until`.
        patched: As for `met_until`.
        original: As for `met_until`.
    """
    fast = (turns_of(trained, original) >= FAST_TURNS) & (patched > 0)
    if not bool(fast.any()):
        return 1.0
    return max(1.0, float((trained[fast] / patched[fast]).max()))
