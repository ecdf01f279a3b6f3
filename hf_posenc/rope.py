"""One rotary table of a model, as the methods see it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_posenc.errors import PosencError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, eq=False)
class RopeSpec:
    """The properties of a rotary table that a frequency method reads.

    Attributes:
        dim: The rotary dimension `d` (head_dim x partial_rotary_factor); even.
        theta: The base `b` (`rope_theta`).
        original_max_position_embeddings: The context length `L` of the training, in tokens.
        frequencies: The model's own default table, shape (d/2,), in radians per token. The methods start from it, so
            that `scale=1` gives the very bits of the unpatched model; a table with zeros at its end (`proportional`
            RoPE) keeps them. `None`: `theta ** (-2i/d)`, evaluated in float64.
        order: The pair at each place of the module's table, where that is not the natural order (Ernie 4.5 VL);
            methods always see the natural one.

    Raises:
        PosencError: An odd `dim`, a base or a length out of range, or a table of another length.
    """

    dim: int
    theta: float
    original_max_position_embeddings: int
    frequencies: Tensor | None = None
    order: Tensor | None = None

    def __post_init__(self) -> None:
        if self.dim < 2 or self.dim % 2:
            raise PosencError(f"A rotary dimension is even and at least 2, not {self.dim}.")
        if not self.theta > 1 or math.isinf(self.theta):
            raise PosencError(f"rope_theta is a finite number above 1, not {self.theta}.")
        if self.original_max_position_embeddings < 1:
            raise PosencError(
                f"original_max_position_embeddings is at least 1 token, not {self.original_max_position_embeddings}."
            )
        if self.frequencies is not None and self.frequencies.shape != (self.dim // 2,):
            raise PosencError(
                f"A table of dimension {self.dim} has {self.dim // 2} frequencies, not {tuple(self.frequencies.shape)}."
            )

    def default_inv_freq(self) -> Tensor:
        """Return the unscaled frequencies `f_i`, shape (d/2,), float64, radians per token."""
        import torch

        if self.frequencies is not None:
            return self.frequencies.detach().to("cpu", torch.float64)
        return self.theta ** -self.exponents()

    def exponents(self) -> Tensor:
        """Return `2i/d` for the pair index `i = 0 .. d/2-1`, shape (d/2,), float64."""
        import torch

        return torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim

    def pair_index(self, rotations: float) -> float:
        """Return the pair index, not rounded, whose frequency makes so many full turns over `L` tokens.

        YaRN (arXiv 2309.00071) eq. 18 solved for the index: `d ln(L / (2 pi rotations)) / (2 ln b)`.
        """
        turns = self.original_max_position_embeddings / (rotations * 2 * math.pi)
        return self.dim * math.log(turns) / (2 * math.log(self.theta))
