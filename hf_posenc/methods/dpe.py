"""DPE: far positions in groups of tokens, and groups of another size for each part of the rotary dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from hf_posenc.methods.bands import RotaryBands
from hf_posenc.methods.base import count, several

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class DPE(RotaryBands):
    """Dimension-wise positional embeddings manipulation (Lu et al. 2025, arXiv 2504.18857).

    Neighbours keep `m - n`. Past the window, the rotary pairs of part j read
    `floor(m/g_j) + w - floor(w/g_j) - floor(n/g_j)`: SelfExtend with a group size for each part, so that
    each part of the dimensions stays within the distances that it was trained well on.

    Args:
        factors: g_j, a group size in tokens for each part of the rotary pairs, the fastest first. Parts are of
            equal size. The authors publish 8 for each of four models, which are recipes.
        window: Distances w below it are kept, in tokens.
    """

    name = "dpe"
    summary = (
        "positions past a window in groups of tokens, of another size for each part of the pairs"
    )
    source = "Lu et al. 2025, arXiv 2504.18857; LuLuLuyi/DPE"
    by_pair: ClassVar[bool] = True

    factors: Sequence[int] = field(metadata=several(count()))
    window: int | None = field(default=1024, metadata=count())

    def __post_init__(self) -> None:
        super().__post_init__()
        # A tuple, so that the frozen method stays hashable.
        object.__setattr__(self, "factors", tuple(self.factors))
        object.__setattr__(self, "_by_device", {})

    def query_position(self, m: Tensor, original: int) -> Tensor:
        """Return the rotary positions of a query at m in the far band, shape (*m.shape, parts)."""
        window, factors = self.near_window(original), self._factors(m)
        # The authors' decoding rounds w/g down, their prefill does not: equal wherever g divides w.
        return m[..., None] // factors + (window - window // factors)

    def key_position(self, n: Tensor, original: int) -> Tensor:
        return n[..., None] // self._factors(n)

    def _factors(self, like: Tensor) -> Tensor:
        import torch

        kept: dict[torch.device, Tensor] = self.__dict__["_by_device"]
        if torch.compiler.is_compiling():
            return torch.tensor(self.factors, device=like.device)
        if like.device not in kept:  # a copy to the device once, and not in every layer
            kept[like.device] = torch.tensor(self.factors, device=like.device)
        return kept[like.device]
