"""The folders that an export writes: of a model, and of an adapter."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_posenc import PosencError, from_pretrained, patch_model
from hf_posenc.engines import export, write_export
from hf_posenc.training import choose_parameters
from tests.support import zoo
from tests.support.commands import invoke
from tests.support.selection import quick
from tests.support.verifying import verify_here


def config_of(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return values


class TestWriting:
    def test_a_folder_that_loads(self, saved: Path, tmp_path: Path) -> None:
        folder = tmp_path / "out"
        written = {path.name for path in write_export(export(saved, "vllm"), folder)}
        assert {"config.json", "export.json", "model.safetensors"} <= written
        assert (folder / "model.safetensors").samefile(saved / "model.safetensors")
        assert "hf_posenc" not in config_of(folder)
        record = json.loads((folder / "export.json").read_text(encoding="utf-8"))
        assert record["engine"] == "vllm"
        assert record["errors"][0]["frequency"] < 1e-6
        write_export(export(saved, "transformers5"), tmp_path / "own", weights="none")
        assert config_of(tmp_path / "own")["hf_posenc"] == config_of(saved)["hf_posenc"]
        assert not (tmp_path / "own" / "model.safetensors").exists()
        write_export(export(saved, "vllm"), folder, weights="copy")  # again, into the same folder
        assert not (folder / "model.safetensors").samefile(saved / "model.safetensors")

    def test_newer_weights_in_other_files_replace_the_old_ones(self, tmp_path: Path) -> None:
        source, folder, model = tmp_path / "model", tmp_path / "out", zoo.build("llama")
        write = functools.partial(write_export, weights="copy")
        model.save_pretrained(source)
        write(export(source, "transformers5", method="yarn", scale=2), folder)
        with torch.no_grad():
            model.lm_head.weight += 1
        (source / "model.safetensors").unlink()
        model.save_pretrained(source, max_shard_size="100KB")
        write(export(source, "transformers5", method="yarn", scale=2), folder)
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)

    def test_tokenizers_name_a_class_of_transformers_4(self, saved: Path, tmp_path: Path) -> None:
        source = tmp_path / "model"
        write_export(export(saved, "vllm"), source)
        (source / "export.json").unlink()
        (source / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
        names = {"transformers4": "PreTrainedTokenizerFast", "transformers5": "TokenizersBackend"}
        for engine, expected in names.items():
            folder = tmp_path / engine
            write_export(export(source, engine), folder)
            values = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
            assert values["tokenizer_class"] == expected

    def test_refusals(self, saved: Path, llama: Path, tmp_path: Path) -> None:
        found, other = export(saved, "vllm"), export(llama, "vllm", method="rerope")
        for exported, folder, weights, said in (
            (found, saved, "link", "where the model is"),
            (found, llama, "link", "another model"),
            (other, tmp_path / "out", "link", "cannot have"),
            (found, tmp_path / "out", "move", "weights is one of"),
        ):
            with pytest.raises(PosencError, match=said):
                write_export(exported, folder, weights=weights)
        with pytest.raises(PosencError, match="config"):
            export(tmp_path, "vllm")
        with pytest.raises(PosencError, match="already patched"):
            export(saved, "vllm", method="yarn", scale=2)
        AutoConfig.for_model("recurrent_gemma", num_hidden_layers=3).save_pretrained(tmp_path)
        with pytest.raises(PosencError, match="no context length: write max_position_embeddings"):
            export(tmp_path, "vllm")


def test_an_adapter_without_a_base_is_refused(tmp_path: Path) -> None:
    """PEFT 0.18 writes an empty name for a model that was made from a config."""
    values = {"peft_type": "LORA", "base_model_name_or_path": "", "r": 2}
    (tmp_path / "adapter_config.json").write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(PosencError, match="names no base model"):
        export(tmp_path, "vllm")


@pytest.mark.parametrize("model_type", quick(["deepseek_v3", "glm4_moe_lite"], ["deepseek_v3"]))
def test_deepseeks_classes_take_only_their_own_yarn(model_type: str, tmp_path: Path) -> None:
    """They compute any rope_type as YaRN, whose factor the scores have too."""
    zoo.build(model_type).save_pretrained(tmp_path)
    for engine in ("vllm", "sglang"):
        assert export(tmp_path, engine, method="yarn", scale=2.0).possible
        assert export(tmp_path, engine, method="ntk", scale=2.0).possible  # by rope_theta alone
        refused = export(tmp_path, engine, method="llama3", scale=2.0)
        assert not refused.possible
        assert "its class for this model computes every scaling as YaRN" in str(refused.reason)
    refused = export(tmp_path, "llama.cpp", method="pi", scale=2.0)
    assert "its class for this model computes a factor of scores" in str(refused.reason)
    assert export(tmp_path, "llama.cpp", method="ntk", scale=2.0).possible


# In which precision an adapter is exported, and what `hf-posenc export --verify` compares it with.


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A LoRA of a base model in bfloat16, trained in float32 as hf-posenc finetune does."""
    pytest.importorskip("peft")
    zoo.build("llama").bfloat16().save_pretrained(tmp_path / "base")
    base = from_pretrained(tmp_path / "base", dtype=torch.float32)
    tuned = choose_parameters(patch_model(base, "ntk_mixed", scale=4), "lora")
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 1e-3)
    tuned.save_pretrained(tmp_path / "adapter")  # type: ignore[operator]
    return tmp_path / "adapter"


def test_trained_float32_is_not_rounded_to_the_base(adapter: Path, tmp_path: Path) -> None:
    found = export(adapter, "transformers5")
    assert found.is_adapter
    assert export(adapter, "sglang").overrides == ()  # it is not served from where it is
    write_export(found, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tuned = from_pretrained(adapter, dtype=torch.float32)
    ids = zoo.tokens(96)
    assert zoo.relative_difference(zoo.logits(plain, ids), zoo.logits(tuned, ids)) < 1e-4


def test_a_lora_alone_keeps_the_precision_of_its_base(adapter: Path, tmp_path: Path) -> None:
    from hf_posenc.training import lora_config

    peft = pytest.importorskip("peft")
    base = patch_model(from_pretrained(tmp_path / "base"), "ntk_mixed", scale=4)
    tuned = peft.get_peft_model(base, lora_config(base, modules_to_save=[]))
    tuned.save_pretrained(tmp_path / "alone")
    write_export(export(tmp_path / "alone", "transformers5"), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


@pytest.mark.parametrize("clean", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_command_finds_it_to_be_the_same_model(
    clean: bool, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not clean:
        verify_here(monkeypatch)
    given = ("export", adapter, "--to", "transformers5", "--output", tmp_path / "out", "--verify")
    assert "the same model" in " ".join(invoke(*given).output.split())
