"""Whole texts under a bias by distance, by FlashAttention-4 from a table; for inference."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_posenc.attention.call import Call
from hf_posenc.attention.encoding import Encoding
from hf_posenc.attention.fused.flash4 import Flash4, interface
from hf_posenc.attention.kernels import biased
from hf_posenc.attention.kernels.biases import operands_of
from hf_posenc.attention.kernels.device import trains
from hf_posenc.attention.toeplitz import LEAST
from hf_posenc.methods import ALiBi, DistanceBias, KerplePower


def accepts(call: Call, encoding: Encoding) -> bool:
    """True if FlashAttention-4 computes this call.

    ALiBi and KERPLE's power stay with the kernel whose windows leave keys out: it is faster in long texts.
    """
    features = max(call.query.shape[-1], call.value.shape[-1])
    return (
        Flash4().serves(call.query.device, call.dtype, features)
        and isinstance(encoding.bias, DistanceBias)
        and not isinstance(encoding.bias, ALiBi | KerplePower)
        and not trains(call, encoding)
        and not torch.compiler.is_compiling()
        and biased.accepts(call, encoding)
        and call.count_up(from_zero=False)
    )


def run(call: Call, encoding: Encoding) -> tuple[Tensor, None]:
    """Compute a call that is accepted."""
    table = table_of(encoding, call.key.shape[2], call.query.device)

    def attend(query: Tensor, key: Tensor, value: Tensor, *positions: Tensor) -> Tensor:
        return tabled(query, key, value, table, call.scaling)

    return biased.by_runs(call, encoding, attend), None


def table_of(encoding: Encoding, keys: int, device: torch.device) -> Tensor:
    """Return the bias of every head and distance, (heads, keys or more), float32."""
    method = encoding.bias
    assert isinstance(method, DistanceBias)
    if not encoding.parameters:  # kept for all layers and forwards
        kept = operands_of(encoding, 0, keys, device)
        assert kept is not None
        assert kept.first is not None
        return kept.first
    distance = torch.arange(keys, device=device, dtype=torch.float32)
    bias = encoding.own(method.bias(distance, encoding.all_heads, encoding.parameters or {}))
    return bias.float().clamp_min(LEAST).contiguous()


def tabled(query: Tensor, key: Tensor, value: Tensor, table: Tensor, scaling: float) -> Tensor:
    """Compute causal attention, aligned to the bottom right, with `table[head, distance]` added to the scores.

    Shapes: queries (B, H, R, D), keys and values (B, HK, N, D), the table (H, N), and the result (B, H, R, D).
    """
    from hf_posenc.attention.kernels import biased_cute

    out: Tensor = interface()._flash_attn_fwd(
        *(x.transpose(1, 2) for x in (query, key, value)),
        softmax_scale=scaling,
        causal=True,
        score_mod=biased_cute.by_distance,
        aux_tensors=[table],
        pack_gqa=False,
    )[0]
    return out.transpose(1, 2)
