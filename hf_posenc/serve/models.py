"""Architectures of vLLM with a patch: subclasses, made by name, that give each attention layer its methods."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding, RotaryEmbeddingBase
from vllm.model_executor.models.utils import extract_layer_index

from hf_posenc.attention.rotation import Rotation
from hf_posenc.engines.served import PREFIX
from hf_posenc.errors import UnsupportedModelError
from hf_posenc.methods import RotaryBands
from hf_posenc.model.attention import Layer
from hf_posenc.model.parameters import PARAMETERS
from hf_posenc.patch.attention import Turn
from hf_posenc.patch.config import PatchConfig
from hf_posenc.serve.attention import served_by
from hf_posenc.serve.checkpoint import IN_PROCESS, ROWS, SERVED, layers_of


def __getattr__(name: str) -> Any:
    """Return the patched form of an architecture, `HfPosencLlamaForCausalLM` of `LlamaForCausalLM`."""
    own = ModelRegistry.models.get(name.removeprefix(PREFIX))
    if not name.startswith(PREFIX) or own is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base: Any = own.load_model_cls()

    def initialize(self: Any, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        base.__init__(self, vllm_config=vllm_config, prefix=prefix)
        install(self, vllm_config)

    def load_weights(self: Any, weights: Iterable[tuple[str, Tensor]]) -> Any:
        # Those of the patch are read with it.
        return base.load_weights(
            self, (each for each in weights if f".{PARAMETERS}." not in each[0])
        )

    hooks = {"__init__": initialize, "load_weights": load_weights, "__module__": __name__}
    made = type(name, (base,), hooks)
    globals()[name] = made
    return made


def install(model: nn.Module, vllm_config: VllmConfig) -> None:
    """Give the attention layers and the rotary modules of a new model what its patch changes.

    Raises:
        UnsupportedModelError: A layer that vLLM rotates or attends otherwise than transformers.
    """
    config = vllm_config.model_config.hf_config
    if not hasattr(config, SERVED):
        return
    layers, length = layers_of(config)[0], vllm_config.model_config.max_model_len
    IN_PROCESS.append(PatchConfig.from_dict(getattr(config, SERVED)["patch"]))
    rotated = {}
    for name, module in list(model.named_modules()):
        rotary = getattr(module, "rotary_emb", None)
        if isinstance(rotary, RotaryEmbeddingBase):
            number = extract_layer_index(name)
            rotated[number] = module
            if number in layers:
                layers[number] = _rotate(module, rotary, layers[number], name, length)
    attended = set()
    for name, module in model.named_modules():
        if not isinstance(module, Attention):
            continue
        number = extract_layer_index(module.layer_name)
        if number in layers:
            layer = layers[number]
            if number not in rotated and layer.encoding.rotation is not None:
                raise UnsupportedModelError(f"{name} has no rotary module of its own in vLLM.")
            rank, size = (get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size())
            encoding = dataclasses.replace(
                layer.encoding, heads=module.num_heads, share=(rank, size)
            )
            trained = encoding.parameters or {}
            for key in trained:
                trained[key].data = trained[key].data.to(vllm_config.device_config.device)
            layer = dataclasses.replace(layer, encoding=encoding)
            served_by(module, layer, getattr(config, SERVED)[ROWS])
            attended.add(number)
    if missing := sorted({*layers} - attended):
        raise UnsupportedModelError(
            f"{type(model).__name__}: vLLM has no attention of layers {missing} that the patch changes."
        )


def _rotate(module: Any, rotary: Any, layer: Layer, name: str, length: int) -> Layer:
    """Give a module a rotary table as long as the longest request, with the frequencies of a static method.

    Returns:
        What is left for attention.
    """
    turn, rotation = layer.turn, layer.encoding.rotation
    if rotation is None:
        return layer
    own = turn.own if isinstance(turn, Turn) else rotation
    _check_rotation(rotary, own, name)
    if isinstance(turn, Turn) and turn.frequencies is not None:
        layer = dataclasses.replace(
            layer, turn=dataclasses.replace(turn, own=rotation, frequencies=None, factor=1.0)
        )
        own = rotation
    longer = RotaryEmbedding(
        rotary.head_size, rotary.rotary_dim, length, rotary.base, rotary.is_neox_style, rotary.dtype, init_cache=False,
    )  # fmt: skip
    # Bands turn further what the table has rotated, so its angles are not rounded; else they are rounded as vLLM's own.
    kind = torch.float64 if isinstance(layer.encoding.method, RotaryBands) else torch.float32
    table = _table(own, length, kind).to(rotary.cos_sin_cache)
    longer.register_buffer("cos_sin_cache", table, persistent=False)
    module.rotary_emb = longer
    return layer


def _table(rotation: Rotation, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return cos and sin of positions 0 to length - 1, shape (length, d), of angles in this dtype."""
    angles = torch.arange(length, dtype=dtype)[:, None] * rotation.inv_freq.cpu()
    return torch.cat((angles.cos(), angles.sin()), -1) * rotation.factor


def _check_rotation(rotary: Any, own: Rotation, name: str) -> None:
    """Raise unless vLLM's rotary module rotates as transformers does before the patch."""
    layout, table = own.layout, rotary.cos_sin_cache
    same = (layout.start, layout.sign) == (0, 1) and layout.dim == rotary.rotary_dim
    same = same and layout.interleaved is not rotary.is_neox_style
    same = same and table.dim() == 2 and len(table) > 1 and not hasattr(rotary, "mrope_section")
    if same:
        expected = _table(own, 2)[1].to(table)
        same = expected.shape == table[1].shape and bool(
            torch.allclose(table[1], expected, atol=1e-2 if table.dtype != torch.float32 else 1e-5)
        )
    if not same:
        raise UnsupportedModelError(
            f"{name}: {type(rotary).__name__} of vLLM does not rotate as the model in transformers does, from which "
            "the patch starts."
        )
