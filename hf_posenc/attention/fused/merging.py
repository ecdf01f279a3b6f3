"""Parts of one softmax become one, weighed by their log-sum-exps."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Merge(Protocol):
    """A way to merge parts; shapes: outputs (B, H, R, D), log-sum-exps (B, H, R)."""

    def __call__(
        self,
        out: Tensor,
        lse: Tensor,
        part_out: Tensor,
        part_lse: Tensor,
        *,
        reverse: bool = False,
        last: bool = False,
    ) -> None:
        """Add a part to what `out` and `lse` hold, in place.

        Args:
            out: The output of the parts before.
            lse: Their log-sum-exp.
            part_out: The part's output.
            part_lse: Its log-sum-exp.
            reverse: The part's rows are in reverse order.
            last: Nothing reads `lse` after this, so that it may stay as it is.
        """
        ...


def merge(
    out: Tensor,
    lse: Tensor,
    part_out: Tensor,
    part_lse: Tensor,
    *,
    reverse: bool = False,
    last: bool = False,
) -> None:
    """Merge in PyTorch operations, as `Merge`."""
    if reverse:
        part_out, part_lse = part_out.flip(2), part_lse.flip(2)
    share = torch.empty_like(part_lse, dtype=out.dtype)
    torch.sigmoid(part_lse - lse, out=share)
    out.lerp_(part_out, share.unsqueeze(-1))
    if not last:
        lse.copy_(torch.logaddexp(part_lse, lse))
