"""GGUF files as llama.cpp's converter makes them, with one tensor in the place of a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_posenc.engines.llama_cpp import converted


def converted_file(path: Path, config: Mapping[str, Any], architecture: str = "llama") -> Path:
    """Write the file that the converter makes from a config that it supports."""
    gguf = pytest.importorskip("gguf")
    kinds = {int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32}
    keys, tensors = converted(config, 16, "LlamaForCausalLM")
    assert not tensors
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in keys.items():
        kind = kinds.get(type(value), gguf.GGUFValueType.STRING)
        writer.add_key_value(f"{architecture}.{name}", value, kind)
    writer.add_token_list(["a", "b"])
    writer.add_tensor("blk.0.attn_q.weight", torch.arange(64.0).reshape(8, 8).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
