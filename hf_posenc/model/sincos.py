"""The seam of older models: attention reads sines and cosines from a precomputed table (GPT-J, RoFormer)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_posenc.errors import UnsupportedModelError
from hf_posenc.methods import RopeScaling
from hf_posenc.model.discovery import RotaryTable
from hf_posenc.rope import RopeSpec

# The base that all of these models have in their code; `read_spec` checks it against the table.
_BASE = {"rope_theta": 10_000.0}


@dataclass(frozen=True, eq=False)
class SinCosTable(RotaryTable):
    """A table `[sin | cos]` of shape (positions, d): a buffer, or an embedding's weight.

    Attributes:
        attribute: The tensor's name in `module`.
    """

    attribute: str

    def live(self) -> tuple[Tensor, float]:
        """The frequencies and the factor, read off the row of position 1."""
        sin, cos = self.tensor()[1].detach().double().chunk(2)
        return torch.atan2(sin, cos).float(), float(torch.hypot(sin, cos).mean())

    def tensor(self) -> Tensor:
        """The table itself."""
        tensor: Tensor = getattr(self.module, self.attribute)
        return tensor

    def swap(self, tensor: Tensor) -> None:
        """Puts another table in its place, with the device and dtype of the one that is there."""
        tensor = tensor.to(self.tensor().device, self.tensor().dtype)
        if isinstance(self.tensor(), nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=False)
        setattr(self.module, self.attribute, tensor)
        if isinstance(self.module, nn.Embedding):
            self.module.num_embeddings = tensor.shape[0]


def sincos_tables(model: nn.Module, attribute: str) -> tuple[SinCosTable, ...]:
    """Every table that modules of a model hold under this name, as a buffer or as an embedding."""
    return tuple(_find(model, attribute))


def sincos_table(method: RopeScaling, spec: RopeSpec, positions: int) -> Tensor:
    """The table of a static method, shape (positions, d), float32, computed in float64.

    Raises:
        UnsupportedModelError: A method whose frequencies depend on the length of the text.
    """
    if method.length_dependent:
        raise UnsupportedModelError(
            f"{method.name} changes its frequencies with the length of the text, but this model reads them "
            "from a table made once. Use a static method (yarn, ntk_by_parts, ntk, pi, ...)."
        )
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * method.inv_freq(spec)
    return (torch.cat((angles.sin(), angles.cos()), dim=-1) * method.cos_sin_factor(spec)).float()


def _find(model: nn.Module, attribute: str) -> Iterator[SinCosTable]:
    config: Any = getattr(model, "config", None)
    for name, module in model.named_modules():
        held = getattr(module, attribute, None)
        if isinstance(held, nn.Embedding):
            yield SinCosTable(
                f"{name}.{attribute}".lstrip("."), "", held, config, "default", _BASE, "weight"
            )
        elif isinstance(held, Tensor):
            yield SinCosTable(name, "", module, config, "default", _BASE, attribute)
