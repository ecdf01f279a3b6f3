"""Mistral Large 4: latent attention whose frequencies carry a learned factor each."""

from __future__ import annotations

from hf_posenc.adapters import ArchAdapter

ADAPTER = ArchAdapter(
    family="mistral_large",
    model_types=("mistral_large4_text",),
    log_gain="alpha",
)
