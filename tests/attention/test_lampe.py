"""LaMPE and Jet-Long, whose positions follow the length of the text; DPE, whose positions differ by pair."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_posenc
from hf_posenc import PosencError, patch_model, unpatch_model
from hf_posenc.methods import DPE, LaMPE, LogN, YaRN
from tests.attention.test_attention import PATHS, assert_close, build
from tests.support import zoo
from tests.support.attention_llama import ORIGINAL, Case, reference
from tests.support.attention_ways import left_masked, left_padded, right_padded
from tests.support.families import build_text_model
from tests.support.selection import late
from tests.support.zoo import CACHE

IDS = zoo.tokens(50)
KNOBS: dict[str, Any] = {"growth": 0.01, "shift": -0.5, "capacity": 50.0, "head": 6, "tail": 4}
CASE = Case("lampe", KNOBS)


def patched(model: Any, **more: Any) -> Any:
    knobs = {**KNOBS, "bucket": 16, **more}
    return patch_model(model, "lampe", original_max_position_embeddings=ORIGINAL, **knobs)


@pytest.mark.parametrize("knobs", [{}, {"tail": 0}, {"tail": 30}, {"head": 20}, {"capacity": 20.0}])
def test_a_text_equals_the_authors_regions(knobs: dict[str, Any]) -> None:
    model = patched(build(), **knobs)
    want = reference(model, replace(CASE, options={**KNOBS, **knobs}), IDS)
    assert_close(zoo.logits(model, IDS), want)
    assert_close(zoo.logits(copy.deepcopy(model), IDS), want)


@pytest.mark.parametrize("way", [left_padded, left_masked, right_padded])
@pytest.mark.parametrize("path", PATHS, indirect=True)
def test_every_row_has_its_own_length(way: Any, path: str) -> None:
    model = patched(build())
    assert_close(way(model, IDS), reference(model, CASE, IDS))


def test_a_cached_step_reads_the_length_of_its_request() -> None:
    """In one layer keys and values do not depend on it: a prompt of 40 tokens, then one bucket of 16 more."""
    model = patched(build(num_hidden_layers=1))
    prompt = model(input_ids=IDS[:, :40], use_cache=True)
    assert_close(prompt.logits, reference(model, CASE, IDS[:, :40]))
    step = model(input_ids=IDS[:, 40:41], **{CACHE: prompt[CACHE]}, use_cache=True)
    case = replace(CASE, options={**KNOBS, "text": 56})
    assert_close(step.logits, reference(model, case, IDS[:, :41])[:, 40:])


def test_bands_follow_the_length_of_the_query_or_of_the_request() -> None:
    """As the other one's default."""
    by_row = [ORIGINAL + max(0, m // 16) * 16 for m in range(50)]
    model = patched(build(), update="row")
    case = replace(CASE, options={**KNOBS, "text": by_row})
    assert_close(zoo.logits(model, IDS), reference(model, case, IDS))
    knobs: dict[str, Any] = {"window": 6, "update": "request"}
    model = patch_model(build(), "jet_long", original_max_position_embeddings=ORIGINAL, **knobs)
    case = Case("jet_long", {"window": 6, "text": 50})
    assert_close(zoo.logits(model, IDS), reference(model, case, IDS))


@pytest.mark.parametrize("length", [ORIGINAL, 11])
def test_short_texts_are_read_as_unpatched(length: int) -> None:
    model = build()
    before = zoo.logits(model, IDS[:, :length])
    assert zoo.relative_difference(zoo.logits(patched(model), IDS[:, :length]), before) < 1e-6
    full = zoo.logits(patched(build(), capacity=1e6), IDS)  # room for all of its tokens
    assert zoo.relative_difference(full, zoo.logits(build(), IDS)) < 1e-6


def test_it_is_saved_composed_and_undone(tmp_path: Path) -> None:
    model = build()
    before = zoo.logits(model, IDS)
    methods = [YaRN(scale=2), LaMPE(**KNOBS, bucket=16), LogN()]
    patch_model(model, methods, original_max_position_embeddings=ORIGINAL)
    case = replace(CASE, table=("yarn", {"scale": 2.0}), law="log_n")
    assert_close(zoo.logits(model, IDS), reference(model, case, IDS))
    model.save_pretrained(tmp_path)
    assert torch.equal(zoo.logits(hf_posenc.from_pretrained(tmp_path), IDS), zoo.logits(model, IDS))
    unpatch_model(model)
    assert torch.equal(zoo.logits(model, IDS), before)


def test_gradients() -> None:
    model = patched(build())
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_what_it_needs() -> None:
    with pytest.raises(PosencError, match="lampe needs growth="):
        patch_model(build(), "lampe")
    with pytest.raises(PosencError, match="update of jet_long 'sequence'"):
        patch_model(build(), "jet_long", update="sequence")
    with pytest.raises(PosencError, match="jet_long: window=1000 leaves no trained positions"):
        patch_model(build(), "jet_long", window=1000)
    with pytest.raises(PosencError, match="reads the text in both directions"):
        patched(build_text_model("eurobert"))


# DPE, whose positions differ by pair: with equal group sizes it is SelfExtend, in every layout of the pairs

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
    packed = zoo.logits(model, torch.cat((IDS, IDS[:, :1]), 1), position_ids=positions)[:, :50]
    assert zoo.relative_difference(packed, full) < 1e-5


def test_factors_that_do_not_divide_the_pairs() -> None:
    with pytest.raises(PosencError, match="3 factors, which do not divide the 8 pairs"):
        patch_model(zoo.build("llama"), "dpe", factors=[2, 2, 3])
