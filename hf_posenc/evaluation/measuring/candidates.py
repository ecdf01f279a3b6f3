"""What a run compares: the entries of `--patch`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_posenc.errors import PosencError
from hf_posenc.methods import LengthDependent, Method, get_method
from hf_posenc.model.discovery import rotary_tables
from hf_posenc.model.rotary import PosencRotary, RotaryWrapper, moves_with_length
from hf_posenc.patch.config import PatchConfig, parse_method
from hf_posenc.patch.patching import get_patch, patched
from hf_posenc.patch.state import state_of

# What `--patch` may say: `method:option=value,...`, or several of these joined by `+`.


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


UNPATCHED = "none"


@dataclass(frozen=True)
class Candidate:
    """A method, or several at once, to measure, or the model as it was loaded.

    Attributes:
        spec: As it was given, e.g. `"yarn:scale=8"`.
        label: As reports show it, e.g. `"yarn (scale 8)"`.
        request: What it asks for; `None` for the model as loaded.
        original: The original length that the scale refers to, in tokens; `None` until `checked`.
        moves: Whether a rotary table or a saved patch depends on the length of the text; known once `checked`.
        stateful: Whether one of these tables is the model's own: transformers' dynamic RoPE keeps the table of the
            longest text that it has met, whatever else is patched in; known once `checked`.
        state: For `as_it_is`: what tells this state of the model, its weights above all, from its others.
    """

    spec: str
    label: str
    request: Request | None
    original: int | None = None
    moves: bool = False
    stateful: bool = False
    state: str | None = None

    @classmethod
    def as_it_is(cls, model: nn.Module, label: str, state: str) -> Candidate:
        """A model as it is, patched or not, which one run measures in several states: while it is trained.

        Args:
            model: The model. A patch in it stays where it is.
            label: As reports show it.
            state: What tells this state from the others; numbers are stored under it.
        """
        patch = get_patch(model)
        request = None if patch is None else Request.installed(patch.config)
        original = None if patch is None else patch.original_max_position_embeddings
        return cls(label, label, request, original, _moves(model), _moving_tables(model), state)

    @classmethod
    def parse(cls, spec: str) -> Candidate:
        """Reads `none`, the short form `method:option=value,...`, or several of these joined by `+`.

        Raises:
            PosencError: An unknown method or option.
        """
        if spec.strip().lower() == UNPATCHED:
            return cls(spec, UNPATCHED, None)
        request = Request.parse(spec)
        return cls(spec, request.label, request)

    @property
    def method(self) -> str | None:
        """The method's name, several joined by `+`; `None` for the model as loaded."""
        if self.request is None:
            return None
        return "+".join(part.method for part in self.request.parts)

    @property
    def auto_scale(self) -> bool:
        """A method takes a scale and was given none: it is `length / original length`, anew at every length."""
        return self.request is not None and self.request.auto

    @property
    def length_dependent(self) -> bool:
        """Whether what is computed for a token depends on how much text follows it."""
        return self.moves or (
            self.to_patch is not None and any(p.length_dependent for p in self.to_patch.parts)
        )

    @property
    def to_patch(self) -> Request | None:
        """What is patched in for the measurement; `None` where the model is measured as it is."""
        return self.request if self.state is None else None

    @property
    def key(self) -> str:
        """What was asked for, in one canonical line."""
        parts = () if self.request is None else self.request.parts
        asked = [[part.method, part.options, part.auto] for part in parts]
        beside = {} if self.request is None else self.request.beside
        state = [] if self.state is None else [self.state]
        return json.dumps([asked, beside, self.original, *state], sort_keys=True)

    @property
    def scale(self) -> float | None:
        """The scale that was given; `None` for none, or an automatic one."""
        parts = () if self.request is None else self.request.parts
        return next((p.options["scale"] for p in parts if "scale" in p.options), None)

    def scale_at(self, length: int) -> float | None:
        """The scale of `auto_scale` at a length: at least 1, a shorter text than the original needs none."""
        if not self.auto_scale:
            return None
        assert self.original is not None
        return max(1.0, length / self.original)

    def checked(self, model: nn.Module) -> Candidate:
        """Tries the patch on the model and takes it back.

        Returns:
            The candidate with its `original` length, and whether it `moves`.

        Raises:
            PosencError: This model cannot be patched so; the message names the candidate.
        """
        if self.request is None:
            return dataclasses.replace(self, moves=_moves(model), stateful=_moving_tables(model))
        if get_patch(model) is not None:
            raise PosencError(
                f"--patch {self.spec}: this model carries a saved patch ({_headline(get_patch(model))}); it is "
                "measured as it is, with --patch none only."
            )
        trial = dataclasses.replace(self, original=1)
        try:
            with trial.applied(model, 1):
                patch, moves, stateful = get_patch(model), _moves(model), _moving_tables(model)
        except PosencError as error:
            raise PosencError(f"--patch {self.spec}: {error}") from error
        assert patch is not None
        return dataclasses.replace(
            self,
            original=patch.original_max_position_embeddings,
            moves=moves,
            stateful=stateful,
        )

    @contextlib.contextmanager
    def applied(self, model: nn.Module, length: int) -> Iterator[None]:
        """Patches the model for this length, and unpatches it."""
        if self.to_patch is None:
            yield
            return
        method, options = self.to_patch.arguments(self.scale_at(length) or 1.0)
        with patched(model, method, **options):
            yield


def parse_candidates(specs: Sequence[str]) -> list[Candidate]:
    """Reads a list of specs, each method once.

    Raises:
        PosencError: An unknown method or option, or the same entry twice.
    """
    candidates = [Candidate.parse(spec) for spec in specs]
    labels = [candidate.label for candidate in candidates]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise PosencError(f"--patch {twice} is given twice.")
    return candidates


def _moves(model: nn.Module) -> bool:
    """Whether what the model computes for a token depends on how much text follows it.

    Asked of the live modules and not of the config: a checkpoint may be dynamic, or LongRoPE, by itself.
    """
    state = state_of(model)
    methods = () if state is None else state.methods
    if any(isinstance(method, LengthDependent) and method.update != "row" for method in methods):
        return True
    return _moving_tables(model)


def _moving_tables(model: nn.Module) -> bool:
    """Whether a rotary table of the model's own, as it is in force, depends on the length of the text."""
    return any(
        moves_with_length(rotary, table.label, _device(rotary, model))
        for table in rotary_tables(model)
        for rotary in [model.get_submodule(table.name)]
        if not _is_patched(rotary, table.label)
    )


def _is_patched(rotary: nn.Module, label: str) -> bool:
    """Whether a patch gives the frequencies of a table."""
    while isinstance(rotary, RotaryWrapper):
        if isinstance(rotary, PosencRotary) and label in rotary.specs:
            return True
        rotary = rotary.base
    return False


def _device(rotary: nn.Module, model: nn.Module) -> torch.device:
    tensors = [*rotary.buffers(), *rotary.parameters(), *model.parameters()]
    return tensors[0].device


def _headline(patch: Any) -> str:
    return str(patch).splitlines()[0]


def original_length(model: nn.Module, candidates: Sequence[Candidate]) -> int | None:
    """The context length that the model was trained on: what the first patch starts from, or what the config says."""
    known = next((c.original for c in candidates if c.original is not None), None)
    patch = get_patch(model)
    if known is None and patch is not None:
        known = patch.original_max_position_embeddings
    config: Any = model.config
    return known or getattr(config.get_text_config(), "max_position_embeddings", None)
