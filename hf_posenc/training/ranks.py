"""The processes of a training run: who there is, what they tell each other, who holds what."""

from __future__ import annotations

import os
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.processes import Shard

T = TypeVar("T")


def place() -> Shard:
    """This process's place in the process group; the only one where there is none.

    Raises:
        PosencError: A launcher started several processes, and they have no process group yet.
    """
    if dist.is_available() and dist.is_initialized():
        return Shard(dist.get_rank(), dist.get_world_size(), launched=True)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise PosencError(
            "Several processes were launched and do not know of each other yet: make the TrainingArguments, or the "
            "Accelerator, first."
        )
    return Shard()


def from_first(value: T) -> T:
    """What the first process gives, in every process. All must call it."""
    if place().count == 1:
        return value
    told: list[Any] = [value]
    dist.broadcast_object_list(told, src=0)
    given: T = told[0]
    return given


def from_all(value: T) -> list[T]:
    """What every process gives, in the order of their places. All must call it."""
    count = place().count
    if count == 1:
        return [value]
    told: list[Any] = [None] * count
    dist.all_gather_object(told, value)
    return told


def is_sharded(model: nn.Module) -> bool:
    """Whether no process holds the whole model: FSDP, tensor parallelism, DeepSpeed ZeRO-3.

    A forward then takes all processes at once.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules()) or any(
        hasattr(parameter, "device_mesh") or hasattr(parameter, "ds_tensor")
        for parameter in model.parameters()
    )


def without_wrapper(model: nn.Module) -> nn.Module:
    """The model inside DDP, DataParallel, DeepSpeed's engine and `torch.compile`; that of PEFT stays whole.

    Their forwards talk to the other processes, or compile anew for every length. What shards the parameters is in the
    model's own modules and stays.
    """
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and (
            isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel)
            or type(model).__name__ == "DeepSpeedEngine"
        ):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner
