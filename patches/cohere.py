"""Command R: interleaved RoPE, none in the full-attention layers of the later models."""

from __future__ import annotations

from hf_posenc.adapters import ArchAdapter

ADAPTER = ArchAdapter(
    family="cohere",
    model_types=(
        "cohere",
        "cohere2",
        "cohere2_moe",
        "cohere_compass_text",
    ),
)
