"""Latent attention (MLA): a rotated tail of each head, interleaved or half-split."""

from __future__ import annotations

from hf_posenc.adapters import ArchAdapter

ADAPTER = ArchAdapter(
    family="deepseek",
    model_types=(
        "axk1",
        "axk2",
        "bailing_hybrid",
        "deepseek_ocr2_text",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "deepseek_v4",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "hy_v4",
        "hy_v4_vl_text",
        "longcat_flash",
        "minicpm3",
        "mistral4",
        "sarvam_mla",
        "youtu",
    ),
    beside={"deepseek_v4": ("relative encoding in code of its own",)},  # of the keys that it pools
)
