"""The processes of a training run: who there is, what they tell each other, who holds what."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.measuring.store import Shard

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


# Steps that the processes of one run take together; with one process, nothing is sent.
#
# accelerate's own operations: they know every backend that the Trainer runs on. What processes tell each other about is
# in `ranks`.


def wait() -> None:
    """Returns once every process has come here."""
    from accelerate import PartialState

    PartialState().wait_for_everyone()


def leave() -> None:
    """Ends the talk before all processes end on purpose: a torn connection would be reported as a crash."""
    from accelerate import PartialState

    wait()
    PartialState().destroy_process_group()


def largest(number: int) -> int:
    """The largest of all processes' numbers: the same answer in all of them."""
    from accelerate import PartialState
    from accelerate.utils import reduce

    state = PartialState()
    if state.num_processes == 1:
        return number
    return int(reduce(torch.tensor(number, device=state.device), "max").item())


# Looking at a model in the middle of its training without a trace: the next step is what it would have been.


class RandomState:
    """The generators of Python, NumPy and PyTorch (the CPU's and that of the current GPU) as they stand now."""

    def __init__(self) -> None:
        self._python, self._numpy, self._cpu = (
            random.getstate(),
            np.random.get_state(),
            torch.get_rng_state(),
        )
        in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._cuda = torch.cuda.get_rng_state() if in_use else None

    def restore(self) -> None:
        """Puts all of them back."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Puts back what forwards leave behind: random generators, and what modules without weights remember.

    transformers' dynamic RoPE keeps the table of the longest text so far. FSDP2 keeps the outermost parameters whole
    after a forward that no backward follows.

    Args:
        model: The model, wrapped or sharded as it may be.
    """
    draws, kept = RandomState(), [(module, _memory(module)) for module in _without_weights(model)]
    reshard(model)
    try:
        yield
    finally:
        reshard(model)
        for module, before in kept:
            _put_back(module, *before)
        draws.restore()


def reshard(model: nn.Module) -> None:
    """Lets every FSDP2 module hold its own part of the parameters only."""
    for module in model.modules():
        if callable(free := getattr(module, "reshard", None)):
            free()


def _without_weights(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if not module._parameters)


def _memory(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return own, dict(module._buffers)


def _put_back(module: nn.Module, own: dict[str, Any], buffers: dict[str, Any]) -> None:
    for name in [name for name in vars(module) if not name.startswith("_")]:
        if name not in own:
            del vars(module)[name]
    vars(module).update(own)
    module._buffers.clear()
    module._buffers.update(buffers)
