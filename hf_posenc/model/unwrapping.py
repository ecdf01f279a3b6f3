"""The transformers model inside the wrappers that other libraries put around it, and its mode for a trial."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hf_posenc.errors import UnsupportedModelError


def unwrap(model: nn.Module, *, adapters: bool = True, sharding: bool = False) -> nn.Module:
    """Return the model inside `torch.compile`, DataParallel, DDP, DeepSpeed's engine and PEFT.

    Without `adapters` a PEFT model stays whole. Without `sharding` FSDP's outermost module stays, since its forward
    gathers the parameters.
    """
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        message = f"{kind} is not a model: give a transformers model (PreTrainedModel), also wrapped by PEFT or DDP."
        if isinstance(getattr(model, "model", None), nn.Module):
            message = (
                f"A {kind} is not a model: give the model that it holds, its attribute .model."
            )
        if isinstance(model, str):
            message = f"{model!r} is a name, not a model: load it first, as in hf_posenc.from_pretrained({model!r})."
        raise UnsupportedModelError(message)
    while True:
        inner = getattr(model, "_orig_mod", None)
        kinds = {kind.__name__ for kind in type(model).__mro__}
        if inner is None and (
            isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel)
            or "DeepSpeedEngine" in kinds
            or (sharding and "FullyShardedDataParallel" in kinds)
        ):
            inner = model.module
        if inner is None and adapters and hasattr(model, "get_base_model"):
            inner = model.get_base_model()  # type: ignore[operator]
        if not isinstance(inner, nn.Module) or inner is model:
            return model
        model = inner


def is_sharded(model: nn.Module) -> bool:
    """Return whether no rank holds the whole model (FSDP, tensor parallelism, ZeRO-3), so that all run it together."""
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    return "FullyShardedDataParallel" in kinds or any(
        hasattr(parameter, "device_mesh") or hasattr(parameter, "ds_tensor")
        for parameter in model.parameters()
    )


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run in evaluation mode without gradients; every module's mode is restored."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextlib.contextmanager
def trial(model: nn.Module) -> Iterator[None]:
    """Run as in evaluation, which leaves the weights as they are."""
    with evaluating(model):
        for module in model.modules():
            # In evaluation bitsandbytes packs its 4 bits anew on some CPUs, for good: a LoRA on them is not trained.
            if any(hasattr(weight, "quant_state") for weight in module.parameters(recurse=False)):
                module.training = True
        yield


def owner_of(model: nn.Module, place: str) -> Any:
    """Return the innermost model of transformers around a path: the decoder."""
    owner = model
    for name, module in model.named_modules():
        inside = not name or place.startswith(f"{name}.")
        if inside and hasattr(module, "set_attn_implementation"):
            owner = module
    return owner
