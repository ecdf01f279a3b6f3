"""Weights as this process holds them: whole or a shard, plain or quantized, at hand or offloaded by accelerate."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def plain_parts(weight: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors that this process holds of a weight; none where it holds no values.

    A plain weight is its own only part. Of others it is this process's shard (DTensor, ZeRO-3), or the codes and scales
    of a quantized weight (torchao, quanto).
    """
    weight = getattr(weight, "ds_tensor", weight).detach()
    if is_traceable_wrapper_subclass(weight):
        for part in (getattr(weight, name) for name in weight.__tensor_flatten__()[0]):
            if isinstance(part, Tensor):
                yield from plain_parts(part)
    elif is_plain(weight):
        yield weight


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor has values of its own, and every operation of torch on it is torch's own code."""
    own = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    dense = tensor.layout == torch.strided and not tensor.is_quantized
    return own and dense and not tensor.is_meta


def stored(module: nn.Module, name: str) -> Tensor:
    """Return a parameter or buffer of a module, loaded to where it is computed if accelerate has offloaded it."""
    tensor: Tensor = getattr(module, name)
    hook = next((hook for hook in _hooks(module) if hook.offload), None) if tensor.is_meta else None
    return tensor if hook is None else hook.weights_map[name].to(hook.execution_device)


def is_offloaded(module: nn.Module) -> bool:
    """Return whether accelerate loads the own weights of a module for its forward."""
    return any(hook.offload for hook in _hooks(module))


def execution_device(model: nn.Module) -> torch.device:
    """Return the device of a model's first weight; of an offloaded one that on which it is computed."""
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            devices = [hook.execution_device for hook in _hooks(module) if hook.offload]
            return torch.device(devices[0]) if weight.is_meta and devices else weight.device
    return torch.device("cpu")


def is_quantized(model: nn.Module) -> bool:
    """Return whether layers of a model are quantized, so that they may round what they read, too."""
    if getattr(getattr(model, "config", None), "quantization_config", None) is not None:
        return True
    dtypes: set[torch.dtype] = set()
    for module in model.modules():
        if "_packed_params" in module._modules:  # torch's own
            return True
        for weight in module._parameters.values():
            if weight is None:
                continue
            dtypes.add(weight.dtype)
            if type(weight) is not nn.Parameter or hasattr(weight, "ds_tensor"):
                dtypes |= {part.dtype for part in plain_parts(weight)}
    return any(not dtype.is_floating_point or dtype.itemsize < 2 for dtype in dtypes)


def rounding_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype whose rounding a model's results have: its own, or bfloat16 if it is quantized."""
    return torch.bfloat16 if is_quantized(model) else next(model.parameters()).dtype


def _hooks(module: nn.Module) -> list[Any]:
    """Return accelerate's hooks that move the weights of a module."""
    hook = getattr(module, "_hf_hook", None)
    return [each for each in getattr(hook, "hooks", (hook,)) if hasattr(each, "offload")]


def damaged_weights(named: Iterable[tuple[str, Tensor]], *, sampled: bool = False) -> str | None:
    """Return a sentence on weights that are not finite, or all zero; `None` if there are none.

    Only plain tensors are computed on: `plain_parts`. A warning names weights of a kind that has none. If `sampled`,
    the first row alone is read of every matrix, which takes no time.
    """
    unread: dict[str, str] = {}
    all_zero = None  # nothing was read yet
    for name, weight in named:
        parts = [*plain_parts(weight)]
        if not parts:
            all_zero = False
            if not weight.is_meta:
                unread.setdefault(type(weight).__name__, name)
        for part in parts:
            if not part.numel():
                continue
            if not part.is_floating_point() or part.element_size() < 2:
                all_zero = False  # 8 bits have no norm in torch
                continue
            row = part[0] if sampled and part.ndim > 1 else part
            largest = float(torch.linalg.vector_norm(row, math.inf))
            if not math.isfinite(largest):
                return (
                    f"The weights of the model are not finite: {name} has NaN or infinity. Load another checkpoint, or "
                    "this one in the dtype that it was saved in."
                )
            if part.ndim > 1 and all_zero is not False:
                # The first row of an embedding may be that of padding.
                all_zero = not (largest or (row is not part and bool(part.any())))
    if unread:
        kinds = ", ".join(f"{kind} (such as {name})" for kind, name in unread.items())
        warnings.warn(
            f"The model has weights of a kind that hf_posenc cannot read: {kinds}. They were not checked.",
            stacklevel=4,
        )
    if all_zero:
        return "The weights of the model are all zero: every matrix is. Load a checkpoint that is whole."
    return None
