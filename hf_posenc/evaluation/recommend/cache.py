"""What the keys and values of a text take, found by filling transformers' own cache on the meta device."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_TOKENS = 4


@dataclass(frozen=True)
class CacheCost:
    """The cache of one text, keys and values alone.

    Attributes:
        tokens: Length of the text.
        bytes: What it takes.
        bytes_per_token: What one more token takes, in the layers that keep every token.
        full_layers: Layers that keep every token.
        window_layers: Layers that keep a window.
        window: Tokens that these keep; 0 where there are none.
        dtype: The number format.
    """

    tokens: int
    bytes: int
    bytes_per_token: int
    full_layers: int
    window_layers: int
    window: int
    dtype: str


def cache_cost(model: nn.Module, tokens: int, dtype: torch.dtype) -> CacheCost | None:
    """The cache of one text of so many tokens.

    A model of the same config runs a few tokens on the meta device, where nothing is computed or stored, so that
    grouped heads, latent attention, shared and sliding-window layers are counted as transformers keeps them.

    Args:
        model: Any model of that config.
        tokens: Length of the text.
        dtype: The number format of keys and values.

    Returns:
        The cost; `None` where the model does not run on the meta device.
    """
    layers = _filled(model)
    if layers is None:
        return None
    growing = fixed = window = full = windowed = 0
    for layer in layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.ndim != 4:
            continue
        size = (keys[0].numel() + values[0].numel()) // _TOKENS * dtype.itemsize
        if getattr(layer, "is_sliding", False):
            kept = min(tokens, int(layer.sliding_window) - 1)  # the next token completes the window
            fixed, window, windowed = fixed + size * kept, max(window, kept), windowed + 1
        else:
            growing, full = growing + size, full + 1
    total = growing * tokens + fixed
    name = str(dtype).removeprefix("torch.")
    return CacheCost(tokens, total, growing, full, windowed, window, name) if total else None


def _filled(model: nn.Module) -> list[Any] | None:
    """The layers of a cache that holds a few tokens."""
    config: Any = copy.deepcopy(model.config)
    text = config.get_text_config(decoder=True)
    text.rope_parameters = _unscaled(getattr(text, "rope_parameters", None))
    make: Any = type(model)
    try:
        # bfloat16: mixtures of experts take nothing else on this device
        with torch.device("meta"), torch.no_grad():
            twin = make._from_config(config, dtype=torch.bfloat16).eval()
            ids = torch.zeros(1, _TOKENS, dtype=torch.int64)
            cache = twin(ids, use_cache=True).past_key_values
        return list(cache.layers)
    except Exception:  # a family may need values, which this device does not have
        return None


def _unscaled(parameters: Any) -> Any:
    """The same table without its scaling, which may read the positions: they have no values here."""
    if not isinstance(parameters, dict):
        return parameters
    if "rope_type" not in parameters:
        return {key: _unscaled(value) for key, value in parameters.items()}
    kept = {
        key: parameters[key] for key in ("rope_theta", "partial_rotary_factor") if key in parameters
    }
    return {"rope_type": "default", **kept}
