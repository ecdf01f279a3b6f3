"""The parameters that a method trains, as a child of the attention module that they belong to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

PARAMETERS = "posenc"
"""The child of an attention module that holds the parameters of a method."""


class MethodParameters(nn.Module):
    """Named float32 parameters that a cast of the model to half precision does not round, read as a mapping.

    Not an `nn.ParameterDict`, which PEFT cannot train beside an adapter (`modules_to_save`).
    """

    def __init__(self, values: Mapping[str, Tensor] | None = None) -> None:
        super().__init__()
        for name, value in (values or {}).items():
            self.register_parameter(name, nn.Parameter(value.float()))

    def forward(self, _: Any = None) -> MethodParameters:
        """Return the module itself: called, PEFT's wrapper gives the parameters of the active adapter."""
        return self

    def __getitem__(self, name: str) -> nn.Parameter:
        return self.get_parameter(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def keys(self) -> list[str]:
        return list(self)

    def _apply(self, fn: Any, recurse: bool = True) -> MethodParameters:
        def moved(tensor: Tensor) -> Tensor:
            target: Tensor = fn(tensor)
            return tensor.to(target.device) if target.dtype != torch.float32 else target

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self


def parameters_in_force(attention: nn.Module) -> MethodParameters | None:
    """Return the parameters of one attention module: its own, or those of PEFT's active adapter."""
    held: Any = getattr(attention, PARAMETERS, None)
    if held is None or isinstance(held, MethodParameters):
        return held
    active: MethodParameters = held(None)
    return active


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return every parameter of a method, by its name in the model's state dict without adapters."""
    return {
        f"{path}.{PARAMETERS}.{name}".lstrip("."): parameter
        for path, module in model.named_modules()
        if (held := module._modules.get(PARAMETERS)) is not None
        and any(isinstance(part, MethodParameters) for part in held.modules())
        and (active := parameters_in_force(module)) is not None
        for name, parameter in active.named_parameters()
    }


def damaged_weights(named: Iterable[tuple[str, Tensor]], *, sampled: bool = False) -> str | None:
    """Return a sentence on weights that are not finite, or all zero; `None` if there are none.

    Of sharded parameters this process's part is read; if `sampled`, the first row alone, which takes no time.
    """
    matrices = zeros = 0
    for name, parameter in named:
        tensor: Tensor = getattr(parameter, "ds_tensor", parameter).detach()
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if tensor.is_meta or not tensor.numel() or not tensor.is_floating_point():
            continue
        if tensor.element_size() < 2:  # 8 bits have no norm in torch
            continue
        row = tensor[0] if sampled and tensor.ndim > 1 else tensor
        largest = float(torch.linalg.vector_norm(row, math.inf))
        if not math.isfinite(largest):
            return (
                f"The weights of the model are not finite: {name} has NaN or infinity. Load another checkpoint, "
                "or this one in the dtype that it was saved in."
            )
        if tensor.ndim > 1:
            matrices += 1
            zeros += largest == 0
    if matrices and zeros == matrices:
        return "The weights of the model are all zero: every matrix is. Load a checkpoint that is whole."
    return None
