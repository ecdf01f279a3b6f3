"""`patch_model` and its companions: request, discovery, installation, read-back, undo."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from hf_posenc.attention.call import outside_autocast
from hf_posenc.errors import PosencError, UnsupportedModelError
from hf_posenc.methods import PositionInterpolation, RopeScaling, get_method, needs_no_rotation
from hf_posenc.model.discovery import (
    INSPECT,
    PARTS,
    PER_LENGTH,
    NoRotaryError,
    RotaryTable,
    SinCosTable,
    foreign_frequencies,
    is_table,
    select,
    tables_of,
    uncertain_rotaries,
)
from hf_posenc.model.parameters import trained_parameters
from hf_posenc.model.rotary import PosencRotary
from hf_posenc.model.sampled import Sample, sample_of
from hf_posenc.model.unwrapping import configs_of, default_dtype, unwrap
from hf_posenc.model.weights import damaged_weights
from hf_posenc.patch import export
from hf_posenc.patch.batching import unwrap_batching, wrap_batching
from hf_posenc.patch.config import Layers, PatchConfig, of_kind
from hf_posenc.patch.frequencies import install_rotary, install_sincos, refuse_local
from hf_posenc.patch.report import EffectiveTables, Patch
from hf_posenc.patch.report import inspect_rope as inspect_rope
from hf_posenc.patch.request import MethodLike, named, resolve_request
from hf_posenc.patch.saving import unwrap_saving, wrap_saving
from hf_posenc.patch.scaled import moving_note
from hf_posenc.patch.state import STATE, State, config_values, own_config, replace_modules, state_of
from hf_posenc.seams.held import ABSENT, refuse_replica, restore
from hf_posenc.seams.hidden import once, refuse_hidden
from hf_posenc.seams.inspection import Positions, inspect
from hf_posenc.seams.native import NativeSeam, choose

ModelT = TypeVar("ModelT", bound=nn.Module)


def patch_model(
    model: ModelT,
    method: MethodLike,
    *,
    scale: float | None = None,
    target_length: int | str | None = None,
    original_max_position_embeddings: int | str | None = None,
    layers: Layers | Sequence[int] = "full",
    compose: bool = False,
    replace: bool = False,
    verify: str = "sample",
    **options: Any,
) -> ModelT:
    """Change how a live model encodes position, in place and reversibly.

    A model with RoPE is first run on seven tokens, through one block of each kind, which shows that positions enter
    nowhere else. The call ends by reading back the frequencies in force; where anything fails, the model is left as it
    was.
    The same request once more changes nothing, also after training. Another one needs `replace=True`.

    Args:
        model: A transformers model, also wrapped by PEFT, DDP or `torch.compile`, also on the meta device.
        method: A name or alias (`available_methods()`), a Method object, a list of them on different seams
            (filters after the table that they change), or a dictionary of layers with such values, or `None` for
            layers that stay: `{"full": NoPE(), "sliding": None}`, `{range(0, 16): YaRN(scale=4), 16: "rerope"}`.
        scale: Target context as a multiple of the original one.
        target_length: Target context in tokens, instead of `scale`; text such as `"32k"` is read too.
        original_max_position_embeddings: The context length that the method starts from, in tokens: with `compose` the
            one that the scaled checkpoint reaches, else the one before any scaling. By default it is read from the
            config, and from the recipes of known checkpoints (`hf_posenc.model.context.readings`).
        layers: `"full"` (all but sliding-window layers; frequency methods leave out those with a rotary table of their
            own; an error where no others rotate), `"all"`, or a list of layer indices. In an encoder-decoder model also
            `"encoder"` or `"decoder"`: its full layers. For static frequencies also a block of `rope_parameters`.
        compose: On a checkpoint that is scaled already: start from its scaled frequencies.
        replace: Start from the plain rotation: undo a patch that is in force, unless that has parameters to train, and
            drop the scaling of a checkpoint that is scaled already.
        verify: The blocks that the patch is tried on: `"sample"` (one of each kind: built of the same classes, shapes
            and attributes) or `"full"` (all).
        **options: The method's own knobs (`get_method(name).knobs()`).

    Returns:
        The same object.

    Raises:
        UnsupportedModelError: A model that cannot be patched, with the reason.
        VerificationError: The model does not compute the requested patch; it was restored.
        PosencError: Any other request that cannot be met.

    Examples:
        >>> from hf_posenc import get_patch, patch_model
        >>> model = patch_model(model, "yarn", scale=8)  # 4,096 tokens become 32,768
        >>> get_patch(model).method
        'yarn'
        >>> model = patch_model(model, "rerope", window=2048, replace=True)
    """
    request = {"scale": scale, "target_length": target_length, "layers": layers, **options}
    request |= {"compose": compose, "replace": replace, "verify": verify}
    request["original_max_position_embeddings"] = original_max_position_embeddings
    _patch(model, method, request)
    return model


def _patch(
    model: nn.Module, method: MethodLike, request: Mapping[str, Any], *, temporary: bool = False
) -> Callable[[], None] | None:
    """Patch a model, and return the function that puts back the patch from before; `None` if it is the same patch."""
    request = dict(request)
    if (verify := request.pop("verify", "sample")) not in ("sample", "full"):
        raise PosencError(f'verify is "sample" or "full", not {verify!r}.')
    inner: Any = unwrap(model)
    earlier = state_of(model)
    trained = earlier is not None and not temporary and _is_trained(inner, earlier)
    put_back = _suspend(inner, earlier)
    try:
        damage = damaged_weights(inner.named_parameters(), sampled=True)
        # Inside `with torch.device("meta")` too, tables and probes are real. A device context takes a third of the
        # time of a patch, so there is one only where tensors would be made elsewhere.
        elsewhere = torch.empty(0).device.type != "cpu"
        placed = torch.device("cpu") if elsewhere else contextlib.nullcontext()
        # Trials are compared as precisely as the weights are. Tables are float32, whatever default vLLM has set.
        kind = next((each.device.type for each in inner.parameters()), "cpu")
        with placed, outside_autocast(kind), default_dtype(torch.float32):
            sample = sample_of(inner) if verify == "sample" else Sample({})
            source = _source(inner, method, sample)
            tables = () if isinstance(source, NativeSeam) else source
            foreign = _is_foreign(inner, tables, method, request)
            scaled = any(table.scaled for table in tables)
            replace = request.get("replace") is True
            try:
                state = resolve_request(source, method, **request)
            except PosencError:
                # The refusal offers ways that a patch in force refuses.
                if earlier is not None and scaled:
                    compose = request.get("compose") is True
                    _check_replaceable(earlier, trained=trained, compose=compose, replace=replace)
                raise
            state.foreign = foreign
            if earlier is not None:
                if _is_same(state, earlier, scaled=scaled):
                    put_back()
                    return None
                compose = state.config.compose
                _check_replaceable(earlier, trained=trained, compose=compose, replace=replace)
            if state.in_attention:
                _refuse_prompts(model)
            _refuse_damaged(damage, state)
            state.sample = sample
            if tables and (uncertain := uncertain_rotaries(inner, tables)):
                from hf_posenc.model.calibration import certify  # imports transformers

                certify(inner, uncertain)
            if tables:
                names = ", ".join(each.name for each in state.methods)
                # Frequencies alone are changed on the meta device without a trial, which takes memory.
                tried = sample if state.in_attention or not sample.empty else Sample({})
                refuse_hidden(inner, tables, names, tried)
            if tables and len(state.methods) > len(state.in_attention):
                layers = state.config.layers
                if layers == "full" or layers in PARTS:
                    refuse_local(inner, select(tables, layers, whole=True), sample)
            setattr(inner, STATE, state)
            try:
                if isinstance(source, NativeSeam):
                    (state.native,) = own_config(model, (source,))
                    state.native.install(inner, state, state.methods[0])
                else:
                    _install(inner, state, own_config(model, source))
                if not state.in_attention:
                    from hf_posenc.model.positions import watch_caches  # imports transformers

                    state.hooks += watch_caches(inner, state.config)
                state.hooks.append(inner.register_forward_pre_hook(refuse_replica))
            except BaseException as error:
                _undo(inner, state)
                if isinstance(error, UnsupportedModelError) and state.in_attention:
                    _refuse_damaged(damaged_weights(inner.named_parameters()), state)
                raise
    except BaseException:
        put_back()
        raise
    wrap_saving(inner)
    wrap_batching(inner)
    return put_back


def native_seams() -> tuple[type[NativeSeam], ...]:
    """Return the seams of models without rotary embedding, in the order in which they are tried."""
    # They import transformers.
    from hf_posenc.patch.silenced import SilencedTable
    from hf_posenc.seams.bias import BiasSeam
    from hf_posenc.seams.distances import DistanceSeam
    from hf_posenc.seams.tables import TableSeam

    return TableSeam, BiasSeam, DistanceSeam, SilencedTable


def _source(
    model: nn.Module, method: MethodLike, sample: Sample
) -> tuple[RotaryTable, ...] | NativeSeam:
    """Return what a request patches: the rotary tables of a model, or another seam that is found by trial."""
    methods = named(method)
    lack: UnsupportedModelError | None = None
    try:
        tables = tables_of(model)
        if all(one.for_rotary for one in methods):
            return tables
    except NoRotaryError as error:
        lack = error
    try:
        positions = once(model, "positions", lambda: _inspected(model, sample))
    except UnsupportedModelError as error:
        without_weights = any(each.is_meta for each in model.parameters())
        if lack is None or without_weights or not all(one.for_rotary for one in methods):
            raise
        raise NoRotaryError(f"{str(lack).removesuffix(INSPECT)}{error}") from error
    with sample.only():
        return choose(native_seams(), model, positions, methods)


def _inspected(model: nn.Module, sample: Sample) -> Positions:
    """Inspect the sample of a model, or the whole model where that has an unknown place or shows none at all."""
    if sample.twins and not sample.empty:
        with contextlib.suppress(Exception), sample.only():
            found = inspect(model)
            if found.complete and found.sources:
                sources = (
                    dataclasses.replace(one, places=sample.everywhere(model, one.places))
                    for one in found.sources
                )
                return dataclasses.replace(found, sources=tuple(sources))
    return inspect(model)


def _suspend(model: nn.Module, state: State | None) -> Callable[[], None]:
    """Undo a patch, if there is one, and return the function that puts back its very objects.

    Edits of a config meanwhile, which then is another object, are made in the old one too; not of what the patch sets.
    """
    if state is None:
        return lambda: None
    held = [vars(each) for each in (*model.modules(), *(target for target, _ in state.changes))]
    held += [inner for outer in held for inner in outer.values() if isinstance(inner, dict)]
    before = [dict(entries) for entries in held]
    _undo(model, state)
    plain = config_values(model)
    changes: list[tuple[dict[str, Any], str, Any]] = []
    for entries, old in zip(held, before, strict=True):
        # The config always: the next patch gives the model another one.
        kept = {key for key, value in entries.items() if old.get(key) is value and key != "config"}
        changes += [(entries, key, value) for key, value in old.items() if key not in kept]

    def put_back() -> None:
        edited = config_values(model)
        for entries, key, value in changes:
            entries[key] = value
        owned = {(id(target), key) for target, values in state.changes for key in values}
        for place, config in configs_of(model).items():
            now, then = edited.get(place, {}), plain.get(place, {})
            for key in {*now, *then}:
                value = now.get(key, ABSENT)
                if value != then.get(key, ABSENT) and (id(config), key) not in owned:
                    restore(config, {key: value})

    return put_back


def _is_same(state: State, earlier: State, *, scaled: bool) -> bool:
    """Return whether two requests are one; `compose` and `replace` count on a scaled checkpoint alone."""
    flags: dict[str, Any] = {} if scaled else {"compose": False, "replace": False}
    one, other = (dataclasses.replace(each.config, **flags) for each in (state, earlier))
    return state.methods == earlier.methods and one == other


def _is_trained(model: nn.Module, state: State) -> bool:
    """Return whether undoing a patch would lose what was, or could have been, trained."""
    if state.native is not None:
        return state.native.trained(model, state, state.methods[0])
    return any(method.trainable for method in state.methods)


def _check_replaceable(earlier: State, *, trained: bool, compose: bool, replace: bool) -> None:
    """Refuse a second patch without `replace`, and one that would lose trained parameters for good."""
    way = "Pass replace=True, or call unpatch_model(model) first."
    if compose:
        way = "Call unpatch_model(model) first."
    if trained:
        keep = "model.save_pretrained(folder)" if earlier.native else "save_patch(model, folder)"
        way = (
            f"Its parameters would be lost, so replace=True does not undo it: keep them with {keep}, then call "
            "unpatch_model(model)."
        )
    elif replace:
        return
    raise PosencError(f"This model is already patched with {earlier.config}. {way}")


def _is_foreign(
    model: nn.Module, tables: Sequence[RotaryTable], method: MethodLike, request: Mapping[str, Any]
) -> bool:
    """Return whether a patch starts from frequencies that are not those of their config; raise unless that is asked.

    Raise for those of a saved patch too.
    """
    foreign = False
    frequencies = any(of_kind(one, RopeScaling) for one in named(method))
    block = vars(getattr(model, "config", model)).get(export.BLOCK)
    composed = request.get("compose") is True or any(table.scaled for table in tables)
    if frequencies and block and tables and not composed:
        raise PosencError(
            f"This model was saved with {PatchConfig.from_dict(block)}, and plain transformers has loaded it. Load it "
            "with hf_posenc.from_pretrained to replace that patch, or pass compose=True to start from its table."
        )
    for table in tables:
        if table.scaled and request.get("replace") is True and frequencies:
            continue  # starts from rope_theta
        if not (difference := foreign_frequencies(model, table)):
            continue
        set_by_hand = is_table(table.live()[0]) and table.rope_type not in PER_LENGTH
        if set_by_hand and request.get("compose") is True:
            foreign = True
            continue
        way = "compose=True starts from them. " if set_by_hand else ""
        raise UnsupportedModelError(
            f"{difference} {way}If the config was edited after loading, or memory was left as it was (to_empty), load "
            "the model again: from_pretrained(..., config=config)."
        )
    return foreign


def _refuse_damaged(damage: str | None, state: State) -> None:
    """Raise for weights that are not finite or all zero, on which attention cannot be tried; warn where it is not."""
    if damage is not None and state.in_attention:
        raise UnsupportedModelError(damage)
    if damage is not None:
        warnings.warn(damage, stacklevel=4)


def _refuse_prompts(model: Any) -> None:
    """Refuse a model whose cache PEFT fills with keys that have no position."""
    for config in (getattr(model, "peft_config", None) or {}).values():
        if config.peft_type in ("PREFIX_TUNING", "CARTRIDGE"):
            raise UnsupportedModelError(
                f"{str(config.peft_type).removeprefix('PeftType.')} puts learned keys before the text, which have no "
                "position. Patch the model without that adapter, or with a frequency method."
            )


def _install(model: nn.Module, state: State, every: Sequence[RotaryTable]) -> None:
    """Install every method: frequencies first, since attention rotates by them."""
    if state.parts:
        from hf_posenc.patch.attention import install_attention  # imports transformers

        install_attention(model, state, every, every)
        state.write_config(model, _longer(state, every))
        return
    # Of a checkpoint that plain transformers loaded, as an attribute like any other.
    block = vars(model.config).get(export.BLOCK)
    others = state.in_attention
    scalings = [method for method in state.methods if isinstance(method, RopeScaling)]
    rotated = not needs_no_rotation(state.methods)
    tables = select(every, state.config.layers, whole=bool(scalings), rotated=rotated)
    sincos = [table for table in tables if isinstance(table, SinCosTable)]
    for method in scalings:
        if method not in others and sincos:
            install_sincos(model, state, sincos, method)
        elif method not in others:
            install_rotary(model, state, tables, method)
        elif state.config.replace and (scaled := [table for table in tables if table.scaled]):
            # Layers that the method does not compute share these tables: the checkpoint's scaling goes from them too.
            install_rotary(model, state, scaled, PositionInterpolation(scale=1.0))
    lists = [table for table in tables if table.rope_type == "longrope"]
    composed = state.config.compose and any(each.reads_rotation for each in others)
    if lists and composed and not [each for each in scalings if each not in others]:
        install_rotary(model, state, lists, PositionInterpolation(scale=1.0))
    if others:
        from hf_posenc.patch.attention import install_attention  # imports transformers

        install_attention(model, state, every, tables)
        state.export = None
        if vars(model.config).get(export.BLOCK) == block:
            state.write_config(model, _longer(state, tables))
    elif any(method.length_dependent for method in scalings):  # on that of the text alone
        from hf_posenc.patch.attention import count_positions_of, owners_of

        for owner in owners_of(model, tables):
            state.hooks += count_positions_of(model, owner)


def _longer(state: State, tables: Sequence[RotaryTable]) -> list[tuple[Any, dict[str, Any]]]:
    """Return the edits by which configs say the length that a patch reaches: other libraries cut texts there."""
    configs = {id(table.config): table.config for table in tables if table.config is not None}
    if state.extended is None:
        return []
    return [(config, {"max_position_embeddings": state.extended}) for config in configs.values()]


def _undo(model: nn.Module, state: State) -> None:
    """Undo a patch, whole or half done: modules, tensors, attributes and config as before."""
    if state.in_attention:
        from hf_posenc.patch.attention import remove_attention

        remove_attention(model)
    wrappers = [module for module in model.modules() if isinstance(module, PosencRotary)]
    replace_modules(model, {id(wrapper): wrapper.base for wrapper in wrappers})
    state.undo()
    unwrap_saving(model)
    unwrap_batching(model)
    delattr(model, STATE)


def unpatch_model(model: ModelT) -> ModelT:
    """Undo a patch: modules, attributes and config are as before, bit for bit.

    Args:
        model: A model that `patch_model` has patched.

    Returns:
        The same object.

    Raises:
        PosencError: The model is not patched.

    Examples:
        >>> from hf_posenc import get_patch, patch_model, unpatch_model
        >>> model = unpatch_model(patch_model(model, "pi", scale=4))
        >>> get_patch(model) is None
        True
    """
    if (state := state_of(model)) is None:
        saved = vars(getattr(unwrap(model), "config", model)).get(export.BLOCK) or {}
        way = " A saved patch can be undone after hf_posenc.from_pretrained." if saved else ""
        if saved.get(export.IN_WEIGHTS):
            way = " Its weights were saved with the longer table: load the model from before the patch."
        raise PosencError(f"This model is not patched; there is nothing to undo.{way}")
    _undo(unwrap(model), state)
    return model


@contextlib.contextmanager
def patched(model: ModelT, method: MethodLike, **kwargs: Any) -> Iterator[ModelT]:
    """Patch a model for the length of a `with` block; undone on exit, also by an exception.

    A patch that `replace=True` undid is in force again after the block. Edits of the config in the block stay, but for
    values that a patch sets.

    Args:
        model: The model to patch, in place.
        method: As for `patch_model`.
        **kwargs: As for `patch_model`.

    Yields:
        The same model.

    Raises:
        PosencError: As for `patch_model`; the model is then unchanged.

    Examples:
        >>> from hf_posenc import get_patch, patched
        >>> with patched(model, "dynamic_ntk", scale=2):
        ...     get_patch(model).method
        'dynamic_ntk'
        >>> get_patch(model) is None
        True
    """
    put_back = _patch(model, method, kwargs, temporary=True)
    before = _versions(model).items()
    try:
        yield model
    finally:
        if put_back is not None:
            after = _versions(model)
            if any(after.get(name, count) != count for name, count in before):
                warnings.warn(
                    "Parameters of the patch were trained in a block of patched(...), whose end drops them: keep them "
                    "with save_patch(model, folder) before it, or use patch_model.",
                    stacklevel=3,
                )
            if state_of(model) is not None:  # else it was unpatched in the block
                unpatch_model(model)
            put_back()


def _versions(model: nn.Module) -> dict[str, int]:
    trained = trained_parameters(unwrap(model)).items()
    return {name: each._version for name, each in trained if not each.is_inference()}


def moving_notes(model: nn.Module) -> tuple[str, ...]:
    """Return what transformers computes wrongly with tables that move with the text, and a patch that does not."""
    inner = unwrap(model)
    notes: list[str] = []
    for table in tables_of(inner):
        if not (note := moving_note(inner, table)):
            continue
        name, way = get_method(table.rope_type).name, ""
        with contextlib.suppress(PosencError):
            if not any(each.is_meta for each in inner.parameters()):
                with patched(model, name):
                    pass
            way = f' patch_model(model, "{name}"), without numbers, makes both exact.'
        notes.append(note + way)
    return tuple(dict.fromkeys(notes))


def get_patch(model: nn.Module) -> Patch | None:
    """Return the patch in force, read back from the model's modules; `None` where it is not patched.

    Args:
        model: A model, also wrapped by PEFT, DDP or `torch.compile`.

    Examples:
        >>> from hf_posenc import get_patch, patch_model
        >>> patch = get_patch(patch_model(model, "ntk", target_length="16k"))
        >>> patch.options, patch.original_max_position_embeddings
        ({'scale': 4.0}, 4096)
    """
    if (state := state_of(model)) is None:
        return None
    layers: dict[str, Any] = {}
    if state.in_attention:
        from hf_posenc.patch.attention import patched_layers

        layers = dict(patched_layers(unwrap(model)))
    inner, lengths = unwrap(model), (state.original, state.extended)
    tables = EffectiveTables() if state.native is not None else inspect_rope(model)
    places = tuple(state.native.rows(inner)) if state.native is not None else ()
    return Patch(
        *(state.config, tables, *lengths, state.export, tuple(layers), state.attention, places),
        dropped=state.dropped,
        scaled=any(layer.native is not None for layer in layers.values()),
    )


def inspect_positions(model: nn.Module) -> Positions:
    """Find every place where a model gets positions from, by trial, with a certificate that none is missing.

    Each place is silenced and the experiments are run again. What is left is the certificate: the share of the outputs
    that still depends on the order of tokens. A patch is suspended meanwhile: the places are those of the model itself.

    Args:
        model: A transformers model of text with loaded weights, patched or not, wrapped or not.

    Returns:
        An object that a terminal and a notebook show as a table.

    Raises:
        UnsupportedModelError: A model that cannot be run on a few tokens alone.

    Examples:
        >>> from hf_posenc import inspect_positions
        >>> inspect_positions(model).complete  # no place is missing
        True
    """
    inner, state = unwrap(model), state_of(model)
    put_back = _suspend(inner, state)
    try:
        positions = inspect(inner)
    finally:
        put_back()
    return positions if state is None else dataclasses.replace(positions, patch=str(state.config))
