"""Models over several processes: those that share the heads of an attention module, and those that share a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_posenc.errors import FREQUENCY_METHODS_WORK, PosencError, UnsupportedModelError


def sharded_weights(module: nn.Module) -> tuple[Any, ...]:
    """Return the weights of which a module computes a part in this process: DTensors, or marked so by DeepSpeed.

    They are read while the module runs: FSDP has gathered its own by then.
    """
    return tuple(
        weight
        for weight in module.parameters()
        if any(placement.is_shard() for placement in getattr(weight, "placements", ()))
        or getattr(weight, "tensor_model_parallel", False)
    )


def processes_of_heads(name: str, weights: Sequence[Any], features: int) -> Any:
    """Return the device mesh of the processes that share the heads of an attention module; `None`: each has all.

    `weights` are its `sharded_weights`, and `features` is the width of what its attention returned in this process.
    Raises if no weight shows which heads are this process's own.
    """
    if not weights:
        return None
    # A matrix that reads the output of attention has a column for each of its features.
    matrices = [each for each in weights if each.dim() == 2 and hasattr(each, "device_mesh")]
    readers = [each for each in matrices if each.placements[-1].is_shard(1)]
    whole = [each for each in readers if each.shape[1] == features]
    shared = [
        each.device_mesh
        for each in readers
        if each.to_local().shape[1] == features == each.shape[1] / each.device_mesh.size()
    ]
    if bool(whole) != bool(shared):
        return shared[0] if shared else None
    raise UnsupportedModelError(
        f"{name} is split over several processes, and no matrix in it that reads the output of attention shows which "
        f"heads this process computes. A method with numbers for each head needs that. {FREQUENCY_METHODS_WORK}"
    )


def replicated(value: Tensor, mesh: Any) -> Tensor:
    """Return the value of the first process of a device mesh, on every one."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    return distribute_tensor(value, mesh, [Replicate()]).to_local()


def with_summed_gradient(parameter: Tensor, mesh: Any) -> Tensor:
    """Return a parameter that each process reads for its own heads, and whose gradient is the sum over all of them."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    every = DTensor.from_local(parameter, mesh, [Replicate()], run_check=False)
    return every.to_local(grad_placements=[Partial()])


def refuse_parts_of_texts(what: str) -> None:
    """Raise where each process has a part of the text: in context parallelism (torch) or Ulysses (DeepSpeed)."""
    if _splits_texts():
        raise PosencError(
            f"Context or sequence parallelism gives each process a part of the text, and {what} needs the whole. Use a "
            "static frequency method (yarn, ...), or tensor parallelism, FSDP or ZeRO-3."
        )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _splits_texts() -> bool:
    """Return whether attention functions are replaced by those that exchange keys between processes."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    functions = (F.scaled_dot_product_attention, *ALL_ATTENTION_FUNCTIONS.values())
    homes = (getattr(function, "__module__", None) or "" for function in functions)
    return any(home.startswith(("torch.distributed.", "deepspeed.")) for home in homes)
