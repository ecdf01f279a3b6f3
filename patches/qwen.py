"""Qwen: half-split RoPE; M-RoPE in the multimodal decoders, partial RoPE in the hybrid ones."""

from __future__ import annotations

from hf_posenc.adapters import ArchAdapter

ADAPTER = ArchAdapter(
    family="qwen",
    model_types=(
        "qwen2",
        "qwen2_5_omni_text",
        "qwen2_5_vl_text",
        "qwen2_moe",
        "qwen2_vl_text",
        "qwen3",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_omni_moe_text",
        "qwen3_vl_moe_text",
        "qwen3_vl_text",
        "qwen4_exp_text",
    ),
)
