"""What a search varies: a divisor for every pair of features, and the factor on cos and sin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.candidates import Candidate
from hf_posenc.evaluation.requests import Part, Request
from hf_posenc.evaluation.sweep.trials import spec_of
from hf_posenc.methods import RopeScaling, get_method
from hf_posenc.resolve import adapter_of, tables_of, unwrap
from hf_posenc.rope import RopeSpec
from hf_posenc.seams.discovery import original_length, read_spec
from hf_posenc.seams.layers import select

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
    inner = unwrap(model)
    tables = select(tables_of(inner, adapter_of(inner)), "full", whole=True)
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
