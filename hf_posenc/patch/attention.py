"""Installing methods that compute attention: the seam is opened, calibrated, verified, and given the encodings."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.rotation import Rotation
from hf_posenc.errors import (
    FREQUENCY_METHODS_WORK,
    LOAD_FIRST,
    UnsupportedModelError,
    UntrainedWarning,
)
from hf_posenc.methods import (
    Growing,
    LengthDependent,
    LogN,
    Method,
    RopeScaling,
    YaRN,
    needs_no_rotation,
    seam_of,
)
from hf_posenc.methods.bands import moved
from hf_posenc.methods.contract import check_attention, check_frequencies
from hf_posenc.model.attention import (
    IMPLEMENTATION,
    Layer,
    hand_mask,
    hand_positions,
    recording,
    register,
    register_scaled,
)
from hf_posenc.model.calibration import (
    CalibratedLayer,
    Inputs,
    Wrappers,
    alone,
    calibrate,
    everything_at_zero,
    run,
    trial_inputs,
    trial_tokens,
    verify,
)
from hf_posenc.model.discovery import (
    RepositionedTable,
    RotaryTable,
    SinCosTable,
    attends_locally,
    layer_index,
    read_spec,
)
from hf_posenc.model.forward import KEYWORD, Again
from hf_posenc.model.masks import WithWrittenMasks
from hf_posenc.model.parameters import PARAMETERS, MethodParameters, share_parameters
from hf_posenc.model.positions import (
    LAYER,
    DecoderWatch,
    count_positions,
    refuse_drafts,
    refuse_padding,
    watch_caches,
)
from hf_posenc.model.rotary import ENGINE, PosencRotary, RepositionedRotary, native_rotary
from hf_posenc.model.sampled import Sample, without_weights
from hf_posenc.model.temperature import OwnTemperature, own_temperatures, refuse_own
from hf_posenc.model.unwrapping import owner_of, trial
from hf_posenc.model.weights import processes_of_heads
from hf_posenc.patch.export import config_parts, quiet
from hf_posenc.patch.frequencies import keep_frequencies
from hf_posenc.patch.state import LayerPart, State, replace_modules
from hf_posenc.seams.handover import UnwrittenMasks, give_positions, hand_over, search, take_back


def install_attention(
    model: nn.Module, state: State, every: Sequence[RotaryTable], tables: Sequence[RotaryTable]
) -> None:
    """Reposition the rotary modules, calibrate every attention layer and give it its encoding.

    Frequency methods are in place already. `tables` are those of `every` table that serve the chosen layers.
    """
    owners = owners_of(model, tables)
    for owner in owners:
        _refuse(model, owner, state.in_attention)
    if is_pair(model):
        every = [table for table in every if owner_of(model, table.name) in owners]
    if empty := without_weights(model):
        _keep_tables(model, state, every)
    elif any(isinstance(method, Growing | RopeScaling) for method in state.in_attention):
        keep_frequencies(model, state, every)  # other frequencies are reached from them
    with trial(model):
        try:
            with state.sample.only():
                ids = trial_tokens(owners[0])
                subject, text, expected = trial_inputs(model, owners[-1])
        except UnsupportedModelError:  # blocks that need what others leave for them
            if empty:
                raise
            state.sample = Sample({})
            subject, text, expected = trial_inputs(model, owners[-1])
    tried: tuple[Any, Inputs] = owners[0], {"input_ids": ids}
    if is_pair(model):
        tried = subject, text
    natives = {owner: _choose_engine(owner, state) for owner in owners}
    for owner, native in natives.items():
        if native is None and owner.config._attn_implementation != ENGINE:
            _hand_over(owner, trial_tokens(owner), state)
        for module in owner.modules():
            if any(type(child).__name__.endswith("Indexer") for child in module.children()):
                module.register_forward_pre_hook(hand_mask, with_kwargs=True)
    wrappers = _reposition(model, every)
    watches = {owner: DecoderWatch(owner, state.config) for owner in owners}
    if any(isinstance(table.module, nn.Embedding) for table in every):
        # Its rows reach the layers, and its positions do not.
        watches[owners[0]].counts = "places"
        state.hooks += watches[owners[0]].around(owners[0])
    with trial(model), state.sample.only():
        layers = calibrate(model, *tried, every, wrappers, state.in_attention, state.sample)
        _check_hooks(state, layers)
        native = None if None in natives.values() else natives[owners[0]]
        if any(layer.beside for layer in layers):
            native = None  # the queries are scaled for one of two texts
        inside = {owner: {*owner.modules()} for owner in owners}
        own = {o: [layer for layer in layers if layer.module in inside[o]] for o in owners}
        if native is None:
            for owner in owners:
                _use_engine(owner, written=any(x.beside or x.recorded.adds for x in own[owner]))
        verify(subject, text, expected, layers, wrappers, engine=native is None)
        scaled = bool(of_queries(state.in_attention)) and not is_pair(model)
        with everything_at_zero(wrappers):  # else a table that follows the text has a factor too
            own_factors = own_temperatures(owners[0], ids) if scaled else {}
        for module, each in state.sample.counterparts().items():
            if module in own_factors:
                own_factors |= {other[module]: own_factors[module] for other in each}
        if state.parts:
            _give_parts(layers, wrappers, state, native, own_factors)
        else:
            _give_encodings(layers, tables, wrappers, state, native, own_factors)
        for owner in owners:
            _share(owner, own[owner])
            hooks = count_positions_of(model, owner)
            if is_pair(model) and not hooks:
                owner.register_forward_pre_hook(refuse_padding, with_kwargs=True)
            watch = watches[owner]
            if native is None:
                state.hooks += _watch_cache(model, watch, own[owner])
                state.hooks += [] if watch.counts else watch.around(owner)
        if native is not None and len(state.methods) > len(state.in_attention):
            state.hooks += watch_caches(model, state.config)
        run(subject, text)  # the patched model runs
    warn_of(model, state.in_attention, stacklevel=5)


def _keep_tables(model: nn.Module, state: State, tables: Sequence[RotaryTable]) -> None:
    """Keep the frequencies of a model without weights; raise for what cannot be patched before these are there."""
    lacking = ""
    scaled = [table for table in tables if table.scaled]  # left as they are, if they have values
    absent = any(table.held_by(table.module).is_meta for table in scaled)
    if absent or any(isinstance(table, SinCosTable) for table in tables):
        lacking = "its rotation is scaled already, or a table"
    wrappers = {id(each.base): each for each in model.modules() if isinstance(each, PosencRotary)}
    wrapped = [table for table in tables if id(table.module) in wrappers]
    if any(table.label not in wrappers[id(table.module)].specs for table in wrapped):
        lacking = "one part of a rotary module keeps its frequencies"
    if not state.sample.empty:
        lacking = 'verify="full" needs the weights'
    if lacking:
        raise UnsupportedModelError(f"This model is on the meta device and {lacking}. {LOAD_FIRST}")
    kept = {id(table.module) for table in scaled}
    keep_frequencies(model, state, [table for table in tables if id(table.module) not in kept])


def is_pair(model: Any) -> bool:
    """Return whether a model is an encoder and a decoder."""
    return bool(getattr(model.config, "is_encoder_decoder", False))


def owners_of(model: nn.Module, tables: Sequence[RotaryTable]) -> list[Any]:
    """Return the decoder that rotary tables belong to; of an encoder-decoder model both parts, where both have some."""
    owners = dict.fromkeys(owner_of(model, table.name) for table in tables)
    return list(owners) if is_pair(model) else list(owners)[:1]


def _use_engine(owner: Any, *, written: bool) -> None:
    """Let the engine compute where scaled queries were planned; `written`: with masks that modules can change."""
    for _, part in config_parts(owner.config):
        name = vars(part).get(IMPLEMENTATION)
        if isinstance(name, str) and name.startswith(ENGINE):
            vars(part)[IMPLEMENTATION] = WithWrittenMasks(ENGINE) if written else ENGINE


def install_biases(model: nn.Module, state: State, place: str) -> None:
    """Give every attention layer of a model without rotation its encoding; `place` is a path in its decoder.

    Positions are counted in front of the decoder and handed to the layers.
    """
    owner = owner_of(model, place)
    _refuse(model, owner, state.in_attention)
    sample = state.sample
    with trial(model), sample.only():
        ids = trial_tokens(owner)
        subject, text, expected = trial_inputs(model, owner)
    _choose_engine(owner, state)
    calls: Mapping[nn.Module, object] = {}
    if owner.config._attn_implementation == ENGINE:  # which another tower alone may call
        with trial(owner), alone(owner), recording() as calls:
            run(owner, ids)
    if not calls:
        _hand_over(owner, ids, state)
    with trial(model), sample.only():
        watch = DecoderWatch(owner, state.config, counts="tokens")
        state.hooks += watch.around(owner)
        layers = calibrate(model, owner, {"input_ids": ids}, (), {}, state.in_attention, sample)
        _check_hooks(state, layers)
        base = Encoding.of(state.in_attention, state.original)
        watch.passes = all(KEYWORD in layer.recorded.kwargs for layer in layers)
        if owner.config._attn_implementation == ENGINE:
            watch.config = owner.config
        verify(subject, text, expected, layers, {}, engine=True)
        for layer in layers:
            encoding = encoding_of(base, layer, state.in_attention, compose=state.config.compose)
            Layer(encoding, patched=True).attach(layer.module)
        _share(owner, layers)
        state.hooks += _watch_cache(model, watch, layers)
        run(subject, text)


def warn_of(model: nn.Module, methods: Sequence[Method], *, stacklevel: int) -> None:
    """Warn of methods with parameters to train, and of those that no kernel computes on the model's GPU."""
    for method in methods:
        if method.trainable:
            warnings.warn(
                f"{method.name} starts untrained: the model must be trained with it before its output means anything. "
                f"Its parameters are among model.parameters(), named ...{PARAMETERS}.*",
                UntrainedWarning,
                stacklevel=stacklevel + 1,
            )
    if _on_gpu(model) and any(each.encoding.in_blocks for _, each in patched_layers(model)):
        warnings.warn(
            f"No kernel computes {', '.join(one.name for one in methods)} on a GPU, but blocks of PyTorch operations: "
            "a layer took 88 to 189 times as long as plain attention, for 8,192 tokens (docs/gpu.md).",
            stacklevel=stacklevel + 1,
        )


def _on_gpu(model: nn.Module) -> bool:
    return any(parameter.is_cuda for parameter in model.parameters())


def remove_attention(model: nn.Module) -> None:
    """Remove layers, hooks, parameters and wrappers."""
    take_back(model)
    Again.remove(model)
    for module in model.modules():
        module.__dict__.pop(LAYER, None)
        module._modules.pop(PARAMETERS, None)
        for number, hook in list(module._forward_pre_hooks.items()):
            if hook in (hand_positions, count_positions, hand_mask, refuse_padding):
                del module._forward_pre_hooks[number]
                module._forward_pre_hooks_with_kwargs.pop(number, None)
        for name, child in list(module._modules.items()):
            if isinstance(child, RepositionedRotary):
                setattr(module, name, child.base)


def patched_layers(model: nn.Module) -> Iterator[tuple[str, Layer]]:
    """Yield the attention layers in which a method is in force, by path."""
    for name, module in model.named_modules():
        layer: Layer | None = module.__dict__.get(LAYER)
        if layer is not None and layer.patched:
            yield name, layer


def _refuse(model: nn.Module, owner: nn.Module, methods: Sequence[Method]) -> None:
    kinds = [type(module).__name__ for module in owner.modules()]
    indexers = [kind for kind in kinds if kind.endswith("Indexer")]
    if compressors := [kind for kind in kinds if kind.endswith("Compressor")]:
        if not needs_no_rotation(methods):
            raise UnsupportedModelError(
                f"{type(owner).__name__} merges several tokens into one key by a {compressors[0]}, and a method that "
                "computes attention itself is defined by the position of a key, of which such a key has none. log_n "
                f"works there. {FREQUENCY_METHODS_WORK}"
            )
    elif indexers and not all(
        seam_of(method) == "query" or getattr(method, "keep_rope", False) for method in methods
    ):
        raise UnsupportedModelError(
            f"{type(owner).__name__} chooses the keys of a query by a {indexers[0]}, from rotated queries and keys of "
            "its own, which a method that changes the rotation in attention does not follow. log_n and biases with "
            f"keep_rope=True work there. {FREQUENCY_METHODS_WORK}"
        )
    added = [method.name for method in methods if method.trainable]
    classes = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    if added and "FSDPModule" in classes:
        warnings.warn(
            f"FSDP does not manage the parameters that {', '.join(added)} adds to a model after fully_shard: each "
            "process would train its own. Patch the model first, or train it by the Trainer, which averages their "
            "gradients where transformers has sharded the model.",
            stacklevel=7,
        )


def _choose_engine(owner: Any, state: State) -> str | None:
    """Set the attention implementation of the decoder, and of nothing that it contains (an audio codec).

    Returns the model's own one where the methods only scale its queries; `None` where the engine computes.
    """
    register()
    parts = [part for _, part in config_parts(owner.config)]
    before = [vars(part).get(IMPLEMENTATION) for part in parts]
    state.attention = state.attention or str(before[0])  # that of the encoder, before a decoder
    for part, name in zip(parts, before, strict=True):
        state.set(part, {IMPLEMENTATION: name})
    with quiet():
        owner.set_attn_implementation(ENGINE)
    for part, name in zip(parts[1:], before[1:], strict=True):
        if part is not owner.config.get_text_config(decoder=True):
            vars(part)[IMPLEMENTATION] = name
    own_code = owner.config._attn_implementation != ENGINE
    if own_code or any(seam_of(method) != "query" for method in state.in_attention):
        return None
    native = state.attention
    for part in parts:
        if vars(part)[IMPLEMENTATION] == ENGINE:
            vars(part)[IMPLEMENTATION] = register_scaled(native)
    return native


def _hand_over(owner: Any, ids: Tensor, state: State) -> None:
    """Find the modules that compute attention in code of their own, and hand that to the engine."""
    # The engine reads the mask that such code adds to its scores, and code that may call sdpa itself must not.
    state.set(owner.config, {IMPLEMENTATION: "eager"})
    with trial(owner), alone(owner):
        found = search(owner, lambda: run(owner, ids.expand(2, -1)))
    if not found.modules:
        unknown = (
            f" (it applies {', '.join(found.operations)} to scores)" if found.operations else ""
        )
        raise UnsupportedModelError(
            f"{type(owner).__name__} computes attention in its own code, which hf_posenc cannot follow{unknown}. "
            f"{FREQUENCY_METHODS_WORK}"
        )
    hand_over(found)
    state.hooks.append(UnwrittenMasks(owner).install())


def _reposition(model: nn.Module, tables: Sequence[RotaryTable]) -> Wrappers:
    """Wrap every rotary module or table of the text decoder; the wrappers by `id` of the module that holds it."""
    wrappers: dict[int, RepositionedRotary | RepositionedTable] = {}
    replaced: dict[int, nn.Module] = {}
    for module in model.modules():  # the wrapper of a frequency method before its base
        native = native_rotary(module)
        own = [table for table in tables if table.module is native]
        if not own or id(native) in wrappers:
            continue
        owner = owner_of(model, own[0].name)
        if isinstance(own[0], SinCosTable):
            if (repositioned := give_positions(model, own[0])) is None:
                raise UnsupportedModelError(
                    f"{type(owner).__name__} rotates and attends in code of its own, by a table of sines and cosines "
                    f"({own[0].name}) that hf_posenc cannot give other positions. {FREQUENCY_METHODS_WORK}"
                )
            wrappers[id(native)] = repositioned
        else:
            rotary = RepositionedRotary(module, owner.config, [table.label for table in own])
            wrappers[id(native)], replaced[id(module)] = rotary, rotary
    replace_modules(model, replaced)
    return wrappers


def _check_hooks(state: State, layers: Sequence[CalibratedLayer]) -> None:
    calls = [layer.recorded for layer in layers]
    shapes = {(call.query.shape[1], call.key.shape[1], call.query.shape[-1]) for call in calls}
    parts = [([*part.methods], part.original) for part in state.parts]
    for methods, original in parts or [(state.in_attention, state.original)]:
        for method, sizes in itertools.product(methods, shapes):
            check_attention(method, original, *sizes)


def _give_encodings(
    layers: Sequence[CalibratedLayer],
    tables: Sequence[RotaryTable],
    wrappers: Wrappers,
    state: State,
    native: str | None,
    own: Mapping[nn.Module, OwnTemperature | None],
) -> None:
    """Give every attention layer its encoding, and the rotary modules the positions at which keys are cached.

    `own` has the modules that scale their queries themselves.
    """
    base = Encoding.of(state.in_attention, state.original)
    multiplying = of_queries(state.in_attention)
    unrotated = Encoding.of(multiplying, state.original)
    # Layers whose table is a chosen one; not all of them need be chosen themselves.
    sharing = [layer for layer in layers if layer.table in tables]
    chosen = _chosen(layers, sharing, tables[0].config, state)
    scaled = {layer.name: own[layer.module] for layer in chosen if layer.module in own}
    refuse_own(scaled, replace=state.config.replace)
    for layer in layers:
        encoding = plain_encoding(layer, state.original)
        if layer in chosen and layer.table is None:
            encoding = encoding_of(unrotated, layer, multiplying, compose=state.config.compose)
        elif layer in chosen:
            encoding = encoding_of(base, layer, state.in_attention, compose=state.config.compose)
        elif layer in sharing:
            encoding = replace(encoding, cached_by=base)
        if (before := scaled.get(layer.name)) is not None:
            encoding = replace(encoding, own_factor=before.factor)
        Layer(encoding, layer in chosen, native=native, beside=layer.beside).attach(layer.module)
    for module, wrapper in wrappers.items():
        wrapper.labels = frozenset(table.label for table in tables if id(table.module) == module)
        wrapper.encoding = base if wrapper.labels else None


def _chosen(
    layers: Sequence[CalibratedLayer], sharing: Sequence[CalibratedLayer], config: Any, state: State
) -> list[CalibratedLayer]:
    """Return the layers in which a method is in force: layers that rotate, and others where it multiplies queries."""
    methods, requested = state.in_attention, state.config.layers
    scaled = [layer for layer in layers if layer.table is None] if of_queries(methods) else []
    eligible = [*sharing, *scaled] if needs_no_rotation(methods) else [*sharing]

    def chosen(layer: CalibratedLayer) -> bool:
        if requested == "all":
            return True
        if isinstance(requested, str):
            return not attends_locally(layer.module, layer.table.config if layer.table else config)
        return layer_index(layer.name, layer.module) in requested

    if not eligible:
        raise UnsupportedModelError(
            f"No attention layer of this model rotates, as {', '.join(method.name for method in methods)} needs. A "
            "filter before it in a list may have stopped every pair."
        )
    if not isinstance(requested, str):
        refuse_missing(methods, requested, eligible)
    if not any(chosen(layer) for layer in eligible):
        raise UnsupportedModelError(
            f"No layer that rotates is among layers={requested!r}: those of this model have a sliding window or "
            'chunks. layers="all" includes them.'
        )
    return [layer for layer in (*sharing, *scaled) if chosen(layer)]


def refuse_missing(
    methods: Sequence[Method], requested: Sequence[int], layers: Sequence[CalibratedLayer]
) -> None:
    """Raise for numbers of layers that are not among those which methods change."""
    found = (layer_index(layer.name, layer.module) for layer in layers)
    numbers = {number for number in found if number is not None and number >= 0}
    if missing := sorted({*requested} - numbers):
        names = ", ".join(method.name for method in methods)
        raise UnsupportedModelError(
            f"layers={list(requested)}: {names} would change nothing in {', '.join(map(str, missing))}, which "
            "has no attention, no rotation, or a module that it shares with other layers. Layers that it changes: "
            f"{', '.join(str(number) for number in sorted(numbers)) or 'none by a number'}."
        )


def plain_encoding(layer: CalibratedLayer, original: int) -> Encoding:
    """Return the encoding of a layer in which no method is in force."""
    heads, both = layer.recorded.query.shape[1], layer.bidirectional
    return Encoding(original, heads, layer.rotation, bidirectional=both)


def of_queries(methods: Sequence[Method]) -> list[Method]:
    """Return the methods of layers that do not rotate: those that multiply queries."""
    return [
        LogN() if getattr(method, "log_n", False) else method
        for method in methods
        if seam_of(method) == "query" or getattr(method, "log_n", False)
    ]


def encoding_of(
    base: Encoding, layer: CalibratedLayer, methods: Sequence[Method], *, compose: bool
) -> Encoding:
    """The encoding of one layer; its parameters become a child of the attention module."""
    call, mesh, share = layer.recorded, None, (0, 1)
    if base.bias is not None or any(method.trainable for method in methods):
        mesh = processes_of_heads(layer.name, call.sharded, call.features)
        share = share if mesh is None else (mesh.get_local_rank(), mesh.size())
    heads, key_heads = (x.shape[1] * share[1] for x in (call.query, call.key))
    initial: dict[str, Tensor] = {}
    for method in methods:
        initial |= method.parameters_for(heads, key_heads, call.query.shape[-1], base.original)
    parameters: Any = None  # a mapping too, which the type of a module does not express
    if initial:
        parameters = MethodParameters(initial, mesh).to(call.query.device)
        layer.module.register_module(PARAMETERS, parameters)
    spec, factor = None, 1.0
    if isinstance(base.method, LengthDependent):
        assert layer.table is not None
        spec = read_spec(layer.table, base.original, compose=compose)
        check_frequencies(base.method, spec)
        if compose and layer.rotation is not None:
            factor = layer.rotation.factor
        if layer.rotation is not None and (order := layer.rotation.order) is not None:
            spec = replace(spec, order=order if spec.order is None else spec.order[order])
    return replace(
        base,
        heads=call.query.shape[1],
        share=share,
        rotation=layer.rotation,
        spec=spec,
        factor=factor,
        parameters=parameters,
        bidirectional=layer.bidirectional,
    )


def _share(owner: nn.Module, layers: Sequence[CalibratedLayer]) -> None:
    pairs = ((layer.module, getattr(layer.module, LAYER).encoding.bias) for layer in layers)
    share_parameters(owner, [pair for pair in pairs if pair[1] and pair[1].shared_parameters])


def count_positions_of(model: nn.Module, owner: nn.Module) -> list[RemovableHandle]:
    """Hook the decoder and the models around it, some of which count positions before they call it (Gemma 4)."""
    around = [module for module in model.modules() if owner in module.modules()]
    # With the mask for three axes, or of the encoder.
    if is_pair(model) or any(hasattr(module, "get_rope_index") for module in around):
        around = [owner]
    return [
        module.register_forward_pre_hook(count_positions, with_kwargs=True)
        for module in around
        if {"attention_mask", "position_ids"} <= {*inspect.signature(module.forward).parameters}
    ]


def _watch_cache(
    model: nn.Module, watch: DecoderWatch, layers: Sequence[CalibratedLayer]
) -> list[RemovableHandle]:
    """Name the lengths and the rotated keys that layers read of the cache; return further hooks that these need."""
    for layer in layers:
        seam: Layer = getattr(layer.module, LAYER)
        method, original = seam.encoding.method, seam.encoding.original
        if not isinstance(method, Growing):
            continue
        if method.update == "request":
            seam.request = method.bucket_size(original), original
            watch.lengths.add(seam.request)
        index = layer_index(layer.name, layer.module)
        # A module that serves several layers (Zamba 2) writes to several places of the cache.
        if index is not None and index >= 0 and layer.calls == 1:
            seam.index = index
            watch.rotated.add(index)
    if not watch.lengths:
        return []
    return [model.register_forward_pre_hook(refuse_drafts, with_kwargs=True)]


# Different methods in different layers: keys stay cached as the model rotates them, and each layer turns them on.


@dataclass(frozen=True, eq=False)
class Turn:
    """Turns queries and keys from the model's own rotation to the one that an encoding expects."""

    own: Rotation  # the rotation that they have
    # Frequencies beyond it, shape (d/2,), radians per token; `None`: none.
    frequencies: Tensor | None
    factor: float  # the factor on cos and sin beyond it
    encoding: Encoding  # the encoding that reads them, keys at its `cached_position`

    def __call__(self, query: Tensor, key: Tensor, m: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        """Turn queries, (batch, heads, queries, head_dim), at m and keys at n; positions are (batch or 1, length)."""
        return self._turned(query, m, self.own, self.encoding.rotation), self._turned(
            key, n, self.own.of_keys, self.encoding.rotation and self.encoding.rotation.of_keys
        )

    def _turned(self, x: Tensor, p: Tensor, own: Rotation, target: Rotation | None) -> Tensor:
        if self.frequencies is not None:
            x = own.turn(x, p, self.frequencies, self.factor)
        cached = self.encoding.cached_position(p)
        return x if target is None or cached is p else target.turn(x, moved(cached, p))


def _give_parts(
    layers: Sequence[CalibratedLayer],
    wrappers: Wrappers,
    state: State,
    native: str | None,
    own: Mapping[nn.Module, OwnTemperature | None],
) -> None:
    """Give each choice of layers its methods; all of them compute attention, and the model's rotary modules stay."""
    for wrapper in wrappers.values():
        wrapper.encoding = None  # every key is cached at its own position
    for layer in layers:
        if layer.beside is not None:
            raise UnsupportedModelError(
                f"{layer.name} reads two texts in one softmax, where layers cannot have methods of their own. Give one "
                'method, with layers="full", "all", "encoder" or "decoder".'
            )
        Layer(plain_encoding(layer, state.original), native=native).attach(layer.module)
    for part in state.parts:
        multiplying = of_queries(part.methods)
        able = [layer for layer in layers if layer.table is not None or multiplying]
        chosen = [layer for layer in able if layer_index(layer.name, layer.module) in part.layers]
        if part.strict or not chosen:
            refuse_missing(part.methods, part.layers, able)
        scaled = {layer.name: own[layer.module] for layer in chosen if layer.module in own}
        refuse_own(scaled if multiplying else {}, replace=state.config.replace)
        for layer in chosen:
            methods = part.methods if layer.table is not None else multiplying
            encoding, turn = _encoding(layer, methods, part)
            if (before := scaled.get(layer.name)) is not None:
                encoding = replace(encoding, own_factor=before.factor)
            Layer(encoding, True, native=native, turn=turn).attach(layer.module)


def _encoding(
    layer: CalibratedLayer, methods: Sequence[Method], part: LayerPart
) -> tuple[Encoding, Turn | None]:
    """Return the encoding of one layer, and the turn that queries and keys need before it."""
    moving = [method for method in methods if isinstance(method, LengthDependent)]
    static = [m for m in methods if isinstance(m, RopeScaling) and m not in moving]
    others = [method for method in methods if method not in static]
    rotation, frequencies, factor = layer.rotation, None, 1.0
    if static and layer.table is not None and rotation is not None:
        (scaling,) = static
        replaced = layer.table.scaled and not part.compose
        dropped = replaced and layer.table.parameters.get("mscale_all_dim")
        if dropped or (isinstance(scaling, YaRN) and scaling.mscale_all_dim):
            raise UnsupportedModelError(
                f"{layer.name}: mscale_all_dim changes the softmax scale of attention modules, which methods "
                "by layers do not, nor vLLM's plug-in. Choose all layers, or compose=True."
            )
        spec = read_spec(layer.table, part.original, compose=part.compose)
        check_frequencies(scaling, spec)
        table = scaling.frequencies(spec).float()
        table = table if spec.order is None else table[spec.order]
        table = table if rotation.order is None else table[rotation.order]
        factor = float(scaling.cos_sin_factor(spec)) * (rotation.factor if part.compose else 1.0)
        frequencies = table.to(rotation.inv_freq.device) - rotation.inv_freq
        rotation, factor = _scaled(rotation, table, factor), factor / rotation.factor
    base = Encoding.of(others, part.original)
    encoding = encoding_of(base, replace(layer, rotation=rotation), others, compose=part.compose)
    if layer.rotation is None or needs_no_rotation(methods) or (moving and frequencies is None):
        return encoding, None
    return encoding, Turn(layer.rotation, frequencies, factor, encoding)


def _scaled(rotation: Rotation, table: Tensor, factor: float) -> Rotation:
    keys = rotation.keys and _scaled(rotation.keys, table, factor)
    return replace(rotation, inv_freq=table.to(rotation.inv_freq.device), factor=factor, keys=keys)
