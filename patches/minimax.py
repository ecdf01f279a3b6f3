"""MiniMax: half-split RoPE in the softmax-attention layers."""

from __future__ import annotations

from hf_posenc.adapters import ArchAdapter

ADAPTER = ArchAdapter(
    family="minimax",
    model_types=(
        "minimax",
        "minimax_m2",
        "minimax_m3_vl_text",
    ),
)
