"""The patch that a config has in force."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_posenc import inspect_rope, patch_model
from hf_posenc.engines.in_force import Scaling, scaling_of, tables_in_force
from tests.patch.test_patching import OPTIONS
from tests.support import zoo

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10_000.0,
}


@pytest.mark.parametrize("method", ["pi", "yarn", "llama3", "longrope", "dynamic_ntk"])
def test_the_config_of_a_patch_is_read_as_that_patch(method: str) -> None:
    model = patch_model(zoo.build("llama"), method, **OPTIONS[method])
    (patched,) = inspect_rope(model)
    names = ("rope_parameters", "max_position_embeddings")
    config = zoo.tiny_config("llama", **{name: getattr(model.config, name) for name in names})
    (table,) = tables_in_force(config)
    torch.testing.assert_close(
        table.in_force(1).inv_freq.float(), patched.inv_freq, rtol=1e-6, atol=0
    )
    scaling = scaling_of(config)
    assert scaling.scaled
    assert scaling.patch is not None
    assert scaling.patch.method == method
    assert bool(scaling.option) == (method != "longrope")  # whose knobs are lists


def test_the_option_is_the_patch() -> None:
    from hf_posenc.evaluation.loading import parse_patch

    config = zoo.tiny_config("llama", rope_parameters={**YARN, "beta_fast": 16})
    scaling = scaling_of(config)
    assert scaling.option == "yarn:scale=4,beta_fast=16"
    method, options = parse_patch(scaling.option).arguments()
    (one,) = inspect_rope(patch_model(zoo.build("llama"), method, **options))
    assert scaling.patch is not None
    (other,) = inspect_rope(patch_model(zoo.build("llama"), scaling.patch.build()))
    assert torch.equal(one.inv_freq, other.inv_freq)
    assert scaling_of(zoo.tiny_config("llama")) == Scaling(False)


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
