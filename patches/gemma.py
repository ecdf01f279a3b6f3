"""Gemma and its relatives: from the third on, one table for sliding and one for full-attention layers."""

from __future__ import annotations

from hf_posenc.adapters import ArchAdapter

ADAPTER = ArchAdapter(
    family="gemma",
    model_types=(
        "diffusion_gemma_text",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gemma3n_text",
        "gemma4_text",
        "gemma4_unified_text",
        "t5_gemma_module",
        "t5gemma2_decoder",
        "vaultgemma",
    ),
    beside={"t5gemma2_decoder": ("count of keys",)},  # one softmax over text and encoder
)
