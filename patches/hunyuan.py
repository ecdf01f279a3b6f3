"""Hunyuan: half-split RoPE, with query and key normalised after the rotation."""

from __future__ import annotations

from hf_posenc.adapters import ArchAdapter

ADAPTER = ArchAdapter(
    family="hunyuan",
    model_types=(
        "hunyuan_v1_dense",
        "hunyuan_v1_moe",
        "hunyuan_vl_text",
        "hy_v3",
    ),
)
