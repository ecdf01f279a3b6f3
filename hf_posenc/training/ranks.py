"""The processes of a training run: their group, collective operations on objects, and forwards without side effects."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import nn

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.measuring.store import Shard

T = TypeVar("T")


def group_shard() -> Shard:
    """Return this rank and the number of ranks in the process group, which launched processes must have."""
    if dist.is_available() and dist.is_initialized():
        return Shard(dist.get_rank(), dist.get_world_size(), launched=True)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise PosencError(
            "The launched processes have no process group yet: create TrainingArguments, or the Accelerator, first."
        )
    return Shard()


def broadcast(value: T) -> T:
    """Return the first rank's value on every rank. Call it on all ranks."""
    return gather(value)[0]


def gather(value: T) -> list[T]:
    """Return the values of all ranks, in order, on every rank. Call it on all ranks."""
    count = group_shard().count
    if count == 1:
        return [value]
    values: list[Any] = [None] * count
    dist.all_gather_object(values, value)
    return values


def barrier() -> None:
    """Wait until every rank has reached this point."""
    PartialState().wait_for_everyone()


def leave_group() -> None:
    """Destroy the process group once all ranks are done: a rank that exits within it may abort, or end the others."""
    barrier()
    PartialState().destroy_process_group()


def random_state() -> Callable[[], None]:
    """Return a function that restores the present state of Python's, NumPy's and PyTorch's random generators."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)

    return restore


@contextlib.contextmanager
def without_side_effects(model: nn.Module) -> Iterator[None]:
    """Restore what forwards change: random generators, and the attributes of modules without weights.

    transformers' dynamic RoPE keeps the table of the longest text so far. FSDP2 keeps the outermost parameters gathered
    after a forward without a backward.
    """
    restore = random_state()
    before = [
        (module, _public(module), dict(module._buffers))
        for module in model.modules()
        if not module._parameters
    ]
    _reshard(model)
    try:
        yield
    finally:
        _reshard(model)
        for module, attributes, buffers in before:
            for name in _public(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
        restore()


def _public(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if not name.startswith("_")}


def _reshard(model: nn.Module) -> None:
    for module in model.modules():
        if callable(reshard := getattr(module, "reshard", None)):
            reshard()
