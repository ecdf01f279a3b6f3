"""The patch of each attention layer as vLLM's plug-in computes it, or the reason why it cannot; needs no vLLM."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

from hf_posenc.engines.engine import empty_model
from hf_posenc.errors import PosencError, UnsupportedModelError, UntrainedWarning
from hf_posenc.methods import LengthDependent, RotaryBands, TableMethod, Temperature, seam_of
from hf_posenc.model import discovery
from hf_posenc.model.attention import Layer
from hf_posenc.model.parameters import trained_parameters
from hf_posenc.model.positions import LAYER
from hf_posenc.patch.attention import Turn
from hf_posenc.patch.config import PatchConfig
from hf_posenc.patch.patching import patch_model
from hf_posenc.patch.state import state_of
from hf_posenc.saving import fill_from_checkpoint

PREFIX = "HfPosenc"
"""Prefix of the architecture's name in the config of a saved model that needs hf_posenc."""
WINDOWED = "has a sliding window or chunks, or a bias of its own"
"""The reason why attention with a patch is not served in a layer; of a bias, vLLM alone knows."""
_UNCHANGED = Temperature(law="constant", factor=1.0)


def served_layers(
    config: Any, patch: PatchConfig, trained: str | Path | None, **options: Any
) -> tuple[dict[int, Layer], int | None]:
    """Return the patch of each patched attention layer by the layer's number, and the length in tokens that it is for.

    The length is `None` where the patch follows the text. Queries and keys come to a layer as the model rotates them
    before the patch. The patch is made on the same model without weights, so that it is verified as ever.

    Args:
        config: The config from before the patch.
        patch: The patch.
        trained: The folder or hub name with the parameters that the patch has trained; `None`: not read.
        **options: For the hub: `revision`, ...

    Raises:
        PosencError: A patch that the model cannot take, or that the plug-in cannot serve exactly.
    """
    _check(patch)
    text, model = config.get_text_config(decoder=True), empty_model(config)
    tables = discovery.rotary_tables(model)
    for table in tables:
        model.set_submodule(table.name, table.built())
    request = patch.request()
    method, chosen = request.pop("method"), request.pop("layers", ())
    request.pop("target_length", None)
    if not isinstance(method, dict):
        # Where layers differ, keys are cached as the model rotates them: so two keys, with the same methods.
        if isinstance(chosen, str):
            chosen = discovery.layers_of_type(text, chosen)
        method = {chosen[:1]: list(method), chosen[1:]: list(method)}
        if len(chosen) == 1:  # beside another layer, whose queries are multiplied by one
            others = {*discovery.layers_of_type(text, "all")} - {*chosen}
            if not others:
                raise PosencError(
                    f"{patch} cannot be served by vLLM: its plug-in needs two layers of attention, and here is one."
                )
            method = {chosen: method[chosen], min(others): _UNCHANGED}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntrainedWarning)  # its parameters are those of the folder
        try:
            patch_model(model, method, **request)
        except PosencError as error:
            if any(table.rope_type in discovery.PER_LENGTH for table in tables):
                raise PosencError(
                    f"{patch} cannot be served by vLLM's plug-in: its model's frequencies follow the length. One table "
                    f"for all lengths, such as yarn's, needs none: hf-posenc export {trained or 'FOLDER'} --to vllm"
                ) from error
            changed = _changed(config, patch)
            if patch.elsewhere or changed == chosen:
                raise
            # A choice by name leaves out layers without a rotation, and one by numbers may not.
            given = dataclasses.replace(patch, layers=changed)
            return served_layers(config, given, trained, **options)
    if trained is not None and (parameters := trained_parameters(model)):
        fill_from_checkpoint(model, parameters, trained, options)
    layers = {n: _served(patch, text, n, *found) for n, found in _numbered(patch, model).items()}
    state: Any = state_of(model)
    return layers, state.extended


def _check(patch: PatchConfig) -> None:
    """Raise for methods that are not served."""
    for method in patch.build():
        if isinstance(method, LengthDependent) and method.update == "sequence":
            reason = 'update="sequence" depends on the other texts of a batch; "row" and "request" are served'
        elif isinstance(method, TableMethod):
            reason = "its table of positions is no rotary one"
        else:
            continue
        raise PosencError(f"{patch} cannot be served by vLLM: {method.name}: {reason}.")


def _changed(config: Any, patch: PatchConfig) -> tuple[int, ...]:
    """Return the layers that a patch changes, given as it was made; raise where it cannot be tried without weights."""
    model, request = empty_model(config), patch.request()
    if not patch.elsewhere and all(seam_of(method) == "rotary" for method in request["method"]):
        # Frequencies alone are not tried, and this method is, in the same layers.
        request |= {"method": "rerope", "target_length": None}
    try:
        patch_model(model, **request)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"{patch} cannot be served by vLLM: {type(model).__name__} cannot be checked without its weights, and "
            "the plug-in checks a patch before they are loaded."
        ) from error
    return tuple(sorted(_numbered(patch, model)))


def _numbered(patch: PatchConfig, model: Any) -> dict[int, tuple[str, Layer]]:
    """Return the path and the patch of each patched attention layer, by the layer's number."""
    layers: dict[int, tuple[str, Layer]] = {}
    for name, module in model.named_modules():
        layer: Layer | None = module.__dict__.get(LAYER)
        if layer is None or not layer.patched or layer.encoding.query is _UNCHANGED:
            continue
        number = discovery.layer_index(name, module)
        if number is None or number < 0 or number in layers or layer.beside is not None:
            raise UnsupportedModelError(
                f"{patch} cannot be served by vLLM: {name} is not the one attention of a numbered layer."
            )
        layers[number] = name, layer
    return layers


def plain(layer: Layer) -> bool:
    """True if a layer attends as before, apart from factors on its queries."""
    return layer.encoding.method is None and layer.encoding.bias is None


def _served(patch: PatchConfig, text: Any, number: int, name: str, layer: Layer) -> Layer:
    """Return a layer's patch, whose bands read keys as the model rotates them; `text` is the config of its decoder."""
    encoding, turn, reason = layer.encoding, layer.turn, ""
    if (rotation := encoding.rotation) is not None:
        usual = (rotation.layout.start, rotation.layout.sign) == (0, 1) and rotation.order is None
        if rotation.norm is not None or not usual:
            reason = "rotates other features than the first, or before a norm"
        elif "mrope_section" in (getattr(text, "rope_parameters", None) or {}):
            reason = "rotates by positions on three axes (mrope_section), as the plug-in does not"
    # Where a config has no types of layers, or one type, vLLM gives its window to all of them.
    alike = len({*(getattr(text, "layer_types", None) or ())}) < 2
    window = alike and getattr(text, "sliding_window", None)
    local = window or number in discovery.local_layers(text)
    if local and (not plain(layer) or encoding.query is not None):
        reason = reason or WINDOWED
    if reason:
        raise UnsupportedModelError(f"{patch} cannot be served by vLLM: {name} {reason}.")
    if isinstance(encoding.method, RotaryBands):
        encoding = dataclasses.replace(encoding, unmoved=True)
        turn = dataclasses.replace(turn, encoding=encoding) if isinstance(turn, Turn) else turn
    return dataclasses.replace(layer, encoding=encoding, turn=turn)
