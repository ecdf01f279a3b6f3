"""Models that mix attention with state-space, convolution or recurrent layers; only attention rotates."""

from __future__ import annotations

from hf_posenc.adapters import ArchAdapter

ADAPTER = ArchAdapter(
    family="hybrid",
    model_types=(
        "bamba",
        "jetmoe",
        "lara_mini",
        "lfm2",
        "lfm2_moe",
        "lfm3",
        "nemotron",
        "recurrent_gemma",
        "zamba2",
        "zaya",
    ),
    legacy_rope_types={"nemotron": ("default",)},
)
