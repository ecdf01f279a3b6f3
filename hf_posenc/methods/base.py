"""Base classes of the methods: small frozen dataclasses whose fields are the paper's options."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Union

from hf_posenc.errors import PosencError, unknown
from hf_posenc.lengths import plain
from hf_posenc.rope import RopeSpec

if TYPE_CHECKING:
    from torch import Tensor

Length = Union[int, "Tensor", None]
"""A number of tokens: an int, or a 0-dim tensor (a forward then needs no host sync). `None`: not known yet."""

UPDATES = ("sequence", "request", "row")
"""Lengths that a length-dependent method can follow; see `LengthDependent`."""

REGISTRY: dict[str, type[Method]] = {}
"""The methods of this package by class name."""


FILTERS = "filters"
"""The field of a frequency method that is no option of its own, but the methods after it in a list."""
LARGEST = 2**31 - 1
"""The largest whole number of a field: positions are compared with it."""


def number(low: float, *, above: bool = False, most: float = math.inf) -> Mapping[str, Any]:
    """Metadata of a field: a finite number of at least `low` (with `above`, greater than it) and at most `most`."""
    least = math.nextafter(low, math.inf) if above else low
    bounds = f"{'above' if above else 'of at least'} {low:g}"
    bounds += f" and at most {most:g}" * math.isfinite(most)

    def valid(value: Any) -> bool:
        plain = isinstance(value, int | float) and not isinstance(value, bool)
        return plain and least <= value <= min(most, sys.float_info.max)

    return {"values": f"a number {bounds}", "valid": valid}


def count(low: int = 1) -> Mapping[str, Any]:
    """Metadata of a field: a whole number of at least `low`."""

    def valid(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and low <= value <= LARGEST

    return {"values": f"a whole number of at least {low} and at most {LARGEST:,}", "valid": valid}


def switch() -> Mapping[str, Any]:
    """Metadata of a field: `True` or `False`."""
    return {"values": "True or False", "valid": lambda value: isinstance(value, bool)}


def choice(*names: str) -> Mapping[str, Any]:
    """Metadata of a field: one of some names."""
    return {"values": names, "valid": lambda value: isinstance(value, str) and value in names}


def several(one: Mapping[str, Any]) -> Mapping[str, Any]:
    """Metadata of a field: a list, not empty, of values with that metadata."""

    def valid(values: Any) -> bool:
        listed = isinstance(values, Sequence) and not isinstance(values, str)
        return listed and len(values) > 0 and all(map(one["valid"], values))

    return {"values": f"a list of values that are each {one['values']}", "valid": valid}


@dataclass(frozen=True, kw_only=True)
class Method:
    """The base of every method.

    A class in a module of `hf_posenc.methods` is registered by its definition, under its `name` and
    its aliases. A class that is defined elsewhere is not; `patch_model` takes objects of it.

    Fields are checked if their metadata come from `number`, `count`, `switch`, `choice` or `several`;
    `None` is valid where it is the default.

    Attributes:
        name: The canonical name, as `patch_model` takes it.
        aliases: Other names of the same method.
        summary: One line for tables.
        source: Paper and section, or the place of first publication.
        needs: What the method needs before its output means anything.
        kind: Its group in tables: `"frequencies"`, `"bands"`, `"biases"`, `"others"` or
            `"tables"`.
        seam: Where the method lands in a model; two methods on one seam exclude each other.
        beside: Seams of the methods that a list may have beside it; on the seam of frequencies, its filters.
        beside_kept: Those beside a bias with `keep_rope`.
        length_dependent: True if its frequencies depend on the length of the running sequence.
        follows_text: True if it needs no target length, and takes none but in the place of a table of positions.
        reads_length: False if it is patched without a context length of the training too.
        trainable: True if it adds parameters to train.
        trainable_with: The knob with which a method adds some that otherwise has none, in words.
        bidirectional: True if it computes attention to keys after the query too, as encoders read them.
        for_rotary: True if models with a rotary embedding take it.
        for_causal: True if it is meant for models that read what is before a token alone.
    """

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    summary: ClassVar[str]
    source: ClassVar[str]
    needs: ClassVar[str]
    kind: ClassVar[str] = "others"
    seam: ClassVar[str]
    beside: ClassVar[tuple[str, ...]] = ("rotary", "attention", "query", "bias")
    beside_kept: ClassVar[tuple[str, ...]] = ()
    length_dependent: ClassVar[bool] = False
    follows_text: ClassVar[bool] = False
    reads_length: ClassVar[bool] = True
    trainable: ClassVar[bool] = False
    trainable_with: ClassVar[str] = ""
    bidirectional: ClassVar[bool] = False
    for_rotary: ClassVar[bool] = True
    for_causal: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" in vars(cls) and cls.__module__.startswith("hf_posenc.methods."):
            REGISTRY[cls.__name__] = cls

    def __post_init__(self) -> None:
        """Check the fields; the end of the chain of `super()` calls."""
        for option in dataclasses.fields(self):
            value, valid = getattr(self, option.name), option.metadata.get("valid")
            if value is not (value := plain(value)):
                object.__setattr__(self, option.name, value)
            if valid is None or (value is None and option.default is None) or valid(value):
                continue
            values = option.metadata["values"]
            if isinstance(values, tuple):
                raise unknown(f"{option.name} of {self.name}", str(value), values)
            raise PosencError(f"{self.name}: {option.name} is {values}, not {value!r}.")

    @property
    def reads_rotation(self) -> bool:
        """True if the engine must know how a layer rotates to compute the method there."""
        return self.seam != "query"

    def check_beside(self, others: Sequence[Method]) -> None:
        """Check that the method has a meaning together with others, on other seams.

        Raises:
            PosencError: It has none.
        """

    def parameters_for(
        self, heads: int, key_heads: int, head_dim: int, original: int
    ) -> dict[str, Tensor]:
        """Return the parameters to train in one attention layer, at their initial values; none by default.

        Args:
            heads: Query heads.
            key_heads: Key heads.
            head_dim: Width of a head, in features.
            original: The original context length L, in tokens.
        """
        return {}

    @property
    def shared_parameters(self) -> tuple[str, ...]:
        """The names of the parameters that all layers have in common: stored once, trained by every layer."""
        return ()

    def query_factor(self, m: Tensor, original: int) -> Tensor | None:
        """Return the factor on the query at m, of m's shape; `None`: no factor.

        A trained parameter `query_scale` of `parameters_for`, shape (heads,), multiplies it.

        Args:
            m: Positions, an integer tensor of any shape.
            original: The original context length L, in tokens.
        """
        return None

    @classmethod
    def knobs(cls) -> dict[str, Any]:
        """Return the options with their defaults, `scale` first; `dataclasses.MISSING`: required."""
        fields = sorted(dataclasses.fields(cls), key=lambda option: option.name != "scale")
        return {option.name: option.default for option in fields if option.name != FILTERS}

    @classmethod
    def takes_scale(cls) -> bool:
        """True if there is a `scale` knob: a target context as a multiple of the original one."""
        return "scale" in cls.knobs()

    @classmethod
    def from_options(cls, **options: Any) -> Method:
        """Build the method, with errors that name the knob.

        Raises:
            PosencError: An unknown option, a missing one, or a value out of range.
        """
        knobs = cls.knobs()
        for option in options:
            if option not in knobs:
                raise unknown(f"option of {cls.name}", option, knobs)
        for knob, default in knobs.items():
            if default is dataclasses.MISSING and knob not in options:
                also = " (or target_length=)" if knob == "scale" else ""
                raise PosencError(f"{cls.name} needs {knob}={also}: {cls.summary}.")
        try:
            return cls(**options)
        except TypeError as error:
            raise PosencError(f"{cls.name}: a value has the wrong type ({error}).") from error

    def options(self) -> dict[str, Any]:
        """Return the knobs that differ from their defaults."""
        return {
            knob: getattr(self, knob)
            for knob, default in self.knobs().items()
            if getattr(self, knob) != default
        }


@dataclass(frozen=True, kw_only=True)
class RopeScaling(Method):
    """A method that changes only the rotary frequencies and a factor on cos and sin.

    Without `update`, or with `"sequence"`, attention, cache and backend stay the model's own, at no cost.

    Args:
        filters: What changes the finished table, in order. `patch_model` sets it from a list.

    Attributes:
        identity_at_scale_one: True if no bit of the table changes with `scale=1`, or, for a method
            that follows the text, up to the original length. The tests hold a method to it.
        only_lowers_frequencies: True if reaching further raises no frequency, keeps their order and
            lowers none by more than the scale. The tests hold a method to it.
        stops_pairs: True if it may set frequencies to 0; such pairs do not rotate.
    """

    kind: ClassVar[str] = "frequencies"
    seam: ClassVar[str] = "rotary"
    identity_at_scale_one: ClassVar[bool] = True
    only_lowers_frequencies: ClassVar[bool] = True
    stops_pairs: ClassVar[bool] = False

    filters: tuple[TableFilter, ...] = field(default=(), repr=False)

    @property
    def label(self) -> str:
        """The name of the method, and of its filters."""
        return " + ".join(method.name for method in (self, *self.filters))

    def inv_freq(self, rope: RopeSpec, length: Length = None) -> Tensor:
        """Return the method's own frequencies, shape (d/2,), float64, radians per token.

        Args:
            rope: The table to change.
            length: Current number of tokens, for length-dependent methods.
        """
        raise NotImplementedError

    def frequencies(self, rope: RopeSpec, length: Length = None) -> Tensor:
        """Return the frequencies in force: `inv_freq` after every filter."""
        frequencies = self.inv_freq(rope, length)
        for each in self.filters:
            frequencies = each.filtered(frequencies, rope)
        return frequencies

    def scale_at(self, rope: RopeSpec, length: Length) -> float | Tensor:
        """Return the scale `s` that the frequencies have; 1 for a method without one."""
        return 1.0

    def cos_sin_factor(self, rope: RopeSpec, length: Length = None) -> float | Tensor:
        """Return the factor on cos and sin (`attention_scaling` in transformers); 1 for most methods."""
        return 1.0

    def rope_parameters(self, rope: RopeSpec) -> dict[str, Any] | None:
        """Return the same method as `config.rope_parameters`, `rope_type` included.

        `None` where transformers has no such method.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class TableFilter(RopeScaling):
    """A change of a finished table: alone, of the model's own; in a list, of the method's before it."""

    identity_at_scale_one: ClassVar[bool] = False
    only_lowers_frequencies: ClassVar[bool] = False
    stops_pairs: ClassVar[bool] = True
    needs: ClassVar[str] = "fine-tuning"

    def filtered(self, frequencies: Tensor, rope: RopeSpec) -> Tensor:
        """Return the frequencies after the filter, of the same shape, radians per token.

        Args:
            frequencies: Shape (d/2,), float64, the fastest first.
            rope: The table that the method before the filter started from.
        """
        raise NotImplementedError

    def inv_freq(self, rope: RopeSpec, length: Length = None) -> Tensor:
        return self.filtered(rope.default_inv_freq(), rope)


@dataclass(frozen=True, kw_only=True)
class Scaled(RopeScaling):
    """A frequency method with one scale, given in advance.

    Args:
        scale: Target context as a multiple `s` of the original one.
    """

    scale: float = field(metadata=number(1))

    def scale_at(self, rope: RopeSpec, length: Length) -> float:
        return self.scale


@dataclass(frozen=True, kw_only=True)
class Growing(Method):
    """A method that depends on the length of the running text, which it may follow by whole buckets.

    Args:
        bucket: Tokens by which the length grows at once; half of the original context by default.
    """

    bucket: int | None = field(default=None, metadata=count())

    @property
    def update(self) -> str:
        """The length to follow, one of `UPDATES`."""
        raise NotImplementedError

    def bucket_size(self, original: int) -> int:
        """Return the tokens by which the length grows at once, given the original context length."""
        return max(1, original // 2) if self.bucket is None else self.bucket

    def bucket_of(self, m: Tensor, original: int) -> Tensor:
        """Return a number for each query at m, of m's shape: with `update="row"` the length in force, else 0."""
        if self.update != "row":
            return m * 0
        return bucket_length(m, original, self.bucket_size(original))


@dataclass(frozen=True, kw_only=True)
class LengthDependent(RopeScaling, Growing):
    """A frequency method whose table depends on the length of the running sequence.

    Args:
        update: The length to follow. `"row"`: `bucket_length` of each query's own position, so that a
            prefix never changes and every way to run a text agrees. `"request"`: `max(L, n)` with
            n the row's own tokens at its first forward; while its cache lives it grows by whole buckets.
            `"sequence"`: the longest row of the batch, as published and as transformers does it.
        bucket: Tokens by which the length grows at once in the modes `"row"` and `"request"`; half of
            the original context by default.
    """

    length_dependent: ClassVar[bool] = True

    beside: ClassVar[tuple[str, ...]] = ("rotary", "query", "bias")

    update: str = field(default="row", metadata=choice(*UPDATES))


@dataclass(frozen=True, kw_only=True)
class Dynamic(LengthDependent):
    """A frequency method with the scale `s = max(1, N / L)` of the N tokens at hand."""

    follows_text: ClassVar[bool] = True

    def scale_at(self, rope: RopeSpec, length: Length) -> Tensor:
        import torch

        trained = rope.original_max_position_embeddings
        current = torch.as_tensor(trained if length is None else length).to(torch.float64)
        return (current / trained).clamp(min=1.0)


def bucket_length(m: Tensor, original: int, bucket: int) -> Tensor:
    """Return the length in force for a query at position m with `update="row"`, of m's shape, int64.

    It is `L` for positions below the original length `L`, and `L + ceil((m + 1 - L) / bucket) * bucket`
    from there on: `L` and as many whole buckets as hold the position.

    Args:
        m: Positions, an integer tensor of any shape.
        original: The original context length L, in tokens.
        bucket: Tokens a bucket.

    Examples:
        >>> import torch
        >>> from hf_posenc.methods import bucket_length
        >>> bucket_length(torch.tensor([0, 4095, 4096, 6144]), original=4096, bucket=2048)
        tensor([4096, 4096, 6144, 8192])
    """
    import torch

    past = (m.to(torch.int64) + 1 - original).clamp(min=0)
    return original + (past + bucket - 1) // bucket * bucket


def seam_of(method: Method) -> str:
    """Return the seam of a method object: `"rotary"`, `"attention"`, `"bias"`, `"query"` or `"table"`.

    Args:
        method: An object, since the seam of some methods depends on `update`.

    Examples:
        >>> from hf_posenc.methods import DynamicYaRN, seam_of
        >>> seam_of(DynamicYaRN()), seam_of(DynamicYaRN(update="sequence"))
        ('attention', 'rotary')
    """
    if isinstance(method, LengthDependent) and method.length_dependent:
        # In the other modes each query, or each row of the batch, has frequencies of its own.
        return method.seam if method.update == "sequence" else "attention"
    return method.seam


def update_of(method: Method) -> str:
    """Return the length that a method's frequencies, bands or table follow; `"static"` if they follow none."""
    if isinstance(method, LengthDependent) and not method.length_dependent:
        return "static"
    return getattr(method, "update", "static")


def needs_no_rotation(methods: Iterable[Method | type[Method]]) -> bool:
    """Return whether all of these methods act in layers that do not rotate too, since they only multiply queries.

    Args:
        methods: Classes or objects.
    """
    return all(method.seam == "query" for method in methods)


def starting_table(rope: RopeSpec, scale: float | Tensor) -> Tensor:
    """Return the default frequencies, on the device of the scale."""
    from torch import Tensor

    table = rope.default_inv_freq()
    return table.to(scale.device) if isinstance(scale, Tensor) else table


def real(position: Tensor) -> Tensor:
    """Return positions as float64, which is exact for integers; as float32 on MPS, which has no float64."""
    import torch

    return position.to(torch.float32 if position.device.type == "mps" else torch.float64)
