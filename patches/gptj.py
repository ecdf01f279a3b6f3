"""Models whose attention reads sines and cosines from a precomputed table."""

from __future__ import annotations

from hf_posenc.adapters import ArchAdapter

ADAPTER = ArchAdapter(
    family="gptj",
    model_types=("codegen", "gptj", "roformer"),
    sincos_table="embed_positions",
)
