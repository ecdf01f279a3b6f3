"""A patch travels: into plain transformers, as posenc_config.json, and by hf_posenc.from_pretrained."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, pipeline

from hf_posenc import (
    Method,
    PosencError,
    available_methods,
    from_pretrained,
    get_method,
    get_patch,
    inspect_rope,
    load_patch,
    methods,
    patch_model,
    register_method,
    save_patch,
    unpatch_model,
)
from hf_posenc.cli import main
from hf_posenc.embedded import model_path
from hf_posenc.methods import Scaled, Stretch
from hf_posenc.model.parameters import trained_parameters
from hf_posenc.model.unwrapping import trial
from hf_posenc.patch.config import parse_method
from hf_posenc.rope import RopeSpec
from hf_posenc.seams import probes
from hf_posenc.training import choose_parameters
from tests.patch.test_patching import OPTIONS, logits
from tests.support import zoo
from tests.support.families import build_text_model, text_types
from tests.support.selection import covering, late, quick
from tests.support.zoo_registry import quiet

ROTARY = (*zoo.decoder_types(), *zoo.text_tower_types(), *zoo.composite_types())
TEXT = {*text_types()} - {*ROTARY, *zoo.seq2seq_types(), *zoo.NOT_BUILT}
# transformers does not load what the class of this small model saves, patched or not.
EVERY = sorted({*ROTARY, *zoo.seq2seq_types(), *TEXT} - {"shieldgemma2"})
# The infinity in its config; one that takes another attention from the caller; text inside; a table of positions.
FEW = ("falcon_h1", "esm", "gemma3", "gpt2")


@pytest.fixture
def model() -> PreTrainedModel:
    return zoo.build("llama")


def saved(model: PreTrainedModel, path: Path) -> dict[str, Any]:
    model.save_pretrained(path)
    values: dict[str, Any] = json.loads((path / "config.json").read_text())
    return values


def plain(path: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(path).eval()


@pytest.mark.parametrize(
    "model_type", ["deepseek_v2", "youtu", *late(["deepseek_v3", "glm4_moe_lite"])]
)
def test_deepseek_keeps_its_factor_of_scores(model_type: str, tmp_path: Path) -> None:
    """Its attention reads `factor` beside `mscale_all_dim`, whatever the table."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0}
    rope |= {"original_max_position_embeddings": 16, "mscale_all_dim": 1.0}
    model = zoo.build(model_type, rope_parameters=rope)
    requests: list[tuple[Any, dict[str, Any]]] = [
        *((method, {"scale": 2.0, "compose": True}) for method in ("yarn", "ntk")),
        ("yarn", {"scale": 2.0, "compose": True, "mscale": 1.0, "mscale_all_dim": 0.7}),
        (["yarn", "resonance"], {"scale": 8.0, "replace": True}),
        ("mrrope", {"scale": 4.0, "replace": True, "mscale": 0.7, "mscale_all_dim": 0.4}),
    ]
    for method, options in requests:
        patch_model(model, method, **options)
        model.save_pretrained(tmp_path)
        assert torch.allclose(logits(plain(tmp_path)), logits(model), atol=1e-4)
        unpatch_model(model)


@pytest.mark.filterwarnings("ignore:Plain transformers cannot")
@pytest.mark.parametrize("method", ["rerope", *late(["alibi", "log_n"])])
def test_a_patch_on_what_plain_transformers_loaded_is_saved(
    model: PreTrainedModel, method: str, tmp_path: Path
) -> None:
    """The config has the block of the first patch, which is not the one in force."""
    patch_model(model, "abf", rope_theta=4e4)
    saved(model, tmp_path / "first")
    second: Any = plain(tmp_path / "first")
    options: dict[str, Any] = {"window": 16} if method == "rerope" else {}
    with pytest.raises(PosencError, match="was saved with abf"):
        patch_model(second, "yarn", scale=2)
    patch_model(second, method, **options)
    saved(second, tmp_path / "second")
    again = from_pretrained(tmp_path / "second")
    assert zoo.in_force(again).method == method
    assert torch.equal(logits(again), logits(second))


HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8}


@pytest.mark.parametrize(
    "change", [{"num_hidden_layers": 6}, {"num_hidden_layers": 2}, HEADS, {}], ids=str
)
def test_parameters_of_another_model_leave_it_as_it_was(
    change: dict[str, int], model: PreTrainedModel, tmp_path: Path
) -> None:
    """Or damaged ones, which no change stands for."""
    patch_model(model, "fire")
    save_patch(model, tmp_path)
    other = zoo.build("llama", **change)
    if not change:
        (tmp_path / "posenc.safetensors").write_bytes(b"no tensors")
    before = logits(other)
    with pytest.raises(PosencError, match=r"posenc\.safetensors"):
        load_patch(other, tmp_path)
    assert get_patch(other) is None
    assert torch.equal(logits(other), before)


@pytest.mark.parametrize("size", ["5GB", "20KB"])
@pytest.mark.parametrize("family", sorted({"exaone", "bailing_hybrid"} & {*zoo.decoder_types()}))
def test_parameters_are_loaded_where_weights_are_saved_under_other_names(
    family: str, size: str, tmp_path: Path
) -> None:
    model = patch_model(zoo.build(family), "kerple_log")
    for parameter in trained_parameters(model).values():
        parameter.data.mul_(1.5)
    model.save_pretrained(tmp_path, max_shard_size=size)
    assert torch.equal(logits(from_pretrained(tmp_path, auto_class=type(model))), logits(model))


class TestOnlyWithHfPosenc:
    """Plain transformers refuses a patch that it cannot compute; with trust_remote_code it loads it."""

    @pytest.mark.parametrize(
        ("family", "method"),
        [("phi3", "alibi"), ("gpt_oss", "alibi"), ("gemma3", "log_n"), ("gptj", "yarn")],
    )
    def test_a_family(self, family: str, method: str, tmp_path: Path) -> None:
        model = zoo.build(family)
        before = model.config.to_dict()
        patch_model(model, method, scale=4 if method == "yarn" else None)
        saved(model, tmp_path)
        refused(model, tmp_path, method)
        loaded = from_pretrained(tmp_path, auto_class=type(model))
        ids = zoo.tokens(60)
        assert torch.equal(zoo.logits(loaded, ids), zoo.logits(model, ids))
        after = unpatch_model(loaded).config.to_dict()
        changed = {key for key in before | after if before.get(key) != after.get(key)}
        assert changed <= {"_name_or_path", "architectures"}

    def test_tokenizers_commands_and_the_next_save(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32)
        tokenizer: Any = AutoTokenizer.from_pretrained(model_path())
        patch_model(model, "alibi").save_pretrained(tmp_path, max_shard_size="900KB")
        tokenizer.save_pretrained(tmp_path)
        assert type(AutoTokenizer.from_pretrained(tmp_path)) is type(tokenizer)
        text = pipeline("text-generation", str(tmp_path), trust_remote_code=True)
        assert get_patch(text.model) is not None
        with pytest.raises(SystemExit) as done:
            main(["inspect", str(tmp_path)])
        assert not done.value.code
        assert "alibi" in capsys.readouterr().out
        name, folder = str(tmp_path), tmp_path / "again"
        config = AutoConfig.from_pretrained(name)
        for _ in range(2):  # the config keeps its patch
            again = from_pretrained(name, config=config, attn_implementation="eager")
        saved(again, folder)
        assert torch.equal(logits(from_pretrained(folder)), logits(model))
        config = AutoConfig.from_pretrained(model_path()).to_diff_dict()
        assert saved(unpatch_model(again), tmp_path / "plain") == config | {"dtype": "float32"}

    def test_the_code_is_uploaded(
        self, model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        uploaded: list[dict[str, str]] = []

        def upload(_: Any, folder: Any, *args: Any, **kwargs: Any) -> None:
            files = (path for path in Path(folder).iterdir() if path.suffix in (".py", ".json"))
            uploaded.append({path.name: path.read_text(encoding="utf-8") for path in files})

        monkeypatch.setattr("transformers.modeling_utils.hf_api", MagicMock())
        monkeypatch.setattr("transformers.modeling_utils.create_and_tag_model_card", MagicMock())
        monkeypatch.setattr(type(model), "_upload_modified_files", upload)
        patch_model(model, "alibi").save_pretrained(tmp_path, push_to_hub=True)
        (files,) = uploaded
        assert "hf_posenc.from_pretrained(path" in files["modeling_hf_posenc.py"]
        assert "alibi needs hf_posenc" in files["config.json"]

    def test_a_folder_of_an_earlier_version(self, model: PreTrainedModel, tmp_path: Path) -> None:
        values = saved(patch_model(model, "alibi"), tmp_path)
        withheld = values["hf_posenc"].pop("withheld")[""]
        true = {key: withheld.get(key, value) for key, value in values.items()}
        kept = {key: value for key, value in true.items() if value != "<absent>"}
        assert "needs hf_posenc" not in str(kept)
        (tmp_path / "config.json").write_text(json.dumps(kept))
        assert torch.equal(logits(from_pretrained(tmp_path)), logits(model))

    @pytest.mark.parametrize("family", quick(EVERY, FEW))
    def test_every_type_is_loaded_with_its_patch_or_not_at_all(
        self, family: str, tmp_path: Path
    ) -> None:
        model = patched_for_saving(family)
        patch = zoo.in_force(model)
        with quiet():
            model.save_pretrained(tmp_path)
        auto: Any = AutoModelForCausalLM
        known = type(model.config) in auto._model_mapping
        loaders: list[Any] = [type(model), *([auto] if known else [])]
        ids = zoo.tokens(60)
        for loader, attention in itertools.product(loaders, (None, "eager", "sdpa")):
            given = {} if attention is None else {"attn_implementation": attention}
            with quiet():
                if patch.export is None:
                    with pytest.raises(ValueError, match="needs hf_posenc"):
                        loader.from_pretrained(tmp_path, **given)
                    continue
                if attention == "sdpa" and not type(model)._supports_sdpa:
                    continue
                loaded = loader.from_pretrained(tmp_path, **given).eval()
            assert zoo.relative_difference(outputs(loaded, ids), outputs(model, ids)) < 1e-4
        assert AutoConfig.from_pretrained(tmp_path).model_type == model.config.model_type
        with quiet():
            ours: Any = from_pretrained(tmp_path, auto_class=type(model)).eval()
        assert zoo.relative_difference(outputs(ours, ids), outputs(model, ids)) < 1e-4

    def test_the_class_of_the_text_model_alone(self, tmp_path: Path) -> None:
        """It reads the config of the text model, and nothing around that."""
        patch_model(zoo.build("gemma3"), "log_n").save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="log_n needs hf_posenc"):
            transformers.Gemma3ForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")

    @pytest.mark.parametrize(
        ("name", "method"), [("Llama", "alibi"), ("Bert", "interpolate"), ("Bloom", "alibi")]
    )
    def test_a_classifier_is_loaded_as_one(self, tmp_path: Path, name: str, method: str) -> None:
        """A model without RoPE is tried without its head, which has no output for each token."""
        model: Any = build_text_model(name.lower(), f"{name}ForSequenceClassification")
        ids = zoo.tokens(60)
        before = model(ids).logits
        expected = patch_model(model, method, scale=2)(ids).logits
        model.save_pretrained(tmp_path)
        loaded = from_pretrained(tmp_path).eval()
        assert type(loaded) is type(model)
        assert torch.equal(loaded(ids).logits, expected)
        assert torch.equal(unpatch_model(model)(ids).logits, before)

    @pytest.mark.filterwarnings("error:.*around it is not")
    def test_a_part_of_a_larger_model(self, model: Any, tmp_path: Path) -> None:
        """The config of the whole model has no patch; wrappers have no config of their own."""
        patch_model(model.model, "yarn", scale=4).save_pretrained(tmp_path)
        with pytest.warns(
            UserWarning, match="LlamaModel is patched with yarn, and the LlamaForCausal"
        ):
            saved(model, tmp_path)
        unpatch_model(model.model)
        model = torch.compile(choose_parameters(patch_model(model, "yarn", scale=4), "lora"))
        nn.DataParallel(model).state_dict()
        model.save_pretrained(tmp_path)

    def test_a_config_that_was_saved_again(self, model: PreTrainedModel, tmp_path: Path) -> None:
        saved(patch_model(model, "alibi"), tmp_path)
        AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
        refused(model, tmp_path, "alibi")
        assert torch.equal(logits(from_pretrained(tmp_path)), logits(model))

    def test_a_class_that_refuses_nothing_is_named(
        self, model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(type(model), "from_pretrained", lambda folder: model)
        with pytest.warns(UserWarning, match="does not refuse this folder: it gives the model wit"):
            saved(patch_model(model, "alibi"), tmp_path)


def outputs(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    if model.config.model_type not in TEXT:
        return zoo.logits(model, ids)
    with trial(model):
        return torch.cat([each.flatten() for each in probes.forward(model, ids)])


def patched_for_saving(family: str) -> PreTrainedModel:
    """A model with a patch that plain transformers cannot compute, else with one that it can."""
    candidates: dict[str, dict[str, Any]] = {
        "log_n": {},
        "alibi": {},
        "interpolate": {"scale": 2, "update": "request"},
        "sinusoidal": {"scale": 2},
        "t5": {"scale": 2},
        "yarn": {"scale": 2},
    }
    found: PreTrainedModel | None = None
    for method, options in candidates.items():
        try:
            model = build_text_model(family) if family in TEXT else zoo.build(family)
        except Exception as error:
            pytest.skip(f"no small one: {error}")
        with contextlib.suppress(PosencError):
            patch = get_patch(patch_model(model, method, **options))
            found = found or model
            if patch is not None and patch.export is None:
                return model
    if found is None:
        pytest.skip("it takes no method")
    return found


def refused(model: PreTrainedModel, folder: Path, method: str) -> None:
    cases: tuple[dict[str, Any], ...] = ({}, {"attn_implementation": "eager"})
    for options in cases:
        with pytest.raises((ValueError, KeyError), match=f"{method} needs hf_posenc. Load this"):
            type(model).from_pretrained(folder, **options)


class TestOverrides:
    """`from_pretrained` takes what transformers takes beside the path: attributes of the config."""

    @pytest.mark.parametrize(
        ("method", "options"),
        covering(
            ["yarn", "alibi", None],
            [
                {"max_position_embeddings": 512},
                {"use_cache": False, "attention_dropout": 0.25},
                {"output_hidden_states": True, "dtype": torch.bfloat16},
            ],
            rounds=2,
        ),
    )
    def test_attributes_of_the_config(
        self, model: PreTrainedModel, method: str | None, options: dict[str, Any], tmp_path: Path
    ) -> None:
        before = model.config.max_position_embeddings
        if method is not None:
            patch_model(model, method, **OPTIONS.get(method, {}))
        saved(model, tmp_path)
        loaded = from_pretrained(tmp_path, **options)
        for key, value in options.items():
            assert getattr(loaded.config, key) == value
        ours, theirs = get_patch(model), get_patch(loaded)
        assert (ours and ours.config) == (theirs and theirs.config)
        if "dtype" not in options:
            assert zoo.relative_difference(logits(loaded), logits(model)) < 1e-5
        if method == "yarn":
            assert unpatch_model(loaded).config.max_position_embeddings == before

    def test_a_part_of_a_config_inside(self, tmp_path: Path) -> None:
        patch_model(zoo.build("gemma3"), "yarn", scale=4).save_pretrained(tmp_path)
        loaded = from_pretrained(
            tmp_path, auto_class=AutoModelForCausalLM, text_config={"attention_dropout": 0.25}
        )
        assert loaded.config.text_config.attention_dropout == 0.25
        assert get_patch(loaded) is not None

    @pytest.mark.parametrize("beside", [False, True])
    @pytest.mark.parametrize(
        "options",
        [
            {"max_position_embeddings": 128},
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
        ],
        ids=["shorter", "scaled", "theta"],
    )
    def test_what_contradicts_the_patch(
        self, model: PreTrainedModel, options: dict[str, Any], beside: bool, tmp_path: Path
    ) -> None:
        if beside:
            saved(model, tmp_path)
        patch_model(model, "yarn", scale=4)
        if beside:
            save_patch(model, tmp_path)
        else:
            saved(model, tmp_path)
        (key,) = options
        message = rf"{key}=.* contradicts the patch of .*yarn\(scale=4|is already scaled"
        with pytest.raises(PosencError, match=message):
            from_pretrained(tmp_path, **options)

    def test_the_values_of_the_patch_itself(self, model: PreTrainedModel, tmp_path: Path) -> None:
        patch_model(model, "yarn", scale=4)
        saved(model, tmp_path)
        with pytest.raises(PosencError, match=r"undone after hf_posenc\.from_pretrained"):
            unpatch_model(plain(tmp_path))
        config: Any = AutoConfig.from_pretrained(tmp_path)
        loaded = from_pretrained(
            tmp_path, max_position_embeddings=256, rope_parameters=config.rope_parameters
        )
        assert torch.equal(logits(loaded), logits(model))

    def test_what_neither_takes(self, model: PreTrainedModel, tmp_path: Path) -> None:
        saved(model, tmp_path)
        with pytest.raises(PosencError, match="unexpected keyword argument 'nonsense'"):
            from_pretrained(tmp_path, nonsense=3)


class TestKeyStyles:
    """transformers 5 reads rope_parameters; 4 and older servers read rope_theta and rope_scaling."""

    @pytest.mark.parametrize(
        ("family", "method", "options", "expected"),
        [
            ("llama", "yarn", {"scale": 4}, {"rope_theta": 1e4, "max_position_embeddings": 256}),
            ("llama", "abf", {"rope_theta": 5e5}, {"rope_theta": 5e5}),
            ("gemma3_text", "yarn", {"scale": 4}, {"rope_theta": 1e6, "rope_local_base_freq": 1e4}),
            ("phi", "yarn", {"scale": 4}, {"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        ],
    )
    def test_both_are_written(
        self, family: str, method: str, options: Any, expected: dict[str, Any], tmp_path: Path
    ) -> None:
        """A table per layer type as Gemma 3 names it; another base alone is no scaling."""
        config = saved(patch_model(zoo.build(family), method, **options), tmp_path)
        assert config.items() >= expected.items()
        rope = config["rope_parameters"].get("full_attention", config["rope_parameters"])
        assert rope["rope_type"] == ("default" if method == "abf" else "yarn")
        assert config.get("rope_scaling") == (None if method == "abf" else rope)
        assert rope.get("partial_rotary_factor") == expected.get("partial_rotary_factor")


def decoded(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}


class TestPatchFiles:
    @pytest.mark.parametrize("method", ["dynamic_yarn", "kerple_log"])
    def test_beside_a_checkpoint(self, model: PreTrainedModel, method: str, tmp_path: Path) -> None:
        model.save_pretrained(tmp_path)
        options: dict[str, Any] = {"update": "sequence"} if method == "dynamic_yarn" else {}
        patch_model(model, method, **options)
        for parameter in trained_parameters(model).values():
            parameter.data += 0.25
        save_patch(model, tmp_path)
        assert torch.equal(logits(from_pretrained(tmp_path)), logits(model))

    @pytest.mark.parametrize(
        ("family", "method", "options"),
        [
            ("t5", "t5", {"mode": "max_distance", "scale": 4}),
            ("gpt2", "interpolate", {"scale": 2}),
            ("roformer", "yarn", {"scale": 4}),
            ("llama", "yarn", {"scale": 4}),
            *late(["umt5"], ["t5"], [{"mode": "max_distance", "scale": 4}]),
            *late(["bert", "opt", "bart", "gpt_neo", "biogpt"], ["interpolate"], [{"scale": 2}]),
        ],
    )
    def test_beside_a_checkpoint_that_carries_the_patch(
        self, family: str, method: str, options: dict[str, Any], tmp_path: Path
    ) -> None:
        """It is not applied twice, whoever loads the folder, and whatever loads the patch."""
        model: Any = patch_model(build_text_model(family), method, **options)
        patch = zoo.in_force(model)
        model.save_pretrained(tmp_path)
        save_patch(model, tmp_path)
        ids = zoo.tokens(60)
        for load in (type(model).from_pretrained, from_pretrained):
            loaded: Any = load(tmp_path).eval()
            found = get_patch(loaded)
            assert found is None or found.config == patch.config
            assert (found is None) == (load is not from_pretrained or patch.export == "weights")
            if found is None:
                with pytest.raises(PosencError, match="computes it already"):
                    load_patch(loaded, tmp_path)
            else:
                load_patch(loaded, tmp_path)
            one, other = (zoo.logits(each, ids, **decoded(each, ids)) for each in (loaded, model))
            assert zoo.relative_difference(one, other) < 1e-4

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("[]", "is an object"),
            ('{"format": 99, "method": "yarn"}', "format 99"),
            ('{"format": 1}', 'names its "method"'),
            ('{"format": 1, "method": "yarn", "options": {"beta": 1}}', "option of yarn"),
        ],
    )
    def test_bad_files(self, model: Any, tmp_path: Path, text: str, message: str) -> None:
        (tmp_path / "posenc_config.json").write_text(text)
        with pytest.raises(PosencError, match=message):
            load_patch(model, tmp_path)

    def test_names_of_nothing(self, model: PreTrainedModel, tmp_path: Path) -> None:
        with pytest.raises(PosencError, match="Unknown recipe"):
            load_patch(model, "llama-3.1-yran")
        with pytest.raises(PosencError, match="There is no file"):
            load_patch(model, tmp_path / "missing.json")
        with pytest.raises(PosencError, match="nothing to save"):
            save_patch(model, tmp_path)


class TestShortForm:
    @pytest.mark.parametrize(
        ("text", "name", "options"),
        [
            ("yarn", "yarn", {}),
            ("linear:scale=2.5", "pi", {"scale": 2.5}),
            ("yarn:truncate=false, ramp=index", "yarn", {"truncate": False, "ramp": "index"}),
            ("dynamic-ntk:scale=2,replace=true", "dynamic_ntk", {"scale": 2, "replace": True}),
            ("pi:layers=[0, 2],scale=4", "pi", {"layers": [0, 2], "scale": 4}),
            ("abf:rope_theta=1e6,target_length=8", "abf", {"rope_theta": 1e6, "target_length": 8}),
        ],
    )
    def test_reads(self, text: str, name: str, options: dict[str, Any]) -> None:
        assert parse_method(text) == (name, options)

    @pytest.mark.parametrize("text", ["yran", "yarn:8", "yarn:beta=1", "pi:scale"])
    def test_refuses(self, text: str) -> None:
        with pytest.raises(PosencError):
            parse_method(text)


class TestMethodsOfOnesOwn:
    @pytest.fixture
    def halved(self, monkeypatch: pytest.MonkeyPatch) -> type[Method]:
        """A method of frequencies; nothing is registered yet."""
        monkeypatch.setattr(methods, "_OWN", {})

        @dataclass(frozen=True, kw_only=True)
        class Halved(Scaled):
            name = "halved"
            aliases = ("half",)
            summary = source = needs = "this test"

            def inv_freq(self, rope: RopeSpec, length: Any = None) -> torch.Tensor:
                table = rope.default_inv_freq()
                return torch.cat([table[:4], table[4:] / self.scale])

        return Halved

    def test_registered_it_is_saved_and_loaded_by_its_name(
        self, model: PreTrainedModel, tmp_path: Path, halved: type[Method]
    ) -> None:
        assert register_method(halved) is halved
        assert available_methods()[-1] == "halved"
        patch_model(model, "half", scale=4)
        saved(model, tmp_path / "model")
        save_patch(model, tmp_path / "patch")
        other = load_patch(zoo.build("llama"), tmp_path / "patch")
        for loaded in (from_pretrained(tmp_path / "model"), other):
            assert torch.equal(logits(loaded), logits(model))
            assert get_patch(unpatched := unpatch_model(loaded)) is None
            assert not torch.equal(logits(unpatched), logits(model))
        assert zoo.relative_difference(logits(plain(tmp_path / "model")), logits(model)) < 1e-4

    def test_not_registered(self, model: PreTrainedModel, tmp_path: Path, halved: Any) -> None:
        patch_model(model, halved(scale=4))
        with pytest.raises(PosencError, match=r"'halved' is a method of your own.*register_method"):
            save_patch(model, tmp_path)
        with pytest.warns(UserWarning, match=r"'halved'.*not registered.*plain transformers can"):
            saved(model, tmp_path)
        with pytest.raises(PosencError, match=r"Unknown method 'halved'.*import the code"):
            from_pretrained(tmp_path)

    def test_not_registered_but_in_the_weights(self, tmp_path: Path, recwarn: Any) -> None:
        class Own(Stretch):
            name = "own"

        own = patch_model(zoo.build("gpt2"), Own(scale=2))
        saved(own, tmp_path)
        assert not [each for each in recwarn if "registered" in str(each.message)]
        assert torch.equal(logits(from_pretrained(tmp_path)), logits(own))

    def test_a_class_that_is_registered_again_replaces_the_first(self, halved: Any) -> None:
        class Again(halved):  # type: ignore[misc]
            aliases = ()

        register_method(halved)
        register_method(Again)
        assert get_method("halved") is Again
        with pytest.raises(PosencError, match="Unknown method 'half'"):
            get_method("half")

    @pytest.fixture
    def package(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
        monkeypatch.setattr(methods, "_OWN", {})
        (tmp_path / "own_methods.py").write_text(
            "from hf_posenc.methods import Scaled\n\n\nclass Third(Scaled):\n"
            "    name = 'third'\n    summary = source = needs = 'this test'\n\n"
            "    def inv_freq(self, rope, length=None):\n"
            "        return rope.default_inv_freq() / self.scale**3\n"
        )
        about = tmp_path / "own_methods-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own-methods\nVersion: 1.0\n")
        entries = about / "entry_points.txt"
        entries.write_text("[hf_posenc.methods]\nthird = own_methods:Third\n")
        monkeypatch.syspath_prepend(tmp_path)
        yield entries
        sys.modules.pop("own_methods", None)

    def test_that_of_an_installed_package_needs_no_import(
        self, model: PreTrainedModel, package: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert available_methods()[-1] == "third"
        assert "own_methods" not in sys.modules
        (before,) = inspect_rope(model)
        (table,) = inspect_rope(patch_model(model, "third", scale=2))
        torch.testing.assert_close(table.inv_freq, before.inv_freq / 8)
        assert available_methods().count("third") == 1
        with pytest.raises(SystemExit, match="0"):
            main(["methods"])
        assert "third  " in capsys.readouterr().out.partition("Of installed packages")[2]

    def test_what_an_installed_package_offers_in_vain_is_named(self, package: Path) -> None:
        offers = "fourth = own_methods:Third\nfifth = own_methods:Fifth\n"
        package.write_text(f"[hf_posenc.methods]\n{offers}")
        with pytest.raises(PosencError, match=r"own-methods offers .*'fourth'.*is 'third'"):
            get_method("fourth")
        with pytest.raises(PosencError, match=r"own-methods offers own_methods:Fifth.*Attribute"):
            get_method("fifth")
        with pytest.raises(PosencError, match="Unknown method 'sixth'"):
            get_method("sixth")

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            *(("yarn", "name of YaRN"), ("linear", "name of Posi")),
            *(("My", "lower-case"), ("none", "none")),
        ],
    )
    def test_names_that_are_refused(self, name: str, message: str, halved: Any) -> None:
        halved.name = name
        with pytest.raises(PosencError, match=message):
            register_method(halved)
        assert "half" not in methods._OWN

    def test_only_complete_classes_are_registered(self, halved: Any) -> None:
        class Bare(halved):  # type: ignore[misc]
            power: float = 0.5

        with pytest.raises(PosencError, match="Bare is no dataclass"):
            register_method(Bare)
        del halved.needs
        with pytest.raises(PosencError, match="Halved lacks needs"):
            register_method(halved)
        with pytest.raises(PosencError, match="by its class"):
            register_method("yarn")  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["alibi", "log_n", "dynamic_yarn", "yarn"])
def test_saving_warns_once_where_plain_transformers_cannot_compute_the_patch(
    method: str, tmp_path: Path
) -> None:
    warns = method != "yarn"
    model = patch_model(zoo.build("llama"), method, scale=None if warns else 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.save_pretrained(tmp_path / "first")
        model.save_pretrained(tmp_path / "second")
    every = [str(one.message) for one in caught]
    messages = [message for message in every if "hf_posenc.from_pretrained" in message]
    assert len(messages) == warns
    if warns:
        assert method in messages[0]
        assert repr(str(tmp_path / "first")) in messages[0]
    unpatch_model(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model.save_pretrained(tmp_path / "third")


def test_loading_logs_what_transformers_logs(caplog: pytest.LogCaptureFixture) -> None:
    """A level of its own makes a logger of transformers say more, of layers that nobody asked to shard."""
    log, logged = transformers.utils.logging, []
    before = log.get_verbosity()
    log.set_verbosity_warning()
    log.add_handler(caplog.handler)
    try:
        for load in (AutoModelForCausalLM.from_pretrained, from_pretrained):
            load(model_path())
            logged.append([record.getMessage() for record in caplog.records])
            caplog.clear()
    finally:
        log.get_logger("transformers").removeHandler(caplog.handler)  # that of 5.2 fails
        log.set_verbosity(before)
    assert logged[0] == logged[1]
