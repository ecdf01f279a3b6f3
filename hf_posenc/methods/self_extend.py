"""SelfExtend: past a window, positions are counted in groups of tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from hf_posenc.errors import PosencError
from hf_posenc.methods.bands import RotaryBands, compression
from hf_posenc.methods.base import count, number


@dataclass(frozen=True, kw_only=True)
class SelfExtend(RotaryBands):
    """SelfExtend (Jin et al. 2024, arXiv 2401.01325): floor division of the positions past a window.

    Neighbours keep `m - n`; past the window the relative position is
    `floor(m/G) + W - floor(W/G) - floor(n/G)`, an integer that occurred in training.

    Args:
        scale: Target context as a multiple s of the original one, from which
            `G = ceil((s L - W) / (L - W))`: a text of s L tokens then stays within about L positions.
        window: Distances W below it are kept; half of the original context by default.
        group: Tokens G that share a position past the window, given outright; 8 if there is no
            scale either.
    """

    name: ClassVar[str] = "self_extend"
    aliases: ClassVar[tuple[str, ...]] = ("selfextend", "longlm")
    summary: ClassVar[str] = "positions past a window are counted in groups of tokens"
    source: ClassVar[str] = "Jin et al. 2024, arXiv 2401.01325"

    scale: float | None = field(default=None, metadata=number(1))
    group: int | None = field(default=None, metadata=count())

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale is not None and self.group is not None:
            raise PosencError(
                f"{self.name}: scale and group set the same number; give one of them."
            )

    def group_size(self, original: int) -> int:
        """Return the G in force, in tokens."""
        if self.scale is not None:
            return math.ceil(compression(self, self.scale, original))
        return 8 if self.group is None else self.group

    def query_position(self, m: Tensor, original: int) -> Tensor:
        group, window = self.group_size(original), self.near_window(original)
        # The paper and the authors' flash decoding round W/G down, their prefill does not: the two
        # differ wherever G does not divide W.
        return m // group + (window - window // group)

    def key_position(self, n: Tensor, original: int) -> Tensor:
        return n // self.group_size(original)
