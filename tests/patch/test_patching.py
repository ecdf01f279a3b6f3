"""Promises of patch_model beyond the numbers: reversible, atomic, this instance only, never a silent no-op."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hf_posenc
from hf_posenc import (
    PosencError,
    UnsupportedModelError,
    get_method,
    get_patch,
    inspect_positions,
    inspect_rope,
    patch_model,
    patched,
    unpatch_model,
)
from hf_posenc.methods import ABF, NoPE, ReRoPE, SelfExtend, YaRN
from hf_posenc.model.parameters import trained_parameters
from hf_posenc.patch import patching
from hf_posenc.patch.report import COLUMNS
from tests.support import zoo
from tests.support.attention_ways import in_steps
from tests.support.selection import covering, late

LENGTH = 96  # half as many again as the tiny models' 64

# Every method with options that change something at LENGTH tokens of a model with 8 pairs.
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: zoo.frequency_options(name) for name in zoo.frequency_methods()},
    "longrope": {"scale": 4.0, "short_factor": [1.5] * 8, "long_factor": [3.0] * 8},
}


@pytest.fixture
def model() -> PreTrainedModel:
    return zoo.build("llama")


def logits(model: nn.Module, length: int = LENGTH) -> Tensor:
    with torch.no_grad():
        return model(input_ids=zoo.tokens(length), use_cache=False).logits


NEUTRAL = (n for n in zoo.promising("identity_at_scale_one") if get_method(n).takes_scale())


@pytest.mark.parametrize("method", [*NEUTRAL, "longrope"])  # the latter with neutral lists
def test_scale_one_is_the_unpatched_model_bit_for_bit(model: PreTrainedModel, method: str) -> None:
    options = {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8} if method == "longrope" else {}
    length = 64 if get_method(method).follows_text else LENGTH
    before = logits(model, length)
    with patched(model, method, scale=1, **options):
        assert torch.equal(logits(model, length), before)


@pytest.mark.parametrize(
    "method", ["dynamic_pi", "dynamic_ntk", "dynamic_yarn", "dynamic_partial_ntk"]
)
def test_dynamic_methods_leave_short_texts_alone(model: PreTrainedModel, method: str) -> None:
    before = logits(model, 64)
    with patched(model, method):
        long = logits(model, LENGTH)
        assert torch.equal(logits(model, 64), before)
        assert torch.equal(logits(model, LENGTH), long)  # whatever ran in between


def test_context_manager_undoes_the_patch_also_after_an_exception(model: PreTrainedModel) -> None:
    def work() -> None:
        with patched(model, "pi", scale=2):
            assert get_patch(model) is not None
            raise RuntimeError("inside")

    with zoo.unchanged(model), pytest.raises(RuntimeError, match="inside"):
        work()
    with pytest.raises(PosencError, match="not patched"):
        unpatch_model(model)


def test_a_patch_that_fails_late_leaves_the_model_as_it_was(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("after the modules were put in place")

    monkeypatch.setattr("hf_posenc.patch.frequencies._rescale_attention", fail)
    with zoo.unchanged(model), pytest.raises(RuntimeError, match="after the modules"):
        patch_model(model, "yarn", scale=4)
    monkeypatch.undo()
    patch_model(model, "yarn", scale=4)


@pytest.mark.parametrize(
    ("method", "kwargs", "message"),
    [
        ("yran", {"scale": 4}, "Did you mean 'yarn'"),
        ("yarn", {}, "scale= .or target_length="),
        ("yarn", {"scale": 0.5}, "of at least 1"),
        ("yarn", {"scale": "8"}, "not '8'"),
        ("yarn", {"scale": 4, "target_length": 512}, "disagree"),
        ("yarn", {"target_length": 32}, "nothing to extend"),
        (["yarn", "self_extend"], {"target_length": 512}, "that of yarn or self_extend"),
        ("dynamic_yarn", {"scale": 4}, "takes no scale"),
        ("dynamic_yarn", {"target_length": 512}, "follows the length"),
        ("yarn", {"scale": 4, "layers": "some"}, "layers is"),
        ("yarn", {"scale": 4, "layers": 0}, "a list of layer indices, not 0"),
        ("yarn", {"scale": 4, "compose": True, "replace": True}, "exclude each other"),
        (YaRN(scale=4), {"scale": 4}, r"Give the knobs to YaRN\(\.\.\.\)"),
        ("longrope", {"short_factor": [1.0], "long_factor": [1.0]}, "rotates 8 pairs"),
    ],
)
def test_a_request_that_cannot_be_met_says_why(
    model: PreTrainedModel, method: Any, kwargs: dict[str, Any], message: str
) -> None:
    zoo.refused(model, message, method, **kwargs)


def test_anything_but_a_transformers_model_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no transformers config"):
        patch_model(nn.Linear(2, 2), "yarn", scale=4)


def test_target_length_is_scale_times_the_original_length(model: PreTrainedModel) -> None:
    patch_model(model, "yarn", target_length=512)
    patch = zoo.in_force(model)
    assert (patch.method, patch.options) == ("yarn", {"scale": 8})
    assert (patch.original_max_position_embeddings, patch.extended_length) == (64, 512)
    assert model.config.max_position_embeddings == 512


def test_a_method_object_and_a_name_are_the_same(model: PreTrainedModel) -> None:
    with patched(model, YaRN(scale=4, beta_fast=16)):
        one = logits(model)
    with patched(model, ["yarn"], scale=4, beta_fast=16):
        assert torch.equal(logits(model), one)


@pytest.mark.filterwarnings("ignore:.*starts untrained")
@pytest.mark.parametrize("method", ["yarn", "self_extend", "leaky_rerope", "alibi"])
def test_the_config_says_how_far_the_model_reads(method: str) -> None:
    """lm-evaluation-harness, vLLM and trainers cut texts at this length; that of the longest method in a list."""
    beside = [SelfExtend(scale=2)] if method == "yarn" else []
    methods: Any = [*beside, YaRN(scale=4)] if beside else method
    model = patch_model(zoo.build("llama"), methods, scale=None if beside else 4)
    assert zoo.in_force(model).extended_length == model.config.max_position_embeddings == 256


@pytest.mark.parametrize(
    "method",
    [ABF(rope_theta=1e6), [ABF(rope_theta=1e6), ReRoPE()], {range(1): ReRoPE(), 1: NoPE()}],
)
def test_a_target_without_a_scale_is_kept(method: Any, tmp_path: Path) -> None:
    model, again = zoo.build("llama"), zoo.build("llama")
    patch_model(model, method, target_length=256)
    model.save_pretrained(tmp_path)
    hf_posenc.save_patch(model, tmp_path / "patch")
    hf_posenc.load_patch(again, tmp_path / "patch")
    for each in (model, again, hf_posenc.from_pretrained(tmp_path)):
        assert zoo.in_force(each).extended_length == each.config.max_position_embeddings == 256
    with pytest.raises(PosencError, match="already patched"):
        patch_model(model, method, target_length=512)


class TestSecondPatch:
    """A patched model is patched again: a cell of a notebook that runs twice."""

    @pytest.mark.parametrize("first", ["yarn", "rerope"])
    @pytest.mark.parametrize("second", [("pi", {"scale": 2}), ("rerope", {"window": 9})])
    def test_replace_gives_what_the_request_alone_gives(
        self, model: PreTrainedModel, first: str, second: tuple[str, dict[str, Any]]
    ) -> None:
        method, options = second
        with zoo.unchanged(model):
            with patched(model, method, **options):
                expected = logits(model)
            patch_model(model, ReRoPE(window=8) if first == "rerope" else YaRN(scale=4))
            with zoo.unchanged(model):
                message = rf"patched with {first}\(.*replace=True.*unpatch_model"
                with pytest.raises(PosencError, match=message):
                    patch_model(model, method, **options)
                with patched(model, method, **options, replace=True):
                    assert torch.equal(logits(model), expected)
            for _ in range(2):
                patch_model(model, method, **options, replace=True)
                assert torch.equal(logits(model), expected)
            unpatch_model(model)

    @pytest.mark.parametrize("first", ["yarn", "rerope", "gptj"])
    def test_a_second_patch_that_fails_leaves_the_first_in_force(
        self, first: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = zoo.build("gptj" if first == "gptj" else "llama")
        install = patching._install

        def fail(*args: Any) -> None:
            install(*args)
            raise RuntimeError("after the modules were put in place")

        with zoo.unchanged(model):
            patch_model(model, [ReRoPE(window=8)] if first == "rerope" else [YaRN(scale=4)])
            monkeypatch.setattr(patching, "_install", fail)
            with zoo.unchanged(model):
                with pytest.raises(RuntimeError, match="after the modules"):
                    patch_model(model, "pi", scale=2, replace=True)
                with pytest.raises(PosencError, match="needs scale="):
                    patch_model(model, "pi", replace=True)
            unpatch_model(model)

    def test_a_method_that_was_defined_anew_is_another(self, model: PreTrainedModel) -> None:
        def defined() -> Any:
            @dataclasses.dataclass(frozen=True, kw_only=True)
            class MyYaRN(YaRN):
                name = "yarn"

            return MyYaRN(scale=4)

        patch_model(model, defined())
        with pytest.raises(PosencError, match="replace=True"):
            patch_model(model, defined())
        patch_model(model, defined(), replace=True)

    def test_replace_still_drops_the_scaling_of_the_checkpoint(self) -> None:
        parameters = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
        model = zoo.build("llama", rope_parameters=parameters)
        patch_model(model, "rerope", window=8, original_max_position_embeddings=64)
        with pytest.raises(PosencError, match="already patched"):
            patch_model(model, "yarn", scale=4)
        with pytest.raises(PosencError, match=r"frequency method.*unpatch_model"):
            patch_model(model, "rerope", window=9, replace=True)
        given: dict[str, Any] = {"scale": 4, "original_max_position_embeddings": 32}
        patch_model(model, "yarn", replace=True, **given)
        patch_model(model, "yarn", replace=True, **given)
        with pytest.raises(PosencError, match=r"Call unpatch_model\(model\) first"):
            patch_model(model, "yarn", compose=True, **given)

    @pytest.mark.filterwarnings("ignore:.*starts untrained")
    def test_trained_parameters_are_kept(self, model: PreTrainedModel, tmp_path: Path) -> None:
        patch_model(model, "kerple_log")
        hf_posenc.save_patch(model, tmp_path)
        trained = trained_parameters(model)
        next(iter(trained.values())).data.fill_(3)
        for replace in (False, True):
            with pytest.raises(PosencError, match=r"would be lost.*save_patch\(model, folder\)"):
                patch_model(model, "yarn", scale=4, replace=replace)
        of_table = patch_model(zoo.build("gpt2"), "kerple_log")
        with pytest.raises(PosencError, match=r"would be lost.*save_pretrained"):
            patch_model(of_table, "alibi", replace=True)
        with pytest.raises(PosencError, match=r"already patched with kerple_log.*unpatch_model"):
            hf_posenc.load_patch(model, tmp_path)
        with patched(model, "yarn", scale=4, replace=True):
            assert not trained_parameters(model)
        assert all(value is trained[name] for name, value in trained_parameters(model).items())
        unpatch_model(model)
        with (
            pytest.warns(UserWarning, match=r"block of patched\(...\), whose end drops them"),
            patched(model, "kerple_log"),
            torch.no_grad(),
        ):
            next(iter(trained_parameters(model).values())).add_(1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", ".*starts untrained")
            with patched(model, "kerple_log"):
                unpatch_model(model)


class TestScaledCheckpoints:
    """Checkpoints that are scaled already: an error by default, and two ways on."""

    @pytest.fixture
    def scaled(self) -> PreTrainedModel:
        rope: dict[str, Any] = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 2.0}
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope["original_max_position_embeddings"] = 64
        return zoo.build("llama", max_position_embeddings=128, rope_parameters=rope)

    def test_replace_starts_from_the_original_length(self, scaled: PreTrainedModel) -> None:
        patch_model(scaled, "pi", scale=4, replace=True)
        patch = zoo.in_force(scaled)
        assert patch.original_max_position_embeddings == 64
        expected = 10_000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16) / 4
        torch.testing.assert_close(patch.tables[0].inv_freq.double(), expected, rtol=1e-6, atol=0)

    def test_compose_scales_what_is_there(self, scaled: PreTrainedModel, tmp_path: Path) -> None:
        (before,) = inspect_rope(scaled)
        patch_model(scaled, "pi", scale=3, compose=True)
        patch = zoo.in_force(scaled)
        assert (patch.original_max_position_embeddings, patch.extended_length) == (128, 384)
        torch.testing.assert_close(patch.tables[0].inv_freq, before.inv_freq / 3)
        # and it travels, as a longrope list
        expected = logits(scaled)
        scaled.save_pretrained(tmp_path)
        loaded = LlamaForCausalLM.from_pretrained(tmp_path)
        assert zoo.relative_difference(logits(loaded), expected) < 1e-4

    def test_compose_cannot_start_from_a_table_that_moves(self) -> None:
        dynamic = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
        with pytest.raises(PosencError, match="depends on the length"):
            patch_model(zoo.build("llama", rope_parameters=dynamic), "pi", scale=2, compose=True)


class TestLayers:
    """Gemma 3 has one table for its sliding layers and one for its full-attention layers."""

    def tables(self, model: nn.Module) -> dict[str | None, str]:
        return {table.layer_type: table.rope_type for table in inspect_rope(model)}

    @pytest.mark.parametrize("choice", ["full", "all", "indices"])
    def test_tables_of_a_choice(self, choice: str) -> None:
        """Full attention is the default, and its indices are the same choice."""
        model = zoo.build("gemma3_text")
        full = [i for i, kind in enumerate(model.config.layer_types) if kind == "full_attention"]
        chosen: dict[str, Any] = {"all": {"layers": "all"}, "indices": {"layers": full}}
        patch_model(model, "yarn", scale=4, **chosen.get(choice, {}))
        types = {"full_attention": "yarn", "sliding_attention": "default"}
        types |= {"sliding_attention": "yarn"} if choice == "all" else {}
        assert self.tables(model) == types
        if choice != "all":
            parameters = model.config.rope_parameters
            assert {kind: entry["rope_type"] for kind, entry in parameters.items()} == types

    def test_indices_across_kinds_are_patched_in_attention(self) -> None:
        model = patch_model(zoo.build("gemma3_text"), "yarn", scale=4, layers=[0, 3])
        patch = zoo.in_force(model)
        assert patch.layers == ("model.layers.0.self_attn", "model.layers.3.self_attn")
        assert set(self.tables(model).values()) == {"default"}

    def test_one_table_per_layer_can_be_patched_layer_by_layer(self) -> None:
        model = zoo.build("moshi")
        patch_model(model, "yarn", scale=4, layers=[1, 2])
        tables = inspect_rope(model)
        assert len(tables) == 2  # equal ones are listed once
        kinds = {name: table.rope_type for table in tables for name in table.modules}
        of_layers = [kinds[f"model.layers.{i}.self_attn.rotary_emb"] for i in range(4)]
        assert of_layers == ["default", "yarn", "yarn", "default"]


def test_inspect_rope_is_a_tuple_that_prints_as_a_table() -> None:
    model = zoo.build("gemma3_text")
    tables = inspect_rope(patch_model(model, "yarn", scale=4))
    assert isinstance(tables, tuple)
    head, *rows = repr(tables).splitlines()
    assert head.split() == list(COLUMNS)
    assert [row.split()[0] for row in rows] == [table.layer_type for table in tables]
    assert len({row.index("model.") for row in rows} | {head.index("module")}) == 1  # aligned
    cells = re.findall("<td>(.*?)</td>", tables._repr_html_())
    assert cells == [cell for table in tables for cell in table.row()]
    assert str(get_patch(model)).endswith(repr(tables))
    assert copy.deepcopy(tables)._repr_html_() == tables._repr_html_()


class TestRotaryAttributes:
    """`rotary_emb.inv_freq` and `attention_scaling`, where people and tools read what is in force."""

    @staticmethod
    def check(model: nn.Module) -> None:
        for table in inspect_rope(model):
            rotary, prefix = model.get_submodule(table.modules[0]), ""
            if table.layer_type is not None:
                prefix = f"{table.layer_type}_"
            assert torch.equal(getattr(rotary, f"{prefix}inv_freq"), table.inv_freq)
            assert getattr(rotary, f"{prefix}attention_scaling") == table.attention_factor

    @pytest.mark.parametrize(
        ("model_type", "method"),
        covering(["llama", "gemma3_text", "phi3"], ["yarn", "pi", "dynamic_ntk", "longrope"]),
    )
    def test_are_those_in_force(self, model_type: str, method: str) -> None:
        model = zoo.build(model_type)
        names = [name for name, _ in model.named_buffers()]
        keys = [*model.state_dict()]
        native = copy.deepcopy(dict(model.named_buffers()))
        patch_model(model, method, **OPTIONS[method])
        for _ in range(2):
            self.check(model)  # a dynamic one has the table of the original length
            logits(model)  # past that length
        copies = (copy.deepcopy(model), pickle.loads(pickle.dumps(model)))
        for each in (model, *copies):
            self.check(each)
            self.check(each.bfloat16())
            assert [*each.state_dict()] == keys
        for each in copies:
            unpatch_model(each)
            assert [name for name, _ in each.named_buffers()] == names
        model = patch_model(zoo.build(model_type), method, **OPTIONS[method])
        unpatch_model(model)
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, native[name])

    def test_compiled(self, model: PreTrainedModel) -> None:
        patch_model(model, "yarn", scale=4)
        rotary: Any = model.get_submodule("model.rotary_emb")

        def read() -> Tensor:
            scaled: Tensor = rotary.inv_freq * rotary.attention_scaling
            return scaled

        compiled: Any = torch.compile(read, backend="eager", fullgraph=True)
        (table,) = inspect_rope(model)
        assert torch.equal(compiled(), table.inv_freq * table.attention_factor)


def emptied(model: nn.Module) -> None:
    weights = copy.deepcopy(model.state_dict())
    model.to_empty(device="cpu")
    model.load_state_dict(weights)


def initialised(model: Any) -> None:
    for module in model.modules():
        model._init_weights(module)


class TestPrecision:
    """Frequencies are made in float64 and stay float32, whatever happens to the model."""

    @pytest.mark.parametrize("happens", [nn.Module.half, nn.Module.bfloat16, emptied, initialised])
    def test_tables_survive_other_code(self, model: PreTrainedModel, happens: Any) -> None:
        patch_model(model, "yarn", scale=64)
        rotary, positions = model.get_submodule("model.rotary_emb"), torch.arange(4096)[None]
        (before,), cos = inspect_rope(model), rotary(torch.zeros(1, 4096, 1), positions)[0]
        happens(model)
        (after,) = inspect_rope(model)
        assert after.inv_freq.dtype == torch.float32
        assert torch.equal(after.inv_freq, before.inv_freq)
        assert torch.equal(rotary(torch.zeros(1, 4096, 1), positions)[0], cos)
        cast = rotary(torch.zeros(1, 4096, 1, dtype=torch.bfloat16), positions)
        assert [each.dtype for each in cast] == 2 * [torch.bfloat16]

    def test_patching_a_cast_model_is_exact(self, model: PreTrainedModel) -> None:
        model.bfloat16()  # rounds the native table to 8 bits
        patch_model(model, "pi", scale=2)
        expected = 10_000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16) / 2
        (table,) = inspect_rope(model)
        torch.testing.assert_close(table.inv_freq.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("method", ["yarn", *late(["dynamic_ntk", "rerope"])])
def test_compiled_before_and_after(method: str) -> None:
    model = zoo.build("llama", num_hidden_layers=1)  # each layer is traced, for a second
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    before = logits(compiled)
    option = "window" if method == "rerope" else "scale"
    for value in (4, 8):  # the second is not what was traced for the first
        with patched(compiled, method, **{**OPTIONS.get(method, {}), option: value}):
            expected = logits(model)
            assert zoo.relative_difference(expected, before) > 1e-2
            assert zoo.relative_difference(logits(compiled), expected) < 1e-5
    assert torch.equal(logits(compiled), before)


class TestDynamicAndCache:
    """update="sequence" cannot be exact with a cache, and says so once."""

    def decode(self, model: PreTrainedModel, prompt: int, total: int) -> None:
        in_steps(model, zoo.tokens(total), [prompt, *[1] * (total - prompt)])

    def test_warns_once_past_the_original_length_alone(self, model: PreTrainedModel) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with patched(model, "yarn", scale=4):
                self.decode(model, prompt=60, total=70)
            patch_model(model, "dynamic_ntk", update="sequence")
            self.decode(model, prompt=50, total=60)
            logits(model)
        with pytest.warns(UserWarning, match="cached keys keep the frequencies") as caught:
            self.decode(model, prompt=60, total=70)
        assert len(caught) == 1

    @pytest.mark.parametrize("method", ["longrope", "dynamic_ntk", "dynamic_yarn"])
    def test_padding_behind_a_mask_is_no_length(self, model: PreTrainedModel, method: str) -> None:
        patch_model(model, method, **{**OPTIONS[method], "update": "sequence"})
        ids = torch.cat((zoo.tokens(60), zoo.tokens(60)))
        padded = torch.cat((torch.zeros(2, 7, dtype=torch.long), ids), 1)
        mask = (torch.arange(67) >= 7).long().expand(2, -1)
        copies = (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)))
        for one in copies:  # 67 tokens with the padding, of 64
            with torch.no_grad():
                found = one(input_ids=padded, attention_mask=mask).logits[:, 7:]
                torch.testing.assert_close(found, one(input_ids=ids).logits, atol=1e-4, rtol=0)
            unpatch_model(one)
            assert not any(module._forward_pre_hooks for module in one.modules())


def test_a_patch_prints_well(model: PreTrainedModel) -> None:
    patch_model(model, "yarn", scale=4, beta_fast=16)
    patch = zoo.in_force(model)
    text, page = str(patch), patch._repr_html_()
    for part in ("yarn(scale=4, beta_fast=16)", "64 -> 256 tokens", "native rope_parameters"):
        assert part in text
    assert "<table>" in page
    assert "64 -&gt; 256 tokens" in page
    assert "yarn(scale=4, beta_fast=16)" in repr(model.get_submodule("model.rotary_emb"))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_edits_of_the_config_in_a_block_stay(family: str) -> None:
    """The block has a config of its own; where it undid a patch, the one from before is in force again."""
    model: Any = zoo.build(family)
    patch_model(model, "yarn", scale=4)
    text = model.config.get_text_config(decoder=True)
    before = text.max_position_embeddings, copy.deepcopy(text.rope_parameters)
    text.mine = {"kept": [1]}
    with patched(model, "rerope", window=16, replace=True):
        inside = model.config.get_text_config(decoder=True)
        assert inside is not text
        inside.use_cache = False
        inside.added = 3
        inside.mine["kept"].append(2)
        inside.max_position_embeddings = 7  # the patch has set it
        model.config.outer = "too"
        with patched(model, "pi", scale=2, replace=True):
            model.config.get_text_config(decoder=True).nested = 1
    assert model.config.get_text_config(decoder=True) is text
    assert (text.use_cache, text.added, text.mine, text.nested) == (False, 3, {"kept": [1, 2]}, 1)
    assert model.config.outer == "too"
    assert (text.max_position_embeddings, text.rope_parameters) == before
    with patched(model, "pi", scale=2, replace=True):
        del model.config.get_text_config(decoder=True).added
    assert not hasattr(text, "added")
    assert zoo.in_force(model).method == "yarn"
    unpatch_model(model)
    assert (text.use_cache, text.max_position_embeddings) == (False, zoo.ORIGINAL_LENGTH)


class TestForeignFrequencies:
    """Tables that are not those of the config: said in inspection, and refused where they do not look meant."""

    @staticmethod
    def garbage(kind: str) -> PreTrainedModel:
        model: Any = zoo.build("llama")
        table = model.model.rotary_emb.inv_freq
        if kind == "to_empty":  # zeros, or whatever the memory holds
            weights = copy.deepcopy(model.state_dict())
            model.to("meta").to_empty(device="cpu").load_state_dict(weights)
            table = model.model.rotary_emb.inv_freq.fill_(7)
        else:
            table.fill_({"nan": float("nan"), "zeros": 0.0, "negative": -0.5, "rising": 1.0}[kind])
            if kind == "rising":
                table += torch.arange(len(table))
        return model

    @pytest.mark.parametrize("kind", ["to_empty", "nan", "zeros", "negative", "rising"])
    @pytest.mark.parametrize(
        ("method", "options"),
        [
            *(("yarn", {"scale": 4}), ("yarn", {"scale": 4, "compose": True})),
            *(("rerope", {"window": 8}), ("log_n", {}), ("dynamic_ntk", {"update": "sequence"})),
        ],
    )
    def test_garbage_is_named_and_refused(
        self, kind: str, method: str, options: dict[str, Any]
    ) -> None:
        model = self.garbage(kind)
        (table,) = inspect_rope(model)
        assert "does not have the frequencies of its config" in table.difference
        assert table.difference in repr(inspect_rope(model))
        with pytest.raises(UnsupportedModelError, match="not have the frequencies of its config"):
            patch_model(model, method, **options)
        assert get_patch(model) is None

    @pytest.mark.parametrize("kind", ["default", "dynamic", "yarn"])
    @pytest.mark.parametrize("cast", ["float", "half", "bfloat16"])
    def test_rounding_and_long_texts_are_no_difference(self, kind: str, cast: str) -> None:
        rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e6}
        rope |= {"factor": 4.0} if kind != "default" else {}
        rope |= {"original_max_position_embeddings": 32} if kind == "yarn" else {}
        model: Any = zoo.build("llama", rope_parameters=rope)
        logits(model)  # a dynamic table grows
        getattr(model, cast)()
        assert [table.difference for table in inspect_rope(model)] == [""]
        given: dict[str, Any] = {"original_max_position_embeddings": 64}
        patch_model(model, "yarn", scale=4, replace=kind != "default", **given)
        assert [table.difference for table in inspect_rope(model)] == [""]

    @pytest.mark.parametrize("method", ["pi", "rerope", "dynamic_yarn"])
    def test_a_table_set_by_hand_is_composed_with(
        self, model: Any, method: str, tmp_path: Path
    ) -> None:
        rotary = model.model.rotary_emb
        knobs: dict[str, Any] = {"pi": {"scale": 2}, "rerope": {"window": 8}}
        options = knobs.get(method, {})
        rotary.inv_freq *= torch.linspace(1, 0.5, len(rotary.inv_freq))
        own = rotary.inv_freq.clone()
        assert inspect_rope(model)[0].difference
        (source,) = inspect_positions(model).sources
        assert source.facts.endswith(", not the frequencies of its config")
        with pytest.raises(UnsupportedModelError, match="compose=True starts from them"):
            patch_model(model, method, **options)
        patch_model(model, method, **options, compose=True)
        (table,) = inspect_rope(model)
        assert torch.allclose(table.inv_freq, own / (2 if method == "pi" else 1), rtol=1e-6)
        if method == "pi":  # no config has such a table, but as a list
            model.save_pretrained(tmp_path)
            (again,) = inspect_rope(hf_posenc.from_pretrained(tmp_path))
            assert torch.allclose(again.inv_freq, table.inv_freq, rtol=1e-6)
        else:
            with pytest.raises(PosencError, match=f"{method} starts from frequencies"):
                model.save_pretrained(tmp_path)
        unpatch_model(model)
        assert torch.equal(rotary.inv_freq, own)

    def test_a_table_that_the_code_of_the_model_sets_is_its_own(self) -> None:
        class Own(LlamaForCausalLM):
            def __init__(self, config: LlamaConfig) -> None:
                super().__init__(config)
                rotary: Any = self.model.rotary_emb
                rotary.inv_freq *= torch.linspace(1, 0.5, len(rotary.inv_freq))

        config: Any = zoo.tiny_config("llama")
        model: Any = Own(config)
        assert inspect_rope(model)[0].difference == ""
        patch_model(model, "pi", scale=2, compose=True)

    def test_a_module_that_the_config_does_not_build_is_left_alone(self, model: Any) -> None:
        class Another(type(model.model.rotary_emb)):  # type: ignore[misc]
            def __init__(self, config: Any, base: float) -> None:
                super().__init__(config)

        model.model.rotary_emb.__class__ = Another
        model.model.rotary_emb.inv_freq *= torch.linspace(1, 0.5, 8)
        assert inspect_rope(model)[0].difference == ""

    def test_a_config_that_was_edited_after_loading(self, model: Any) -> None:
        before = logits(model)
        yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
        model.config.rope_parameters = {**yarn, "original_max_position_embeddings": 64}
        requests: dict[str, dict[str, Any]] = {"yarn": {"scale": 4}, "rerope": {"window": 8}}
        message = r"rope_type=yarn, factor=4.0.*in force: .* rope_type='default'.*config was edited"
        for method, options in requests.items():
            with pytest.raises(UnsupportedModelError, match=message):
                patch_model(model, method, **options)
        patch_model(model, "pi", scale=2, replace=True)  # from rope_theta
        unpatch_model(model)
        assert torch.equal(logits(model), before)
