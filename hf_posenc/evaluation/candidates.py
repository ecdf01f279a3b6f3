"""What a run compares: the entries of `--patch`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.requests import Request
from hf_posenc.install import STATE, State
from hf_posenc.methods import LengthDependent
from hf_posenc.patching import get_patch, patched
from hf_posenc.resolve import unwrap
from hf_posenc.seams.discovery import rotary_tables
from hf_posenc.seams.probe import moves_with_length

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
        state: For `as_it_is`: what tells this state of the model, its weights above all, from its others.
    """

    spec: str
    label: str
    request: Request | None
    original: int | None = None
    moves: bool = False
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
        return cls(label, label, request, original, _moves(model), state)

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
            return dataclasses.replace(self, moves=_moves(model))
        if get_patch(model) is not None:
            raise PosencError(
                f"--patch {self.spec}: this model carries a saved patch ({_headline(get_patch(model))}); it is "
                "measured as it is, with --patch none only."
            )
        trial = dataclasses.replace(self, original=1)
        try:
            with trial.applied(model, 1):
                patch, moves = get_patch(model), _moves(model)
        except PosencError as error:
            raise PosencError(f"--patch {self.spec}: {error}") from error
        assert patch is not None
        return dataclasses.replace(
            self, original=patch.original_max_position_embeddings, moves=moves
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
    state: State | None = getattr(unwrap(model), STATE, None)
    methods = () if state is None else state.methods
    if any(isinstance(method, LengthDependent) and method.update != "row" for method in methods):
        return True
    return any(
        moves_with_length(rotary, table.label, _device(rotary, model))
        for table in rotary_tables(model)
        for rotary in [model.get_submodule(table.name)]
    )


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
