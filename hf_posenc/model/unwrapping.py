"""The transformers model inside the wrappers that other libraries put around it, and its mode for a trial."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

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
            message = f"A {kind} is not a model: give the model that it holds, as .model."
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


def config_parts(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield a config and every config inside it, by dotted path; the outermost is `""`."""
    yield "", config
    for key, value in vars(config).items():
        if hasattr(value, "get_text_config"):
            for path, part in config_parts(value):
                yield f"{key}.{path}".rstrip("."), part


def configs_of(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Return every config of a model and its modules, once, by the path of the module and that within its config."""
    places: dict[int, tuple[tuple[str, str], Any]] = {}
    for name, module in model.named_modules():
        outer = vars(module).get("config")
        if hasattr(outer, "get_text_config") and id(outer) not in places:
            for path, config in config_parts(outer):
                places.setdefault(id(config), ((name, path), config))
    return dict(places.values())


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put every module of the model into evaluation mode, and each back into its own mode on exit.

    Layers of 4-bit weights stay in training mode, which is the same to them: in evaluation bitsandbytes packs their
    weights for good on some CPUs, and then a LoRA on them is no longer trained, nor are they saved correctly.
    """
    modes = {module: module.training for module in model.modules()}
    if any(modes.values()):
        model.eval()
    # Without `parameters()` and needless writes, which take a third of the time of a patch.
    for module in modes:
        if any(hasattr(weight, "quant_state") for weight in module._parameters.values()):
            module.training = True
    try:
        yield
    finally:
        for module, mode in modes.items():
            if module.training != mode:
                module.training = mode


@contextlib.contextmanager
def trial(model: nn.Module) -> Iterator[None]:
    """Run in evaluation mode without gradients, in the model's own precision; all is restored afterwards."""
    own = vars(model)
    with contextlib.ExitStack() as stack, evaluation_mode(model), torch.no_grad():
        if {"forward", "_original_forward"} <= own.keys():  # accelerate's enters autocast
            stack.enter_context(swapped(own, "forward", own["_original_forward"]))
        yield


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Give new tensors this dtype by default. Where they have it, nothing is set, which other threads would share."""
    before = torch.get_default_dtype()
    if before == dtype:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def swapped(values: dict[str, Any], key: str, value: Any) -> Iterator[None]:
    """Give an entry of a dictionary another value for a block; afterwards it has its own again, or is absent."""
    before = {key: values[key]} if key in values else {}
    values[key] = value
    try:
        yield
    finally:
        values.update(before)
        if not before:
            values.pop(key, None)


@contextlib.contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove hooks at the end of a block."""
    with contextlib.ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        yield


def owner_of(model: nn.Module, place: str) -> Any:
    """Return the innermost model of transformers around a path: the decoder."""
    owner = model
    for name, module in model.named_modules():
        inside = not name or place.startswith(f"{name}.")
        if inside and hasattr(module, "set_attn_implementation"):
            owner = module
    return owner
