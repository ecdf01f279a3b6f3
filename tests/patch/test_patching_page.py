"""The code of docs/patching.md runs, and does what the text beside it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_posenc import get_patch
from hf_posenc.embedded import model_path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "patching.md"
CODE = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    return {"model": AutoModelForCausalLM.from_pretrained(model_path())}


def run(code: str, names: dict[str, Any]) -> None:
    exec(compile(code, PAGE.name, "exec"), names)


def test_methods_that_compute_attention(
    names: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run(CODE[0], names)
    assert "attention of 4 layers by hf_posenc instead of sdpa" in capsys.readouterr().out
    patch = get_patch(names["model"])
    assert patch is not None
    assert patch.methods == ("yarn", "rerope", "alibi", "log_n")


@pytest.mark.filterwarnings("ignore:.*starts untrained")
def test_what_trains(names: dict[str, Any], tmp_path: Path) -> None:
    first, second = CODE[1].split("model.save_pretrained")
    run(first, names)
    trained = names["trained"]
    assert "model.layers.0.self_attn.posenc.r1" in trained
    for value in trained.values():
        torch.nn.init.uniform_(value)
    run(f"model.save_pretrained{second}", names)
    assert {path.name for path in (tmp_path / "patch").iterdir()} == {
        "posenc_config.json",
        "posenc.safetensors",
    }
    found = dict(names["model"].named_parameters())
    for name, value in trained.items():
        assert value.dtype == torch.float32
        assert torch.equal(found[name], value)
