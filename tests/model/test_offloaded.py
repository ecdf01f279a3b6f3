"""Models larger than their devices: layers that accelerate keeps on the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_posenc import patched
from hf_posenc.evaluation.measuring.identity import weights_hash
from hf_posenc.evaluation.scoring.head_replay import TokenScorer
from tests.support import zoo

PLACES = {
    **dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), "cpu"),
    "model.layers.0": "disk",
    "model.layers.1": "cpu",
}


@pytest.fixture
def models(tmp_path: Path) -> tuple[Any, Any]:
    """A model, and itself with a layer on the disk."""
    model = zoo.build("llama", num_hidden_layers=2, tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "model")
    options: dict[str, Any] = {"device_map": PLACES, "offload_folder": str(tmp_path / "disk")}
    offloaded = LlamaForCausalLM.from_pretrained(tmp_path / "model", **options)
    assert any(parameter.is_meta for parameter in offloaded.parameters())
    return model, offloaded


@pytest.mark.parametrize("prefill", [None, 16])
@pytest.mark.parametrize("method", ["none", "yarn", "rerope", "alibi"])
def test_they_are_scored_as_if_they_were_whole(
    models: tuple[Any, Any], method: str, prefill: int | None
) -> None:
    ids = zoo.tokens(57)[0]
    losses = []
    for model in models:
        plain = TokenScorer(model, ids, prefill=prefill)
        assert plain.exact
        if method == "none":
            losses.append(plain(ids))
            continue
        options: dict[str, Any] = {"yarn": {"scale": 4}, "rerope": {"window": 16}}.get(method, {})
        with patched(model, method, **options):
            losses.append(TokenScorer(model, ids, prefill=prefill)(ids))
        assert not torch.equal(plain(ids), losses[-1])
    assert torch.equal(*losses)


def test_their_weights_have_the_same_hash(models: tuple[Any, Any]) -> None:
    whole, offloaded = models
    assert weights_hash(whole) == weights_hash(offloaded)
    with torch.no_grad():
        whole.model.layers[0].mlp.up_proj.weight[0, 0] += 1e-6
    assert weights_hash(whole) != weights_hash(offloaded)
