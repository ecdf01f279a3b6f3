"""Granite: half-split RoPE; the sliding-window variants have a second rotary module."""

from __future__ import annotations

from hf_posenc.adapters import ArchAdapter

ADAPTER = ArchAdapter(
    family="granite",
    model_types=(
        "granite",
        "granite4_vision_text",
        "granite_docling_text",
        "granite_swa",
        "granitemoe",
        "granitemoe_swa",
        "granitemoehybrid",
        "granitemoeshared",
    ),
)
