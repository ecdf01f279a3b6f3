"""Positions that differ by pair: DPE with equal group sizes is SelfExtend, in every layout of the pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_posenc import PosencError, patch_model, unpatch_model
from hf_posenc.methods import DPE, YaRN
from tests.support import zoo
from tests.support.families import build_text_model
from tests.support.selection import late

IDS = zoo.tokens(50)
LAYOUTS = ("llama", "cohere", "glm", "deepseek_v3", "gptj", "eurobert")
MORE = ("gpt_neox", "gemma3_text", "roformer", "falcon", "hunyuan_v1_dense")


@pytest.mark.parametrize("model_type", [*LAYOUTS, *late(MORE)])
def test_equal_sizes_are_self_extend(model_type: str) -> None:
    known = model_type in zoo.decoder_types()
    model = zoo.build(model_type) if known else build_text_model(model_type)
    knobs: dict[str, Any] = {"window": 8, "original_max_position_embeddings": 16, "layers": "all"}
    patch_model(model, "self_extend", group=3, **knobs)
    want = zoo.logits(model, IDS)
    unpatch_model(model)
    patch_model(model, "dpe", factors=[3, 3], **knobs)
    assert zoo.relative_difference(zoo.logits(model, IDS), want) < 1e-5
    unpatch_model(model)
    patch_model(model, "dpe", factors=[3, 2], **knobs)
    assert zoo.relative_difference(zoo.logits(model, IDS), want) > 1e-5


def test_the_parts_are_those_of_the_frequencies_below() -> None:
    """Beside YaRN, whose rotary module is another; the last position of a forward may be 0."""
    model = zoo.build("cohere")
    methods = [YaRN(scale=4), DPE(factors=[1, 4], window=8)]
    patch_model(model, methods, original_max_position_embeddings=16)
    full = zoo.logits(model, IDS)
    positions = torch.cat((torch.arange(50), torch.arange(1)))[None]
    ids = torch.cat((IDS, IDS[:, :1]), 1)
    packed = zoo.logits(model, ids, position_ids=positions)[:, :50]
    assert zoo.relative_difference(packed, full) < 1e-5


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ([2, 2, 3], "3 factors, which do not divide the 8 pairs"),
        ([], "a list of whole numbers"),
        ([2, 0.5], "a list of whole numbers"),
        (2, "a list of whole numbers"),
    ],
)
def test_factors_that_do_not_fit(factors: Any, message: str) -> None:
    with pytest.raises(PosencError, match=message):
        patch_model(zoo.build("llama"), "dpe", factors=factors)
