"""Trained parameters: all weights, a LoRA with embeddings and norms, or the encoding alone."""

from __future__ import annotations

import itertools
import warnings
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_posenc import PosencError, get_method, get_patch, patch_model
from hf_posenc.model.parameters import trained_parameters
from hf_posenc.training.distillation import unpatched_teacher
from hf_posenc.training.options import Trained
from hf_posenc.training.parameters import choose_parameters, lora_config, short_names
from tests.support import zoo
from tests.support.families import build_text_model
from tests.support.selection import late, quick

pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*starts untrained"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]


@pytest.fixture
def model() -> PreTrainedModel:
    return zoo.build("llama")


def trained_names(model: nn.Module) -> set[str]:
    return {name for name, value in model.named_parameters() if value.requires_grad}


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    output = model(input_ids=ids, use_cache=False)
    if not hasattr(output, "logits"):  # a tower has no head
        return output[0].float().abs().mean()
    return nn.functional.cross_entropy(output.logits[0, :-1].float(), ids[0, 1:])


def stepped(model: nn.Module, steps: int = 2, **options: Any) -> nn.Module:
    """Trained for a little; every parameter that is to be trained must have had a gradient."""
    ids = zoo.tokens(40)
    chosen = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(chosen.values(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model, ids).backward()
        assert not [name for name, value in chosen.items() if value.grad is None]
        optimizer.step()
    return model


def is_tied(model: Any) -> bool:
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


class TestFull:
    def test_every_weight_and_the_encodings(self, model: PreTrainedModel) -> None:
        patch_model(model, "kerple").requires_grad_(False)
        assert choose_parameters(model) is model
        assert trained_names(model) == {name for name, _ in model.named_parameters()}
        assert any(".posenc." in name for name in trained_names(model))
        stepped(model)

    def test_a_table_of_two_rows_is_not_one_of_sines(self) -> None:
        model: Any = choose_parameters(zoo.build("bert"))
        assert model.bert.embeddings.token_type_embeddings.weight.requires_grad

    def test_a_table_of_sines_stays(self) -> None:
        model = choose_parameters(patch_model(zoo.build("roformer"), "yarn", scale=4))
        table = "roformer.encoder.embed_positions.weight"
        assert {name for name, _ in model.named_parameters()} - trained_names(model) == {table}

    def test_quantized_weights_are_refused(self, model: PreTrainedModel) -> None:
        vars(model)["is_quantized"] = True
        with pytest.raises(PosencError, match=r"quantized.*train='lora'"):
            choose_parameters(model)


class TestEncoding:
    def test_only_its_own(self, model: PreTrainedModel) -> None:
        patch_model(model, "fire")
        assert choose_parameters(model, "encoding") is model
        assert trained_names(model) == set(trained_parameters(model))
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        stepped(model)
        now = model.state_dict()
        changed = {name for name in now if not torch.equal(now[name], weights[name])}
        assert changed
        assert changed <= set(trained_parameters(model))

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_under_gradient_checkpointing(self, model: PreTrainedModel, reentrant: bool) -> None:
        """The reentrant kind gives no gradient to a layer whose input needs none."""
        patch_model(model, "kerple").train()
        ids = zoo.tokens(40)
        loss_of(choose_parameters(model, "encoding"), ids).backward()
        want = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        assert set(want) == trained_names(model)
        model.zero_grad()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        loss_of(model, ids).backward()
        for name, parameter in trained_parameters(model).items():
            torch.testing.assert_close(parameter.grad, want[name], msg=name)

    def test_nothing_to_train_names_what_has_something(self, model: PreTrainedModel) -> None:
        with pytest.raises(PosencError, match=r"not patched.*kerple_log.*train='full'"):
            choose_parameters(model, "encoding")
        patch_model(model, "yarn", scale=4)
        with pytest.raises(PosencError, match=r"yarn has no parameters.*rope_bias"):
            choose_parameters(model, "encoding")

    def test_from_one_choice_to_another(self, model: PreTrainedModel) -> None:
        patch_model(model, "t5")
        every = trained_names(choose_parameters(model))
        choose_parameters(model, "encoding")
        assert trained_names(choose_parameters(model, "full")) == every


class TestLora:
    def test_attention_embeddings_and_norms(self, model: PreTrainedModel) -> None:
        peft_model: Any = choose_parameters(
            patch_model(model, "yarn", scale=4), "lora", lora_rank=4, lora_alpha=8, lora_dropout=0.1
        )
        config = peft_model.peft_config["default"]
        assert set(config.target_modules) == {"q_proj", "k_proj", "v_proj", "o_proj"}
        assert set(config.modules_to_save) == {
            "embed_tokens", "input_layernorm", "post_attention_layernorm", "norm",
        }  # fmt: skip
        assert (config.r, config.lora_alpha, config.lora_dropout) == (4, 8, 0.1)
        assert not any(module.training for module in peft_model.modules())  # as the model before
        assert not [n for n in trained_names(peft_model) if "mlp" in n or "lm_head" in n]
        stepped(peft_model)

    @pytest.mark.parametrize("method", ["kerple", "shaw", *late(["fire", "rope_bias"])])
    def test_what_the_method_trains_is_trained(self, model: PreTrainedModel, method: str) -> None:
        patch_model(model, method)
        before = zoo.logits(model, zoo.tokens(70))
        count = len(trained_parameters(model))
        peft_model: Any = choose_parameters(model, "lora")
        assert torch.equal(zoo.logits(peft_model, zoo.tokens(70)), before)
        mine = [name for name in trained_names(peft_model) if ".posenc." in name]
        assert len(mine) == count
        assert set(trained_parameters(model)) == {
            n.split("base_model.model.")[1].replace(".modules_to_save.default", "") for n in mine
        }  # by the names that they have without adapter
        stepped(peft_model)
        peft_model.eval()
        after = zoo.logits(peft_model, zoo.tokens(70))
        with peft_model.disable_adapter():
            assert torch.equal(zoo.logits(peft_model, zoo.tokens(70)), before)
        # With the encoding alone put back, the logits are others: it was trained and is in force.
        for parameter in trained_parameters(model).values():
            parameter.data.add_(0.5)
        assert not torch.equal(zoo.logits(peft_model, zoo.tokens(70)), after)

    def test_targets_of_ones_own(self, model: PreTrainedModel) -> None:
        patch_model(model, "t5")
        given: dict[str, Any] = {"target_modules": ["up_proj"], "use_rslora": True}
        for own, saved in (([], []), ("norm", ["norm"])):
            config = lora_config(model, modules_to_save=own, **given)
            assert set(config.target_modules or ()) == {"up_proj"}
            assert config.modules_to_save == [*saved, "posenc"]
            assert config.use_rslora

    def test_refusals(self, model: PreTrainedModel) -> None:
        with pytest.raises(PosencError, match="Unknown choice of parameters 'all'"):
            choose_parameters(model, "all")  # type: ignore[arg-type]
        with pytest.raises(PosencError, match="target_modules belong to train='lora'"):
            choose_parameters(model, "full", target_modules=["q_proj"])
        wrapped = choose_parameters(patch_model(model, "yarn", scale=4), "lora")
        given = ((wrapped, "is wrapped by PeftModelForCausalLM"), (model, "has an adapter"))
        made = itertools.product((choose_parameters, unpatched_teacher), get_args(Trained), given)
        for make, train, (each, message) in made:
            with pytest.raises(PosencError, match=f"{message} already.*merge_and_unload"):
                make(each, train)

    def test_a_method_of_ones_own_cannot_travel(self, model: PreTrainedModel) -> None:
        class Half(get_method("pi")):  # type: ignore[misc]
            name = "half"

        with pytest.raises(PosencError, match="'half' is a method of your own"):
            choose_parameters(patch_model(model, Half(scale=2)), "lora")

    def test_weights_that_layers_share_are_left_alone(self) -> None:
        """An adapter of one would be merged into all."""
        with pytest.raises(PosencError, match=r"Zamba2.*not shared"):
            lora_config(patch_model(zoo.build("zamba2"), "yarn", scale=4))

    def test_a_head_with_a_bias_cannot_be_tied(self) -> None:
        model = patch_model(zoo.build("roformer"), "yarn", scale=4)
        with pytest.warns(UserWarning, match="embeddings of RoFormer.* stay frozen"):
            config = lora_config(model)
        assert not [name for name in config.modules_to_save or [] if "word_embeddings" in name]


def test_a_decoder_inside_another_model_gets_a_lora() -> None:
    config = lora_config(build_text_model("opt"))
    assert {*(config.target_modules or ())} == {"k_proj", "out_proj", "q_proj", "v_proj"}
    assert "self_attn_layer_norm" in (config.modules_to_save or ())


@pytest.mark.parametrize(
    "model_type",
    quick(zoo.representative(), ("llama", "roformer", "phimoe", "gemma3", "recurrent_gemma")),
)
def test_every_architecture(model_type: str) -> None:
    """A LoRA changes nothing at first, every chosen parameter gets a gradient, and merging is exact."""
    model = zoo.build(model_type)
    if model_type == "recurrent_gemma":  # its config names no length
        patch_model(model, "yarn", scale=4, original_max_position_embeddings=64, layers="all")
    else:
        patch_model(model, "yarn", scale=4, replace=True, layers="all")
    ids = zoo.tokens(40)
    before, tied = zoo.logits(model, ids), is_tied(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The embeddings of")
        peft_model: Any = choose_parameters(model, "lora")
    assert torch.equal(zoo.logits(peft_model, ids), before)
    stepped(peft_model.train()).eval()
    after = zoo.logits(peft_model, ids)
    assert zoo.relative_difference(after, before) > 1e-3
    merged = peft_model.merge_and_unload()
    assert zoo.relative_difference(zoo.logits(merged, ids), after) < 1e-3
    assert get_patch(merged) is not None
    assert is_tied(merged) == tied


def test_short_names_mean_these_modules_alone() -> None:
    model = nn.ModuleDict({"list": nn.ModuleList([nn.Linear(1, 1)])})
    model["a"] = nn.ModuleDict({"proj": nn.Linear(1, 1), "up_norm": nn.LayerNorm(1)})
    model["b"] = nn.ModuleDict({"proj": nn.Linear(1, 1), "norm": nn.LayerNorm(1)})

    def names(*paths: str) -> list[str]:
        return short_names(model, [model.get_submodule(path) for path in paths])

    assert names("a.proj", "b.proj") == ["proj"]
    assert names("a.proj") == ["a.proj"]
    assert names("b.norm") == ["b.norm"]  # up_norm ends so too
    assert names("list.0") == ["list.0"]
    model["norm"] = nn.LayerNorm(1)  # no name means it and not the others
    assert names("norm") == []
