"""Calibration by trial: how every attention layer of a live model rotates, and that the engine computes the same.

Two forwards over a few tokens, one with the model's own rotation and one with every token at position 0, in which
attention itself is replaced by a function that does not read queries and keys. So the hidden states are the same in
both, in every layer, and the queries and keys that reach the attention function differ by the rotation alone: the
layer's layout is the known one that turns the one into the other. No table of architectures is needed.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.rotation import Layout, Rotation
from hf_posenc.errors import FREQUENCY_METHODS_WORK, PosencError, UnsupportedModelError, one_line
from hf_posenc.methods import METHODS, Method, needs_no_rotation, seam_of
from hf_posenc.model.attention import KNOWN, Layer, Recorded, hand_positions, recording
from hf_posenc.model.discovery import RepositionedTable, RotaryTable, layer_type
from hf_posenc.model.forward import named_arguments
from hf_posenc.model.rotary import PosencRotary, RepositionedRotary
from hf_posenc.model.sampled import Sample
from hf_posenc.model.unwrapping import hooked, swapped, trial
from hf_posenc.model.weights import execution_device, plain_parts, rounding_dtype, stored

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
    calls: int  # in one forward
    bidirectional: bool  # it reads the keys after a query too
    # The argument with the states of another text, whose keys it reads after its own.
    beside: str | None = None


def _inputs(owner: Any, ids: Tensor) -> dict[str, Tensor]:
    """Return the tokens as arguments of a forward; an encoder before a decoder gets fewer of them.

    So cross-attention has another number of keys than of queries.
    """
    if getattr(owner.config, "is_encoder_decoder", False):
        return {"input_ids": ids[:, :-2], "decoder_input_ids": ids}
    return {"input_ids": ids}


Inputs = Mapping[str, Tensor]


def trial_inputs(model: Any, owner: Any) -> tuple[nn.Module, Inputs, Tensor]:
    """Return what runs on a few tokens, a model or else its decoder alone; the arguments, and the output of `run`."""
    ids = trial_tokens(owner)
    inputs = _inputs(model, ids)
    candidates: list[tuple[nn.Module, Inputs]] = [(model, inputs)]
    if len(inputs) > 1:  # a decoder of several channels takes a token for each
        for count in _numbers(model.config, 2, 64):
            several = ids[..., None].expand(-1, -1, count)
            candidates.append((model, {**inputs, "decoder_input_ids": several}))
    candidates.append((owner, {"input_ids": ids}))
    if "encoder_hidden_states" in inspect.signature(owner.forward).parameters:
        # The states of an encoder that reads speech.
        for width in _numbers(owner.config, 1, 1 << 20, "hidden_size"):
            states = torch.randn(1, TOKENS - 2, width, generator=torch.Generator().manual_seed(0))
            states = states.to(execution_device(owner), next(owner.parameters()).dtype)
            candidates.append((owner, {"input_ids": ids, "encoder_hidden_states": states}))
    for subject, candidate in candidates[:-1]:
        with contextlib.suppress(Exception):
            return subject, candidate, run(subject, candidate)
    with alone(owner):
        return *candidates[-1], run(*candidates[-1])


def _numbers(config: Any, low: int, high: int, name: str = "") -> list[int]:
    """Return the numbers in a range that a config and its parts name, or those of one name; the parts' first."""
    parts = [part for part in vars(config).values() if hasattr(part, "to_dict")]
    items = (item for part in (*parts, config) for item in vars(part).items())
    values = [value for key, value in items if key == name or not name]
    return list(dict.fromkeys(v for v in values if type(v) is int and low <= v <= high))


def trial_tokens(model: Any) -> Tensor:
    """Return a few different token ids, shape (1, tokens), on the device of the embedding."""
    count = min(100, model.config.get_text_config(decoder=True).vocab_size)
    ids: Tensor = torch.arange(TOKENS) * 13 % max(1, count - 3) + 3
    return ids[None].to(execution_device(model))


def run(owner: Any, text: Tensor | Inputs) -> Tensor:
    """Return the logits or, of a model without a head, the last hidden states, in float32."""
    inputs = _inputs(owner, text) if isinstance(text, Tensor) else text
    inputs = {name: value.clone() for name, value in inputs.items()}  # a model may write on them
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # DiffusionGemma starts from noise
        output = owner(use_cache=False, **inputs)
    logits = getattr(output, "logits", None)
    result: Tensor = output[0] if logits is None else logits
    return result.float()


def certify(model: Any, uncertain: Mapping[str, nn.Module]) -> None:
    """Verify, by a forward over a few tokens, that none of these rotary modules rotates text; raise for one that does.

    They are those that no table of the text decoder belongs to. A model that cannot be run on tokens gets a warning.
    """
    called: list[str] = []
    handles = [
        module.register_forward_pre_hook(lambda *_, path=name: called.append(path))
        for name, module in uncertain.items()
    ]
    try:
        with hooked(handles), trial(model):
            run(model, trial_tokens(model))
    except Exception as error:
        warnings.warn(
            f"{type(model).__name__} cannot be run on a few tokens ({one_line(error)}), so hf_posenc could not verify "
            f"that {', '.join(uncertain)} rotates no text. The patch leaves it as it is.",
            stacklevel=4,
        )
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
    text: Inputs,
    tables: Sequence[RotaryTable],
    wrappers: Wrappers,
    methods: Sequence[Method],
    sample: Sample,
) -> list[CalibratedLayer]:
    """Find every attention layer of a model that is run on a text, and its rotation; raise where there is none to find.

    `owner` is the decoder, or an encoder-decoder model, whose cross-attention is left out. Layers of blocks that are
    not among those of the `sample` are as those that stand for them.
    """
    with alone(owner), recording() as native:
        run(owner, text)
    with everything_at_zero(wrappers), recording() as still:
        run(owner, text)
    if not native:
        raise UnsupportedModelError(
            f"No layer of {type(owner).__name__} calls the attention function that was set."
        )
    beside: dict[nn.Module, str] = {}
    if getattr(model.config, "is_encoder_decoder", False):
        native, beside = _without_others(native, lambda: run(owner, text))
    needed = bool(beside) or any(method.reads_rotation for method in methods)
    if needed:
        _refuse_dynamic(tables, wrappers)
    names = {module: name for name, module in model.named_modules()}
    layers: list[CalibratedLayer] = []
    counterparts = sample.counterparts()
    rotations: dict[tuple[int, Layout], Rotation] = {}
    for module, calls in native.items():
        name, first, unrotated = names[module], calls[0], still[module][0]
        bidirectional = bool(first.sees_later)
        if module not in beside:
            given = first.kwargs.get("is_causal")
            causal = getattr(module, "is_causal", True) if given is None else given
            bidirectional = causal is False or bidirectional
        passed = {key for call in calls for key, value in call.kwargs.items() if value is not None}
        # Without a rotation to change, the model's own attention gets them.
        if not needs_no_rotation(methods) and (foreign := sorted(passed - KNOWN)):
            raise UnsupportedModelError(
                f"{name} passes {', '.join(foreign)} to attention, unknown to hf_posenc. {FREQUENCY_METHODS_WORK}"
            )
        if bidirectional:
            _check_directions(name, methods, has_decoder=any(table.part for table in tables))
        inner = _inner_rotary(module)
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
                try:
                    rotation, index = _rotation_of(first, unrotated, frequencies, name, module)
                except UnsupportedModelError:
                    orders = [_order_of(table, wrappers) for table in candidates]
                    rotation, index = _rotation_of(
                        first, unrotated, frequencies, name, module, orders
                    )
            except UnsupportedModelError:
                if needed:
                    raise
                index = 0  # it rotates, in a way that need not be known
        table = None if index is None else candidates[index]
        if rotation is not None and rotation.norm is None:
            # One object for all layers, which then share its angles.
            rotation = rotations.setdefault((id(table), rotation.layout), rotation)
        others = [each for each in counterparts.get(module, ()) if each[module] is not module]
        again = len(counterparts.get(module, ())) - len(others)  # one module in several blocks
        count = len(calls) * (1 + again)
        layer = CalibratedLayer(
            name, module, first, rotation, table, count, bidirectional, beside.get(module)
        )
        layers += [layer, *(_counterpart(layer, each, names, tables, wrappers) for each in others)]
    order = {module: place for place, module in enumerate(names)}
    for layer in layers:
        unknown = tables and layer.recorded.kwargs.get("position_ids") is None
        if unknown or layer.beside or _inner_rotary(layer.module) is not None:
            layer.module.register_forward_pre_hook(hand_positions, with_kwargs=True)
    return sorted(layers, key=lambda layer: order[layer.module])


def _counterpart(
    layer: CalibratedLayer,
    modules: Mapping[nn.Module, nn.Module],
    names: Mapping[nn.Module, str],
    tables: Sequence[RotaryTable],
    wrappers: Wrappers,
) -> CalibratedLayer:
    """Return what a layer is in another block of its kind, given the modules there by those that were tried."""
    table, rotation, module = layer.table, layer.rotation, modules[layer.module]
    own = None if table is None else modules.get(table.module, table.module)
    if table is not None and own is not table.module:
        table = next(each for each in tables if each.module is own and each.label == table.label)
    if rotation is not None and (table is not layer.table or rotation.norm is not None):
        assert table is not None
        inv_freq, factor = _in_force(table, wrappers)
        inv_freq = inv_freq if rotation.order is None else inv_freq[rotation.order]

        def here(one: Rotation | None) -> Rotation | None:
            if one is None:
                return None
            norm = None if one.norm is None else modules.get(one.norm, one.norm)
            return replace(one, inv_freq=inv_freq, factor=factor, norm=norm, keys=here(one.keys))

        rotation = here(rotation)
    return replace(layer, name=names[module], module=module, rotation=rotation, table=table)


Calls = dict[nn.Module, list[Recorded]]


def _without_others(
    calls: Calls, forward: Callable[[], object]
) -> tuple[Calls, dict[nn.Module, str]]:
    """Return the calls of self-attention, and by module the argument with another text that it reads beside its own.

    Cross-attention has the keys of another text alone, which is of another length here.
    """
    own, beside = {}, {}
    for module, recorded in calls.items():
        others = recorded[0].keys - recorded[0].query.shape[2]
        if others > 0 and (argument := _argument_of(module, others, forward)):
            beside[module] = argument
        if not others or module in beside:
            own[module] = recorded
    return own, beside


def _argument_of(module: nn.Module, length: int, forward: Callable[[], object]) -> str | None:
    """Return the argument by which a module gets the states of another text of so many tokens; `None`: by none."""
    found: list[str] = []

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        given = named_arguments(module, args, kwargs).items()
        states = ((name, value) for name, value in given if isinstance(value, Tensor))
        found.extend(name for name, x in states if x.dim() == 3 and x.shape[1] == length)

    with hooked([module.register_forward_pre_hook(keep, with_kwargs=True)]):
        forward()
    return found[0] if found else None


def _inner_rotary(module: nn.Module) -> RepositionedRotary | None:
    """Return the rotary module by which an attention module rotates its own queries, and no merged keys."""
    for child in module.children():
        if isinstance(child, RepositionedRotary):
            return child
        if not type(child).__name__.endswith("Compressor") and (inner := _inner_rotary(child)):
            return inner
    return None


def _refuse_dynamic(tables: Sequence[RotaryTable], wrappers: Wrappers) -> None:
    for table in tables:
        rotary = wrappers[id(table.module)].base
        dynamic = table.moves
        if isinstance(rotary, PosencRotary) and table.label in rotary.specs:
            dynamic = rotary.method.length_dependent
        if dynamic:
            raise PosencError(
                f"The frequencies of {table.name} move with the length of the text, and beside a method that computes "
                "attention every layer needs one table. Give one method or list for all layers: a static one first, as "
                'in [YaRN(scale=4), ReRoPE()] (if scaled, replace=True); or a dynamic one with update="row" alone.'
            )


def _check_directions(name: str, methods: Sequence[Method], *, has_decoder: bool) -> None:
    # A table reads both directions alike.
    causal = [m.name for m in methods if not m.bidirectional and seam_of(m) != "rotary"]
    if causal:
        defined = [method for method in METHODS if method.bidirectional]
        like = [method for method in defined if method.seam in {each.seam for each in methods}]
        others = ", ".join(method.name for method in like or defined)
        decoder = 'layers="decoder" patches the decoder alone. ' if has_decoder else ""
        raise UnsupportedModelError(
            f"{name} reads the text in both directions, and {', '.join(causal)} is defined for keys that come before "
            f"the query. {decoder}Defined for both: {others}. {FREQUENCY_METHODS_WORK}"
        )


def verify(
    subject: nn.Module,
    text: Inputs,
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
        Layer(encoding, beside=layer.beside).attach(layer.module)
    with everything_at_zero(wrappers) if known else contextlib.nullcontext():
        computed = run(subject, text)
    error = float((computed - expected).abs().max() / expected.abs().max())
    if not error <= _TOLERANCES.get(rounding_dtype(subject), _HALF)[1]:
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
    orders: Sequence[Tensor | None] | None = None,
) -> tuple[Rotation | None, int | None]:
    """The rotation between the calls of a layer, and the index of its table; `None` twice where it does not rotate.

    Tables are the frequencies in force, shape (d/2,), and the factor on cos and sin. With `orders`, features read them
    in another order than that of the table.
    """
    tolerance = _TOLERANCES.get(native.query.dtype, _HALF)[0]
    pairs = ((native.query, still.query), (native.key, still.key))
    if all(_close(moved, rest, tolerance / 10) for moved, rest in pairs):
        return None, None
    positions = torch.arange(native.query.shape[2], device=native.query.device)[None]
    norms = _norms(module, native.query.shape[-1])
    for (index, (table, factor)), after in itertools.product(enumerate(tables), (False, True)):
        dim, order = 2 * len(table), None if orders is None else orders[index]
        tried = norms if after else (None,)
        table = table if order is None else table[order]
        starts = sorted(start for start in {0, native.query.shape[-1] - dim} if start >= 0)
        for start, interleaved, sign in itertools.product(starts, (False, True), (1, -1)):
            layout = Layout(start, dim, interleaved, sign)
            found: list[Rotation] = []
            for moved, rest in pairs:  # the norm of the queries, and that of the keys
                candidates = (Rotation(table, layout, factor, order, norm) for norm in tried)
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


def _order_of(table: RotaryTable, wrappers: Wrappers) -> Tensor | None:
    """Return the place in a table of the frequency of each pair of features, as the rotary module puts them out.

    It is read off cosines. `None` where they are in the order of the table, or are not those of its frequencies.
    """
    rotary: Any = wrappers[id(table.module)].base
    inv_freq, factor = _in_force(table, wrappers)
    try:
        label = (table.label,) if table.label else ()
        positions = torch.arange(1, 1 << 16, 251, device=inv_freq.device)[None]
        cos = rotary(inv_freq.new_zeros(1), positions, *label)[0]
    except Exception:  # it takes other arguments
        return None
    cos = cos.reshape(-1, positions.shape[1], cos.shape[-1])[0].double() / factor
    every = (positions[0, :, None].float() * inv_freq).double().cos()
    for pairs in (cos[:, ::2], cos[:, : len(inv_freq)]):
        if pairs.shape != every.shape:
            continue
        order = torch.cdist(pairs.T, every.T).argmin(-1)
        permutes = len({*order.tolist()}) == len(order)
        if permutes and torch.allclose(pairs, every[:, order], atol=1e-2):
            return None if bool((order.diff() == 1).all()) else order
    return None


def _norms(module: nn.Module, features: int) -> list[nn.Module]:
    """Return the parts of an attention module that may be norms with a weight for each feature of a head."""
    parts = ((part, part._parameters.get("weight")) for part in module.modules())
    weighted = (part for part, weight in parts if isinstance(weight, nn.Parameter))
    return [
        part
        for part, weight in ((part, stored(part, "weight")) for part in weighted)
        if weight.shape == (features,) and all(bool(held.all()) for held in plain_parts(weight))
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
def everything_at_zero(wrappers: Wrappers) -> Iterator[None]:
    """Put all tokens at position 0 of every rotary module."""
    with contextlib.ExitStack() as stack:
        for wrapper in wrappers.values():
            stack.enter_context(swapped(vars(wrapper), "encoding", _UNROTATED))
        yield
