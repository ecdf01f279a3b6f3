"""GGUF files as llama.cpp's converter makes them: whole tiny models, and one tensor in the place of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hf_posenc.engines.llama_cpp import converted


def converted_file(path: Path, config: Mapping[str, Any], architecture: str = "llama") -> Path:
    """Write the file that the converter makes from a config that it supports."""
    keys, tensors = converted(config, 16, "LlamaForCausalLM")
    assert not tensors
    with _written(path, architecture, keys) as writer:
        writer.add_token_list(["a", "b"])
        writer.add_tensor("blk.0.attn_q.weight", torch.arange(64.0).reshape(8, 8).numpy())
    return path


def header_file(
    path: Path, architecture: str, rope_freqs: list[float] | None = None, **keys: Any
) -> Path:
    """Write a file with a header that describes a small model, and none of its weights."""
    sizes = {"context_length": 4096, "embedding_length": 64, "block_count": 6}
    heads = {"attention.head_count": 4, "attention.head_count_kv": 2}
    values = {**sizes, **heads, "feed_forward_length": 128, **keys}
    with _written(path, architecture, values) as writer:
        writer.add_token_list([f"t{number}" for number in range(300)])
        writer.add_pad_token_id(0)
        writer.add_tensor("token_embd.weight", torch.zeros(300, 64).numpy())
        if rope_freqs is not None:
            writer.add_tensor("rope_freqs.weight", torch.tensor(rope_freqs).numpy())
    return path


@contextlib.contextmanager
def _written(path: Path, architecture: str, keys: Mapping[str, Any]) -> Iterator[Any]:
    """Give the writer of a file with these keys, and write what was added to it."""
    gguf = pytest.importorskip("gguf")
    kinds = {int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32}
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in keys.items():
        kind = kinds.get(type(value), gguf.GGUFValueType.STRING)
        writer.add_key_value(name if "split" in name else f"{architecture}.{name}", value, kind)
    yield writer
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def model_file(
    path: Path, model: Any, kind: str = "F32", keys: Mapping[str, Any] | None = None, **tensors: Any
) -> Path:
    """Write the file that llama.cpp's converter makes from a Llama: a tokenizer of bytes, further keys and tensors.

    `kind` is the type of matrices; `keys` are without the architecture's name, and `None` leaves one out.
    """
    gguf = pytest.importorskip("gguf")
    config, quantized = model.config, gguf.GGMLQuantizationType[kind]
    values = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "rope.dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
    }
    given = {name: value for name, value in {**values, **(keys or {})}.items() if value is not None}
    with _written(path, "llama", given) as writer:
        letters = list(bytes_to_unicode().values())
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list([*letters, "th", "the", "<|endoftext|>"])
        writer.add_token_types([gguf.TokenType.NORMAL] * 258 + [gguf.TokenType.CONTROL])
        writer.add_token_merges(["t h", "th e"])
        writer.add_bos_token_id(258)
        writer.add_eos_token_id(258)
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        for name, tensor in model.state_dict().items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            weight = tensor.float()
            if (part := name.split(".")[-2]) in heads:  # LlamaModel.permute of the converter
                rows = weight.reshape(heads[part], 2, config.head_dim // 2, *weight.shape[1:])
                weight = rows.swapaxes(1, 2).reshape(weight.shape)
            stem, end = name.rsplit(".", 1)
            stored = gguf.GGMLQuantizationType.F32 if weight.dim() == 1 else quantized
            data = gguf.quantize(weight.numpy(), stored)
            writer.add_tensor(f"{names.get_name(stem)}.{end}", data, raw_dtype=stored)
        for name, extra in tensors.items():
            writer.add_tensor(f"{name}.weight", torch.tensor(extra, dtype=torch.float32).numpy())
    return path
