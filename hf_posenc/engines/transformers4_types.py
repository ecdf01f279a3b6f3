"""The model types with rotary embedding that transformers 4.57.1 knows, of those that 5.23.0 has."""

from __future__ import annotations

_NAMES = """
apertus arcee aria aria_text aya_vision bamba bitnet blt chameleon codegen cohere cohere2
cohere2_vision dbrx deepseek_v2 deepseek_v3 deepseek_vl deepseek_vl_hybrid diffllama doge dots1
emu3 ernie4_5 ernie4_5_moe evolla exaone4 falcon falcon_h1 flex_olmo fuyu gemma gemma2 gemma3
gemma3_text gemma3n_text glm glm4 glm4_moe glm4v glm4v_moe glm4v_moe_text glm4v_text got_ocr2
gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_speech granitemoe granitemoehybrid
granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe idefics idefics2 idefics3 internvl janus
jetmoe kyutai_speech_to_text lfm2 lfm2_vl llama llama4 llama4_text llava llava_next
llava_next_video llava_onevision longcat_flash minimax ministral mistral mistral3 mixtral mllama
modernbert-decoder moshi nemotron olmo olmo2 olmo3 olmoe ovis2 paligemma persimmon phi phi3
phi4_multimodal phimoe qwen2 qwen2_5_omni_thinker qwen2_5_vl qwen2_5_vl_text qwen2_audio qwen2_moe
qwen2_vl qwen2_vl_text qwen3 qwen3_moe qwen3_next qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe
qwen3_vl_moe_text qwen3_vl_text recurrent_gemma roformer seed_oss shieldgemma2 smollm3 smolvlm
stablelm starcoder2 vaultgemma video_llava vipllava voxtral zamba2
"""

MODEL_TYPES = frozenset(_NAMES.split())
