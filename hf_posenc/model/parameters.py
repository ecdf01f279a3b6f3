"""The parameters that a method trains, as a child of the attention module that they belong to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hf_posenc.errors import UnsupportedModelError
from hf_posenc.methods import Method
from hf_posenc.model.weights import replicated, stored, with_summed_gradient

PARAMETERS = "posenc"
"""The child of an attention module that holds the parameters of a method, and of a decoder those of all its layers."""

PARAMETER_FILE = "posenc.safetensors"
"""The file of these parameters beside a patch, or an adapter whose weights do not hold them."""


class _Common:
    """A reference to the decoder whose child holds the parameters of all layers; not a module, and so not a child.

    A copy of the whole model refers to its own decoder, a copy of a layer alone to the one that it was copied from.
    """

    def __init__(self, decoder: nn.Module) -> None:
        self.decoder = decoder

    def __deepcopy__(self, memo: dict[int, Any]) -> _Common:
        return _Common(memo.get(id(self.decoder), self.decoder))


class MethodParameters(nn.Module):
    """Named float32 parameters that a cast of the model to half precision does not round, read as a mapping.

    Those that all layers share are read through it too, but are no parameters of this module.
    Not an `nn.ParameterDict`, which PEFT cannot train beside an adapter (`modules_to_save`).
    """

    common: _Common | None = None

    def __init__(self, values: Mapping[str, Tensor] | None = None, mesh: Any = None) -> None:
        """Store parameters of all heads.

        All processes of a mesh, which share the heads of the layers in tensor parallelism, have the values of the
        first, and each gradient is the sum of theirs.
        """
        super().__init__()
        self.mesh = mesh
        for name, value in (values or {}).items():
            initial = value.detach().float()
            if mesh is not None:
                initial = replicated(initial, mesh)
            self.register_parameter(name, nn.Parameter(initial))

    def forward(self, _: Any = None) -> MethodParameters:
        """Return the module itself: called, PEFT's wrapper gives the parameters of the active adapter."""
        return self

    def __getitem__(self, name: str) -> Tensor:
        shared = self._shared()
        if shared is not None and name in shared._parameters:
            return shared[name]
        parameter = stored(self, name)
        if self.mesh is None or not (torch.is_grad_enabled() and parameter.requires_grad):
            return parameter
        return with_summed_gradient(parameter, self.mesh)

    def __iter__(self) -> Iterator[str]:
        return iter((*self._parameters, *(self._shared() or ())))

    def __len__(self) -> int:
        return len(self._parameters) + len(self._shared() or ())

    def _shared(self) -> MethodParameters | None:
        return None if self.common is None else parameters_in_force(self.common.decoder)

    def keys(self) -> list[str]:
        return list(self)

    def _apply(self, fn: Any, recurse: bool = True) -> MethodParameters:
        def moved(tensor: Tensor) -> Tensor:
            target: Tensor = fn(tensor)
            # a cast would round the values, and `to_empty` of a model without weights leave them behind
            return target.float() if tensor.is_meta else tensor.to(target.device)

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self


def share_parameters(decoder: nn.Module, sharing: Sequence[tuple[nn.Module, Method]]) -> None:
    """Move the parameters that a method shares among attention layers to their decoder, with the first layer's values.

    Raises for layers that need them in different shapes, on different devices or for other methods.
    """
    shared: MethodParameters | None = None
    for layer, method in sharing:
        held: Any = layer._modules[PARAMETERS]
        own = {name: held._parameters.pop(name) for name in method.shared_parameters}
        if shared is None:
            shared = MethodParameters(own, held.mesh)
            decoder.register_module(PARAMETERS, shared)
        if method != (first := sharing[0][1]):
            raise UnsupportedModelError(
                f"shared=True gives all layers the parameters of one method, not of {first} and {method}. Leave shared "
                "out of one of them."
            )
        for name, value in own.items():
            if (value.shape, value.device) != (shared[name].shape, shared[name].device):
                raise UnsupportedModelError(
                    f"shared=True gives all layers one {name}, and the layers of this model differ: "
                    f"{tuple(shared[name].shape)} on {shared[name].device} and {tuple(value.shape)} on {value.device}. "
                    "Leave shared out, or choose layers that are alike with layers=[...]."
                )
        held.common = _Common(decoder)


def parameters_in_force(attention: nn.Module) -> MethodParameters | None:
    """Return the parameters of one attention module, or a decoder: its own, or those of PEFT's active adapter."""
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


def write_parameters(parameters: Mapping[str, Tensor], folder: str | Path) -> None:
    """Write parameters to their file in a folder; none where there are none."""
    if parameters:
        values = {name: each.detach().cpu().contiguous() for name, each in parameters.items()}
        save_file(values, Path(folder) / PARAMETER_FILE)
