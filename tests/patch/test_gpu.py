"""Patches on a GPU: tables that follow the model between devices, and compiled decoding with CUDA graphs.

The attention path: `tests/attention/test_gpu_attention.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_posenc import patch_model, patched, unpatch_model
from tests.patch.test_patching import LENGTH, logits
from tests.support import zoo

pytestmark = pytest.mark.gpu
METHODS: dict[str, dict[str, Any]] = {
    "yarn": {"scale": 4},
    "ntk_mixed": {"scale": 4},
    "dynamic_ntk": {"update": "sequence"},
    "dynamic_yarn": {"update": "sequence"},
}


def gpu_logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=zoo.tokens(LENGTH).cuda(), use_cache=False).logits.cpu()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "deepseek_v3", "llama4_text"])
def test_patched_before_and_after_the_move(model_type: str, method: str) -> None:
    model: Any = zoo.build(model_type)
    with patched(model, method, **METHODS[method], layers="all"):
        expected = logits(model)
        assert zoo.relative_difference(gpu_logits(model.cuda()), expected) < 1e-3
    before = gpu_logits(model)
    patch_model(model, method, **METHODS[method], layers="all")
    assert zoo.relative_difference(gpu_logits(model), expected) < 1e-3
    assert torch.equal(gpu_logits(unpatch_model(model)), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_worse_than_the_native_rotation(dtype: torch.dtype) -> None:
    """cos of the slowest pair at 20,000 tokens, against float64: only the final cast may round."""
    model: Any = zoo.build("llama")
    model.cuda()
    patch_model(model, "yarn", scale=4)
    model.to(dtype)
    patch = zoo.in_force(model)
    positions = torch.arange(19_000, 20_000, device="cuda")[None]
    rotary = model.get_submodule("model.rotary_emb")
    cos, _ = rotary(torch.zeros(1, 1, 1, dtype=dtype, device="cuda"), positions)
    (table,) = patch.tables
    angles = positions[0, :, None].double().cpu() * table.inv_freq.double().cpu()
    expected = angles.cos() * table.attention_factor
    assert (cos[0, :, :8].double().cpu() - expected).abs().max() < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("method", METHODS)
def test_compiled_with_cuda_graphs(method: str) -> None:
    model: Any = zoo.build("llama")
    model.cuda()
    patch_model(model, method, **METHODS[method])
    expected = gpu_logits(model)
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    for _ in range(3):  # the graph is recorded in the second call and replayed from the third on
        assert zoo.relative_difference(gpu_logits(compiled), expected) < 1e-3
