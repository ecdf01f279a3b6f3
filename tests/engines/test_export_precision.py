"""In which precision an adapter is exported, and what `hf-posenc export --verify` compares it with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_posenc import from_pretrained, patch_model
from hf_posenc.engines import export, write_export
from hf_posenc.training import choose_parameters
from tests.cli.test_cli import invoke
from tests.support import zoo
from tests.support.verifying import verify_here


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
    write_export(found, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tuned = from_pretrained(adapter, dtype=torch.float32)
    ids = zoo.tokens(96)
    assert zoo.relative_difference(zoo.logits(plain, ids), zoo.logits(tuned, ids)) < 1e-4


def test_an_adapter_is_not_served_from_where_it_is(adapter: Path) -> None:
    assert export(adapter, "vllm").overrides == ()
    assert export(adapter.parent / "base", "vllm", method="yarn", scale=4).overrides


def test_a_lora_alone_keeps_the_precision_of_its_base(adapter: Path, tmp_path: Path) -> None:
    from hf_posenc.training import lora_config

    peft = pytest.importorskip("peft")
    base = patch_model(from_pretrained(tmp_path / "base"), "ntk_mixed", scale=4)
    tuned = peft.get_peft_model(base, lora_config(base, modules_to_save=[]))
    tuned.save_pretrained(tmp_path / "alone")
    write_export(export(tmp_path / "alone", "transformers5"), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert plain.dtype == torch.bfloat16


@pytest.mark.parametrize("clean", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_command_finds_it_to_be_the_same_model(
    clean: bool, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not clean:
        verify_here(monkeypatch)
    given = ("export", adapter, "--to", "transformers5", "--output", tmp_path / "out", "--verify")
    assert "the same model" in " ".join(invoke(*map(str, given)).output.split())
