"""Text and speech decoders of multimodal models that no other family covers."""

from __future__ import annotations

from hf_posenc.adapters import ArchAdapter

ADAPTER = ArchAdapter(
    family="multimodal",
    model_types=(
        "aria_text",
        "chameleon",
        "cosmos3_edge_text",
        "dia_decoder",
        "emu3_text_model",
        "evolla",
        "idefics",
        "kyutai_speech_to_text",
        "mllama_text_model",
        "molmo2_text",
        "moonshine",
        "moonshine_streaming",
        "moshi",
        "muse_glimmer_text",
        "muse_spark_text",
        "paddleocr_vl_text",
        "unlimited_ocr_text",
        "voxtral_realtime_text",
    ),
    legacy_rope_types={
        "chameleon": ("default", "linear", "dynamic"),
        "mllama_text_model": ("linear", "dynamic", "yarn", "longrope", "llama3"),
    },
    legacy_fields={"chameleon": ("type", "factor")},
)
