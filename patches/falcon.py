"""Falcon: RoPE in the later models; the first ones (Falcon-RW) have ALiBi and a rotary module that nothing calls."""

from __future__ import annotations

from hf_posenc.adapters import ArchAdapter

ADAPTER = ArchAdapter(
    family="falcon",
    model_types=("falcon", "falcon_h1"),
    refused_if={
        "alibi": "it encodes position by ALiBi (config.alibi); its rotary module is never called."
    },
)
