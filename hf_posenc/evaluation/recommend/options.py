"""Each method at the target length: whether it gets there, what it needs, and why."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.recommend import limits as evidence
from hf_posenc.evaluation.recommend.limits import least_base, met_until, slowed_by
from hf_posenc.methods import (
    ABF,
    LengthDependent,
    LogN,
    Method,
    RopeScaling,
    RotaryBands,
    get_method,
)
from hf_posenc.rope import RopeSpec

AS_IT_IS = "as it is"
FINE_TUNED = "after fine-tuning"
SHORT = "does not reach"
WINDOW = "a window only"
TRAINED = "after training"
BESIDE = "beside another"
REFUSED = "not on this model"
WORKS = (AS_IT_IS, FINE_TUNED, SHORT, WINDOW, BESIDE, TRAINED, REFUSED)
"""How a method works at the target, the best first."""

_SEARCH = 16
"""A larger scale is looked for up to so many times the plain one."""


@dataclass(frozen=True)
class Start:
    """What a method starts from.

    Attributes:
        spec: The table that frequency methods start from, and the length that it was trained at.
        target: The target length, in tokens.
        beside: What `patch_model` takes beside a frequency method's options: `compose` or `replace`, where the
            checkpoint is scaled already, and the original length, where the config names another.
        reach: The length that the table in force reaches, in tokens: methods that compute attention go on from there.
        beside_attention: As `beside`, for these.
    """

    spec: RopeSpec
    target: int
    beside: Mapping[str, Any]
    reach: int
    beside_attention: Mapping[str, Any]

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
    """A method at the target length.

    Attributes:
        method: Its name.
        works: One of `WORKS`.
        reason: Why, in one line.
        options: What to give `patch_model`; `None` where something has to be found first.
        attention: Whether it computes attention itself, rather than changing the table alone.
        trial: Whether it was tried on the model; `None`: its weights are not there to try it on.
        evidence: What published tables show of it without training.
        met: Of a frequency method, the length in tokens up to which slow pairs stay at angles met in training.
        slowed: Of a frequency method, by how much the most slowed of the fast pairs turns slower.
    """

    method: str
    works: str
    reason: str
    options: dict[str, Any] | None
    attention: bool
    trial: bool | None = None
    evidence: tuple[evidence.Seen, ...] = ()
    met: float | None = None
    slowed: float = 1.0

    @property
    def spec(self) -> str | None:
        """As `--patch` takes it."""
        if self.options is None:
            return None
        said = [f"{knob}={_said(value)}" for knob, value in self.options.items()]
        return f"{self.method}:{','.join(said)}" if said else self.method

    @property
    def call(self) -> str | None:
        """The call of `patch_model`."""
        if self.options is None:
            return None
        said = "".join(f", {knob}={value!r}" for knob, value in self.options.items())
        return f"patch_model(model, {self.method!r}{said})"

    @property
    def by_sequence(self) -> Option | None:
        """A dynamic method in the form that changes the table alone; `None` for the others."""
        if self.options is None or "update" not in get_method(self.method).knobs():
            return None
        options = {**self.options, "update": "sequence"}
        return dataclasses.replace(self, options=options, attention=False)

    def after(self, error: PosencError | None) -> Option:
        """The same after its trial on the model."""
        if error is None:
            return dataclasses.replace(self, trial=True)
        reason = " ".join(str(error).split())
        return dataclasses.replace(self, works=REFUSED, reason=reason, trial=False)


def option_of(kind: type[Method], start: Start) -> Option:
    """What a method does at the target length."""
    if issubclass(kind, RotaryBands):
        return _bands(kind, start)
    if issubclass(kind, RopeScaling):
        return _frequencies(kind, start)
    options = dict(start.beside_attention)
    if kind is LogN:
        reason = "sharpens attention over many keys, and leaves the angles as they are"
        return Option(kind.name, BESIDE, reason, options, attention=True)
    reason = f"{kind.summary}; says nothing before training"
    return Option(kind.name, TRAINED, reason, options, attention=True)


def _frequencies(kind: type[RopeScaling], start: Start) -> Option:
    moving = issubclass(kind, LengthDependent)
    if kind.name == "longrope":
        reason = (
            "a divisor of its own for every pair, which hf-posenc search looks for on your text"
        )
        return Option(kind.name, FINE_TUNED, reason, None, attention=moving)
    if kind is ABF:
        return _another_base(start)
    if kind.needs.startswith("training"):
        reason = f"{kind.summary}; says nothing before training"
        return Option(kind.name, TRAINED, reason, dict(start.beside), attention=False)

    untrained = kind.needs.startswith("nothing")
    method, options = _reaching(kind, start, raised=untrained)
    trained, original = start.spec.default_inv_freq(), start.original
    patched = method.inv_freq(start.spec, start.target)
    met = met_until(trained, patched, original)
    slowed = slowed_by(trained, patched, original)
    reaches = met >= start.target * (1 - 1e-9)
    angles = (
        "slow pairs stay at angles met in training"
        if reaches
        else f"slow pairs leave the angles of training at {math.floor(met):,} tokens"
    )
    near = (
        "fast pairs are untouched"
        if slowed == 1
        else f"fast pairs turn up to {slowed:.3g} times slower"
    )
    works = (AS_IT_IS if untrained else FINE_TUNED) if reaches else SHORT
    shown = evidence.seen(kind.name)
    reason = "; ".join(filter(None, (f"{angles}, {near}", evidence.sentence(shown))))
    options = {**options, **start.beside}
    return Option(kind.name, works, reason, options, moving, None, shown, met, slowed)


def _another_base(start: Start) -> Option:
    """A larger base, for a model that is then trained with it."""
    dim = start.spec.dim
    least = least_base(start.target)
    ntk = start.spec.theta * start.factor ** (dim / max(1, dim - 2))
    base = _two_digits(max(least, ntk))
    reason = (
        f"rope_theta {base:,.0f}: {start.target:,} tokens take {least:,.0f} (arXiv 2405.14591), and {ntk:,.0f} slow "
        "the slowest pair as NTK does"
    )
    scaled = {"compose", "replace"} & set(start.beside)
    options = {"rope_theta": base, **({"replace": True} if scaled else {})}
    return Option(ABF.name, FINE_TUNED, reason, options, attention=False)


def _reaching(
    kind: type[RopeScaling], start: Start, *, raised: bool
) -> tuple[RopeScaling, dict[str, Any]]:
    """The method at the least scale with which slow pairs stay at angles met in training, and the options that say so.

    Args:
        kind: The method.
        start: What it starts from.
        raised: Look for a larger scale than the plain one, where that is too small.
    """

    def made(scale: float) -> RopeScaling:
        method = kind.from_options(**({"scale": scale} if kind.takes_scale() else {}))
        assert isinstance(method, RopeScaling)
        return method

    def enough(scale: float) -> bool:
        patched = made(scale).inv_freq(start.spec, start.target)
        met = met_until(start.spec.default_inv_freq(), patched, start.original)
        return met >= start.target * (1 - 1e-9)

    plain = 1.0 if kind.follows_text else start.factor
    options = {} if kind.follows_text else {"target_length": start.target}
    top = _SEARCH * start.factor
    if not kind.takes_scale() or not raised or enough(plain) or not enough(top):
        return made(plain), options
    low, high = plain, top
    while high - low > 1e-3 * low:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    scale = math.ceil(high * 100) / 100
    return made(scale), {"scale": scale}


def _bands(kind: type[RotaryBands], start: Start) -> Option:
    original, target = start.reach, start.target
    takes_scale = kind.takes_scale()
    method = kind.from_options(**({"scale": target / original} if takes_scale else {}))
    assert isinstance(method, RotaryBands)
    farthest, read = _distances(method, original, target)
    if read < target:
        works = WINDOW
        reason = f"reads {read:,} of {target:,} tokens: never breaks, and cannot use the rest"
    elif farthest > original:
        works = SHORT
        reason = (
            f"reads distances of up to {farthest:,.0f} tokens, trained on less than {original:,}"
        )
    else:
        works = AS_IT_IS
        reason = f"reads every distance as one of at most {farthest:,.0f} tokens"
    shown = evidence.seen(kind.name)
    reason = "; ".join(filter(None, (reason, evidence.sentence(shown))))
    options = {**({"target_length": target} if takes_scale else {}), **start.beside_attention}
    return Option(kind.name, works, reason, options, attention=True, evidence=shown)


def _distances(method: RotaryBands, original: int, target: int) -> tuple[float, int]:
    """The largest rotary distance at which the last query of a text reads a key, and how many keys it reads."""
    query, keys = torch.tensor(target - 1), torch.arange(target)
    farthest, read = 0.0, 0
    for band in method.bands(original):
        inside = keys[band.contains(query, keys)]
        if len(inside):
            distance = band.query_position(query) - band.key_position(inside)
            farthest, read = max(farthest, float(distance.max())), read + len(inside)
    return farthest, read


def rank(options: list[Option], factor: float) -> list[Option]:
    """The best first.

    By how they work; then those that published tables saw hold at this factor, and last those that one saw break; then
    those that change the table alone, which cost nothing and can be exported; then by how little they slow the fast
    pairs, and by how far the tables saw them hold.

    Args:
        options: In the order of the documentation, which decides where nothing else does.
        factor: The target as a multiple of the trained length.
    """

    def key(option: Option) -> tuple[int, int, bool, float, float]:
        held = max((one.held for one in option.evidence), default=0.0)
        shown = evidence.verdict(option.evidence, factor)
        return WORKS.index(option.works), -shown, option.attention, option.slowed, -held

    return sorted(options, key=key)


def _two_digits(value: float) -> float:
    """Rounded up to two significant digits."""
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(value / step) * step


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else f"{value:.12g}"
