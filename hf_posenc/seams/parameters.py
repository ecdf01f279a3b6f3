"""What a method trains, as a child of the attention module that it belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class MethodParameters(nn.ParameterDict):
    """Named float32 parameters that a cast of the model to half precision does not round.

    Args:
        values: Their initial values, by name.
    """

    def __init__(self, values: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(
            {name: nn.Parameter(value.float()) for name, value in (values or {}).items()}
        )

    def _apply(self, fn: Any, recurse: bool = True) -> MethodParameters:
        def moved(tensor: Tensor) -> Tensor:
            target: Tensor = fn(tensor)
            return tensor.to(target.device) if target.dtype != torch.float32 else target

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Everything in a model that a method trains, by its name in the model's state dict."""
    return {
        f"{path}.{name}": parameter
        for path, module in model.named_modules()
        if isinstance(module, MethodParameters)
        for name, parameter in module.named_parameters(recurse=False)
    }
