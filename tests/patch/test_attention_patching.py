"""patch_model with methods inside attention: atomic, this instance only, beside PEFT and threads."""

from __future__ import annotations

import copy
import threading
import warnings
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_posenc import PosencError, get_patch, patch_model, unpatch_model
from hf_posenc.methods import DynamicYaRN, JetLong, ReRoPE, YaRN
from hf_posenc.model.unwrapping import default_dtype
from tests.attention.test_attention import apply, assert_close, build
from tests.support import zoo
from tests.support.attention_ways import token_by_token
from tests.support.selection import quick

pytestmark = pytest.mark.filterwarnings("ignore:.*starts untrained")
FEW = ("rerope", "dual_chunk", "alibi", "fire", "transformer_xl", "rope_bias", "dynamic_ntk_row")
IDS = zoo.tokens(40)


@pytest.fixture
def model() -> PreTrainedModel:
    return build()


@pytest.mark.parametrize("name", ["rerope", "log_n"])
def test_a_model_in_another_thread_notices_no_patch(model: PreTrainedModel, name: str) -> None:
    """A server runs one model while another one is patched; both call the same attention function."""
    other = apply(build(), "rerope")
    expected, found = zoo.logits(other, IDS), []

    def run_other(*_: Any) -> None:
        thread = threading.Thread(target=lambda: found.append(zoo.logits(other, IDS)))
        thread.start()
        thread.join()

    handle = model.get_submodule("model.layers.0").register_forward_hook(run_other)
    apply(model, name)
    handle.remove()
    assert len(found) > 1
    assert all(torch.equal(logits, expected) for logits in found)


@pytest.mark.parametrize(
    "where", ["_choose_engine", "_reposition", "calibrate", "verify", "_give_encodings"]
)
def test_a_patch_that_fails_leaves_no_trace(
    model: PreTrainedModel, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_posenc.patch import attention

    original = getattr(attention, where)

    def fail(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        raise RuntimeError("late")

    monkeypatch.setattr(attention, where, fail)
    methods: tuple[Any, ...] = ("t5", ReRoPE(window=8), [YaRN(scale=4), ReRoPE(window=8)])
    for method in methods:
        with zoo.unchanged(model), pytest.raises(RuntimeError, match="late"):
            patch_model(model, method)
    monkeypatch.undo()
    apply(model, "t5")


def test_a_warning_that_is_an_error_leaves_no_trace(model: PreTrainedModel) -> None:
    with zoo.unchanged(model), warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="starts untrained"):
            patch_model(model, "t5")


@pytest.mark.parametrize("name", quick(FEW, ("rerope", "alibi", "rope_bias", "dynamic_ntk_row")))
def test_other_models_are_untouched(model: PreTrainedModel, name: str) -> None:
    apart, sharing = zoo.twin(model), zoo.twin(model, share_config=True)
    with zoo.unchanged(apart), zoo.unchanged(sharing):
        apply(model, name)
    patch_model(apart, "lm_infinite", window=5)  # two patched models, two methods
    expected = zoo.logits(model, IDS)
    assert zoo.relative_difference(zoo.logits(apart, IDS), expected) > 1e-2
    assert torch.equal(zoo.logits(model, IDS), expected)


@pytest.mark.parametrize("name", ["rerope", "t5"])
def test_peft_before_and_after(model: PreTrainedModel, name: str) -> None:
    peft = pytest.importorskip("peft")
    before = zoo.logits(model, IDS)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(apply(model, name), config)
    adapted = zoo.logits(wrapped, IDS)
    assert_close(token_by_token(wrapped, IDS), adapted)
    apply(unpatch_model(wrapped), name)
    if name == "rerope":
        assert torch.equal(zoo.logits(wrapped, IDS), adapted)
    wrapped(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    trained = [key for key, value in wrapped.named_parameters() if value.grad is not None]
    assert any("lora" in key for key in trained)
    assert any(".posenc." in key for key in trained) == (name == "t5")
    merged: Any = wrapped.merge_and_unload()
    assert get_patch(merged) is not None
    unpatch_model(merged)
    assert zoo.relative_difference(zoo.logits(merged, IDS), before) > 1e-2  # LoRA is in


def test_alibi_needs_no_length() -> None:
    """RecurrentGemma's config names none."""
    model, other = zoo.build("recurrent_gemma"), zoo.build("recurrent_gemma")
    every: tuple[dict[str, Any], ...] = ({}, {"scale": 2.0})
    for options in every:
        patch_model(model, "alibi", layers="all", **options)
        patch = zoo.in_force(model)
        assert patch.extended_length is None
        assert "0 ->" not in str(patch)
        patch_model(other, "alibi", layers="all", original_max_position_embeddings=64, **options)
        assert torch.equal(zoo.logits(model, IDS), zoo.logits(other, IDS))
        unpatch_model(model)
        unpatch_model(other)
    with pytest.raises(PosencError, match="names no context length"):
        patch_model(model, "alibi", layers="all", target_length=128)
    with pytest.raises(PosencError, match="names no context length"):
        patch_model(model, "rerope", layers="all")


@pytest.mark.parametrize(("method", "slow"), [("fire", True), ("rerope", False)])
def test_what_no_kernel_computes_is_named_on_a_gpu(
    model: PreTrainedModel, method: str, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_posenc.patch.attention._on_gpu", lambda model: True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch_model(model, method)
    found = [each for each in caught if "blocks of PyTorch operations" in str(each.message)]
    assert [each.filename for each in found] == [__file__] * slow


@pytest.mark.parametrize("method", [YaRN(scale=4), "rerope", "alibi"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_another_default_dtype(method: Any, device: str) -> None:
    """As vLLM sets it while it makes a model."""
    config = build().config
    with default_dtype(torch.bfloat16):
        with torch.device(device):
            made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        assert get_patch(patch_model(made, method)) is not None
        assert torch.get_default_dtype() == torch.bfloat16


@pytest.mark.parametrize(
    "methods", [DynamicYaRN(), JetLong(), {0: YaRN(scale=16), 1: ReRoPE(window=30)}]
)
def test_no_cast_reaches_the_frequencies(methods: Any) -> None:
    model = patch_model(zoo.build("llama"), methods)
    for parameter in model.parameters():  # a cast changes none of them
        parameter.data = parameter.data.bfloat16().float()
    ids = zoo.tokens(300)
    want, weights = zoo.logits(model, ids), copy.deepcopy(model.state_dict())
    assert torch.equal(zoo.logits(copy.deepcopy(model).bfloat16().float(), ids), want)
    filled = copy.deepcopy(model).to_empty(device="cpu")
    filled.load_state_dict(weights)
    assert torch.equal(zoo.logits(filled, ids), want)
