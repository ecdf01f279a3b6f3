"""The patch of a folder as vLLM reads it: from its config, and refused there if it cannot be served exactly."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm import ModelRegistry
from vllm.transformers_utils import config as vllm_config

from hf_posenc.engines.source import empty_model
from hf_posenc.errors import PosencError, UnsupportedModelError
from hf_posenc.methods import LengthDependent, RotaryBands, TableMethod
from hf_posenc.model.attention import Layer
from hf_posenc.model.discovery import layer_index, layers_of_type, rotary_tables
from hf_posenc.model.positions import LAYER
from hf_posenc.patch.config import PatchConfig
from hf_posenc.patch.export import BLOCK
from hf_posenc.patch.files import FILE
from hf_posenc.patch.layers import Turn
from hf_posenc.patch.patching import patch_model
from hf_posenc.saving import take_patch

PREFIX = "HfPosenc"
"""Prefix of the architecture's name in the config of a saved model that needs hf_posenc."""
SERVED = "hf_posenc_served"
"""The attribute of vLLM's config with the patch in JSON and the length that the model's own config has."""
STEPS, ROWS = "steps", "rows"
"""Its keys for tables that follow a request's length: bucket and original length of the layers, and the lengths in the
worker by row of the batch."""
_LENGTH = "max_position_embeddings"
_UNBOUNDED = 1 << 31
_ROPE = "rope_parameters"
_SCALING = ("rope_scaling", _ROPE, "rope_theta", _LENGTH)


def register_parser() -> None:
    """Replace vLLM's reader of Hugging Face configs by one that reads a saved patch too."""
    parsers = vllm_config._CONFIG_FORMAT_TO_CONFIG_PARSER
    own: Any = parsers["hf"]
    if issubclass(own, _Reader):
        return
    parsers["hf"] = type(own.__name__, (_Reader, own), {})


class _Reader:
    """The part of a config's parser that reads the patch."""

    def parse(self, model: str | Path, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], Any]:
        overrides = kwargs.get("hf_overrides")
        values, config = super().parse(model, *args, **kwargs)  # type: ignore[misc]
        if values.get(BLOCK) is not None or (Path(model) / FILE).is_file():
            read(model, config, overrides if isinstance(overrides, Mapping) else {})
            values["architectures"] = config.architectures
        return values, config


def read(model: str | Path, config: Any, overrides: Mapping[str, Any]) -> None:
    """Take the patch of a folder out of its config, which then describes the model before the patch, with its reach.

    Raises:
        PosencError: A patch that is damaged, that the model cannot take, or that vLLM cannot serve exactly.
    """
    names = config.architectures
    architectures = [name.removeprefix(PREFIX) for name in names]
    missing = [name for name in architectures if not _implements(name)]
    if missing and names == architectures and hasattr(config, BLOCK):
        return  # vLLM runs transformers' own code, which reads the table in the config
    patch = take_patch(config, model)
    if patch is None:
        return  # one that lies in the weights, which every engine computes
    if missing:
        raise UnsupportedModelError(
            f"{model}: vLLM has no implementation of its own of {missing[0]}, and {patch} is served in one only."
        )
    if flags := [key for key in _SCALING if key in overrides]:
        raise _contradicted(patch, flags)
    text = config.get_text_config(decoder=True)
    own = getattr(text, _LENGTH)
    config.architectures = [PREFIX + name for name in architectures]
    rope = copy.deepcopy(getattr(text, _ROPE, None))
    setattr(config, SERVED, {"patch": patch.to_dict(), "length": own, "rope": rope})
    layers = layers_of(config)  # raises before anything is loaded
    steps = sorted({layer.request for layer in layers.values() if layer.request})
    getattr(config, SERVED).update({STEPS: steps, ROWS: {}})
    if patch.scale is not None and not any(method.follows_text for method in patch.build()):
        original = patch.original_max_position_embeddings or own
        reach = patch.target_length or round(original * patch.scale)
        text.max_position_embeddings = max(own, reach)
    else:
        text.model_max_length = config.model_max_length = _UNBOUNDED  # where the user asks for more


def _implements(architecture: str) -> bool:
    """Return whether vLLM has an implementation of its own, beside transformers' code, whose classes it rewrites."""
    known: Any = ModelRegistry.models.get(architecture)
    return known is not None and not known.module_name.endswith(".transformers")


def layers_of(config: Any) -> dict[int, Layer]:
    """Return the patch of each patched attention layer by the layer's number, from a config that `read` has changed.

    Queries and keys come to it as the model rotates them before the patch. The patch is made on the same model without
    weights, so that it is verified as ever.

    Raises:
        PosencError: A patch that the model cannot take, or that vLLM cannot serve exactly.
    """
    served = getattr(config, SERVED)
    patch = PatchConfig.from_dict(served["patch"])
    _check(patch)
    plain = copy.deepcopy(config)
    text = plain.get_text_config(decoder=True)
    if not _holds(
        getattr(text, _ROPE, None), served["rope"]
    ):  # vLLM sets dictionaries after its reader
        raise _contradicted(patch, [_ROPE])
    text.max_position_embeddings = served["length"]
    plain.architectures = [name.removeprefix(PREFIX) for name in plain.architectures]
    model = empty_model(plain)
    for table in rotary_tables(model):
        model.set_submodule(table.name, table.built())
    request = patch.request()
    method = request.pop("method")
    for key in ("target_length", "layers"):
        request.pop(key, None)
    if not isinstance(method, dict):
        # Where layers differ, keys are cached as the model rotates them: so two keys, with the same methods.
        chosen = patch.layers
        if isinstance(chosen, str):
            chosen = layers_of_type(text, chosen)
        if len(chosen) < 2:
            raise PosencError(f"{patch} changes one layer alone, which vLLM cannot be given.")
        method = {chosen[:1]: list(method), chosen[1:]: list(method)}
    patch_model(model, method, **request)
    layers = {}
    for name, module in model.named_modules():
        layer: Layer | None = module.__dict__.get(LAYER)
        if layer is None or not layer.patched:
            continue
        number = layer_index(name, module)
        if number is None or number in layers or layer.beside is not None:
            raise UnsupportedModelError(
                f"{patch} cannot be served by vLLM: {name} is not the one attention of a numbered layer."
            )
        layers[number] = _in_place(patch, name, layer)
    return layers


def _holds(value: Any, expected: Any) -> bool:
    """Return whether a block of the config still has every value that it had; vLLM adds some."""
    if isinstance(expected, Mapping):
        return isinstance(value, Mapping) and all(
            _holds(value.get(k), v) for k, v in expected.items()
        )
    return bool(value == expected)


def _contradicted(patch: PatchConfig, keys: Sequence[str]) -> PosencError:
    return PosencError(
        f"This folder is served with its patch {patch}, which --hf-overrides of {', '.join(keys)} contradicts. Leave "
        "the override out, or serve a folder without a patch."
    )


def _check(patch: PatchConfig) -> None:
    """Raise for methods that are not served."""
    for method in patch.build():
        if method.trainable:
            reason = "it adds trained parameters, which vLLM does not load"
        elif isinstance(method, LengthDependent) and method.update == "sequence":
            reason = (
                'update="sequence" depends on the other texts of a batch; update="row" and "request" '
                "are served"
            )
        elif isinstance(method, TableMethod):
            reason = "its table of positions is no rotary one"
        else:
            continue
        raise PosencError(f"{patch} cannot be served by vLLM: {method.name}: {reason}.")


def _in_place(patch: PatchConfig, name: str, layer: Layer) -> Layer:
    """Return the patch of a layer whose bands read keys as the model rotates them, which turns them once."""
    encoding, turn = layer.encoding, layer.turn
    rotation = encoding.rotation
    if rotation is not None and (rotation.norm is not None or rotation.order is not None):
        raise UnsupportedModelError(
            f"{patch} cannot be served by vLLM: {name} rotates in an order of its own, or before a norm."
        )
    if isinstance(encoding.method, RotaryBands):
        encoding = dataclasses.replace(encoding, unmoved=True)
        turn = dataclasses.replace(turn, encoding=encoding) if isinstance(turn, Turn) else turn
    return dataclasses.replace(layer, encoding=encoding, turn=turn)
