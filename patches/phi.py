"""Phi: partial RoPE in the first, LongRoPE in Phi-3, factors of their own keys in Phi-3.5-MoE."""

from __future__ import annotations

from hf_posenc.adapters import ArchAdapter

ADAPTER = ArchAdapter(
    family="phi",
    model_types=(
        "phi",
        "phi3",
        "phi4_multimodal",
        "phimoe",
    ),
    legacy_rope_types=dict.fromkeys(("phi3", "phi4_multimodal"), ("default", "longrope")),
    legacy_fields=dict.fromkeys(
        ("phi3", "phi4_multimodal"), ("type", "short_factor", "long_factor")
    ),
)
