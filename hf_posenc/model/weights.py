"""Weights as this process holds them: whole or a shard, plain or quantized, at hand or offloaded by accelerate.

Also the processes that share a model or a text, and the memory of a device.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_posenc.errors import FREQUENCY_METHODS_WORK, PosencError, UnsupportedModelError


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


# Models over several processes: those that share the heads of an attention module, and those that share a text


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


_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def free_memory(device: torch.device | str) -> int | None:
    """Return the bytes that a program can still allocate on a device.

    On CUDA these are the driver's free memory and PyTorch's unused reserve; on a CPU under Linux what the kernel calls
    available, or the rest of a container's limit if that is less. On other devices they are unknown.
    """
    device = torch.device(device)
    if device.type == "cuda":
        reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + reserve
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    if device.type != "cpu":
        return None
    available = _fields(_MEMINFO).get("MemAvailable")
    limits = (None if available is None else available * 1024, _left_in_container())
    return min((limit for limit in limits if limit is not None), default=None)


def _left_in_container() -> int | None:
    """Return the rest of the limit of control groups, version 2; cached pages of files count as free."""
    try:
        limit = int((_CGROUP / "memory.max").read_text(encoding="ascii"))
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):  # there is no limit, or it is "max"
        return None
    return max(0, limit - used + _fields(_CGROUP / "memory.stat").get("inactive_file", 0))


def _fields(path: Path) -> dict[str, int]:
    """Return the numbers of a file of lines such as `MemAvailable: 123 kB`."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    words = [line.replace(":", " ").split() for line in lines]
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdecimal()}
