"""STRING: distances that are rare in training are overwritten by frequent ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from hf_posenc.errors import PosencError
from hf_posenc.methods.bands import RotaryBands
from hf_posenc.methods.base import count


@dataclass(frozen=True, kw_only=True)
class STRING(RotaryBands):
    """STRING, shifted rotary position embedding (An et al. 2024, arXiv 2410.18745).

    Distances below the shift S stay; a distance `m - n` of at least S is read as `m - n - S + W`.
    Long distances are rare in training texts, so a model reads them better as shorter ones. The method
    improves the use of the trained context, and adds `S - W` tokens to it.

    Args:
        shift: Offset S in tokens; a third of the original context by default.
        window: Local window W, the least distance that a shifted pair gets; 128 by default, and
            below S.
    """

    name: ClassVar[str] = "string"
    summary: ClassVar[str] = "distances from S on are read as S - W less"
    source: ClassVar[str] = "An et al. 2024, arXiv 2410.18745"
    keeps_order: ClassVar[bool] = False

    shift: int | None = field(default=None, metadata=count())

    def near_window(self, original: int) -> int:
        """Return the shift S: a text of no more tokens is read as unpatched."""
        return max(1, round(original / 3)) if self.shift is None else self.shift

    def local_window(self, original: int) -> int:
        """Return the W in force, in tokens.

        Raises:
            PosencError: A window above the shift, which would lengthen distances.
        """
        shift = self.near_window(original)
        if self.window is None:
            return max(1, min(128, shift - 1))
        if self.window > shift:
            raise PosencError(
                f"{self.name}: window ({self.window}) is at most the shift ({shift} tokens here)."
            )
        return self.window

    def query_position(self, m: Tensor, original: int) -> Tensor:
        return m - (self.near_window(original) - self.local_window(original))

    def key_position(self, n: Tensor, original: int) -> Tensor:
        return n
