"""The interfaces of vLLM that the plug-in uses, and the check that a version has them."""

from __future__ import annotations

import importlib
import inspect
import operator
from typing import Any

INTERFACES: dict[str, str] = {
    "vllm.transformers_utils.config:_CONFIG_FORMAT_TO_CONFIG_PARSER": "",
    "vllm.transformers_utils.config:HFConfigParser.parse": "model revision kwargs",
    "vllm.transformers_utils.config:with_retry": "fatal_errors",
    "vllm.model_executor.models.config:MODELS_CONFIG_MAP": "",
    "vllm.model_executor.models.config:VerifyAndUpdateConfig": (
        "verify_and_update_config verify_and_update_model_config"
    ),
    "vllm.model_executor.models.registry:ModelRegistry": (
        "models get_supported_archs register_model"
    ),
    "vllm.model_executor.models.registry:_LazyRegisteredModel": "module_name load_model_cls",
    "vllm.model_executor.models.utils:extract_layer_index": "",
    "vllm.config:VllmConfig": "model_config parallel_config cache_config speculative_config",
    "vllm.config:ModelConfig": "hf_config max_model_len",
    "vllm.config:ParallelConfig": (
        "pipeline_parallel_size prefill_context_parallel_size decode_context_parallel_size"
    ),
    "vllm.config:CacheConfig": "cache_dtype",
    "vllm.config:SpeculativeConfig": "method",
    "vllm.model_executor.layers.attention:Attention": "impl layer_name num_heads",
    "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding": (
        "head_size rotary_dim max_position_embeddings base is_neox_style dtype init_cache cos_sin_cache"
    ),
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl": (
        "kv_cache_dtype sliding_window alibi_slopes scale logits_soft_cap sinks"
    ),
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.forward": (
        "layer query key value kv_cache attn_metadata output"
    ),
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadata": (
        "seq_lens query_start_loc block_table"
    ),
    "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl": (
        "kv_cache_dtype sliding_window alibi_slopes scale logits_soft_cap sinks"
    ),
    "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.forward": (
        "layer query key value kv_cache attn_metadata output"
    ),
    "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadata": (
        "seq_lens query_start_loc block_table"
    ),
    "vllm.v1.attention.backends.registry:AttentionBackendEnum": "FLASH_ATTN",
    "vllm.config:CUDAGraphMode.PIECEWISE": "has_full_cudagraphs",
    "vllm.config:CompilationConfig": "cudagraph_mode",
    "vllm.config.attention:AttentionConfig": "backend",
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder._set_isa_to_layers": "isa",
    "vllm._custom_ops:cpu_attn_reshape_and_cache": (
        "key value key_cache value_cache slot_mapping isa k_scale v_scale kv_cache_dtype"
    ),
    "vllm.lora.peft_helper:PEFTHelper.from_local_dir": "lora_path",
    "vllm.v1.engine.core:EngineCore.preprocess_add_request": "request",
    "vllm.v1.engine:EngineCoreRequest": (
        "prompt_token_ids prompt_embeds sampling_params cache_salt resumable"
    ),
    "vllm.v1.sample.logits_processor:LogitsProcessor": (
        "validate_params update_state is_argmax_invariant apply"
    ),
    "vllm.v1.sample.logits_processor:process_dict_updates": "",
    "vllm.sampling_params:SamplingParams": "extra_args max_tokens",
}
"""All of vLLM that the plug-in uses and no version promises: `module:name`, and the names in it."""
READING = (
    "vllm.transformers_utils.config", "vllm.model_executor.models.config", "vllm.lora.peft_helper",
    "vllm.model_executor.models.registry", "vllm.sampling_params", "vllm.v1.engine", "vllm.v1.engine.core",
    "vllm.v1.sample.logits_processor",
)  # fmt: skip
"""Modules of the interfaces that are checked in every process; the others are, with them, once there is a patch."""


def moved(*modules: str) -> list[str]:
    """Return the interfaces of vLLM, those of some modules or all, that are not where the plug-in expects them."""
    gone = []
    for place, names in INTERFACES.items():
        module, _, path = place.partition(":")
        if modules and module not in modules:
            continue
        try:
            found = operator.attrgetter(path)(importlib.import_module(module))
        except (ImportError, AttributeError):
            gone.append(place)
            continue
        gone += [f"{name} of {place}" for name in names.split() if name not in _names(found)]
    return gone


def _names(found: Any) -> set[Any]:
    """Return the attributes of an object, its parameters, and the names in the code that makes it."""
    made = isinstance(found, type)
    makers = [vars(kind).get("__init__") for kind in inspect.getmro(found)] if made else [found]
    names = {*dir(found), *getattr(found, "__dataclass_fields__", ())}
    for maker in map(inspect.unwrap, filter(None, makers)):
        if (code := getattr(maker, "__code__", None)) is not None:
            names |= {*code.co_names, *code.co_varnames, *code.co_consts}
    return names
