"""Configurations shrunk to a toy: any configuration class, by the names of its fields."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from typing import Any

from transformers import PretrainedConfig

from tests.support.zoo_registry import field_names, modelling_module, parts, source_of

LAYERS = 4
VOCABULARY = 128
ORIGINAL_LENGTH = 64
"""Positions that every tiny model is "trained" on: its ``max_position_embeddings``."""

_KEEP = ...  # as a quirk's value: leave this field at the configuration's own default

# What each field shrinks to, wherever a configuration has it.
_SMALL: dict[str, Any] = {
    # depth
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "encoder_num_hidden_layers"), 2),
    **dict.fromkeys(("decoder_num_hidden_layers", "depth"), 2),
    **dict.fromkeys(("num_nextn_predict_layers", "num_kv_shared_layers"), 0),
    "first_k_dense_replace": 1,
    # width
    **dict.fromkeys(("hidden_size", "n_embd", "n_embed", "d_model", "dim", "block_dim"), 64),
    **dict.fromkeys(("embed_dim", "lru_width", "embedding_size", "hidden_size_global"), 64),
    **dict.fromkeys(("out_hidden_size", "text_hidden_size", "audio_hidden_size"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "ffn_dim"), 96),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("expert_ffn_hidden_size", "expert_intermediate_size"), 32),
    # heads
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_head_kv"), 2),
    **dict.fromkeys(("head_dim", "attention_head_size", "d_kv", "kv_channels"), 16),
    "rotary_dim": 8,
    # latent attention and its sparse indexer
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("kv_lora_rank", "v_head_dim", "qk_head_dim", "index_head_dim"), 16),
    "q_lora_rank": 24,
    "index_n_heads": 16,  # with few, scores after the ReLU tie at zero, and the choice of keys is arbitrary
    "index_topk": 8,
    "index_kpool": 2,
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_num_experts", "num_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "experts_per_token"), 2),
    **dict.fromkeys(("moe_topk", "moe_top_k", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group"), 1),
    # state-space and linear-attention layers
    **dict.fromkeys(("mamba_d_state", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "mamba_d_conv"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 32),
    **dict.fromkeys(("n_groups", "mamba_n_groups"), 1),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 16),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    "mamba_expand": 2,
    "mamba_d_ssm": 128,
    "conv_L_cache": 3,
    # lengths and windows
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 64),
    "original_max_position_embeddings": ORIGINAL_LENGTH,
    **dict.fromkeys(("sliding_window", "local_attention", "local_window_size"), 8),
    **dict.fromkeys(("attention_window", "attention_window_size"), 8),
    # vocabulary
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    "encoder_hash_byte_group_vocab": 64,
    "hidden_size_per_layer_input": 8,
    "pad_token_id": 0,
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), 1),
    "eos_token_id": 2,
    **dict.fromkeys(("image_token_id", "image_token_index"), 120),
    **dict.fromkeys(("audio_token_id", "audio_token_index"), 122),
    "video_token_id": 121,
    "vision_start_token_id": 123,
    "vision_end_token_id": 124,
    "boi_token_id": 125,
    "eoi_token_id": 126,
    # numerics
    **dict.fromkeys(("dropout", "attention_dropout", "hidden_dropout", "resid_pdrop"), 0.0),
    **dict.fromkeys(("embd_pdrop", "attn_pdrop", "hidden_dropout_prob"), 0.0),
    **dict.fromkeys(("attention_probs_dropout_prob", "activation_dropout"), 0.0),
    **dict.fromkeys(("classifier_dropout", "layerdrop"), 0.0),
    **dict.fromkeys(("decoder_layerdrop", "encoder_layerdrop"), 0.0),
    "initializer_range": 0.2,
    "init_std": 0.2,
}

# Fields where None means "this model has no such thing", so it must stay None.
_NONE_MEANS_ABSENT = {
    *("sliding_window", "attention_window_size", "num_nextn_predict_layers"),
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "original_max_position_embeddings"),
}

_PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type")


def _alternating(*kinds: str) -> list[str]:
    return [kinds[i % len(kinds)] for i in range(LAYERS)]


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


_BOTH = _alternating("sliding_attention", "full_attention")

# What no rule predicts: model type -> fields that replace the generic ones.
_QUIRKS: dict[str, dict[str, Any]] = {
    # Which layers attend is counted in other units than layer_types.
    "bamba": {"attn_layer_indices": [1, 3], "layers_block_type": _KEEP},
    "lfm2": {"layer_types": _alternating("conv", "full_attention")},
    "lfm2_moe": {"layer_types": _alternating("conv", "full_attention")},
    # Rotary positions are an option of these, and not the default.
    "granitemoehybrid": {
        "layer_types": _alternating("mamba", "attention"),
        "layers_block_type": _KEEP,
        "position_embedding_type": "rope",
    },
    "zamba2": {"use_mem_rope": True},
    "falcon": {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    "step3p5": {"sliding_window": 8},  # its default layer types need one, and its default is None
    "kyutai_speech_to_text": {"codebook_vocab_size": 128, "audio_pad_token_id": 127},
    "chameleon": {"vocabulary_map": {"<image>": 120}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "hunyuan_vl_text": {"rope_parameters": {**_rope(1e4), "mrope_section": [2, 2, 2, 2]}},
    "hy_v4_vl_text": {"rope_parameters": {**_rope(1e4), "mrope_section": [2, 1, 1]}},
    # A causal decoder only when told so.
    "roformer": {"is_decoder": True},
    # Sub-configurations that are plain dicts.
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {
            **dict.fromkeys(("ffn_hidden_size", "hidden_size"), 64),
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
    },
    # One table per layer type, and the first layers of the default list are all of one type.
    "cohere_compass_text": {
        "layer_types": _BOTH,
        "rope_parameters": {"sliding_attention": _rope(1e4), "full_attention": _rope(5e4)},
    },
    "gemma3n_text": {
        "layer_types": _BOTH,
        "intermediate_size": 96,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * LAYERS,
    },
    # Global layers have wider heads, and there are no experts unless enabled.
    **{
        gemma4: {"layer_types": _BOTH, "global_head_dim": 32}
        for gemma4 in ("gemma4_text", "gemma4_unified_text", "diffusion_gemma_text")
    },
    # Layers of one kind have their own head sizes, which are no fields of the class.
    "dots3_note_text": {
        **dict.fromkeys(("head_dim", "swa_head_dim", "swa_kv_lora_rank", "swa_v_head_dim"), 16),
        **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), 4),
        "swa_q_lora_rank": 24,
        "swa_qk_nope_head_dim": 8,
    },
    # Sizes that have to agree with one another.
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]], "window_size": 8},
    "dots3_note_vision_encoder": {"adapter_in_dim": 64, "adapter_out_dim": 64},
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_output_size": 64},
    "dia_decoder": {
        **dict.fromkeys(("cross_num_attention_heads", "cross_num_key_value_heads"), 4),
        "cross_hidden_size": 64,
        "cross_head_dim": 16,
        "bos_token_id": 3,
    },
    # Two layers of the kind that shares weights.
    "zamba": {"layers_block_type": _alternating("mamba", "hybrid")},
    "moonshine": {
        **dict.fromkeys(("encoder_num_attention_heads", "encoder_num_key_value_heads"), 4),
        **dict.fromkeys(("decoder_num_attention_heads", "decoder_num_key_value_heads"), 4),
    },
    "moonshine_streaming": {"num_key_value_heads": 4},  # its class forgets what its layers read
    "deepseek_v4": {"o_groups": 2, "o_lora_rank": 16},
    "mimi": {"upsample_groups": 4},
    "wavtokenizer_encoder": {"codebook_dim": 64, "codebook_size": 8},
    "apertus1p5_vision_tokenizer": {"codebook_size": 8},
    "apertus1p5": {"image_token_offset": 100, "audio_token_offset": 108},
    # One of the layers that are run twice reads the whole text.
    "dory": {"layer_types": _BOTH, "n_input_layers": 1, "n_output_layers": 1},
    # head_dim is the rotary width here; the query width is v_head_dim plus it.
    "longcat_flash": {"head_dim": 8},
    "minicpm3": {"num_key_value_heads": 4},
    "bailing_hybrid": {"num_key_value_heads": 4},
    # 0.334 of a head is 5.3 features: an odd rotary width that the real model does not have.
    "mimo_v2_flash": {
        "rope_parameters": {
            "full_attention": {**_rope(5e6), "partial_rotary_factor": 0.5},
            "sliding_attention": {**_rope(1e4), "partial_rotary_factor": 0.5},
        }
    },
    # Its plain forward ignores the window that its cache honours.
    "moshi": {"sliding_window": 3000},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
    "qwen4_exp_text": {
        **dict.fromkeys(("indexer_n_heads", "indexer_head_dim", "hc_lowrank"), 16),
        **dict.fromkeys(("indexer_compress_ratio", "ngram_size", "heads_per_ngram"), 2),
        **dict.fromkeys(("split_ngram_parts", "hc_count"), 2),
        **dict.fromkeys(("indexer_budget", "ple_embed_dim"), 8),
        "indexer_kv_heads": 1,
        "ngram_vocab_size_base": 200,
        "ple_layer_ids": [],
    },
}


def _distinct(kinds: Iterable[Any]) -> list[Any]:
    """A per-layer list cut to ``LAYERS`` entries: the first ones, unless others have every kind and these have not."""
    every = list(kinds)
    seen, first = list(dict.fromkeys(every)), every[:LAYERS]
    if len(seen) > LAYERS or {*first} == {*seen}:
        return first
    return (seen + [seen[0], seen[-1]] * LAYERS)[:LAYERS]


def _value(config: PretrainedConfig, name: str, fallback: Any) -> Any:
    try:
        return getattr(config, name, fallback)
    except RuntimeError:  # differs between layers: transformers refuses to name one value
        return fallback


def _shrunken_rope(default: PretrainedConfig, head_dim: int) -> dict[str, Any]:
    """The fields that shrink ``rope_parameters``; none where there is nothing to shrink."""
    rope = copy.deepcopy(getattr(default, "rope_parameters", None) or {})
    fields: dict[str, Any] = {}
    pairs = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
    if sections := _mrope_sections(default, pairs):
        rope["mrope_section"] = sections
        fields["rope_parameters"] = rope
    if "original_max_position_embeddings" in rope:  # a checkpoint that is scaled already
        rope |= {"original_max_position_embeddings": ORIGINAL_LENGTH, "factor": 4.0}
        fields |= {"rope_parameters": rope, "max_position_embeddings": 4 * ORIGINAL_LENGTH}
    return fields


def _mrope_sections(config: PretrainedConfig, half: int) -> list[int] | None:
    """The multimodal sections of ``config``, or of its source, scaled to ``half`` frequencies."""
    sections = (getattr(config, "rope_parameters", None) or {}).get("mrope_section")
    if sections is None:
        text = source_of(modelling_module(type(config)))
        if "mrope_section" not in text:
            return None
        match = re.search(r'"mrope_section", \[([\d, ]+)\]', text)
        sections = [int(x) for x in match[1].split(",")] if match else [16, 24, 24]
    ends = [round(half * sum(sections[: i + 1]) / sum(sections)) for i in range(len(sections))]
    return [b - a for a, b in zip([0, *ends], ends, strict=False)]


def shrunken(config_class: type[PretrainedConfig], **overrides: Any) -> PretrainedConfig:
    default = config_class()
    fields = field_names(config_class) | {k for k in vars(default) if not k.startswith("_")}
    kwargs: dict[str, Any] = {}
    for name, small in _SMALL.items():
        if name not in fields:
            continue
        current = _value(default, name, small)
        absent = current is None and name in _NONE_MEANS_ABSENT
        per_layer = isinstance(current, (list, tuple)) and not name.endswith("token_id")
        if not (absent or per_layer or isinstance(current, bool)):
            kwargs[name] = type(current)(0) if small == 0 and current is not None else small
    for name in _PER_LAYER:
        if name in fields and getattr(default, name, None):
            kwargs[name] = _distinct(getattr(default, name))
    if getattr(default, "no_rope_layers", None):
        kwargs["no_rope_layers"] = default.no_rope_layers[:LAYERS]
    if "qk_rope_head_dim" in fields:  # head_dim follows from the parts of a latent query
        kwargs.pop("head_dim", None)
        kwargs.pop("qk_head_dim", None)
        kwargs["num_key_value_heads"] = kwargs.get("num_attention_heads", 4)
    for name in parts(config_class):
        part = getattr(default, name, None)
        if isinstance(part, PretrainedConfig):
            kwargs[name] = shrunken(type(part))
    kwargs.update(copy.deepcopy(_QUIRKS.get(config_class.model_type, {})))
    kwargs = {k: v for k, v in (kwargs | overrides).items() if v is not _KEEP}
    if "rope_parameters" in fields and "rope_parameters" not in kwargs:
        kwargs |= _shrunken_rope(default, kwargs.get("head_dim", 16))
    return config_class(**kwargs)
