"""A LoRA carries its patch: with hf_posenc it cannot be loaded without, and plain PEFT does not load it at all."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Trainer
from transformers.integrations.peft import MIN_PEFT_VERSION

from hf_posenc import (
    PosencError,
    from_pretrained,
    get_method,
    get_patch,
    load_adapter,
    load_patch,
    patch_model,
    save_patch,
    unpatch_model,
)
from hf_posenc.embedded import model_path
from hf_posenc.engines.engine import open_source
from hf_posenc.methods import JetLong, KerpleLog
from hf_posenc.model.parameters import trained_parameters
from hf_posenc.training.parameters import choose_parameters, lora_config
from tests.saving.test_resuming import settings
from tests.support import zoo
from tests.support.processes import printed
from tests.support.selection import covering, late
from tests.training.test_training_parameters import is_tied, stepped

peft: Any = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*starts untrained"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*base_model_name_or_path.*renamed"),
]
PATCHES: dict[str, dict[str, Any]] = {
    "yarn": {"method": "yarn", "scale": 4},  # frequencies
    "dynamic_yarn": {"method": "dynamic_yarn"},
    "rerope": {"method": "rerope", "window": 16},  # bands
    "alibi": {"method": "alibi"},  # a bias
    "kerple": {"method": "kerple_log"},  # parameters of its own
    "shared": {"method": "transformer_xl", "shared": True},  # and of all layers
    "fire": {"method": "fire"},
    "list": {"method": [get_method("yarn").from_options(scale=4), get_method("log_n")()]},
}
IDS = zoo.tokens(80)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    zoo.build("llama").save_pretrained(folder)
    return folder


def load(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = from_pretrained(folder)
    return model.eval()


def trained(base: Path, patch: dict[str, Any], **options: Any) -> Any:
    """A patched model with a LoRA that has learned something, in eval mode."""
    torch.manual_seed(0)
    model = choose_parameters(patch_model(load(base), **patch), "lora", lora_rank=4, **options)
    return stepped(model).eval()


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


class TestCarriesItsPatch:
    @pytest.mark.parametrize(
        "name",
        ["kerple", *late(["yarn", "list", "rerope", "shared", "dynamic_yarn", "alibi", "fire"])],
    )
    def test_comes_back_and_merges(self, base: Path, tmp_path: Path, name: str) -> None:
        model = trained(base, PATCHES[name])
        expected, patch = zoo.logits(model, IDS), zoo.in_force(model)
        adapter = saved(model, tmp_path / "adapter")
        assert zoo.relative_difference(expected, zoo.logits(load(base), IDS)) > 0.01

        loaded: Any = from_pretrained(adapter).eval()
        found = zoo.in_force(loaded)
        assert found.config == patch.config
        assert torch.equal(zoo.logits(loaded, IDS), expected)
        assert not any(parameter.requires_grad for parameter in loaded.parameters())
        assert torch.equal(zoo.logits(load_adapter(load(base), adapter).eval(), IDS), expected)

        merged = loaded.merge_and_unload()
        assert zoo.relative_difference(zoo.logits(merged, IDS), expected) < 1e-4
        found = zoo.in_force(merged)
        assert found.config == patch.config
        again = load(saved(merged, tmp_path / "merged"))
        assert torch.equal(zoo.logits(again, IDS), zoo.logits(merged, IDS))
        assert trained_parameters(again).keys() == trained_parameters(merged).keys()

    def test_plain_transformers_loads_what_was_merged(self, base: Path, tmp_path: Path) -> None:
        merged = trained(base, PATCHES["yarn"]).merge_and_unload()
        saved(merged, tmp_path / "merged")
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
        assert zoo.relative_difference(zoo.logits(plain, IDS), zoo.logits(merged, IDS)) < 1e-4

    def test_trained_further_and_saved_again(self, base: Path, tmp_path: Path) -> None:
        first = saved(trained(base, PATCHES["kerple"]), tmp_path / "first")
        model = from_pretrained(first, is_trainable=True)
        chosen = {name for name, value in model.named_parameters() if value.requires_grad}
        assert any(".posenc." in name for name in chosen)
        stepped(model).eval()
        expected = zoo.logits(model, IDS)
        second = saved(model, tmp_path / "second")
        written, read = (
            json.loads((folder / "adapter_config.json").read_text()) for folder in (second, first)
        )
        for config in (written, read):
            config["target_modules"].sort()  # a set in PEFT, written in any order
        assert written == read
        assert torch.equal(zoo.logits(from_pretrained(second).eval(), IDS), expected)

    def test_on_a_base_that_was_saved_with_the_patch(self, base: Path, tmp_path: Path) -> None:
        patched = saved(patch_model(load(base), "kerple"), tmp_path / "patched")
        torch.manual_seed(0)
        model: Any = stepped(choose_parameters(load(patched), "lora")).eval()
        adapter = saved(model, tmp_path / "adapter")
        assert torch.equal(zoo.logits(from_pretrained(adapter).eval(), IDS), zoo.logits(model, IDS))

    @pytest.mark.parametrize("names", [("yarn", "rerope"), ("rerope", "yarn")])
    def test_on_a_base_that_was_saved_with_another(
        self, names: tuple[str, str], base: Path, tmp_path: Path
    ) -> None:
        first, second = (PATCHES[name] for name in names)
        patched = saved(patch_model(load(base), **first), tmp_path / "patched")
        model: Any = choose_parameters(patch_model(unpatch_model(load(patched)), **second), "lora")
        adapter = saved(stepped(model).eval(), tmp_path / "adapter")
        assert torch.equal(zoo.logits(from_pretrained(adapter).eval(), IDS), zoo.logits(model, IDS))
        assert [method.name for method in open_source(adapter).methods] == [names[1]]

    def test_with_options_for_the_base(self, base: Path, tmp_path: Path) -> None:
        adapter = saved(trained(base, PATCHES["yarn"]), tmp_path / "adapter")
        model = from_pretrained(adapter, dtype=torch.bfloat16, attn_implementation="eager")
        assert model.config._attn_implementation == "eager"
        assert model.get_base_model().lm_head.weight.dtype == torch.bfloat16

    @pytest.mark.parametrize(
        "method", ["kerple_log", "rope_bias", [JetLong(), KerpleLog(keep_rope=True)]], ids=str
    )
    def test_the_active_encoding_is_in_force(self, method: Any, base: Path, tmp_path: Path) -> None:
        model = trained(base, {"method": method})
        one = zoo.logits(model, IDS)
        model.add_adapter("other", copy.deepcopy(model.peft_config["default"]))
        model.set_adapter("other")
        stepped(model, steps=3).eval()
        assert not torch.equal(one, zoo.logits(model, IDS))
        with pytest.raises(PosencError, match="has an adapter already"):
            lora_config(model.get_base_model())
        model.set_adapter("default")
        assert torch.equal(zoo.logits(model, IDS), one)
        save_patch(model, tmp_path)  # what is in force, by names that a model without adapter has
        with model.disable_adapter():
            plain = zoo.logits(model, IDS)
        fresh: Any = load_patch(load(base), tmp_path)
        assert not torch.equal(zoo.logits(fresh, IDS), plain)
        for name, value in trained_parameters(fresh).items():
            assert torch.equal(value, trained_parameters(model.get_base_model())[name])


def plain_config(**options: Any) -> Any:
    return peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, **options)


# transformers' add_adapter, where it takes the installed peft: that of 5.24 needs 0.22.
ADD = () if Version(peft.__version__) < Version(MIN_PEFT_VERSION) else ("add_adapter",)


class TestPlainConfig:
    """An adapter of a plain `LoraConfig` on a patched model carries the patch all the same."""

    @pytest.mark.parametrize(
        ("way", "method"),
        [
            *covering(("before", "after", *ADD, "Trainer"), ("yarn", "alibi")),
            *late(("SFTTrainer",), ("yarn", "alibi")),
        ],
    )
    def test_ways(self, base: Path, tmp_path: Path, way: str, method: str) -> None:
        model: Any = load(base) if way == "after" else patch_model(load(base), **PATCHES[method])
        config, adapter = plain_config(init_lora_weights=False), tmp_path / "adapter"
        if way == "add_adapter":
            model.add_adapter(config)
        elif way != "SFTTrainer":
            model = peft.get_peft_model(model, config)
        if way == "after":
            patch_model(model, **PATCHES[method])
        if way in ("Trainer", "SFTTrainer"):
            model, adapter = self.trained_by(way, model, config, tmp_path)
        else:
            saved(model, adapter)
        assert json.loads((adapter / "adapter_config.json").read_text())["peft_type"] != "LORA"
        expected = zoo.logits(model.eval(), IDS)
        assert torch.equal(zoo.logits(from_pretrained(adapter).eval(), IDS), expected)
        with pytest.raises(PosencError, match=r"hf_posenc.from_pretrained"):
            peft.PeftModel.from_pretrained(load(base), str(adapter))
        unpatch_model(model)
        assert type(next(iter(model.peft_config.values()))) is peft.LoraConfig

    def trained_by(self, way: str, model: Any, config: Any, folder: Path) -> tuple[Any, Path]:
        """Train two steps, the second one after a resume; return the model and its checkpoint."""
        ids = zoo.tokens(40, batch=4).tolist()
        if way == "Trainer":
            rows = [{"input_ids": row, "labels": row} for row in ids]
            trainer: Any = Trainer(model, settings(folder), train_dataset=rows)
        else:
            datasets, trl = (pytest.importorskip(name) for name in ("datasets", "trl"))
            trainer = trl.SFTTrainer(
                model=model,
                args=settings(folder, trl.SFTConfig, max_length=40, bf16=False),
                train_dataset=datasets.Dataset.from_dict({"input_ids": ids}),
                processing_class=AutoTokenizer.from_pretrained(model_path()),
                peft_config=config,
            )
        trainer.train()
        whole = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-1"))
        resumed = trainer.model.state_dict()
        assert all(torch.equal(whole[name], value) for name, value in resumed.items())
        return trainer.model, folder / "checkpoint-2"

    def test_what_is_lost_is_a_warning(self, base: Path, tmp_path: Path) -> None:
        ia3 = peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])
        patched = patch_model(load(base), ["alibi", "log_n"])
        with pytest.warns(UserWarning, match="Plain transformers cannot compute alibi"):
            patched.save_pretrained(tmp_path / "whole")
        model = peft.get_peft_model(patched, ia3)
        with pytest.warns(UserWarning, match=r"\(IA3\) is saved without .*, alibi\(.*\) \+ log_n"):
            saved(model, tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            saved(model, tmp_path)
        by_hand: Any = load(base)
        by_hand.model.rotary_emb.inv_freq *= 0.5
        model = peft.get_peft_model(
            patch_model(by_hand, "pi", scale=2, compose=True), plain_config()
        )
        with pytest.warns(
            UserWarning, match=r"\(frequencies set by hand\) is saved without the patch"
        ):
            saved(model, tmp_path / "by_hand")

    @pytest.mark.parametrize(
        ("way", "method"), covering(("get_peft_model", *ADD, "after"), ("kerple_log", "fire", "t5"))
    )
    def test_patch_parameters(self, base: Path, tmp_path: Path, method: str, way: str) -> None:
        """They start from random values, and are trained where the patch comes after the adapter."""
        config = plain_config(init_lora_weights=False)
        model: Any = load(base)
        if way == "after":
            model = patch_model(peft.get_peft_model(model, config), method)
        elif way == "add_adapter":
            patch_model(model, method).add_adapter(config)
        else:
            model = peft.get_peft_model(patch_model(model, method), config)
        for parameter in trained_parameters(getattr(model, "base_model", model)).values():
            parameter.data.add_(torch.rand_like(parameter))
        adapter = saved(model, tmp_path / "adapter")
        expected = zoo.logits(model.eval(), IDS)
        assert torch.equal(zoo.logits(from_pretrained(adapter).eval(), IDS), expected)
        assert torch.equal(zoo.logits(load_adapter(load(base), adapter).eval(), IDS), expected)
        other = patch_model(load(base), method)
        for parameter in trained_parameters(other).values():
            parameter.data.add_(1)
        with pytest.raises(PosencError, match="trained with other parameters of the patch"):
            load_adapter(other, adapter)
        (adapter / "posenc.safetensors").unlink()  # as an earlier version has saved it
        fresh = load(base)
        with pytest.raises(PosencError, match=r"of the patch's weights: model.*drawn at random"):
            load_adapter(fresh, adapter)
        assert get_patch(fresh) is None
        with pytest.warns(UserWarning, match="of the patch's weights"):
            from_pretrained(adapter, allow_missing_weights=True)
        unpatch_model(model)
        configs = model.peft_config.values()
        assert not any("posenc" in key for config in configs for key in vars(config))


def test_an_adapter_that_lacks_weights(base: Path, tmp_path: Path) -> None:
    adapter = saved(trained(base, PATCHES["yarn"]), tmp_path / "adapter")
    file = adapter / "adapter_model.safetensors"
    weights = load_file(file)

    def without(*names: str) -> int:
        kept = {key: value for key, value in weights.items() if not all(n in key for n in names)}
        save_file(kept, file, {"format": "pt"})
        return len(weights) - len(kept)

    for names in (("base_model",), ("layers.1.input_layernorm",)):
        without(*names)
        with pytest.raises(PosencError, match=r"lacks \d+ of the adapter's weights: base_model"):
            from_pretrained(adapter)
    lost, model = without("layers.1.", "lora_A"), load(base)
    with pytest.raises(PosencError, match=rf"lacks {lost} of the adapter's weights: .*lora_A"):
        load_adapter(model, adapter)
    assert not any("lora" in name for name, _ in model.named_parameters())
    with pytest.warns(UserWarning, match="of the adapter's weights"):
        one = from_pretrained(adapter, allow_missing_weights=True)
    two = from_pretrained(adapter, allow_missing_weights=True)
    assert torch.equal(zoo.logits(one.eval(), IDS), zoo.logits(two.eval(), IDS))


class TestTiedEmbeddings:
    @pytest.mark.parametrize(
        ("model_type", "method"),
        [("llama", "kerple"), ("gpt_neox", "yarn"), *late(["llama"], ["yarn"])],
    )
    def test_stay_tied(self, tmp_path: Path, model_type: str, method: str) -> None:
        base = saved(zoo.build(model_type, tie_word_embeddings=True), tmp_path / "base")
        model = trained(base, PATCHES[method])
        expected = zoo.logits(model, IDS)
        embeddings = model.get_base_model().get_input_embeddings().weight
        assert model.get_base_model().get_output_embeddings().weight is embeddings
        untrained: Any = load(base).get_input_embeddings()
        assert not torch.equal(embeddings, untrained.weight)
        loaded: Any = from_pretrained(saved(model, tmp_path / "adapter")).eval()
        assert torch.equal(zoo.logits(loaded, IDS), expected)
        merged = loaded.merge_and_unload()
        assert is_tied(merged)
        again = load(saved(merged, tmp_path / "merged"))
        assert is_tied(again)
        assert torch.equal(zoo.logits(again, IDS), zoo.logits(merged, IDS))


class TestNotWithoutIt:
    @pytest.mark.slow
    def test_plain_peft_stops(self, base: Path, tmp_path: Path) -> None:
        """In a process that has never heard of hf_posenc; a plain LoRA loads there, on the same weights."""
        adapter = saved(trained(base, PATCHES["yarn"]), tmp_path / "adapter")
        plain = saved(choose_parameters(load(base), "lora"), tmp_path / "plain")
        code = f"""
import sys
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM
ways = {{
    "PeftModel": lambda path: PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({str(base)!r}), path),
    "AutoPeftModel": AutoPeftModelForCausalLM.from_pretrained,
    "AutoModel": AutoModelForCausalLM.from_pretrained,
    "load_adapter": lambda path: AutoModelForCausalLM.from_pretrained({str(base)!r}).load_adapter(path),
}}
for name, way in ways.items():
    way({str(plain)!r})
    try:
        way({str(adapter)!r})
    except KeyError as error:
        print(name, error)
assert not [name for name in sys.modules if name.startswith("hf_posenc")]
"""
        lines = printed(code).splitlines()
        ways = ("PeftModel", "AutoPeftModel", "AutoModel", "load_adapter")
        assert lines == [f"{way} 'LORA_NEEDS_HF_POSENC'" for way in ways]

    def test_peft_beside_hf_posenc_says_what_to_do(self, base: Path, tmp_path: Path) -> None:
        adapter = saved(trained(base, PATCHES["yarn"]), tmp_path / "adapter")
        for model in (load(base), patch_model(load(base), "yarn", scale=4)):
            with pytest.raises(PosencError, match=r"adapter in .*hf_posenc.from_pretrained"):
                peft.PeftModel.from_pretrained(model, str(adapter))
            with pytest.raises(PosencError, match=r"hf_posenc.load_adapter"):
                model.load_adapter(str(adapter))

    def test_another_patch_is_refused(self, base: Path, tmp_path: Path) -> None:
        adapter = saved(trained(base, PATCHES["yarn"]), tmp_path / "adapter")
        model = patch_model(load(base), "yarn", scale=8)
        before = zoo.logits(model, IDS)
        with pytest.raises(
            PosencError,
            match=r"patched with yarn \(scale=4, .*=64.* is patched with yarn \(scale=8",
        ):
            load_adapter(model, adapter)
        assert torch.equal(zoo.logits(model, IDS), before)
        assert not hasattr(model, "peft_config")
        assert load_adapter(unpatch_model(model), adapter) is not None

    def test_a_newer_format_is_refused(self, base: Path, tmp_path: Path) -> None:
        adapter = saved(trained(base, PATCHES["yarn"]), tmp_path / "adapter")
        path = adapter / "adapter_config.json"
        values = json.loads(path.read_text())
        values["hf_posenc"]["format"] = 99
        path.write_text(json.dumps(values))
        with pytest.raises(PosencError, match="format 99"):
            from_pretrained(adapter)
        del values["hf_posenc"]
        path.write_text(json.dumps(values))
        with pytest.raises(PosencError, match="holds the patch"):
            load_adapter(load(base), adapter)

    def test_a_base_that_nobody_knows(self, tmp_path: Path) -> None:
        model: Any = choose_parameters(patch_model(zoo.build("llama"), "yarn", scale=4), "lora")
        adapter = saved(model, tmp_path / "adapter")
        with pytest.raises(PosencError, match=r"does not name its base model.*load_adapter"):
            from_pretrained(adapter)
        loaded = load_adapter(zoo.build("llama"), adapter)
        assert torch.equal(zoo.logits(loaded.eval(), IDS), zoo.logits(model.eval(), IDS))

    def test_no_adapter_there(self, base: Path) -> None:
        with pytest.raises(PosencError, match=r"no adapter_config.json in"):
            load_adapter(load(base), base)


def test_a_model_without_a_patch_gets_a_plain_lora(base: Path, tmp_path: Path) -> None:
    model: Any = stepped(choose_parameters(load(base), "lora")).eval()
    adapter = saved(model, tmp_path / "adapter")
    values = json.loads((adapter / "adapter_config.json").read_text())
    assert values["peft_type"] == "LORA"
    assert "hf_posenc" not in values
    plain = peft.PeftModel.from_pretrained(load(base), str(adapter))
    for loaded in (plain, from_pretrained(adapter)):
        assert torch.equal(zoo.logits(loaded.eval(), IDS), zoo.logits(model, IDS))
