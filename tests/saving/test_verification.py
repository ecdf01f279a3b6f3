"""A saved model against the model in memory, in a process that has no hf_posenc."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from hf_posenc import PosencError, VerificationError, patch_model, verification
from hf_posenc.verification import require, verify_export
from tests.support import zoo
from tests.support.verifying import verify_here


@pytest.fixture
def model() -> PreTrainedModel:
    return patch_model(zoo.build("llama"), "ntk_mixed", scale=4)


@pytest.mark.slow
def test_the_same_model(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    model.train()
    found = verify_export(tmp_path, model)
    assert found.passed
    assert found.error < 1e-5
    assert (found.tokens, found.reach) == (64 + 64, 256)
    assert model.training
    require(found)
    assert "the same model" in str(found)


@pytest.mark.slow
def test_another_method(tmp_path: Path) -> None:
    patched = patch_model(zoo.build("llama"), "rerope", window=16)  # plain transformers has none
    patched.save_pretrained(tmp_path / "rerope")
    with pytest.raises(PosencError, match=r"cannot load .*rerope needs hf_posenc"):
        verify_export(tmp_path / "rerope")
    found = verify_export(tmp_path / "rerope", patched, plain=False)
    assert found.passed
    assert "with hf_posenc: the same model" in str(found)
    other = patch_model(zoo.build("llama"), "rerope", window=8)
    assert not verify_export(tmp_path / "rerope", other, plain=False).passed


@pytest.mark.parametrize("clean", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_missing_weight(clean: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not clean:
        verify_here(monkeypatch)
    patched = patch_model(zoo.build("llama"), "rerope", window=16)
    zoo.build("llama").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    kept = {name: value for name, value in weights.items() if "layers.3.mlp.up" not in name}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = verify_export(tmp_path, patched)
    assert found.error > 1e-2
    assert found.missing == ("model.layers.3.mlp.up_proj.weight",)
    with pytest.raises(VerificationError, match=r"ANOTHER model.*up_proj"):
        require(found)


def test_far_positions_count() -> None:
    """Lists that differ only past the trained length: a text within it could not tell."""
    lists: dict[str, Any] = {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
    plain = zoo.build("llama")
    model = patch_model(zoo.build("llama"), "longrope", scale=4, attention_factor=1.0, **lists)
    near, far = verification._probes(model)
    assert near["input_ids"].shape == (1, 64)
    (a, b), (c, d) = (verification._logits(one, [near, far]) for one in (model, plain))
    assert torch.equal(a, c)
    assert zoo.relative_difference(b, d) > 1e-2


@pytest.mark.parametrize(
    ("error", "missing", "passed"),
    [
        *((0.0, [], True), (1e-5, [], True), (1e-3, [], False)),
        *((float("nan"), [], False), (0.0, ["lm_head.weight"], False)),
    ],
)
def test_what_passes(
    model: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
    error: float,
    missing: list[str],
    passed: bool,
) -> None:
    def found(_: Path, __: str, inner: Any, probes: list[dict[str, Any]], *___: object) -> Any:
        logits = verification._logits(inner, probes)
        for one in logits:
            one[0, 0, 0] += error * one.abs().max()
        return logits, {"version": "5", "missing": missing}

    monkeypatch.setattr(verification, "_in_a_clean_process", found)
    assert verify_export("folder", model).passed == passed


@pytest.mark.slow
def test_the_clean_process_has_no_hf_posenc(model: PreTrainedModel, tmp_path: Path) -> None:
    """A folder of packages in which transformers itself asks for it."""
    (tmp_path / "transformers.py").write_text("import hf_posenc\n")
    with pytest.raises(PosencError, match="kept out of this process"):
        verify_export(tmp_path / "model", model, packages=tmp_path)


def test_rounding_is_no_other_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frequencies half a float32 off turn far positions; a scale that is 0.1 % off does too, and is another model."""
    verify_here(monkeypatch)
    sizes = {"max_position_embeddings": 4096, "initializer_range": 0.2}
    model = patch_model(zoo.build("llama", **sizes), "yarn", scale=16)
    tables = list(model.buffers())
    before = [table.clone() for table in tables]
    logits = zoo.logits(model, zoo.tokens(20))
    model.save_pretrained(tmp_path)
    found = verify_export(tmp_path, model)
    assert found.passed
    assert found.reach == 16 * 4096
    assert found.tolerance > 5 * verification.TOLERANCES[torch.float32]  # a fixed one refused it
    assert all(map(torch.equal, tables, before))
    assert torch.equal(zoo.logits(model, zoo.tokens(20)), logits)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"factor": 16.0', '"factor": 16.016'))
    assert not verify_export(tmp_path, model).passed
