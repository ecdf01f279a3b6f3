"""Mistral: half-split RoPE; Ministral's queries also grow with the position, past the original length."""

from __future__ import annotations

from hf_posenc.adapters import ArchAdapter

ADAPTER = ArchAdapter(
    family="mistral",
    model_types=(
        "ministral",
        "ministral3",
        "mistral",
        "mixtral",
    ),
)
