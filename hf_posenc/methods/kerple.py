"""KERPLE: learned kernels of the distance, logarithmic or a power."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_posenc.methods.bias import DistanceBias, Weights, per_head

LEAST = 0.01
"""The authors' lower bound of r1 and r2."""


@dataclass(frozen=True, kw_only=True)
class _Kerple(DistanceBias):
    """Either kernel, with r1 and r2 per head.

    Class attributes:
        drawn: The upper ends of the initial draws of r1 and r2.
        most: The upper bound of r2.
    """

    source: ClassVar[str] = "Chi et al. 2022, arXiv 2205.09921; chijames/KERPLE"
    trainable: ClassVar[bool] = True
    drawn: ClassVar[tuple[float, float]]
    most: ClassVar[float | None] = None

    def initial(self, heads: int, original: int) -> dict[str, Tensor]:
        r1, r2 = self.drawn
        return {"r1": r1 * torch.rand(heads), "r2": r2 * torch.rand(heads)}

    def _bounded(self, parameters: Weights) -> tuple[Tensor, Tensor]:
        """Return r1 and r2 held within bounds, with the gradient of the values themselves.

        The authors' code clamps the parameters in place in every forward. This gives the same values and
        changes no parameter. A plain clamp would leave a value out of bounds without a gradient.
        """
        r1, r2 = parameters["r1"], parameters["r2"]
        return (
            r1 + (r1.clamp(min=LEAST) - r1).detach(),
            r2 + (r2.clamp(min=LEAST, max=self.most) - r2).detach(),
        )


@dataclass(frozen=True, kw_only=True)
class KerpleLog(_Kerple):
    """KERPLE with the logarithmic kernel (Chi et al. 2022, arXiv 2205.09921): `-r1 ln(1 + r2 (m - n))`.

    r1 and r2 are learned per head, from uniform draws between 0 and 2, and 0 and 1, as in the
    authors' code, and are held at 0.01 or more; below that they count as 0.01 and keep their gradient.
    """

    name: ClassVar[str] = "kerple_log"
    aliases: ClassVar[tuple[str, ...]] = ("kerple",)
    summary: ClassVar[str] = "a learned logarithmic penalty on the distance"
    drawn: ClassVar[tuple[float, float]] = (2.0, 1.0)

    def bias(
        self,
        distance: Tensor,
        heads: int,
        parameters: Weights,
        query_position: Tensor | None = None,
    ) -> Tensor:
        r1, r2 = (per_head(r, distance) for r in self._bounded(parameters))
        return -r1 * torch.log1p(r2 * distance)

    def horizon(self, drop: Tensor, heads: int, parameters: Weights | None = None) -> Tensor | None:
        if parameters is None:
            return None
        r1, r2 = (r.detach() for r in self._bounded(parameters))
        return torch.expm1(drop / r1) / r2


@dataclass(frozen=True, kw_only=True)
class KerplePower(_Kerple):
    """KERPLE with the power kernel (Chi et al. 2022, arXiv 2205.09921): `-r1 (m - n)^r2`.

    r1 and r2 are learned per head, from uniform draws between 0 and 1, and 0 and 2, as in the
    authors' code. r1 is held at 0.01 or more, r2 between 0.01 and 2; beyond these bounds they count
    as the bound and keep their gradient.
    """

    name: ClassVar[str] = "kerple_power"
    summary: ClassVar[str] = "a learned power of the distance as penalty"
    drawn: ClassVar[tuple[float, float]] = (1.0, 2.0)
    most: ClassVar[float | None] = 2.0

    def bias(
        self,
        distance: Tensor,
        heads: int,
        parameters: Weights,
        query_position: Tensor | None = None,
    ) -> Tensor:
        r1, r2 = (per_head(r, distance) for r in self._bounded(parameters))
        return -r1 * torch.pow(distance, r2)

    def horizon(self, drop: Tensor, heads: int, parameters: Weights | None = None) -> Tensor | None:
        if parameters is None:
            return None
        r1, r2 = (r.detach() for r in self._bounded(parameters))
        return (drop / r1) ** (1 / r2)
