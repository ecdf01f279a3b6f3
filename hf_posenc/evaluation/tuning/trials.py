"""What a sweep compares: methods times scales, and the controls that every table needs."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.measuring.candidates import UNPATCHED, Candidate, Part, Request
from hf_posenc.methods import get_method
from hf_posenc.patch.patching import get_patch

CONTROLS = (UNPATCHED, "sliding_window")
"""The model as loaded, and plain attention to the last original-context tokens, which no length breaks."""


@dataclass(frozen=True)
class Trial:
    """One line of a sweep.

    Attributes:
        label: As the table shows it.
        spec: What `--patch` takes to measure it again.
        method: The method's name, several joined by `+`; `None` for the model as loaded.
        scale: Its scale, where it has one.
        control: It is measured beside the others on every document, and cannot win.
        call: The Python that patches a model with it; `None` for the model as loaded.
    """

    label: str
    spec: str
    method: str | None
    scale: float | None
    control: bool
    call: str | None

    @classmethod
    def of(cls, candidate: Candidate, *, control: bool = False) -> Trial:
        """The line of a candidate whose scale is set."""
        request = candidate.request
        call = None if request is None else call_of(request)
        scale = candidate.scale
        return cls(candidate.label, candidate.spec, candidate.method, scale, control, call)


def crossed(specs: Sequence[str], scales: Sequence[float]) -> list[tuple[Candidate, bool]]:
    """Every method at every scale; a method that takes none, or was given its own, once.

    Args:
        specs: What `--patch` was given.
        scales: Target contexts as multiples of the original one.

    Returns:
        The candidates, each with whether it is a control; the controls first.

    Raises:
        PosencError: An unknown method or option, an entry twice, a scale that a method refuses, or nothing but
            controls.
    """
    wanted = [(candidate, spec) for spec in specs for candidate in at_scales(spec, scales)]
    named = {candidate.label for candidate, _ in wanted}
    twice = next(
        (c.label for c, _ in wanted if [w.label for w, _ in wanted].count(c.label) > 1), None
    )
    if twice is not None:
        raise PosencError(f"--patch {twice} is given twice.")
    competing = [candidate for candidate, _ in wanted if candidate.request is not None]
    if not competing:
        raise PosencError(
            "There is nothing to compare: --patch none is always measured. Name a method, such as --patch yarn."
        )
    controls = [
        Candidate.parse(spec) for spec in CONTROLS if spec == UNPATCHED or spec not in named
    ]
    return [*((c, True) for c in controls), *((c, False) for c in competing)]


def parse_scales(text: str) -> tuple[float, ...]:
    """Reads `2,4,8`.

    Raises:
        PosencError: Something else than different numbers above 1.
    """
    try:
        scales = tuple(float(part) for part in text.split(","))
    except ValueError:
        scales = ()
    if not scales or not all(1 < scale < math.inf for scale in scales):
        raise PosencError(f"--scales {text}: give numbers above 1, such as 2,4,8.")
    if len(set(scales)) < len(scales):
        raise PosencError(f"--scales {text}: a scale is given twice.")
    return scales


def tried(
    model: nn.Module, candidates: Sequence[tuple[Candidate, bool]]
) -> list[tuple[Candidate, bool]]:
    """The candidates as this model takes them; one that it refuses stays as it is, and becomes a cell without a number.

    Raises:
        PosencError: It refuses every method.
    """
    made, errors, accepted = [], [], 0
    for candidate, control in candidates:
        try:
            made.append((candidate.checked(model), control))
            accepted += not control
        except PosencError as error:
            made.append((candidate, control))
            errors += [] if control else [error]
    if errors and not accepted:
        raise errors[0]
    return made


def at_scales(spec: str, scales: Sequence[float]) -> list[Candidate]:
    """The candidates that one entry of `--patch` stands for."""
    candidate = Candidate.parse(spec)
    request = candidate.request
    if request is None or "target_length" in request.beside:
        return [candidate]
    takers = [i for i, part in enumerate(request.parts) if part.auto] or [
        index for index, part in enumerate(request.parts) if _takes_a_number(part)
    ]
    if not takers:
        return [candidate]
    return [_scaled(request, takers, scale) for scale in scales]


def _takes_a_number(part: Part) -> bool:
    """Whether a part that works without a scale has one that was left at its default (`dynamic_ntk`)."""
    default = get_method(part.method).knobs().get("scale")
    return isinstance(default, int | float) and "scale" not in part.options


def _scaled(request: Request, takers: Sequence[int], scale: float) -> Candidate:
    parts = tuple(
        dataclasses.replace(part, options={"scale": scale, **part.options}, auto=False)
        if index in takers
        else part
        for index, part in enumerate(request.parts)
    )
    for part in parts:
        part.build(1.0)  # refuses a scale that the method does not take
    return candidate_of(Request(parts, request.beside))


def candidate_of(request: Request) -> Candidate:
    """The candidate of a request that was put together and not read."""
    return Candidate(spec_of(request), request.label, request)


def spec_of(request: Request) -> str:
    """A request in the short form that `--patch` reads; lists, which that has no place for, as JSON."""
    first, *more = request.parts
    pieces = [
        (first, {**first.options, **request.beside}),
        *((part, part.options) for part in more),
    ]
    written = (
        part.method
        + (":" if options else "")
        + ",".join(f"{k}={_word(v)}" for k, v in options.items())
        for part, options in pieces
    )
    return "+".join(written)


def call_of(request: Request) -> str:
    """The Python that patches `model` as a request says."""
    if len(request.parts) == 1:
        part = request.parts[0]
        given: dict[str, Any] = {**part.options, **request.beside}
        return _call("patch_model", "model", repr(part.method), **given)
    methods = (_call(get_method(p.method).__name__, **p.options) for p in request.parts)
    return _call("patch_model", "model", f"[{', '.join(methods)}]", **request.beside)


def _call(name: str, *values: str, **options: Any) -> str:
    return f"{name}({', '.join([*values, *(f'{k}={v!r}' for k, v in options.items())])})"


def _word(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return json.dumps(value)


# A candidate as a recipe that `hf_posenc.load_patch` reads.


def recipe_of(
    model: nn.Module,
    candidate: Candidate,
    *,
    name: str,
    checkpoint: str,
    source: str,
    description: str,
) -> dict[str, Any]:
    """The patch as `save_patch` would write it, with what it is and where it comes from.

    Args:
        model: The model that it was measured on, unpatched.
        candidate: A method whose scale is set.
        name: A name for the recipe.
        checkpoint: The model's name.
        source: How the recipe was found.
        description: What it was measured to do.
    """
    with candidate.applied(model, 1):
        patch = get_patch(model)
    assert patch is not None
    config: Any = model.config
    about = {
        "name": name,
        "model_types": [config.model_type],
        "checkpoint": checkpoint,
        "source": source,
        "description": description,
    }
    return {**patch.config.to_dict(), "recipe": about}


def recipe_text(recipe: dict[str, Any]) -> str:
    """The JSON text of a recipe, as the recipes that ship with the package are written."""
    return json.dumps(recipe, indent=2, allow_nan=False) + "\n"
