"""The judgement of each method at a target length, in closed form.

Two things go wrong past the trained length, and each method trades one for the other. Slow pairs, which made less than
one turn in training, reach angles that the model has never met. Slowed-down fast pairs, which distinguish neighbouring
tokens, make neighbours look closer than in training. Nothing here runs the model.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch
from torch import Tensor

from hf_posenc.evaluation.measuring.candidates import Candidate, Part
from hf_posenc.methods import (
    ABF,
    DPE,
    GrowingBands,
    LaMPE,
    LengthDependent,
    Method,
    RopeScaling,
    RotaryBands,
    TableFilter,
    get_method,
)
from hf_posenc.rope import RopeSpec

TOLERANCE = 1.25
"""A method holds while its perplexity is at most this multiple of the unpatched model's at the trained length.

Our choice: the published numbers are either a few per cent above or many times as large.
"""
FAST_TURNS = 32
"""Pairs with at least this many turns in training are fast: YaRN's beta_fast (arXiv 2309.00071)."""

SEARCHED = 2**17
"""Longest length, in tokens, whose least base is searched for; beyond it, the base grows by `EXPONENT`."""
EXPONENT = 1.628
"""Growth of the least base with the length in figure 1 of Men et al. 2024 (arXiv 2405.14591)."""
LARGEST_BASE = 1e12
"""The search for a base ends here: with few pairs there is none."""

AS_IT_IS = "as it is"
FINE_TUNED = "after fine-tuning"
FITTED = "once fitted to it"
SHORT = "does not reach"
WINDOW = "a window only"
TRAINED = "after training"
BESIDE = "beside another"
REFUSED = "not on this model"
WORKS = (AS_IT_IS, FINE_TUNED, FITTED, WINDOW, SHORT, BESIDE, TRAINED, REFUSED)
"""The ways in which a method works at the target, the best first."""

_BLOCK = 1 << 14
_LARGEST_SCALE = 16  # the search for a larger scale ends at this multiple of the plain one


def least_base(spec: RopeSpec, length: int) -> float | None:
    """Return the least base of two digits with which a similar token gets more attention at all distances < `length`.

    That is `sum_i cos(m f_i) >= 0` for all `m < length` (arXiv 2405.14591, theorem 1 and its least base), of the pairs
    that this model rotates: with half of the pairs, five times the base. Past `SEARCHED` tokens it is extrapolated.
    `None` if there is no such base up to `LARGEST_BASE`.
    """
    searched = min(length, SEARCHED)
    probes = [  # most bases fail at a few distances; then all of them
        torch.linspace(searched // 64, searched - 1, count, dtype=torch.float64).round()
        for count in (100, 3_000, 50_000)
    ]
    probes += torch.arange(searched, dtype=torch.float64).split(_BLOCK)
    for exponent in range(1, round(math.log10(LARGEST_BASE))):
        for digits in range(10, 100):
            base = digits * 10.0 ** (exponent - 1)
            table = ABF(rope_theta=base).inv_freq(spec)
            if not any(bool((torch.outer(each, table).cos().sum(1) < 0).any()) for each in probes):
                return base * math.pow(length / searched, EXPONENT)
    return None


def met_until(trained: Tensor, patched: Tensor, original: int) -> float:
    """Return the length in tokens up to which no slow pair of a changed table leaves the angles of training.

    The minimum of `L f_i / f'_i` over the pairs with `L f_i < 2 pi`, f' being the changed frequencies, shape (d/2,);
    infinite if there is none.
    """
    slow = (trained > 0) & (_turns(trained, original) < 1) & (patched > 0)
    if not bool(slow.any()):
        return math.inf
    return original * float((trained[slow] / patched[slow]).min())


def _turns(table: Tensor, length: int) -> Tensor:
    """Turns that each pair makes over a length, shape (d/2,)."""
    return table * (length / (2 * math.pi))


# Published evidence for methods without training: a digest of the tables in docs/data/published.json, which
# `python -m scripts.make_readme` writes.


@dataclass(frozen=True)
class Evidence:
    """Evidence of one published row for a method: the table's name, and the model as printed.

    Attributes:
        held: The largest multiple of the trained length at which it held; 0: none.
        broke: The first multiple at which it did not; `None`: none in the table.
    """

    table: str
    model: str
    held: float
    broke: float | None


@functools.cache
def evidence_of(method: str) -> tuple[Evidence, ...]:
    """Return the published evidence for a method, by its canonical name; empty if there is none."""
    rows = json.loads(resources.files(__package__).joinpath("evidence.json").read_bytes())
    return tuple(Evidence(*row) for name, *row in rows if name == method)


def verdict(evidence: Sequence[Evidence], factor: float) -> int:
    """Return 1 if the method held at this multiple and never broke below it, -1 if it broke, else 0."""
    if any(one.broke is not None and one.broke <= factor for one in evidence):
        return -1
    return int(any(one.held >= factor for one in evidence))


def summary(evidence: Sequence[Evidence], factor: float) -> str:
    """Return the evidence in a few words, with the factor and the model of each measurement, and how far it reaches."""
    parts = []
    best = max(evidence, key=lambda one: one.held, default=None)
    if best is not None and best.held:
        parts.append(f"held at x{best.held:g} ({best.model}, {best.table})")
    worst = min(evidence, key=lambda one: one.broke or math.inf, default=None)
    if worst is not None and worst.broke is not None:
        parts.append(f"not at x{worst.broke:g} ({worst.model}, {worst.table})")
    elif best is not None and factor > best.held:
        parts.append(f"x{factor:.3g} is beyond what was measured")
    return f"published, untrained: {', '.join(parts) or 'nothing'}"


@dataclass(frozen=True)
class Start:
    """Starting point of a method on the way to the target length, in tokens.

    Frequency methods start from the table of `spec`, with further arguments of `patch_model` in `beside`. Methods that
    compute attention start from the length that the table in force reaches, with `beside_attention`. What drops a
    scaling of the checkpoint has `replaced`.
    """

    spec: RopeSpec
    target: int
    beside: Mapping[str, Any]
    reach: int
    beside_attention: Mapping[str, Any]
    replaced: Mapping[str, Any]

    @property
    def original(self) -> int:
        """The trained length, in tokens."""
        return self.spec.original_max_position_embeddings

    @property
    def factor(self) -> float:
        """The target as a multiple of the trained length."""
        return self.target / self.original


@dataclass(frozen=True)
class Option:
    """Method at the target length; how it `works` is one of `WORKS`.

    Attributes:
        options: Arguments of `patch_model`; `None` if some of them have to be searched first.
        attention: True if it computes attention itself, rather than changing the table alone.
        trial: True if its trial on the model succeeded; `None`: not tried, as there are no weights.
        evidence: Published evidence for it without training.
        met: Of a frequency method, the length in tokens up to which slow pairs stay at angles met in training.
        slowed: Of a frequency method, the largest factor by which a fast pair is slowed.
    """

    method: str
    works: str
    reason: str
    options: dict[str, Any] | None
    attention: bool
    trial: bool | None = None
    evidence: tuple[Evidence, ...] = ()
    met: float | None = None
    slowed: float = 1.0

    @property
    def kind(self) -> str:
        """The part of a model that it changes, as the tables of methods name it."""
        table_alone = issubclass(get_method(self.method), (RopeScaling, TableFilter))
        return "frequencies" if table_alone else "attention"

    @property
    def candidate(self) -> Candidate | None:
        """The method with its options; `None` if some of them have to be searched first."""
        return None if self.options is None else Candidate.of([Part(self.method, self.options)], {})

    @property
    def spec(self) -> str | None:
        """The value of `--patch`."""
        return None if self.candidate is None else self.candidate.spec

    @property
    def call(self) -> str | None:
        """The call of `patch_model`."""
        return None if self.candidate is None else self.candidate.call


def option_of(kind: type[Method], start: Start) -> Option:
    """Judge a method at the target length."""
    if issubclass(kind, TableFilter):
        reason = f"{kind.summary}: changes the table that another method extends, and is measured beside it"
        return Option(kind.name, BESIDE, reason, None, attention=False)
    if kind in (DPE, LaMPE):
        reason = f"{kind.summary}: its numbers are fitted to each model, and four sets are recipes"
        return Option(kind.name, FITTED, reason, None, attention=True)
    if issubclass(kind, RotaryBands | GrowingBands):
        return _bands(kind, start)
    if issubclass(kind, RopeScaling):
        return _frequencies(kind, start)
    works, reason = TRAINED, f"{kind.summary}; needs training first"
    if kind.seam == "query":
        works = BESIDE
        reason = "sharpens attention over many keys, and leaves the angles as they are"
    return Option(kind.name, works, reason, dict(start.beside_attention), attention=True)


def _frequencies(kind: type[RopeScaling], start: Start) -> Option:
    moving = issubclass(kind, LengthDependent)
    if kind.name == "longrope":
        reason = "a separate divisor for every pair: hf-posenc search finds them on your text"
        return Option(kind.name, FINE_TUNED, reason, None, attention=moving)
    if kind is ABF:
        return _another_base(start)
    if kind.needs.startswith("training"):
        reason = f"{kind.summary}; needs training first"
        options = {"target_length": start.target, **start.beside}
        return Option(kind.name, TRAINED, reason, options, attention=False)

    untrained = kind.needs.startswith("nothing")
    method, options = _reaching(kind, start, untrained)
    trained, original = start.spec.default_inv_freq(), start.original
    patched = method.inv_freq(start.spec, start.target)
    met = met_until(trained, patched, original)
    fast = (_turns(trained, original) >= FAST_TURNS) & (patched > 0)
    ratios = trained[fast] / patched[fast]  # by how much neighbours are slowed
    slowed = max(1.0, float(ratios.max())) if bool(fast.any()) else 1.0
    reaches = met >= start.target * (1 - 1e-9)
    works = AS_IT_IS if untrained else FINE_TUNED
    angles, near = "slow pairs stay at angles met in training", "fast pairs are untouched"
    if not reaches:
        works = SHORT
        angles = f"slow pairs leave the angles of training at {math.floor(met):,} tokens"
    if slowed != 1:
        near = f"fast pairs turn up to {slowed:.3g} times slower"
    evidence = evidence_of(kind.name)
    reason = f"{angles}, {near}; {summary(evidence, start.factor)}"
    options = {**options, **start.beside}
    return Option(kind.name, works, reason, options, moving, None, evidence, met, slowed)


def _another_base(start: Start) -> Option:
    """A larger base, for a model that is then trained with it."""
    dim = start.spec.dim
    least = least_base(start.spec, start.target)
    ntk = start.spec.theta * start.factor ** (dim / max(1, dim - 2))
    base = max(least or 0.0, ntk)
    step = 10.0 ** (math.floor(math.log10(base)) - 1)
    base = math.ceil(base / step) * step  # two significant digits, rounded up
    needed = "no base suffices for" if least is None else f"{least:,.0f} is the least for"
    reason = (
        f"rope_theta {base:,.0f}: {needed} {start.target:,} tokens with {dim // 2} pairs (arXiv 2405.14591), and "
        f"{ntk:,.0f} slows the slowest pair as NTK does"
    )
    options = {"rope_theta": base, "target_length": start.target, **start.replaced}
    return Option(ABF.name, FINE_TUNED, reason, options, attention=False)


def _reaching(
    kind: type[RopeScaling], start: Start, untrained: bool
) -> tuple[RopeScaling, dict[str, Any]]:
    """Return the method at the least scale that keeps slow pairs at angles met in training, and its options.

    Only methods that need no training get a larger scale than the plain one.
    """

    def build(scale: float) -> RopeScaling:
        method = kind.from_options(**({"scale": scale} if kind.takes_scale() else {}))
        assert isinstance(method, RopeScaling)
        return method

    def reaches(scale: float) -> bool:
        patched = build(scale).inv_freq(start.spec, start.target)
        met = met_until(start.spec.default_inv_freq(), patched, start.original)
        return met >= start.target * (1 - 1e-9)

    plain = 1.0 if kind.follows_text else start.factor
    options = {} if kind.follows_text else {"target_length": start.target}
    low, high = plain, _LARGEST_SCALE * start.factor
    if not kind.takes_scale() or not untrained or reaches(low) or not reaches(high):
        return build(plain), options
    while high - low > 1e-3 * low:
        middle = (low + high) / 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    scale = math.ceil(high * 100) / 100
    return build(scale), {"scale": scale}


def _bands(kind: type[RotaryBands | GrowingBands], start: Start) -> Option:
    original, target = start.reach, start.target
    takes_scale = kind.takes_scale()
    method = kind.from_options(**({"scale": target / original} if takes_scale else {}))
    assert isinstance(method, RotaryBands | GrowingBands)
    length = (target,) if isinstance(method, GrowingBands) else ()
    # what the last query reads: the largest rotary distance, the number of keys, and if the first is one
    query, keys = torch.tensor(target - 1), torch.arange(target)
    farthest, read, sees_first = 0.0, 0, False
    for band in method.bands(original, *length):
        if len(inside := keys[band.contains(query, keys)]):
            distance = band.query_position(query) - band.key_position(inside)
            farthest, read = max(farthest, float(distance.max())), read + len(inside)
            sees_first = sees_first or int(inside[0]) == 0
    works, reason = AS_IT_IS, f"reads every distance as one of at most {farthest:,.0f} tokens"
    if read < target:
        works = WINDOW
        reason = f"reads {read:,} of {target:,} tokens, and cannot use the rest"
        if not sees_first:
            reason += "; without the first tokens a model may collapse (arXiv 2309.17453)"
    elif farthest > original:
        works, far = SHORT, f"{farthest:,.0f}"
        reason = f"reads distances of up to {far} tokens, trained on less than {original:,}"
    evidence = evidence_of(kind.name)
    if works != WINDOW:
        reason = f"{reason}; {summary(evidence, target / original)}"
    options = {**({"target_length": target} if takes_scale else {}), **start.beside_attention}
    return Option(kind.name, works, reason, options, attention=True, evidence=evidence)


def rank(options: list[Option], factor: float) -> list[Option]:
    """Sort options by class: how they work, the most useful class first.

    Within a class the order is a listing, not a finding: by published evidence at this factor, for or against; by
    whether they change the table alone, which costs nothing and can be exported; by how little they slow fast pairs;
    by the largest factor at which published tables show them hold; then that of the documentation.
    """

    def key(option: Option) -> tuple[int, int, bool, float, float]:
        held = max((one.held for one in option.evidence), default=0.0)
        proof = verdict(option.evidence, factor)
        return WORKS.index(option.works), -proof, option.attention, option.slowed, -held

    return sorted(options, key=key)
