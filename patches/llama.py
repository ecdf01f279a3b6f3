"""Llama, and every other decoder whose rotary module needs no care: full or partial, half-split or interleaved."""

from __future__ import annotations

from hf_posenc.adapters import ArchAdapter

ADAPTER = ArchAdapter(
    family="llama",
    model_types=(
        "afmoe",
        "apertus",
        "apertus1p5_text",
        "arcee",
        "beam",
        "bitnet",
        "blt",
        "cwm",
        "dbrx",
        "diffllama",
        "doge",
        "dory",
        "dots1",
        "dots3_note_text",
        "flint",
        "gpt_oss",
        "helium",
        "hrm_text",
        "hyperclovax",
        "internlm3",
        "iquestcoder",
        "jais2",
        "kolibri1",
        "laguna",
        "llama",
        "llama4_text",
        "mellum",
        "mimo_v2_flash",
        "modernbert-decoder",
        "nanochat",
        "persimmon",
        "seed_oss",
        "smollm3",
        "solar_open",
        "stablelm",
        "starcoder2",
        "step3p5",
    ),
    legacy_rope_types={
        "llama4_text": ("default", "llama3"),
        "modernbert-decoder": (),
    },
    beside={"blt": ("unknown source",)},  # an embedding of groups of bytes
)
