"""What a method is: a small frozen dataclass whose fields are the paper's knobs."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_posenc.errors import PosencError, unknown
from hf_posenc.rope import RopeSpec

Length = int | Tensor | None
"""A number of tokens: an int, or a 0-dim tensor (a forward then needs no host sync). `None`: not known yet."""


UPDATES = ("sequence", "request", "row")
"""What the length of a length-dependent method can be."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """The base of every method.

    Class attributes:
        name: The canonical name, as `patch_model` takes it.
        aliases: Other names of the same method.
        summary: One line for tables.
        source: Paper and section, or the place of first publication.
        needs: What the method needs before its output means anything.
        seam: Where the method lands in a model; two methods on one seam exclude each other.
        length_dependent: Whether what it computes depends on the length of the running sequence.
        follows_text: Whether it scales just as far as the text needs, so that it takes no target
            length.
        trainable: Whether it brings parameters of its own to train.
    """

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    summary: ClassVar[str]
    source: ClassVar[str]
    needs: ClassVar[str]
    seam: ClassVar[str]
    length_dependent: ClassVar[bool] = False
    follows_text: ClassVar[bool] = False
    trainable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Checks the knobs; the end of the chain of `super()` calls."""

    @classmethod
    def knobs(cls) -> dict[str, Any]:
        """The options with their defaults, `scale` first; `dataclasses.MISSING`: must be given."""
        fields = sorted(dataclasses.fields(cls), key=lambda field: field.name != "scale")
        return {field.name: field.default for field in fields}

    @classmethod
    def takes_scale(cls) -> bool:
        """Whether the method has a `scale` knob, i.e. a target context as a multiple of the original one."""
        return "scale" in cls.knobs()

    @classmethod
    def from_options(cls, **options: Any) -> Method:
        """Builds the method, with errors that name the knob.

        Raises:
            PosencError: An option that the method does not have, one that it needs and did not get,
                or a value out of range.
        """
        knobs = cls.knobs()
        for option in options:
            if option not in knobs:
                raise unknown(f"option of {cls.name}", option, knobs)
        for knob, default in knobs.items():
            if default is dataclasses.MISSING and knob not in options:
                also = " (or target_length=)" if knob == "scale" else ""
                raise PosencError(f"{cls.name} needs {knob}={also}. {cls.summary}")
        try:
            return cls(**options)
        except TypeError as error:
            raise PosencError(f"{cls.name}: a value has the wrong type ({error}).") from error

    def options(self) -> dict[str, Any]:
        """The knobs that differ from their defaults."""
        return {
            knob: getattr(self, knob)
            for knob, default in self.knobs().items()
            if getattr(self, knob) != default
        }


@dataclass(frozen=True, kw_only=True)
class RopeScaling(Method):
    """A method that changes only the rotary frequencies and a factor on cos and sin.

    Attention, cache and backend stay the model's own, so the method costs nothing.
    """

    seam: ClassVar[str] = "rotary"

    def inv_freq(self, rope: RopeSpec, length: Length = None) -> Tensor:
        """The frequencies in force, shape (d/2,), float64, radians per token.

        Args:
            rope: The table to change.
            length: Current number of tokens, for length-dependent methods.
        """
        raise NotImplementedError

    def cos_sin_factor(self, rope: RopeSpec, length: Length = None) -> float | Tensor:
        """The factor on cos and sin (`attention_scaling` in transformers); 1 for most methods."""
        return 1.0

    def rope_parameters(self, rope: RopeSpec) -> dict[str, Any] | None:
        """The same method in transformers' own words; `None` where it has no such method.

        Returns:
            Entries of `config.rope_parameters`, `rope_type` among them.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class Scaled(RopeScaling):
    """A frequency method with one scale, given in advance.

    Args:
        scale: Target context as a multiple `s` of the original one.
    """

    scale: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "scale", 1)


@dataclass(frozen=True, kw_only=True)
class LengthDependent(RopeScaling):
    """A frequency method whose table moves with the length of the running sequence.

    Args:
        update: What that length is. `"row"`: `bucket_length` of each query's own position, so that a
            prefix never changes and every way to run a text agrees. `"request"`: each batch row's own
            length, pinned while its cache lives. `"sequence"`: the longest row of the batch, as published
            and as transformers does it.
        bucket: By how many tokens at once the length moves on in the modes `"row"` and `"request"`;
            half of the original context by default.
    """

    length_dependent: ClassVar[bool] = True

    update: str = "row"
    bucket: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.update not in UPDATES:
            raise unknown(f"update mode of {self.name}", str(self.update), UPDATES)
        check_count(self, "bucket", optional=True)

    def bucket_size(self, original: int) -> int:
        """By how many tokens at once the length moves on, given the original context length."""
        return max(1, original // 2) if self.bucket is None else self.bucket


def check_range(method: Method, knob: str, low: float, *, exclusive: bool = False) -> None:
    """Refuses a knob that is not a finite number of at least (or, `exclusive`, above) `low`."""
    value = getattr(method, knob)
    good = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and (value > low if exclusive else value >= low)
    )
    if not good:
        bound = "above" if exclusive else "of at least"
        raise PosencError(f"{method.name}: {knob} is a number {bound} {low:g}, not {value!r}.")


def check_count(method: Method, knob: str, low: int = 1, *, optional: bool = False) -> None:
    """Refuses a knob that is not a whole number of at least `low` (or `None`, if `optional`)."""
    value = getattr(method, knob)
    if optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise PosencError(
            f"{method.name}: {knob} is a whole number of at least {low}, not {value!r}."
        )


def check_switch(method: Method, knob: str) -> None:
    """Refuses a knob that is neither `True` nor `False`."""
    value = getattr(method, knob)
    if not isinstance(value, bool):
        raise PosencError(f"{method.name}: {knob} is True or False, not {value!r}.")


def bucket_length(m: Tensor, original: int, bucket: int) -> Tensor:
    """The length in force for a query at position m with `update="row"`, of m's shape, int64.

    `L` for the positions up to the original length `L`; past it `L` and as many whole buckets as
    hold the position, `L + ceil((m + 1 - L) / bucket) * bucket`, so that it depends on nothing else.

    Args:
        m: Positions, an integer tensor of any shape.
        original: The original context length L, in tokens.
        bucket: Tokens a bucket.
    """
    past = (m.to(torch.int64) + 1 - original).clamp(min=0)
    return original + (past + bucket - 1) // bucket * bucket


def seam_of(method: Method) -> str:
    """Where a method lands: `"rotary"`, `"attention"`, `"bias"` or `"query"`."""
    if isinstance(method, LengthDependent) and method.update != "sequence":
        return "attention"  # each query, or each row of the batch, has frequencies of its own
    return method.seam


def running_scale(rope: RopeSpec, length: Length) -> Tensor:
    """`s = max(1, N / L)` of the dynamic methods, as a 0-dim float64 tensor."""
    trained = rope.original_max_position_embeddings
    current = torch.as_tensor(trained if length is None else length).to(torch.float64)
    return (current / trained).clamp(min=1.0)
