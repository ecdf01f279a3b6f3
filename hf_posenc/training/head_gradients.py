"""Gradients of a head that runs once for each slice: sums in single precision, and sharded weights gathered once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

_Function: Any = torch.autograd.Function  # whose `apply` has no types


class SinglePrecisionSums(TorchFunctionMode):
    """Adds up the gradients of half-precision weights in float32, over all their uses, and rounds the sum once.

    Autograd adds up a weight's gradients in the weight's own dtype, and under autocast in that of its cast copy. With
    500 chunks in bfloat16 the error is about 2 %; from 512 chunks on, addends can be smaller than the last bit of the
    sum. One mode serves all chunks of a batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sums: dict[int, tuple[nn.Parameter, Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.is_grad_enabled() and func.__name__ != "__get__":
            args, kwargs = tree_map_only(nn.Parameter, self._used, (args, kwargs))
        return func(*args, **(kwargs or {}))

    def _used(self, weight: nn.Parameter) -> Tensor:
        half = weight.dtype in (torch.bfloat16, torch.float16)
        cast = weight.dtype == torch.float32 and torch.is_autocast_enabled(weight.device.type)
        if not (half or cast) or not weight.requires_grad or isinstance(weight, DTensor):
            return weight
        if id(weight) not in self._sums:
            self._sums[id(weight)] = weight, _Sum.apply(weight)
        used: Tensor = _Use.apply(self._sums[id(weight)][1], weight.detach())
        return used


class _Sum(_Function):  # type: ignore[misc]
    """An empty float32 tensor, for which autograd adds up gradients before they become the weight's."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return torch.zeros((), dtype=torch.float32, device=weight.device).expand(weight.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.to(ctx.dtype)


class _Use(_Function):  # type: ignore[misc]
    """The weight's values, whose gradient flows to the sum."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, weight: Tensor) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.float(), None


@contextlib.contextmanager
def unsharded(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Gather the whole weights of modules sharded by FSDP2, and hide their forwards from FSDP.

    FSDP's hooks reduce gradients and free weights behind the backward of each module. accelerate puts the last norm and
    the head into one group, which counts as run when each of its modules has run once. A head that runs once per slice
    would be freed and reduced behind the first slice that comes back, while the others still need its weights:
    gradients would be missing, or the process would access freed memory. With this, FSDP registers one run of the head.
    """
    with contextlib.ExitStack() as stack:
        for module in modules:
            sharded: Any = module
            sharded.unshard()
            for name in ("_forward_pre_hooks", "_forward_hooks"):
                hooks = getattr(module, name)
                others = [(n, h) for n, h in hooks.items() if "fsdp" not in str(h.__module__)]
                setattr(module, name, type(hooks)(others))
                stack.callback(setattr, module, name, hooks)
            stack.callback(module.register_forward_pre_hook(_cast_inputs).remove)
        yield


def _cast_inputs(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Cast inputs to the weights' dtype, as FSDP's own hook does with mixed precision."""
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)

    def cast(value: Tensor) -> Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    result: tuple[Any, ...] = tree_map_only(Tensor, cast, inputs)
    return result
