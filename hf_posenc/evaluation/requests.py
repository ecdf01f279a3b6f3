"""What `--patch` may say: `method:option=value,...`, or several of these joined by `+`."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from hf_posenc.config import PatchConfig, parse_method
from hf_posenc.errors import PosencError
from hf_posenc.methods import LengthDependent, Method, get_method

# A plus sign in front of a name; the one in `rope_theta=1e+6` is a number's.
_PLUS = re.compile(r"\+(?=\s*[A-Za-z_])")

MAX_SHOWN = 4
"""Up to so many numbers of a list are written out in a label."""


@dataclass(frozen=True)
class Part:
    """One method of a request.

    Attributes:
        method: Its canonical name.
        options: Its knobs, as they were given.
        auto: It takes a scale and was given none; it gets one when it is patched in.
    """

    method: str
    options: dict[str, Any]
    auto: bool = False

    def label(self, beside: dict[str, Any]) -> str:
        """As reports show it: `yarn (scale 8)`, `yarn (auto)`, `rerope (window 128, log_n)`.

        Args:
            beside: What it shows behind its own options.
        """
        auto = ["auto"] if self.auto else []
        shown = [*auto, *(_said(*option) for option in (self.options | beside).items())]
        return f"{self.method} ({', '.join(shown)})" if shown else self.method

    @property
    def update(self) -> str | None:
        """The update mode of a length-dependent method; `None` for the others."""
        kind = get_method(self.method)
        if not issubclass(kind, LengthDependent):
            return None
        return str(self.options.get("update", kind.knobs()["update"]))

    @property
    def length_dependent(self) -> bool:
        """Whether what it computes for a token depends on how much text follows that token."""
        return self.update not in (None, "row")

    @property
    def changes_attention(self) -> bool:
        """Whether it needs more than another rotary table."""
        seam = get_method(self.method).seam
        return seam != "rotary" or self.update not in (None, "sequence")

    def build(self, scale: float) -> Method:
        """The method object; `scale` is the automatic one."""
        given = {"scale": scale} if self.auto else {}
        return get_method(self.method).from_options(**given, **self.options)


@dataclass(frozen=True)
class Request:
    """One method, or several on different seams, and what `patch_model` takes beside them.

    Attributes:
        parts: The methods, in the order in which they were named.
        beside: `target_length`, `original_max_position_embeddings`, `layers`, `compose`, `replace`, where given.
    """

    parts: tuple[Part, ...]
    beside: dict[str, Any]

    @classmethod
    def parse(cls, text: str) -> Request:
        """Reads `yarn:scale=4,beta_fast=16` or `yarn:scale=4+log_n`.

        Raises:
            PosencError: An unknown method or option, or options that do not go together.
        """
        named: list[tuple[str, dict[str, Any]]] = []
        beside: dict[str, Any] = {}
        for piece in _PLUS.split(text):
            name, options = parse_method(piece)
            knobs = get_method(name).knobs()
            named.append((name, {k: v for k, v in options.items() if k in knobs}))
            for option in (option for option in options if option not in knobs):
                if beside.setdefault(option, options[option]) != options[option]:
                    raise PosencError(f"{text}: {option} is given twice, with different values.")
        if len(named) > 1 and "target_length" in beside:
            raise PosencError(
                f"{text}: target_length belongs to one method; give scale= to those that take one."
            )
        for option in ("target_length", "original_max_position_embeddings"):
            if not isinstance(beside.get(option, 1), int):
                raise PosencError(f"{text}: {option} is a whole number, not {beside[option]!r}.")
        auto = _automatic(named) if "target_length" not in beside else set()
        return cls(
            tuple(Part(name, options, name in auto) for name, options in named),
            beside,
        )

    @classmethod
    def installed(cls, config: PatchConfig) -> Request:
        """What asks for the patch that a model carries."""
        scale = {} if config.scale is None else {"scale": config.scale}
        named = [(config.method, {**scale, **config.options}), *config.others]
        beside = {"layers": config.layers, "compose": config.compose, "replace": config.replace}
        return cls(
            tuple(Part(name, dict(options)) for name, options in named),
            {name: value for name, value in beside.items() if value not in (False, "full")},
        )

    @property
    def auto(self) -> bool:
        """Whether any of the methods gets an automatic scale."""
        return any(part.auto for part in self.parts)

    @property
    def changes_attention(self) -> bool:
        """Whether any of the methods needs more than another rotary table."""
        return any(part.changes_attention for part in self.parts)

    @property
    def label(self) -> str:
        """As reports show it: `yarn (scale 4) + log_n`."""
        first, *more = self.parts
        return " + ".join([first.label(self.beside), *(part.label({}) for part in more)])

    def arguments(self, scale: float = 1.0) -> tuple[Any, dict[str, Any]]:
        """What to call `patch_model` with: the method or the methods, and the keyword arguments.

        Args:
            scale: The automatic scale.
        """
        if len(self.parts) > 1:
            return [part.build(scale) for part in self.parts], dict(self.beside)
        part = self.parts[0]
        automatic = {"scale": scale} if part.auto else {}
        return part.method, {**automatic, **part.options, **self.beside}


def _automatic(named: list[tuple[str, dict[str, Any]]]) -> set[str]:
    """The methods that get an automatic scale: those that cannot do without and, if nothing else scales, one that can.

    A method whose `scale` is `None` by default computes something from it that can be given outright too
    (`group`, `k`); with that given, it needs no scale.
    """
    default = {name: get_method(name).knobs().get("scale", 1.0) for name, _ in named}
    required = [name for name, value in default.items() if value is dataclasses.MISSING]
    without = {name: options for name, options in named if "scale" not in options}
    if required:
        return {name for name in required if name in without}
    return {
        name
        for name, options in without.items()
        if default[name] is None and _takes_one(name, options)
    }


def _takes_one(name: str, options: dict[str, Any]) -> bool:
    try:
        get_method(name).from_options(scale=2.0, **options)
    except PosencError:
        return False
    return True


def _said(option: str, value: Any) -> str:
    """An option in words; a switch that is on by its name alone, a long list by its length."""
    if value is True:
        return option
    if isinstance(value, tuple | list) and len(value) > MAX_SHOWN:
        return f"{option} of {len(value)} numbers"
    return f"{option} {value:g}" if isinstance(value, float) else f"{option} {value}"
