"""Two parts of a softmax merged in one launch: the operator."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_posenc.attention.kernels.device import padded, strided, unwatched

_ROWS = 32


def _merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor, reverse: bool) -> None:
    """Merge outputs (B, H, R, D), whose features are dense, and log-sum-exps (B, H, R), float32."""
    from hf_posenc.attention.kernels import merging_triton

    batch, heads, rows, features = out.shape
    with torch.cuda.device_of(out):
        merging_triton.merge_rows[(-(-rows // _ROWS), batch * heads)](
            *strided(out), *strided(lse), *strided(part_out), *strided(part_lse), heads, rows,
            REVERSE=reverse, D=features, PADDED=padded(features), BM=_ROWS,
        )  # fmt: skip


_operator = torch.library.custom_op(
    "hf_posenc::merge",
    _merge,
    mutates_args=("out", "lse"),
    schema="(Tensor(a!) out, Tensor(b!) lse, Tensor part_out, Tensor part_lse, bool reverse) -> ()",
)


@_operator.register_fake
def _(*arguments: object) -> None:
    return None


def merge(
    out: Tensor,
    lse: Tensor,
    part_out: Tensor,
    part_lse: Tensor,
    *,
    reverse: bool = False,
    last: bool = False,
) -> None:
    """Merge by the operator, as `fused.protocol.merge`; the log-sum-exp is written in any case."""
    (_merge if unwatched(out) else _operator)(out, lse, part_out, part_lse, reverse)
