"""patch_model with methods inside attention: reversible, atomic, this instance only, portable."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import hf_posenc
from hf_posenc import PosencError, get_patch, load_patch, patch_model, save_patch, unpatch_model
from hf_posenc.methods import ReRoPE, YaRN
from tests.attention.test_attention import apply, assert_close, build
from tests.support import zoo
from tests.support.attention_llama import CASES, FORMS, ORIGINAL, TRAINABLE, parameters_of
from tests.support.attention_ways import token_by_token
from tests.support.selection import quick

pytestmark = pytest.mark.filterwarnings("ignore:.*starts untrained")
FEW = ("rerope", "dual_chunk", "alibi", "fire", "transformer_xl", "rope_bias", "dynamic_ntk_row")
MAIN = ("rerope", "dual_chunk", "alibi_keep_rope", "fire", "rope_bias", "dynamic_ntk_row")
IDS = zoo.tokens(40)


@pytest.fixture
def model() -> PreTrainedModel:
    return build()


def everything(model: nn.Module) -> dict[str, Any]:
    """The state that unpatching has to restore."""
    found = {}
    for name, module in model.named_modules(remove_duplicate=False):
        hooks = {key: list(value) for key, value in vars(module).items() if key.endswith("_hooks")}
        attributes = {key for key in vars(module) if not key.startswith("_compiled")}
        found[name] = (type(module), hooks, attributes, list(module._modules), module.training)
    anything: Any = model
    return {
        "modules": found,
        "state": list(model.state_dict()),
        "config": anything.config.to_dict(),
        "attention": anything.config._attn_implementation,
        "positions": [p.requires_grad for p in model.parameters()],
    }


@pytest.mark.parametrize("name", quick(CASES, MAIN))
def test_unpatching_restores_everything(model: PreTrainedModel, name: str) -> None:
    model.train()
    before, logits = copy.deepcopy(everything(model)), zoo.logits(model, IDS)
    apply(model, name)
    patch = zoo.in_force(model)
    assert patch.method == CASES[name].method
    assert CASES[name].method in str(patch)
    token_by_token(model, IDS[:, :12])
    assert unpatch_model(model) is model
    assert everything(model) == before
    assert torch.equal(zoo.logits(model, IDS), logits)
    assert get_patch(model) is None


@pytest.mark.parametrize("name", ["rerope", "log_n"])
def test_a_model_in_another_thread_does_not_notice_a_patch(
    model: PreTrainedModel, name: str
) -> None:
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

    before, logits = copy.deepcopy(everything(model)), zoo.logits(model, IDS)
    original = getattr(attention, where)

    def fail(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        raise RuntimeError("late")

    monkeypatch.setattr(attention, where, fail)
    for name in ("t5", "rerope"):
        with pytest.raises(RuntimeError, match="late"):
            apply(model, name)
        assert everything(model) == before
        assert torch.equal(zoo.logits(model, IDS), logits)
    with pytest.raises(RuntimeError, match="late"):
        patch_model(model, [YaRN(scale=4), ReRoPE(window=8)])
    assert everything(model) == before
    monkeypatch.undo()
    apply(model, "t5")


def test_a_warning_that_is_an_error_leaves_no_trace(model: PreTrainedModel) -> None:
    before, logits = copy.deepcopy(everything(model)), zoo.logits(model, IDS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="starts untrained"):
            patch_model(model, "t5")
    assert everything(model) == before
    assert torch.equal(zoo.logits(model, IDS), logits)


@pytest.mark.parametrize("name", quick(FEW, ("rerope", "alibi", "rope_bias", "dynamic_ntk_row")))
def test_other_models_are_untouched(model: PreTrainedModel, name: str) -> None:
    apart, sharing = zoo.twin(model), zoo.twin(model, share_config=True)
    before = [(zoo.logits(other, IDS), everything(other)) for other in (apart, sharing)]
    apply(model, name)
    for other, (logits, state) in zip((apart, sharing), before, strict=True):
        assert torch.equal(zoo.logits(other, IDS), logits)
        assert everything(other) == state
    patch_model(apart, "lm_infinite", window=5)  # two patched models, two methods
    expected = zoo.logits(model, IDS)
    assert zoo.relative_difference(zoo.logits(apart, IDS), expected) > 1e-2
    assert torch.equal(zoo.logits(model, IDS), expected)


@pytest.mark.parametrize("name", quick(FEW, ("rerope", "alibi", "rope_bias")))
def test_copies_and_pickles(model: PreTrainedModel, name: str, tmp_path: Path) -> None:
    before = zoo.logits(model, IDS)
    expected = zoo.logits(apply(model, name), IDS)
    clone = copy.deepcopy(model)
    torch.save(model, tmp_path / "model.pt")
    unpatch_model(model)
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    other: Any
    for other in (clone, loaded):
        assert torch.equal(zoo.logits(other, IDS), expected)
        assert_close(token_by_token(other, IDS), expected)
        assert torch.equal(zoo.logits(unpatch_model(other), IDS), before)
    torch.save({"ids": IDS, "expected": expected}, tmp_path / "expected.pt")
    if name != "fire":
        return
    code = (
        "import sys, torch; path = sys.argv[1]\n"
        "model = torch.load(path + '/model.pt', weights_only=False)\n"
        "saved = torch.load(path + '/expected.pt')\n"
        "with torch.no_grad(): found = model(input_ids=saved['ids'], use_cache=False).logits\n"
        "assert torch.equal(found.double(), saved['expected'])\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


@pytest.mark.parametrize("name", ["rerope", "t5"])
def test_peft_before_and_after(model: PreTrainedModel, name: str) -> None:
    peft = pytest.importorskip("peft")
    before = zoo.logits(model, IDS)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(apply(model, name), config)
    adapted = zoo.logits(wrapped, IDS)
    assert_close(token_by_token(wrapped, IDS), adapted)
    unpatch_model(wrapped)
    patch_model(
        wrapped,
        CASES[name].method,
        original_max_position_embeddings=ORIGINAL,
        **CASES[name].options,
    )
    if name == "rerope":
        assert torch.equal(zoo.logits(wrapped, IDS), adapted)
    loss = wrapped(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    trained = [key for key, value in wrapped.named_parameters() if value.grad is not None]
    assert any("lora" in key for key in trained)
    assert any(".posenc." in key for key in trained) == (name == "t5")
    merged: Any = wrapped.merge_and_unload()
    assert get_patch(merged) is not None
    unpatch_model(merged)
    assert zoo.relative_difference(zoo.logits(merged, IDS), before) > 1e-2  # LoRA is in


# ------------------------------------------------------------------------------------------
# On disk


@pytest.mark.parametrize("name", quick(CASES, (*MAIN, "transformer_xl_shared")))
def test_saved_and_loaded(model: PreTrainedModel, name: str, tmp_path: Path) -> None:
    """Trained parameters are included."""
    before = zoo.logits(model, IDS)
    expected = zoo.logits(apply(model, name), IDS)
    model.save_pretrained(tmp_path)
    loaded = hf_posenc.from_pretrained(tmp_path)
    assert_close(zoo.logits(loaded, IDS), expected, tolerance=1e-6)
    assert zoo.in_force(model).config == zoo.in_force(loaded).config
    assert set(parameters_of(loaded)) == set(parameters_of(model))
    assert torch.equal(zoo.logits(unpatch_model(loaded), IDS), before)


@pytest.mark.parametrize("name", quick(sorted(set(CASES) - set(TRAINABLE)), FORMS))
def test_as_a_file(model: PreTrainedModel, name: str, tmp_path: Path) -> None:
    expected = zoo.logits(apply(model, name), IDS)
    save_patch(model, tmp_path)
    loaded: Any = load_patch(build(), tmp_path)
    assert torch.equal(zoo.logits(loaded, IDS), expected)


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
