"""`torch.export` of patched models: equal logits at other lengths and through a static cache, or a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM
from transformers.modeling_outputs import CausalLMOutput

from hf_posenc import PosencError, patch_model
from hf_posenc.methods import ALiBi, DynamicNTK, ReRoPE
from tests.attention.test_attention import apply, build
from tests.support import zoo
from tests.support.attention_llama import CASES, ORIGINAL
from tests.support.selection import late, quick

GROUPS = "torch.export cannot trace {}, which computes several tokens of a call in groups"
TOKEN = "What can be exported: calls of one token each, with a static cache"
XL = ("transformer_xl, which makes one embedding for each distance",)
REFUSED = {
    **{
        f"{name}_row": (GROUPS.format(name), TOKEN, 'or update="sequence"')
        for name in ("dynamic_ntk", "dynamic_yarn", "longrope")
    },
    "xpos": (GROUPS.format("xpos"), TOKEN),
    "jet_long": (GROUPS.format("jet_long"), "positions. torch.compile"),
    **dict.fromkeys(("transformer_xl", "transformer_xl_shared", "transformer_xl_keep_rope"), XL),
}
QUICK = ("dynamic_ntk_row",)
"""One that is refused; CI exports a bias too, and below, bands are exported with padding."""


def traced(model: PreTrainedModel, *, strict: bool = False) -> torch.export.ExportedProgram:
    """Export a model for texts of 2 to 2,048 tokens, from one of 30."""
    inputs = {"input_ids": zoo.tokens(30), "use_cache": False}
    shapes = {"input_ids": {1: torch.export.Dim("tokens", min=2, max=2048)}, "use_cache": None}
    with torch.no_grad():
        return torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=strict)


def export(model: PreTrainedModel, *, strict: bool = False) -> Any:
    return traced(model, strict=strict).module()


def check(model: PreTrainedModel, program: Any, lengths: Any = (9, 70, 600)) -> None:
    for length in lengths:
        ids = zoo.tokens(length)
        got = program(input_ids=ids, use_cache=False).logits.double()
        assert zoo.relative_difference(got, zoo.logits(model, ids)) < 1e-5


def layer() -> PreTrainedModel:
    """A model of one layer: what is traced takes seconds, and another layer the same ones again."""
    return build(num_hidden_layers=1)


@pytest.mark.slow  # of transformers itself
def test_the_unpatched_model() -> None:
    check(model := layer(), export(model))


@pytest.mark.parametrize("name", quick(CASES, QUICK))
def test_an_exported_model_computes_any_length(name: str) -> None:
    model = apply(build(), name)
    zoo.logits(model, zoo.tokens(40))  # leaves nothing behind that a graph would keep
    if name not in REFUSED:
        check(model, export(model))
        return
    with pytest.raises(PosencError) as error:
        export(model)
    assert all(part in str(error.value) for part in REFUSED[name])


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gemma3_text", "gpt_oss", "gpt_neox", "gpt2"])
def test_other_architectures(model_type: str) -> None:
    model = zoo.build(model_type)
    rotary = model_type != "gpt2"
    before = zoo.logits(model, zoo.tokens(50))
    patch_model(model, ReRoPE(window=4) if rotary else ALiBi(), layers="all" if rotary else "full")
    assert zoo.relative_difference(zoo.logits(model, zoo.tokens(50)), before) > 1e-4
    check(model, export(model), (9, 50))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rerope", "alibi"])
def test_a_strict_export(name: str) -> None:
    check(model := apply(build(), name), export(model, strict=True))


@pytest.mark.slow
def test_a_padded_batch_of_any_size() -> None:
    model: Any = apply(layer(), "rerope").bfloat16()
    inputs = {"input_ids": zoo.tokens(30, 2), "attention_mask": torch.ones(2, 30, dtype=torch.long)}
    sizes = {0: torch.export.Dim("rows", max=8), 1: torch.export.Dim("tokens", min=2, max=2048)}
    shapes = {**dict.fromkeys(inputs, sizes), "use_cache": None}
    given = {**inputs, "use_cache": False}
    with torch.no_grad():
        exported = torch.export.export(model, (), given, dynamic_shapes=shapes)
    ids, mask = zoo.tokens(50, 3), torch.ones(3, 50, dtype=torch.long)
    mask[0, :9] = 0
    got = exported.module()(input_ids=ids, attention_mask=mask, use_cache=False).logits.double()
    want = zoo.logits(model, ids, attention_mask=mask)
    assert zoo.relative_difference(got * mask[..., None], want * mask[..., None]) < 0.02


def through_static_cache(model: PreTrainedModel, ids: Tensor, tokens: int) -> Tensor:
    """The logits of transformers' own exported module, so many tokens a call."""
    config = {"batch_size": 1, "max_cache_len": ids.shape[1], "device": "cpu"}
    static: dict[str, Any] = {"cache_implementation": "static", "cache_config": config}
    model.generation_config.update(**static, use_cache=True)
    sizes: dict[str, Any] = {"batch_size": 1, "max_cache_len": ids.shape[1]}
    module: Any = TorchExportableModuleForDecoderOnlyLM(model, **sizes)
    first = {"input_ids": ids[:, :tokens], "cache_position": torch.arange(tokens)}
    with torch.no_grad():
        program = module.export(**first, strict=False).module()
    parts = [
        program(input_ids=ids[:, i : i + tokens], cache_position=torch.arange(i, i + tokens))
        for i in range(0, ids.shape[1], tokens)
    ]
    return torch.cat(parts, 1).double()


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("dynamic_ntk_row", 1), *late(["rerope", "dual_chunk"], [8]), *late(["alibi"], [1])],
)
def test_through_a_static_cache(name: str, tokens: int) -> None:
    model, ids = apply(layer(), name), zoo.tokens(48)
    want = zoo.logits(model, ids)
    assert zoo.relative_difference(through_static_cache(model, ids, tokens), want) < 1e-5


@pytest.mark.slow
def test_a_length_that_a_cache_would_keep() -> None:
    method = DynamicNTK(scale=2, update="request")
    model = patch_model(layer(), method, original_max_position_embeddings=ORIGINAL)
    check(model, export(model), (9, 70))
    with pytest.raises(PosencError, match='use_cache=False or update="sequence"'):
        through_static_cache(model, zoo.tokens(48), 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "patch",
    [
        {"method": "yarn", "scale": 4},
        {"method": "ntk_by_parts", "scale": 4},
        pytest.param({"method": "rerope", "window": 8}, marks=pytest.mark.weekly),
        pytest.param({"method": "alibi"}, marks=pytest.mark.weekly),
    ],
    ids=lambda patch: patch["method"],
)
def test_onnx(patch: dict[str, Any], tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = layer()
    plain = zoo.logits(model, zoo.tokens(90))
    program = traced(patch_model(model, **patch))
    file = tmp_path / "model.onnx"
    exported: Any = torch.onnx.export(program, dynamo=True, optimize=False, verbose=False)
    exported.save(file)
    session = runtime.InferenceSession(file)

    def computed(input_ids: Tensor, **given: Any) -> Any:
        (logits,) = session.run(None, {"input_ids": input_ids.numpy()})
        return CausalLMOutput(logits=torch.from_numpy(logits))

    check(model, computed, (9, 90))
    assert zoo.relative_difference(zoo.logits(model, zoo.tokens(90)), plain) > 1e-2
