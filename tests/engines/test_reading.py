"""Flags of other engines read back, the patch that a config has in force, and blocks that do nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_posenc import PosencError, inspect_rope, patch_model
from hf_posenc.engines import export
from hf_posenc.engines.in_force import Scaling, idle_blocks, scaling_of, tables_in_force
from hf_posenc.engines.llama_cpp import runtime
from hf_posenc.engines.reading import Reading, read_flags
from tests.patch.test_patching import OPTIONS
from tests.support import zoo
from tests.support.selection import covering

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10_000.0,
}


def read(*flags: str, model_type: str = "llama") -> tuple[Reading, Scaling]:
    reading = read_flags(zoo.tiny_config(model_type, max_position_embeddings=64), flags)
    return reading, scaling_of(reading.config, reading.base, length=reading.length)


def overrides(block: dict[str, Any], **more: Any) -> str:
    return json.dumps({"rope_parameters": block, **more})


@pytest.mark.parametrize(
    ("method", "engine"),
    covering(["pi", "ntk", "yarn", "llama3", "longrope", "abf"], ["vllm", "sglang"]),
)
def test_the_flags_of_an_export_are_read_as_its_patch(
    llama: Path, method: str, engine: str
) -> None:
    exported = export(llama, engine, method=method, **OPTIONS[method])
    name, value = exported.overrides
    reading, scaling = read(*exported.flags, name, value)
    (table,) = tables_in_force(reading.config)
    (patched,) = inspect_rope(patch_model(zoo.build("llama"), method, **OPTIONS[method]))
    length = reading.length or 256
    assert scaling.scaled
    torch.testing.assert_close(
        table.in_force(1).inv_freq.float(), patched.inv_freq, rtol=1e-6, atol=0
    )
    assert length == 256 or method == "abf"
    named = {"ntk": "abf"}.get(method, method)
    if method != "longrope":  # which has keys of their own
        assert scaling.patch is not None
        assert scaling.patch.method == named


def test_the_option_is_the_patch(llama: Path) -> None:
    _, scaling = read("--hf-overrides", overrides({**YARN, "beta_fast": 16}))
    assert scaling.option == "yarn:scale=4,beta_fast=16"
    from hf_posenc.evaluation.loading import parse_patch

    method, options = parse_patch(scaling.option).arguments()
    (one,) = inspect_rope(patch_model(zoo.build("llama"), method, **options))
    assert scaling.patch is not None
    (other,) = inspect_rope(patch_model(zoo.build("llama"), scaling.patch.build()))
    assert torch.equal(one.inv_freq, other.inv_freq)


@pytest.mark.parametrize(
    ("flags", "option"),
    [
        ("--rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 32 -c 128", "yarn:scale=4"),
        ("--rope-scaling yarn --rope-scale 8 --yarn-beta-fast 16", "yarn:scale=8,beta_fast=16"),
        ("--rope-scaling linear --rope-scale 2.5", "pi:scale=2.5"),
        ("--rope-scale 4", "pi:scale=4"),
        ("--rope-freq-scale 0.25", "pi:scale=4"),
        ("--rope-scaling yarn --rope-scale 4 --yarn-ext-factor 0", "pi:scale=4"),
        ("--rope-freq-base 80000", "abf:rope_theta=80000"),
        ("--rope-freq-base 0 --rope-freq-scale 0 --rope-scale 4", "pi:scale=4"),  # 0: the file's
    ],
)
def test_llama_cpps_flags(flags: str, option: str) -> None:
    """The table is that of llama.cpp's own code, as rewritten for the export."""
    words = flags.split()
    reading, scaling = read("llama-server", "-m", "model.gguf", *words)
    assert scaling.option == option
    (table,) = tables_in_force(reading.config)
    keys = {"context_length": 64, "rope.freq_base": 10_000.0}
    if "--yarn-ext-factor" not in words:
        words = ["--rope-scale", "4"] if "--rope-freq-scale" in words else words
        theirs = runtime(keys, {}, 16, reading.length or 64, words)
        torch.testing.assert_close(table.in_force(1).inv_freq, theirs.inv_freq, rtol=1e-6, atol=0)
        assert table.in_force(1).factor == pytest.approx(theirs.factor)


class TestFlagsThatDoNothing:
    @pytest.mark.parametrize("flag", ["--hf-overrides", "--json-model-override-args"])
    def test_type_beside_a_rope_type(self, flag: str) -> None:
        block = {key: value for key, value in YARN.items() if key != "rope_type"}
        reading, scaling = read(flag, overrides({**block, "type": "yarn"}))
        assert not scaling.scaled
        assert '"type": "yarn" does nothing' in reading.notes[0]

    @pytest.mark.parametrize("flag", ["--hf-overrides", "--json-model-override-args"])
    def test_a_block_beside_the_text_config(self, flag: str) -> None:
        reading, scaling = read(flag, overrides(YARN), model_type="qwen3_5")
        assert not scaling.scaled
        assert "Nest it there" in reading.notes[0]
        block = {**YARN, "partial_rotary_factor": 0.25}
        nested = json.dumps({"text_config": {"rope_parameters": block}})
        assert read(flag, nested, model_type="qwen3_5")[1].option == "yarn:scale=4"

    def test_vllm_takes_another_base_where_none_is_given(self) -> None:
        block = {key: value for key, value in YARN.items() if key != "rope_theta"}
        reading = read_flags(
            zoo.tiny_config("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
            ["--hf-overrides", overrides(block)],
        )
        assert reading.config.rope_parameters["rope_theta"] == 10_000.0
        assert "it computes with 10,000" in reading.notes[0]

    def test_a_scale_of_one(self) -> None:
        reading, scaling = read("--rope-scaling", "yarn", "-c", "4096")
        assert not scaling.scaled
        assert "give --rope-scale" in reading.notes[0]

    def test_a_length_that_needs_no_scaling(self) -> None:
        _, scaling = read("--hf-overrides", overrides(YARN), "--max-model-len", "64")
        assert "need no scaling" in scaling.notes[0]
        assert not read("--hf-overrides", overrides(YARN), "--max-model-len=256")[1].notes


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--grp-attn-n", "4"], "no Self-Extend since October 2024"),
        (["--rope-scaling", '{"rope_type": "yarn"}'], "no --rope-scaling since 0.11.1"),
        (["--rope-scalling", "yarn"], "is not a flag that is read"),
        (["--port", "80"], "None of these flags"),
        (["--hf-overrides", '{"rope_scaling": {"rope_type": "yarn"}}'], "empty rope_theta"),
        (["--hf-overrides", "{"], "give JSON|Give JSON"),
        (["--hf-overrides"], "has no value"),
        (["--rope-scale", "four"], "give a number"),
        (["--hf-overrides", "{}", "--rope-scale", "4"], "give one command"),
        (["--rope-scale", "0"], "--rope-scale 0: give a positive"),
        (["--rope-freq-base", "-1"], "--rope-freq-base -1: give a"),
        (["--hf-overrides", '{"rope_parameters": "yarn"}'], "rope_parameters is an object with a"),
        (["--hf-overrides", '{"rope_parameters": null}'], "rope_parameters is an object with a"),
        (["--hf-overrides", '{"max_position_embeddings": "4k"}'], "max_position_embeddings cannot"),
    ],
)
def test_flags_that_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(PosencError, match=message):
        read(*flags)


class TestBlocksOfAFile:
    def values(self, model_type: str = "llama", **more: Any) -> dict[str, Any]:
        values: dict[str, Any] = zoo.tiny_config(model_type, max_position_embeddings=64).to_dict()
        return {**values, **more}

    def test_a_block_in_force_is_not_named(self) -> None:
        assert idle_blocks(self.values(rope_parameters=YARN)) == []
        assert idle_blocks(self.values(rope_parameters={**YARN, "rope_type": "dynamic"})) == []
        assert idle_blocks(self.values()) == []

    @pytest.mark.parametrize(
        ("more", "reason"),
        [
            (
                {"rope_parameters": {**YARN, "rope_type": "linear", "factor": 1.0}},
                "its factor is 1",
            ),
            ({"rope_parameters": {"factor": 4.0, "rope_theta": 10_000.0}}, 'Add "rope_type"'),
            ({"rope_scale": YARN}, "Name it rope_parameters"),
            ({"rope_parameters": {**YARN, "factor": 2.0}, "rope_scaling": YARN}, "Remove that"),
        ],
    )
    def test_the_reason(self, more: dict[str, Any], reason: str) -> None:
        (note,) = idle_blocks(self.values(**more))
        assert reason in note

    @pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
    def test_beside_the_text_config(self, key: str) -> None:
        values = self.values("llava")
        (note,) = idle_blocks({**values, key: YARN})
        assert note.startswith(f"{key} does nothing: this model reads it in text_config")
        values["text_config"]["rope_parameters"] = YARN
        assert idle_blocks(values) == []


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
