"""Seams of models whose positions come from elsewhere than a rotary embedding: what a seam is, and its choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from hf_posenc.errors import PosencError, UnsupportedModelError
from hf_posenc.methods import METHODS, Method
from hf_posenc.seams.held import Record
from hf_posenc.seams.inspection import RECURRENCE, ROTARY, ROTARY_TABLE, Positions, with_article


@dataclass(frozen=True, eq=False)
class NativeSeam:
    """The place where a model gets positions from, and the way to patch it; one subclass for each kind of place.

    A seam is kept in the patched model, so it holds paths rather than modules. All that `install` changes goes through
    the record of the patch, which undoes it.
    """

    config: Any  # of the model; one of its own once the patch is installed
    length: int | None  # the trained length L, in tokens; `None` if the model has none
    sources: ClassVar[tuple[str, ...]] = ()  # the kinds of `Source` that the seam patches
    # True if its methods compute attention themselves, in the engine.
    in_attention: ClassVar[bool] = False
    # True if the length that the model reads is a matter of the seam, with every method.
    has_length: ClassVar[bool] = False
    purpose: ClassVar[str] = "Methods for {}"  # the use of its methods; `{}` stands for a source

    @classmethod
    def takes(cls, method: type[Method], source: str) -> bool:
        """Return whether a method patches a kind of source at this seam."""
        raise NotImplementedError

    @classmethod
    def reason(cls, method: type[Method], source: str) -> str:
        """Return a sentence on why a method does not patch a kind of source at this seam; empty if there is none."""
        return ""

    @classmethod
    def of(cls, model: nn.Module, positions: Positions) -> NativeSeam:
        """Build the seam of a model with a source that the requested method patches; raise for another form."""
        raise NotImplementedError

    def install(self, model: nn.Module, state: Record, method: Method) -> None:
        """Patch a model, verify it, and set `state.export`; the caller undoes what an error leaves half done.

        Raises:
            UnsupportedModelError: A model that cannot take the method.
            VerificationError: The model does not compute the requested patch.
        """
        raise NotImplementedError

    def trained(self, model: nn.Module, state: Record, method: Method) -> bool:
        """Return whether undoing a patch in force would lose what was, or could have been, trained."""
        return method.trainable

    def rows(self, model: nn.Module) -> list[tuple[str, ...]]:
        """Read the patch back: the cells of a table, its heading first."""
        raise NotImplementedError


Seams = Sequence[type[NativeSeam]]


def advice_on(seams: Seams, positions: Positions) -> list[str]:
    """Return a sentence on the methods for each kind of a model's sources, by the seam that they patch."""
    if not positions.sources and any(source.kind == RECURRENCE for source in positions.rest):
        return ["There is nothing to patch: a recurrence has no positions."]
    advice: dict[str, None] = {}
    for kind in dict.fromkeys(source.kind for source in positions.sources):
        if kind in (ROTARY, ROTARY_TABLE):
            advice[f"Methods for {with_article(kind)}: {_ROTARY_METHODS}"] = None
        for seam in seams:
            if kind not in seam.sources:
                continue
            both_ways = positions.bidirectional and seam.in_attention
            names = [
                method.name
                for method in METHODS
                if seam.takes(method, kind)
                and not (both_ways and method.seam == "bias" and not method.bidirectional)
            ]
            advice[f"{seam.purpose.format(with_article(kind))}: {', '.join(names)}."] = None
    return list(advice)


_ROTARY_METHODS = (
    "frequency methods (yarn, ntk_by_parts, ...); in most models also those that compute attention (rerope, "
    "self_extend, ...). `hf-posenc methods` lists them; `hf-posenc recommend` sorts them."
)


def choose(
    seams: Seams, model: nn.Module, positions: Positions, methods: Sequence[Method | type[Method]]
) -> NativeSeam:
    """Return the seam of a model that the requested methods patch; else raise with its sources and their methods."""
    kinds = [each if isinstance(each, type) else type(each) for each in methods]
    for seam in seams:
        for source in positions.sources:
            if source.kind not in seam.sources or not seam.takes(kinds[0], source.kind):
                continue
            if len(kinds) > 1:
                raise PosencError(
                    f"{type(model).__name__} has no rotary embedding and takes one method at a time, not "
                    f"{', '.join(kind.name for kind in kinds)}. Most of them take target_length= for longer texts."
                )
            if hidden := positions.hidden:
                raise UnsupportedModelError(
                    f"{type(model).__name__} gets positions from a place that hf_posenc does not know: "
                    f"{', '.join(map(str, hidden))} still reads order when {positions.sources[0]} is silenced. A patch "
                    "would change one of the two and not the other. The model was not changed."
                )
            return seam.of(model, positions)
    raise refusal(seams, model, positions, kinds[0])


def refusal(
    seams: Seams, model: nn.Module, positions: Positions, method: type[Method]
) -> UnsupportedModelError:
    """Return the error for a method that patches none of a model's sources, naming these and what patches them."""
    found = dict.fromkeys(source.kind for source in positions.sources)
    reasons = dict.fromkeys(
        seam.reason(method, kind) for kind in found for seam in seams if kind in seam.sources
    )
    advice = " ".join(filter(None, (*reasons, *advice_on(seams, positions))))
    rotates = positions.of_kind(ROTARY, ROTARY_TABLE)
    lacks = f"nothing that {method.name} changes" if rotates else "no rotary embedding"
    if rotates and method.seam == "rotary":
        lacks = "a rotary table that its adapter does not name (sincos_table)"
    return UnsupportedModelError(
        f"{type(model).__name__} has {lacks}. {positions.describe()}. "
        f"{advice or 'hf_posenc has no method for that.'}"
    )
