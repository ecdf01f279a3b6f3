"""Attention-path methods in models of several towers, and where tokens see what follows them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from hf_posenc import PosencError, UnsupportedModelError, patch_model, unpatch_model
from hf_posenc.model import masks
from tests.model.test_attention_architectures import (
    LENGTH,
    SPARSE,
    left_masked,
    left_masked_cached,
    patch,
)
from tests.support import zoo


@pytest.mark.parametrize("method", ["rerope", "string", "sliding_window"])
def test_tokens_that_see_what_follows_are_computed_or_refused(method: str) -> None:
    """Image tokens of Gemma 3 see each other in both directions."""
    model, ids = zoo.build("gemma3"), zoo.tokens(LENGTH)
    kinds = torch.zeros_like(ids)
    kinds[:, 4:9] = 1
    before = zoo.logits(model, ids, token_type_ids=kinds)
    assert zoo.relative_difference(zoo.logits(model, ids), before) > 1e-2
    options: dict[str, Any] = {"shift": 40} if method == "string" else {"window": 40}
    patch_model(model, method, layers="all", **options)
    try:
        got = zoo.logits(model, ids, token_type_ids=kinds)
    except PosencError:
        return
    assert zoo.relative_difference(got, before) < 2e-6


@pytest.mark.parametrize("dense", [1, 1 << 18])
@pytest.mark.parametrize("name", ["dual_chunk", "log_n", "dynamic_ntk_row"])
def test_padding_that_the_decoder_gets_as_masks_by_layer_type(
    name: str, dense: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 3 makes the masks, written or not, around the decoder that it hands them to."""
    model, ids = zoo.build("gemma3"), zoo.tokens(LENGTH)
    monkeypatch.setattr(masks, "DENSE", dense)
    patch(model, name)
    full = zoo.logits(model, ids)
    for way in (left_masked, left_masked_cached):
        assert zoo.relative_difference(way(model, ids), full) < 1e-4


FEW_COMPOSITES = ("qwen2_5_vl", "paligemma", "diffusion_gemma")
COMPOSITES = [
    pytest.param(name, marks=() if name in FEW_COMPOSITES else pytest.mark.slow)
    for name in zoo.composite_types()
]


@pytest.mark.parametrize("model_type", COMPOSITES)
def test_composite_models_are_as_before_with_a_window_longer_than_the_text(model_type: str) -> None:
    """Though their keys are cached elsewhere; and a short window acts."""
    model, ids = zoo.build(model_type), zoo.tokens(LENGTH)
    before = zoo.logits(model, ids)
    kwargs: dict[str, Any] = {"layers": "all", "original_max_position_embeddings": 64}
    try:
        patch_model(model, "rerope", window=500, **kwargs)
    except UnsupportedModelError as error:
        refusal = str(error)
    else:
        refusal = ""
        assert zoo.relative_difference(zoo.logits(model, ids), before) < 1e-5
        unpatch_model(model)
        patch_model(model, "rerope", window=5, **kwargs)
        assert zoo.relative_difference(zoo.logits(model, ids), before) > 1e-3
        unpatch_model(model)
    assert bool(refusal) == (model_type in REFUSED_COMPOSITES), refusal
    assert re.search(REFUSED_COMPOSITES.get(model_type, ""), refusal)
    assert torch.equal(zoo.logits(model, ids), before)


REFUSED_COMPOSITES = {"mistral_large4": SPARSE, "diffusion_gemma": "besides attention"}


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
@pytest.mark.parametrize("method", ["rerope", "log_n"])
def test_an_image_with_positions_on_three_axes_is_refused(model_type: str, method: str) -> None:
    """Layers of Qwen3-VL get no positions beside an image, those of Qwen2-VL get all three axes."""
    model: Any = zoo.build(model_type)
    config, vision = model.config, model.config.vision_config
    merge, features = vision.spatial_merge_size, vision.temporal_patch_size * vision.patch_size**2
    grid = torch.tensor([[1, 2 * merge, 2 * merge]])
    image = [config.vision_start_token_id, *[config.image_token_id] * 4]
    ids = torch.tensor([[10, 11, *image, 12, 13, 14]])
    given: dict[str, Any] = {
        "pixel_values": torch.randn(int(grid.prod()), 3 * features),
        "image_grid_thw": grid,
        "mm_token_type_ids": (ids == config.image_token_id).int(),
    }
    before = zoo.logits(model, ids, **given)
    patch_model(model, method)
    with pytest.raises(PosencError, match=r"on three axes.* Use a frequency method"):
        zoo.logits(model, ids, **given)
    unpatch_model(model)
    assert torch.equal(zoo.logits(model, ids, **given), before)
