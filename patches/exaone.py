"""EXAONE: half-split RoPE, none in some layers."""

from __future__ import annotations

from hf_posenc.adapters import ArchAdapter

ADAPTER = ArchAdapter(
    family="exaone",
    model_types=(
        "exaone",
        "exaone4",
        "exaone_moe",
    ),
)
