"""Tries a model's attention layers before they are patched: what each does, and that the engine does the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.attention.encoding import Encoding
from hf_posenc.errors import FREQUENCY_METHODS_WORK, PosencError, UnsupportedModelError
from hf_posenc.methods import DistanceBias, LogN, Method, RelativeKeys
from hf_posenc.model.attention import LAYER, Layer, catch_positions, recording, unknown_arguments
from hf_posenc.model.calibration import Recorder, Seen, rotation_of
from hf_posenc.model.discovery import RotaryTable, layer_type
from hf_posenc.model.repositioned import RepositionedRotary
from hf_posenc.model.rotary import PosencRotary

_TOLERANCE = {torch.float64: 5e-3, torch.float32: 5e-3}


_TOLERANCE_HALF = 0.1


@dataclass(frozen=True, eq=False)
class Found:
    """One attention module, as calibration saw it.

    Attributes:
        name: Its path in the model.
        module: The module.
        seen: What it handed over.
        rotation: What it rotates by; `None`: it does not, or that need not be known.
        table: Which of the model's tables that is of; `None`: it does not rotate.
        rotary: The rotary module inside it.
        calls: How often it attends in one forward.
    """

    name: str
    module: nn.Module
    seen: Seen
    rotation: Any
    table: RotaryTable | None
    rotary: RepositionedRotary | None
    calls: int


def calibrated(
    model: nn.Module,
    owner: Any,
    ids: Tensor,
    tables: Sequence[RotaryTable],
    wrappers: dict[int, RepositionedRotary],
    methods: Sequence[Method],
) -> list[Found]:
    """Every attention layer of the decoder, and how it rotates.

    Raises:
        PosencError: Frequencies that move with the length, which no rotation can be added to.
        UnsupportedModelError: A layer of which it cannot be found out what it does.
    """
    native, still = Recorder(), Recorder()
    with recording(native):
        owner(input_ids=ids, use_cache=False)
    with _everything_at_zero(wrappers), recording(still):
        owner(input_ids=ids, use_cache=False)
    if not native.seen:
        raise UnsupportedModelError(
            f"No layer of {type(owner).__name__} calls the attention function that was set."
        )
    names = {module: name for name, module in model.named_modules()}
    needed = any(not _without_rotation(method) for method in methods)
    for table in tables:
        rotary = wrappers[id(table.module)].base
        dynamic = isinstance(rotary, PosencRotary) and rotary.method.length_dependent
        if needed and (dynamic or table.rope_type in ("dynamic", "longrope")):
            raise PosencError(
                f"The frequencies of {table.name} move with the length of the text, so no rotation can be added to "
                "them. Replace them by a static method in a list, as in [YaRN(scale=4), ReRoPE()] with "
                'replace=True, or use a dynamic method with update="row" alone.'
            )
    found = []
    for module, calls in native.seen.items():
        if getattr(module, "is_causal", True) is False:
            raise UnsupportedModelError(
                f"{names[module]} sees the text in both directions, and the methods that compute attention "
                f"themselves are defined for keys that come before the query. {FREQUENCY_METHODS_WORK}"
            )
        for seen in calls:
            unknown = unknown_arguments(dict(seen.kwargs))
            if unknown:
                raise UnsupportedModelError(
                    f"{names[module]} hands {', '.join(unknown)} to attention, of which hf_posenc does not "
                    f"know what it means. {FREQUENCY_METHODS_WORK}"
                )
        # Tables of two layer types may hold the same frequencies: the layer's own comes first.
        candidates = sorted(
            tables, key=lambda table: table.label != layer_type(module, table.config)
        )
        rotation, index = None, None
        if needed or _moves(calls[0], still.seen[module][0]):
            frequencies = [_in_force(table, wrappers) for table in candidates]
            try:
                rotation, index = rotation_of(
                    calls[0], still.seen[module][0], frequencies, names[module]
                )
            except UnsupportedModelError:
                if needed:
                    raise
                index = 0  # it rotates, in a way that nobody needs to know
        inner = next((m for m in module.modules() if isinstance(m, RepositionedRotary)), None)
        if inner is not None:
            inner.inside_attention = True
        elif calls[0].kwargs.get("position_ids") is None:
            module.register_forward_pre_hook(catch_positions, with_kwargs=True)
        own = None if index is None else candidates[index]
        found.append(Found(names[module], module, calls[0], rotation, own, inner, len(calls)))
    return found


def verify(
    subject: nn.Module,
    ids: Tensor,
    expected: Tensor,
    found: Sequence[Found],
    wrappers: dict[int, RepositionedRotary],
) -> None:
    """Makes sure that the model computes what it did, with plain RoPE by way of the engine.

    Raises:
        UnsupportedModelError: It does not.
    """
    known = all(entry.rotation is not None or entry.table is None for entry in found)
    for entry in found:
        encoding = Encoding(original=1, heads=entry.seen.query.shape[1], rotation=entry.rotation)
        if known and entry.rotation is not None:
            encoding = replace(encoding, cached_by=_UNROTATED)
        setattr(entry.module, LAYER, Layer(encoding, rotary=entry.rotary))
    with _everything_at_zero(wrappers) if known else contextlib.nullcontext():
        computed = run(subject, ids)
    tolerance = _TOLERANCE.get(next(subject.parameters()).dtype, _TOLERANCE_HALF)
    error = float((computed - expected).abs().max() / expected.abs().max())
    if not error <= tolerance:
        raise UnsupportedModelError(
            f"With its own rotation computed by hf_posenc's attention, {type(subject).__name__} gives other "
            f"hidden states than before (relative difference {error:.1e}): something besides attention reads the "
            f"rotation. The model was restored. {FREQUENCY_METHODS_WORK}"
        )


def run(owner: Any, ids: Tensor) -> Tensor:
    """The logits or, of a model without a head, the last hidden states, in float32."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # DiffusionGemma starts from noise
        output = owner(input_ids=ids, use_cache=False)
    logits = getattr(output, "logits", None)
    found: Tensor = output[0] if logits is None else logits
    return found.float()


def _moves(native: Seen, still: Seen) -> bool:
    return not torch.equal(native.query, still.query)


def _without_rotation(method: Method) -> bool:
    """Whether a method needs no knowledge of how a layer rotates."""
    if isinstance(method, RelativeKeys):
        return not method.keep_rope
    return isinstance(method, LogN | DistanceBias)


def _in_force(table: RotaryTable, wrappers: dict[int, RepositionedRotary]) -> tuple[Tensor, float]:
    rotary: Any = wrappers[id(table.module)].base
    if isinstance(rotary, PosencRotary) and table.label in rotary.specs:
        inv_freq, factor = rotary.table(table.label)
    else:
        inv_freq, factor = table.live()
    return inv_freq.detach().float(), float(factor)


_UNROTATED = Encoding(original=1, heads=1, rotates=False)


@contextlib.contextmanager
def _everything_at_zero(wrappers: dict[int, RepositionedRotary]) -> Iterator[None]:
    for wrapper in wrappers.values():
        wrapper.encoding = _UNROTATED
    try:
        yield
    finally:
        for wrapper in wrappers.values():
            wrapper.encoding = None
