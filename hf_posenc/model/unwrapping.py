"""The transformers model inside the wrappers that other libraries put around it."""

from __future__ import annotations

from torch import nn


def unwrap(model: nn.Module, *, adapters: bool = True, sharding: bool = False) -> nn.Module:
    """Return the model inside `torch.compile`, DataParallel, DDP, DeepSpeed's engine and PEFT.

    Without `adapters` a PEFT model stays whole. Without `sharding` FSDP's outermost module stays, since its forward
    gathers the parameters.
    """
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
