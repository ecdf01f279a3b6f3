"""Biases by a formula of the distance: ALiBi's line, KERPLE's learned kernels, Sandwich's cosines."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from hf_posenc.errors import PosencError
from hf_posenc.methods.base import choice, count, number, real, switch
from hf_posenc.methods.bias import DistanceBias, Weights, per_head

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ALiBi(DistanceBias):
    """Attention with linear biases (Press et al. 2021, arXiv 2108.12409): `-slope_h * (m - n)`.

    The slopes are `2 ** (-8 (h+1) / H)` for a power of two of heads H; else those of the power of two
    P below H, then every second slope of 2P. They are not trained. Dividing them by the scale
    interpolates a model that was trained with ALiBi (arXiv 2310.13017).

    A head is blind where its weights underflow: in bfloat16 about `92 / slope_h` tokens back. Logarithmic
    distances, `-slope_h ln(1 + m - n)`, put that off beyond any text (arXiv 2608.03994, which trains with them).

    Args:
        scale: Divides the slopes: target context as a multiple of the one that ALiBi was trained with.
        distance: `"linear"`, m - n; `"log"`, `ln(1 + m - n)`.
    """

    name = "alibi"
    summary = "a penalty in proportion to the distance, a slope for every head"
    source = (
        "Press et al. 2021, arXiv 2108.12409; Al-Khateeb et al. 2023, arXiv 2310.13017; Schröder et al. 2026, "
        "arXiv 2608.03994"
    )
    needs = "training, or a model that was trained with it"
    follows_text = False
    reads_length = False
    bidirectional = True

    scale: float = field(default=1.0, metadata=number(1))
    distance: str = field(default="linear", metadata=choice("linear", "log"))

    @property
    def line(self) -> bool:
        """True if a bias is a slope times the distance, whatever the slopes."""
        return self.distance == "linear" and type(self).bias is ALiBi.bias

    def slopes(self, heads: int, device: torch.device | None = None) -> Tensor:
        """Return the slopes, shape (heads,), float64 (float32 on MPS), in score per token; divided by the scale."""
        import torch

        below = 2 ** math.floor(math.log2(heads))
        # Made on the device, so that no step waits for a copy; every exponent is exact.
        exponents = real(torch.arange(1, below + 1, device=device)) * (-8 / below)
        if heads > below:
            others = real(torch.arange(1, 2 * (heads - below), 2, device=device)) * (-4 / below)
            exponents = torch.cat((exponents, others))
        return torch.pow(2.0, exponents) / self.scale

    def bias(self, distance: Tensor, heads: int, parameters: Weights, *_: Any) -> Tensor:
        slopes = self.slopes(heads, distance.device).to(distance.dtype)
        counted = distance.log1p() if self.distance == "log" else distance
        return -per_head(slopes, distance) * counted

    def horizon(self, drop: Tensor, heads: int, parameters: Weights | None = None) -> Tensor:
        reach = drop / self.slopes(heads, drop.device).to(drop.dtype)
        return reach.expm1() if self.distance == "log" else reach


LEAST = 0.01
"""The authors' lower bound of r1 and r2."""


@dataclass(frozen=True, kw_only=True)
class _Kerple(DistanceBias):
    """Either kernel, with r1 and r2 per head: upper ends `drawn` of their initial draws, r2 bounded by `most`."""

    source = "Chi et al. 2022, arXiv 2205.09921; chijames/KERPLE"
    trainable = True
    bidirectional = True
    drawn: ClassVar[tuple[float, float]]
    most: ClassVar[float | None] = None

    shared: bool = field(default=False, metadata=switch())

    @property
    def shared_parameters(self) -> tuple[str, ...]:
        return ("r1", "r2") if self.shared else ()

    def initial(self, heads: int, original: int) -> dict[str, Tensor]:
        import torch

        r1, r2 = self.drawn
        return {"r1": r1 * torch.rand(heads), "r2": r2 * torch.rand(heads)}

    def kernel(self, distance: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
        """Return the bias at a distance; `inverse` returns the distance with a penalty."""
        raise NotImplementedError

    def inverse(self, penalty: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
        raise NotImplementedError

    def bias(self, distance: Tensor, heads: int, parameters: Weights, *_: Any) -> Tensor:
        return self.kernel(distance, *(per_head(r, distance) for r in self._bounded(parameters)))

    def horizon(self, drop: Tensor, heads: int, parameters: Weights | None = None) -> Tensor | None:
        if parameters is None:
            return None
        return self.inverse(drop, *(r.detach() for r in self._bounded(parameters)))

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

    Args:
        shared: One r1 and r2 of a head for all layers, as in the authors' code.
    """

    name = "kerple_log"
    aliases = ("kerple",)
    summary = "a learned logarithmic penalty on the distance"
    drawn = (2.0, 1.0)

    def kernel(self, distance: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
        return -r1 * (r2 * distance).log1p()

    def inverse(self, penalty: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
        return (penalty / r1).expm1() / r2


@dataclass(frozen=True, kw_only=True)
class KerplePower(_Kerple):
    """KERPLE with the power kernel (Chi et al. 2022, arXiv 2205.09921): `-r1 (m - n)^r2`.

    r1 and r2 are learned per head, from uniform draws between 0 and 1, and 0 and 2, as in the
    authors' code. r1 is held at 0.01 or more, r2 between 0.01 and 2; beyond these bounds they count
    as the bound and keep their gradient.

    Args:
        shared: One r1 and r2 of a head for all layers, as in the authors' code.
    """

    name = "kerple_power"
    summary = "a learned power of the distance as penalty"
    drawn = (1.0, 2.0)
    most = 2.0

    def kernel(self, distance: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
        return -r1 * distance**r2

    def inverse(self, penalty: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
        return (penalty / r1) ** (1 / r2)


@dataclass(frozen=True, kw_only=True)
class Sandwich(DistanceBias):
    """Sandwich (Chi et al. 2022, arXiv 2212.10356): a decaying sum of cosines of the distance.

    `(sum_i cos((m - n) / 10000 ** (2i/D)) - D/2) / (8 (h+1) / H)` for `i = 1 .. D/2`: the inner product
    of two sinusoidal embeddings, shifted to 0 at distance 0 and divided by a slope per head.

    Args:
        dim: Width D of the sinusoidal embeddings; independent of the model's own width.
        first: The i of the fastest pair: 1 as in the paper's equation, or 0 as in its printed code, whose sum is
            that over `i = 0 .. D/2 - 1`.
    """

    name = "sandwich"
    summary = "a decaying sum of cosines of the distance"
    source = "Chi et al. 2022, arXiv 2212.10356"
    bidirectional = True

    dim: int = field(default=128, metadata=count(2))
    first: int = field(default=1, metadata=count(0))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim % 2:
            raise PosencError(f"{self.name}: dim is even, not {self.dim}.")
        if self.first > 1:
            raise PosencError(f"{self.name}: first is 0 or 1, not {self.first}.")

    def bias(self, distance: Tensor, heads: int, parameters: Weights, *_: Any) -> Tensor:
        import torch

        pairs = self.dim // 2
        exact = real(distance)
        below_zero = torch.zeros_like(exact)
        for i in range(
            self.first, self.first + pairs
        ):  # one pair at a time: no scratch of D/2 times the distances
            below_zero += torch.cos(exact / 10_000 ** (2 * i / self.dim)) - 1
        slopes = 8 * real(torch.arange(1, heads + 1, device=exact.device)) / heads
        return (below_zero / per_head(slopes, distance)).to(distance.dtype)
