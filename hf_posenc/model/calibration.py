"""Calibration by trial: how every attention layer of a live model rotates, and that the engine computes the same.

Two forwards over a few tokens, one with the model's own rotation and one with every token at position 0, in which
attention itself is replaced by a function that does not read queries and keys. So the hidden states are the same in
both, in every layer, and the queries and keys that reach the attention function differ by the rotation alone: the
layer's layout is the known one that turns the one into the other. No table of architectures is needed.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.rotation import Layout, Rotation
from hf_posenc.errors import FREQUENCY_METHODS_WORK, PosencError, UnsupportedModelError, one_line
from hf_posenc.methods import METHODS, Method, needs_no_rotation
from hf_posenc.model.attention import KNOWN, LAYER, Layer, Recorded, catch_positions, recording
from hf_posenc.model.discovery import RotaryTable, layer_type
from hf_posenc.model.repositioned import RepositionedRotary, RepositionedTable
from hf_posenc.model.rotary import PosencRotary
from hf_posenc.model.unwrapping import trial

# Relative tolerances of a layer's queries and keys, and of the whole model's output.
_TOLERANCES = {torch.float64: (1e-4, 5e-3), torch.float32: (1e-3, 5e-3)}
_HALF = (0.03, 0.1)
TOKENS = 7
"""Length of the text that a model is tried on."""
_UNROTATED = Encoding(original=1, rotates=False)
Wrappers = Mapping[int, RepositionedRotary | RepositionedTable]
"""By `id` of the model's own rotary module, or of the module that holds a sin-cos table."""


@dataclass(frozen=True, eq=False)
class CalibratedLayer:
    """One attention module, as calibration found it."""

    name: str
    module: nn.Module
    recorded: Recorded  # its first call
    rotation: Rotation | None  # `None`: it has none, or that need not be known
    table: RotaryTable | None  # `None`: it does not rotate
    rotary: RepositionedRotary | None  # inside the module
    calls: int  # in one forward
    bidirectional: bool  # it reads the keys after a query too


def _inputs(owner: Any, ids: Tensor) -> dict[str, Tensor]:
    """Return the tokens as arguments of a forward; a decoder behind an encoder gets them too."""
    both = {"input_ids": ids, "decoder_input_ids": ids}
    return both if getattr(owner.config, "is_encoder_decoder", False) else {"input_ids": ids}


def trial_tokens(model: Any) -> Tensor:
    """Return a few different token ids, shape (1, tokens), on the device of the embedding."""
    count = min(100, model.config.get_text_config(decoder=True).vocab_size)
    ids = torch.arange(TOKENS) * 13 % max(1, count - 3) + 3
    on_device: Tensor = ids[None].to(next(model.parameters()).device)
    return on_device


def run(owner: Any, ids: Tensor) -> Tensor:
    """Return the logits or, of a model without a head, the last hidden states, in float32."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # DiffusionGemma starts from noise
        output = owner(use_cache=False, **_inputs(owner, ids))
    logits = getattr(output, "logits", None)
    result: Tensor = output[0] if logits is None else logits
    return result.float()


def certify(model: Any, uncertain: Mapping[str, nn.Module]) -> None:
    """Verify, by a forward over a few tokens, that none of these rotary modules rotates text; raise for one that does.

    They are those that no table of the text decoder belongs to. A model that cannot be run on tokens gets a warning.
    """
    called: list[str] = []
    hooks = [
        module.register_forward_pre_hook(lambda *_, path=name: called.append(path))
        for name, module in uncertain.items()
    ]
    try:
        with trial(model):
            run(model, trial_tokens(model))
    except Exception as error:
        warnings.warn(
            f"{type(model).__name__} cannot be run on a few tokens ({one_line(error)}), so hf_posenc could not verify "
            f"that {', '.join(uncertain)} rotates no text. The patch leaves it as it is.",
            stacklevel=4,
        )
    finally:
        for hook in hooks:
            hook.remove()
    if called:
        raise UnsupportedModelError(
            f"{', '.join(dict.fromkeys(called))} of {type(model).__name__} rotates text too, but is no part that "
            "hf_posenc finds by the config of the text decoder: a patch would change one part of the model and not the "
            "other. The model was not changed. Please report it, with the model type."
        )


@contextlib.contextmanager
def alone(owner: nn.Module) -> Iterator[None]:
    """Raise an `UnsupportedModelError` where a decoder cannot be run on a few tokens."""
    try:
        yield
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(owner).__name__} cannot be run on a few tokens alone ({error}), on which a method that "
            f"computes attention itself is tried. {FREQUENCY_METHODS_WORK}"
        ) from error


def calibrate(
    model: Any,
    owner: Any,
    ids: Tensor,
    tables: Sequence[RotaryTable],
    wrappers: Wrappers,
    methods: Sequence[Method],
) -> list[CalibratedLayer]:
    """Find every attention layer of the decoder, and its rotation; raise where there is none to find."""
    with alone(owner), recording() as native:
        owner(input_ids=ids, use_cache=False)
    with _everything_at_zero(wrappers), recording() as still:
        owner(input_ids=ids, use_cache=False)
    if not native:
        raise UnsupportedModelError(
            f"No layer of {type(owner).__name__} calls the attention function that was set."
        )
    needed = any(method.reads_rotation for method in methods)
    if needed:
        _refuse_dynamic(tables, wrappers)
    names = {module: name for name, module in model.named_modules()}
    layers = []
    rotations: dict[tuple[int, Layout], Rotation] = {}
    for module, calls in native.items():
        name, first, unrotated = names[module], calls[0], still[module][0]
        bidirectional = _is_bidirectional(module, first)
        if not needs_no_rotation(methods):  # else the model's own attention gets them
            _check_arguments(name, calls)
        if bidirectional:
            _check_directions(
                name, methods, beside_decoder=bool(tables) and model.config.is_encoder_decoder
            )
        inner = next((m for m in module.modules() if isinstance(m, RepositionedRotary)), None)
        # Tables may hold the same frequencies: the layer's own comes first, or that of its type.
        candidates = sorted(
            tables,
            key=lambda table: (
                wrappers[id(table.module)] is not inner,
                table.label != layer_type(module, table.config),
            ),
        )
        rotation, index = None, None
        if needed or not torch.equal(first.query, unrotated.query):
            frequencies = [_in_force(table, wrappers) for table in candidates]
            try:
                rotation, index = _rotation_of(first, unrotated, frequencies, name, module)
            except UnsupportedModelError:
                if needed:
                    raise
                index = 0  # it rotates, in a way that need not be known
        if inner is not None:
            inner.inside_attention = True
        elif tables and first.kwargs.get("position_ids") is None:
            module.register_forward_pre_hook(catch_positions, with_kwargs=True)
        table = None if index is None else candidates[index]
        if rotation is not None and rotation.norm is None:
            # One object for all layers, which then share its angles.
            rotation = rotations.setdefault((id(table), rotation.layout), rotation)
        layers.append(
            CalibratedLayer(name, module, first, rotation, table, inner, len(calls), bidirectional)
        )
    return layers


def _refuse_dynamic(tables: Sequence[RotaryTable], wrappers: Wrappers) -> None:
    for table in tables:
        rotary = wrappers[id(table.module)].base
        dynamic = table.rope_type in ("dynamic", "longrope")
        if isinstance(rotary, PosencRotary) and table.label in rotary.specs:
            dynamic = rotary.method.length_dependent
        if dynamic:
            raise PosencError(
                f"The frequencies of {table.name} move with the length of the text, so no rotation can be added to "
                "them. Replace them by a static method in a list, as in [YaRN(scale=4), ReRoPE()] with "
                'replace=True, or use a dynamic method with update="row" alone.'
            )


def _is_bidirectional(module: nn.Module, call: Recorded) -> bool:
    given = call.kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if given is None else given
    return causal is False or bool(call.sees_later)


def _check_directions(name: str, methods: Sequence[Method], *, beside_decoder: bool) -> None:
    if beside_decoder:
        raise UnsupportedModelError(
            f"{name} reads a text in both directions, or another one, in a model that has a decoder too. "
            f"{FREQUENCY_METHODS_WORK}"
        )
    # A table reads both directions alike.
    causal = [m.name for m in methods if not m.bidirectional and m.seam != "rotary"]
    if causal:
        defined = [method for method in METHODS if method.bidirectional]
        like = [method for method in defined if method.seam in {each.seam for each in methods}]
        others = ", ".join(method.name for method in like or defined)
        raise UnsupportedModelError(
            f"{name} reads the text in both directions, and {', '.join(causal)} is defined for keys that come before "
            f"the query. Defined for both: {others}. {FREQUENCY_METHODS_WORK}"
        )


def _check_arguments(name: str, calls: Sequence[Recorded]) -> None:
    for call in calls:
        given = {name for name, value in call.kwargs.items() if value is not None}
        if unknown := sorted(given - KNOWN):
            raise UnsupportedModelError(
                f"{name} passes {', '.join(unknown)} to attention, unknown to hf_posenc. {FREQUENCY_METHODS_WORK}"
            )


def verify(
    subject: nn.Module,
    ids: Tensor,
    expected: Tensor,
    layers: Sequence[CalibratedLayer],
    wrappers: Wrappers,
    *,
    engine: bool,
) -> None:
    """Verify that the model computes the same with plain RoPE computed by the engine, or by its own attention."""
    known = engine and all(layer.rotation is not None or layer.table is None for layer in layers)
    for layer in layers:
        heads = layer.recorded.query.shape[1]
        encoding = Encoding(1, heads, layer.rotation, bidirectional=layer.bidirectional)
        if known and layer.rotation is not None:
            encoding = replace(encoding, cached_by=_UNROTATED)
        setattr(layer.module, LAYER, Layer(encoding, rotary=layer.rotary))
    with _everything_at_zero(wrappers) if known else contextlib.nullcontext():
        computed = run(subject, ids)
    dtype = next(subject.parameters()).dtype
    error = float((computed - expected).abs().max() / expected.abs().max())
    if not error <= _TOLERANCES.get(dtype, _HALF)[1]:
        raise UnsupportedModelError(
            f"With its own rotation computed by hf_posenc's attention, {type(subject).__name__} gives other "
            f"hidden states than before (relative difference {error:.1e}): something besides attention reads the "
            f"rotation. The model was restored. {FREQUENCY_METHODS_WORK}"
        )


def _rotation_of(
    native: Recorded,
    still: Recorded,
    tables: Sequence[tuple[Tensor, float]],
    name: str,
    module: nn.Module,
) -> tuple[Rotation | None, int | None]:
    """The rotation between the calls of a layer, and the index of its table; `None` twice where it does not rotate.

    Tables are the frequencies in force, shape (d/2,), and the factor on cos and sin.
    """
    tolerance = _TOLERANCES.get(native.query.dtype, _HALF)[0]
    pairs = ((native.query, still.query), (native.key, still.key))
    if all(_close(moved, rest, tolerance / 10) for moved, rest in pairs):
        return None, None
    positions = torch.arange(native.query.shape[2], device=native.query.device)[None]
    norms = _norms(module, native.query.shape[-1])
    for (index, (table, factor)), after in itertools.product(enumerate(tables), (False, True)):
        dim = 2 * len(table)
        starts = sorted(start for start in {0, native.query.shape[-1] - dim} if start >= 0)
        for start, interleaved, sign in itertools.product(starts, (False, True), (1, -1)):
            layout = Layout(start, dim, interleaved, sign)
            found: list[Rotation] = []
            for moved, rest in pairs:  # the norm of the queries, and that of the keys
                candidates = (
                    Rotation(table, layout, factor, norm) for norm in (norms if after else (None,))
                )
                fits = (
                    one for one in candidates if _close(moved, one.turn(rest, positions), tolerance)
                )
                found += itertools.islice(fits, 1)
            if len(found) == len(pairs):
                return replace(found[0], keys=found[1] if after else None), index
    raise UnsupportedModelError(
        f"{name}: the change of its queries and keys from position 0 to others is not a rotation in a known "
        f"layout. {FREQUENCY_METHODS_WORK}"
    )


def _norms(module: nn.Module, features: int) -> list[nn.Module]:
    """Return the parts of an attention module that may be norms with a weight for each feature of a head."""
    weighted = (
        part
        for part in module.modules()
        if isinstance(part._parameters.get("weight"), nn.Parameter)
    )
    shaped = ((part, part.get_parameter("weight")) for part in weighted)
    return [
        part
        for part, weight in shaped
        if weight.shape == (features,) and not weight.is_meta and bool(weight.all())
    ]


def _close(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    return bool((actual - expected).abs().max() <= tolerance * expected.abs().max())


def _in_force(table: RotaryTable, wrappers: Wrappers) -> tuple[Tensor, float]:
    rotary: Any = wrappers[id(table.module)].base
    if isinstance(rotary, PosencRotary) and table.label in rotary.specs:
        inv_freq, factor = rotary.table(table.label)
    else:
        inv_freq, factor = table.live()
    return inv_freq.detach().float(), float(factor)


@contextlib.contextmanager
def _everything_at_zero(wrappers: Wrappers) -> Iterator[None]:
    for wrapper in wrappers.values():
        wrapper.encoding = _UNROTATED
    try:
        yield
    finally:
        for wrapper in wrappers.values():
            wrapper.encoding = None
