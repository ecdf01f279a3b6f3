"""GLM: interleaved or half-split RoPE over half of each head."""

from __future__ import annotations

from hf_posenc.adapters import ArchAdapter

ADAPTER = ArchAdapter(
    family="glm",
    model_types=(
        "glm",
        "glm4",
        "glm4_moe",
        "glm4v_moe_text",
        "glm4v_text",
        "glm_ocr_text",
        "sarvam_moe",
    ),
)
