"""The patch of each attention layer as vLLM's plug-in computes it, or the reason why it cannot; needs no vLLM."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

from hf_posenc.engines.engine import empty_model
from hf_posenc.errors import PosencError, UnsupportedModelError, UntrainedWarning
from hf_posenc.methods import LengthDependent, RotaryBands, TableMethod, Temperature
from hf_posenc.model.attention import Layer
from hf_posenc.model.discovery import PER_LENGTH, layer_index, layers_of_type, rotary_tables
from hf_posenc.model.parameters import trained_parameters
from hf_posenc.model.positions import LAYER
from hf_posenc.patch.attention import Turn
from hf_posenc.patch.config import PatchConfig
from hf_posenc.patch.patching import patch_model
from hf_posenc.patch.state import state_of
from hf_posenc.saving import fill_from_checkpoint

PREFIX = "HfPosenc"
"""Prefix of the architecture's name in the config of a saved model that needs hf_posenc."""
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
    for table in rotary_tables(model):
        model.set_submodule(table.name, table.built())
    request = patch.request()
    method, chosen = request.pop("method"), request.pop("layers", ())
    request.pop("target_length", None)
    if not isinstance(method, dict):
        # Where layers differ, keys are cached as the model rotates them: so two keys, with the same methods.
        if isinstance(chosen, str):
            chosen = layers_of_type(text, chosen)
        method = {chosen[:1]: list(method), chosen[1:]: list(method)}
        if len(chosen) == 1:  # beside another layer, whose queries are multiplied by one
            others = [layer for layer in layers_of_type(text, "all") if layer not in chosen]
            if not others:
                raise PosencError(f"{patch} cannot be served by vLLM: the model has one layer.")
            method = {chosen: method[chosen], others[0]: _UNCHANGED}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UntrainedWarning)  # its parameters are those of the folder
        try:
            patch_model(model, method, **request)
        except PosencError as error:
            if not any(table.rope_type in PER_LENGTH for table in rotary_tables(model)):
                raise
            raise PosencError(
                f"{patch} cannot be served by vLLM's plug-in: its model's frequencies follow the length. A patch that "
                f"is one table for all lengths needs none: hf-posenc export {trained or 'FOLDER'} --to vllm"
            ) from error
    if trained is not None and (parameters := trained_parameters(model)):
        fill_from_checkpoint(parameters, trained, options)
    layers: dict[int, Layer] = {}
    for name, module in model.named_modules():
        layer: Layer | None = module.__dict__.get(LAYER)
        if layer is None or not layer.patched or layer.encoding.query is _UNCHANGED:
            continue
        number = layer_index(name, module)
        if number is None or number in layers or layer.beside is not None:
            raise UnsupportedModelError(
                f"{patch} cannot be served by vLLM: {name} is not the one attention of a numbered layer."
            )
        layers[number] = _in_place(patch, name, layer)
    state = state_of(model)
    assert state is not None
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


def _in_place(patch: PatchConfig, name: str, layer: Layer) -> Layer:
    """Return the patch of a layer whose bands read keys as the model rotates them, which turns them once."""
    encoding, turn = layer.encoding, layer.turn
    rotation = encoding.rotation
    if rotation is not None:
        usual = (rotation.layout.start, rotation.layout.sign) == (0, 1) and rotation.order is None
        if rotation.norm is not None or not usual:
            raise UnsupportedModelError(
                f"{patch} cannot be served by vLLM: {name} rotates other features than the first, or before a norm."
            )
    if isinstance(encoding.method, RotaryBands):
        encoding = dataclasses.replace(encoding, unmoved=True)
        turn = dataclasses.replace(turn, encoding=encoding) if isinstance(turn, Turn) else turn
    return dataclasses.replace(layer, encoding=encoding, turn=turn)
