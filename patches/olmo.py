"""OLMo: half-split RoPE whose cos and sin stay float32; one table per layer type from OLMo 3 on."""

from __future__ import annotations

from hf_posenc.adapters import ArchAdapter

ADAPTER = ArchAdapter(
    family="olmo",
    model_types=(
        "flex_olmo",
        "olmo",
        "olmo2",
        "olmo3",
        "olmo_hybrid",
        "olmoe",
    ),
    legacy_keys={"rope_local_base_freq": "rope_theta"},
    legacy_rope_types=dict.fromkeys(("olmo", "olmo2"), ("default", "linear", "dynamic")),
    legacy_fields=dict.fromkeys(("olmo", "olmo2"), ("type", "factor")),
)
