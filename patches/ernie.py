"""ERNIE 4.5: interleaved RoPE; the multimodal decoder keeps its pairs in an order of its own."""

from __future__ import annotations

from hf_posenc.adapters import ArchAdapter

ADAPTER = ArchAdapter(
    family="ernie",
    model_types=(
        "ernie4_5",
        "ernie4_5_moe",
        "ernie4_5_vl_moe_text",
    ),
)
