"""Filters in a list: a table changed by several methods in order, under caches and padding, saved and read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_posenc
from hf_posenc import PosencError, patch_model, unpatch_model
from hf_posenc.methods import (
    Clip,
    DynamicNTK,
    DynamicPI,
    DynamicYaRN,
    LogN,
    Method,
    NoPE,
    NTKAware,
    PositionInterpolation,
    PowerBasis,
    ReRoPE,
    ResonanceRoPE,
    TruncatedBasis,
    YaRN,
)
from hf_posenc.rope import RopeSpec
from tests.attention.test_attention import build
from tests.support import references, zoo
from tests.support.attention_llama import ORIGINAL
from tests.support.attention_ways import WAYS
from tests.support.selection import covering, late

IDS = zoo.tokens(50)
LISTS: dict[str, list[Method]] = {
    "yarn, soft clip": [YaRN(scale=4), Clip(soft=3)],
    "pi, power, clip": [PositionInterpolation(scale=2), PowerBasis(power=0.5), Clip(pairs=2)],
    "yarn, resonance": [YaRN(scale=4), ResonanceRoPE()],
    "ntk, floor": [NTKAware(scale=2), Clip(turns=0.5)],
    "two filters": [TruncatedBasis(wavelength=60), ResonanceRoPE()],
}


def table_of(methods: list[Method], dim: int, theta: float) -> tuple[list[float], float]:
    first, *filters = methods
    table, factor = references.REFERENCES[first.name](dim, theta, ORIGINAL, **first.options())
    for each in filters:
        table = references.FILTERS[each.name](table, ORIGINAL, **each.options())
    return table, factor


@pytest.mark.parametrize("which", LISTS)
def test_filters_change_the_finished_table_in_order(which: str, tmp_path: Path) -> None:
    methods, model = LISTS[which], build()
    before = zoo.logits(model, IDS)
    patch_model(model, methods, original_max_position_embeddings=ORIGINAL)
    patch = zoo.in_force(model)
    (table,) = patch.tables
    want, factor = table_of(methods, table.dim, model.config.rope_parameters["rope_theta"])
    torch.testing.assert_close(table.inv_freq, torch.tensor(want), rtol=1e-6, atol=0)
    assert table.attention_factor == pytest.approx(factor)
    assert table.rope_type == " + ".join(method.name for method in methods)
    assert patch.methods == tuple(method.name for method in methods)
    assert patch.export == "longrope"
    got = zoo.logits(model, IDS)
    assert zoo.relative_difference(got, before) > 1e-3
    model.save_pretrained(tmp_path)
    assert torch.equal(zoo.logits(hf_posenc.from_pretrained(tmp_path), IDS), got)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert zoo.relative_difference(zoo.logits(plain, IDS), got) < 1e-4
    patch_model(model, methods, original_max_position_embeddings=ORIGINAL)  # the same once more
    with pytest.raises(PosencError, match="already patched with"):
        patch_model(model, methods[:1], original_max_position_embeddings=ORIGINAL)
    unpatch_model(model)
    assert torch.equal(zoo.logits(model, IDS), before)


@pytest.mark.parametrize(
    ("pairs", "clipped"), [(64, 20), (48, 15), (40, 13), (32, 10), (24, 8), (16, 5), (8, 3), (4, 3)]
)
def test_clip_fades_as_large_a_share_as_the_authors(pairs: int, clipped: int) -> None:
    rope = RopeSpec(2 * pairs, 10_000.0, ORIGINAL)
    left = Clip().inv_freq(rope) / rope.default_inv_freq()
    kept, faded = left[: pairs - clipped], left[pairs - clipped :]
    assert bool((kept == 1).all())
    assert (float(faded[0]), float(faded[-1])) == (1, 0)
    assert bool((faded.diff() < 0).all())


BESIDE = (
    [YaRN(scale=4), Clip(pairs=3), ReRoPE(window=8), LogN()],
    [DynamicNTK(scale=2, update="row", bucket=8), Clip(pairs=3)],
)


@pytest.mark.parametrize(
    ("way", "methods"),
    [*covering(WAYS[::3], BESIDE), *late(WAYS[1::3], BESIDE), *late(WAYS[2::3], BESIDE)],
)
def test_filters_beside_attention_hold_in_every_way_to_run(way: Any, methods: Any) -> None:
    model = patch_model(build(), methods, original_max_position_embeddings=ORIGINAL)
    full = zoo.logits(model, IDS)
    assert zoo.relative_difference(way(model, IDS), full) < 1e-4
    unpatch_model(model)
    others = [method for method in methods if not isinstance(method, Clip)]
    patch_model(model, others, original_max_position_embeddings=ORIGINAL)
    assert zoo.relative_difference(zoo.logits(model, IDS), full) > 1e-3  # the filter was in force


def test_a_filter_follows_a_dynamic_method_through_its_lengths() -> None:
    model = build()
    methods = [DynamicYaRN(update="sequence"), Clip(pairs=3)]
    patch_model(model, methods, original_max_position_embeddings=ORIGINAL)
    want, _ = references.dynamic_yarn(16, 10_000.0, ORIGINAL, 50)
    want = references.clip_of(want, ORIGINAL, pairs=3)
    (rotary,) = (m for m in model.modules() if hasattr(m, "specs"))
    got = rotary.table("", 50)[0]  # type: ignore[operator]
    torch.testing.assert_close(got, torch.tensor(want), rtol=1e-6, atol=0)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_p_rope_saves_natively(model_type: str, tmp_path: Path) -> None:
    model = zoo.build(model_type)
    patch_model(model, "clip", share=0.5)
    assert zoo.in_force(model).export == "rope_parameters"
    parameters = model.config.rope_parameters
    own = parameters.get("full_attention", parameters)
    assert (own["rope_type"], own["partial_rotary_factor"]) == ("proportional", 0.5)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_scaling"]["rope_type"] == "proportional"  # else 4.57 ignores it
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(zoo.logits(plain, IDS), zoo.logits(model, IDS))


CLIP, YARN = Clip(pairs=2), YaRN(scale=2)


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ([CLIP, YARN], "clip changes the table of the method before it.*yarn first"),
        ([YARN, CLIP, NTKAware(scale=2)], "clip changes the table"),
        ([YARN, NTKAware(scale=2)], "Two methods on one seam exclude each other"),
        ([CLIP, NoPE()], "exclude each other: clip, nope"),
        ([YARN, DynamicPI()], "Two rotary tables exclude each other: yarn, dynamic_pi"),
        ([DynamicYaRN(), YARN], "Two rotary tables exclude each other"),
        ([Clip(share=0), ReRoPE()], "No attention layer of this model rotates, as rerope needs"),
        ([ReRoPE(log_n=True), LogN()], "exclude each other: log_n, rerope with log_n"),
    ],
)
def test_lists_without_an_order_are_refused(methods: list[Method], message: str) -> None:
    with pytest.raises(PosencError, match=message):
        patch_model(build(), methods)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"soft": 2, "pairs": 1}, "not soft, pairs"),
        ({"share": 1.5}, "share is a part of the pairs"),
    ],
)
def test_clip_takes_one_option(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PosencError, match=message):
        Clip(**options)
