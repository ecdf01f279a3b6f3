"""GPT-NeoX: half-split RoPE over a part of each head, with config keys of its own in transformers 4."""

from __future__ import annotations

from hf_posenc.adapters import ArchAdapter

ADAPTER = ArchAdapter(
    family="gpt_neox",
    model_types=("gpt_neox", "gpt_neox_japanese"),
    legacy_keys={"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
)
