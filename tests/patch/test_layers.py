"""Different methods in different layers, also where these share a rotary table."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_posenc
from hf_posenc import (
    PosencError,
    UnsupportedModelError,
    get_patch,
    inspect_rope,
    load_patch,
    patch_model,
    save_patch,
    unpatch_model,
)
from hf_posenc.attention import engine
from hf_posenc.methods import (
    DPE,
    ALiBi,
    Clip,
    DynamicNTK,
    DynamicYaRN,
    LaMPE,
    LMInfinite,
    LogN,
    NoPE,
    PositionInterpolation,
    ReRoPE,
    SelfExtend,
    SlidingWindow,
    Temperature,
    XPos,
    YaRN,
)
from tests.attention.test_attention import assert_close, build
from tests.support import zoo
from tests.support.attention_llama import CASES, ORIGINAL, Case, randomise, reference
from tests.support.attention_ways import WAYS, in_steps, token_by_token
from tests.support.emulated import EmulatedFlash
from tests.support.families import build_text_model
from tests.support.selection import covering, late, quick

pytestmark = pytest.mark.filterwarnings("ignore:.*starts untrained")
DEVICES = "cpu", "meta"
IDS = zoo.tokens(50)
YARN4, DROPPED = ("yarn", {"scale": 4.0}), Case("nope", table=("nope", {}))
NTK, LLAMA4, BUCKETS = CASES["dynamic_ntk_row"], CASES["temperature_llama4"], {0: 10, 1: 3}
REQUESTS: dict[str, tuple[Any, dict[int, Case]]] = {
    "nope in one layer": ({1: NoPE()}, {1: DROPPED}),
    "yarn, rerope": (
        {0: YaRN(scale=4), 1: ReRoPE(window=8)},
        {0: Case("yarn", table=YARN4), 1: CASES["rerope"]},
    ),
    "lists": (
        {(0,): [YaRN(scale=4), ReRoPE(window=8), LogN()], range(1, 2): None},
        {0: replace(CASES["rerope_log_n"], table=YARN4)},
    ),
    "bias, bands": (
        {0: ALiBi(), 1: SelfExtend(**CASES["self_extend"].options)},
        {0: CASES["alibi"], 1: CASES["self_extend"]},
    ),
    "trained": ({0: "kerple_log", 1: "rope_bias"}, {0: CASES["kerple_log"], 1: CASES["rope_bias"]}),
    "by row, xpos": (
        {0: DynamicNTK(scale=2.0, update="row", bucket=8), 1: XPos(scale_base=12)},
        {0: CASES["dynamic_ntk_row"], 1: CASES["xpos"]},
    ),
    "two windows": (
        {0: ReRoPE(window=5), 1: SelfExtend(**CASES["self_extend"].options)},
        {0: Case("rerope", relative={"window": 5}), 1: CASES["self_extend"]},
    ),
    "two reaches": (
        {0: SlidingWindow(window=8), 1: LMInfinite(**CASES["lm_infinite"].options)},
        {0: CASES["sliding_window"], 1: CASES["lm_infinite"]},
    ),
    "two scales": (
        {0: DynamicNTK(scale=2.0, bucket=8), 1: DynamicNTK(scale=3.0, bucket=8)},
        {0: NTK, 1: replace(NTK, table=("dynamic_ntk", {"scale": 3.0}))},
    ),
    "dpe in one layer": ({1: DPE(**CASES["dpe"].options)}, {1: CASES["dpe"]}),
    "two buckets": (
        {layer: DynamicNTK(scale=2.0, bucket=bucket) for layer, bucket in BUCKETS.items()},
        {layer: replace(NTK, options={"bucket": bucket}) for layer, bucket in BUCKETS.items()},
    ),
    "nope, temperature": (
        {0: [NoPE(), Temperature(law="llama4", beta=0.7)], 1: Temperature(law="ssmax")},
        {0: replace(LLAMA4, table=("nope", {})), 1: CASES["temperature_ssmax"]},
    ),
}


def patched(which: str) -> tuple[Any, Mapping[int, Case]]:
    request, cases = REQUESTS[which]
    model = build()
    patch_model(model, request, original_max_position_embeddings=ORIGINAL)
    randomise(model)
    return model, cases


@pytest.mark.parametrize(
    "which", quick(REQUESTS, ("yarn, rerope", "trained", "two scales", "dpe in one layer"))
)
def test_every_layer_has_its_own_methods(which: str) -> None:
    model, cases = patched(which)
    want = reference(model, cases, IDS)
    assert_close(zoo.logits(model, IDS), want)
    assert_close(zoo.logits(copy.deepcopy(model), IDS), want)
    patch = zoo.in_force(model)
    assert patch.export is None
    assert [name.split(".")[2] for name in patch.layers] == [str(layer) for layer in cases]


@pytest.mark.parametrize(
    ("which", "way"),
    [*((name, token_by_token) for name in REQUESTS), *covering(REQUESTS, WAYS[1:])],
)
def test_every_way_to_run_a_text_agrees(which: str, way: Any) -> None:
    model, cases = patched(which)
    assert_close(way(model, IDS), reference(model, cases, IDS))


@pytest.mark.parametrize("backend", [None, EmulatedFlash.name])
@pytest.mark.parametrize("which", ["two windows", "two reaches", "two scales", "two buckets"])
def test_what_layers_of_a_forward_share_is_of_one_method(which: str, backend: str | None) -> None:
    """Tables, parts, buckets, and what is known of the last keys, among which one may be hidden."""
    model, cases = patched(which)
    ids, mask = torch.cat((IDS[:, :44], IDS[:, 43:]), 1), torch.ones(1, 51, dtype=torch.long)
    mask[:, 44] = 0
    with engine.forced(backend):
        for sizes in ([51], [47, 4], [50, 1]):
            got = in_steps(model, ids, sizes, attention_mask=mask)
            got = torch.cat((got[:, :44], got[:, 45:]), 1)
            assert_close(got, reference(model, cases, IDS))


ROOM: dict[str, Any] = {"growth": 0.01, "shift": -0.5, "capacity": 50.0, "head": 6, "tail": 4}
GROWING: dict[str, tuple[Any, Any]] = {
    "row": (DynamicNTK(scale=2.0, bucket=8), lambda texts: NTK),
    "request": (
        DynamicNTK(scale=2.0, update="request", bucket=4),
        lambda texts: replace(NTK, options={"text": texts(4)}),
    ),
    "lampe": (LaMPE(**ROOM, bucket=16), lambda texts: Case("lampe", {**ROOM, "text": texts(16)})),
    "lampe 5": (LaMPE(**ROOM, bucket=5), lambda texts: Case("lampe", {**ROOM, "text": texts(5)})),
}
PAIRS = [("row", "request"), ("request", "lampe"), ("lampe", "row"), ("lampe", "lampe 5")]


@pytest.mark.parametrize("first", [50, 40])
@pytest.mark.parametrize("pair", PAIRS)
def test_every_layer_follows_its_own_length(pair: tuple[str, str], first: int) -> None:
    """Of a prompt, and of steps after it, by whole buckets."""

    def texts(bucket: int) -> list[int]:
        return [first - (first - m - 1) // bucket * bucket * (m >= first) for m in range(50)]

    model = build()
    methods = {layer: GROWING[name][0] for layer, name in enumerate(pair)}
    patch_model(model, methods, original_max_position_embeddings=ORIGINAL)
    got = in_steps(model, IDS, [first, *[1] * (50 - first)])
    cases = {layer: GROWING[name][1](texts) for layer, name in enumerate(pair)}
    assert_close(got, reference(model, cases, IDS))


def test_gradients_flow_through_layers_that_differ() -> None:
    model, _ = patched("trained")
    parameters = {name: value for name, value in model.named_parameters() if ".posenc." in name}
    assert {name.split(".")[2] for name in parameters} == {"0", "1"}
    zoo.logits(model, IDS)
    with torch.enable_grad():
        model(input_ids=IDS, labels=IDS).loss.backward()
    for value in parameters.values():
        assert value.grad is not None
        assert value.grad.abs().sum() > 0


def test_nope_in_some_layers_is_what_smollm3_ships() -> None:
    native = zoo.build("smollm3")
    assert native.config.no_rope_layers == [1, 1, 1, 0]
    rotating = zoo.build("smollm3", no_rope_layers=[1, 1, 1, 1])
    rotating.load_state_dict(native.state_dict())
    assert zoo.relative_difference(zoo.logits(rotating, IDS), zoo.logits(native, IDS)) > 1e-2
    patch_model(rotating, "nope", layers=[3])
    assert zoo.relative_difference(zoo.logits(rotating, IDS), zoo.logits(native, IDS)) < 1e-5


def test_layers_with_tables_of_their_own_keep_their_attention() -> None:
    """As `layers="full"` does, which saves for plain transformers."""
    model, other = zoo.build("gemma3_text"), zoo.build("gemma3_text")
    patch_model(model, {"full": NoPE(), "sliding": None})
    patch_model(other, "nope")
    assert torch.equal(zoo.logits(model, IDS), zoo.logits(other, IDS))
    patch = zoo.in_force(model)
    assert patch.attention is None
    by_type = {table.layer_type: bool(table.inv_freq.any()) for table in patch.tables}
    assert by_type == {"full_attention": False, "sliding_attention": True}


def test_the_name_of_a_table_chooses_it(tmp_path: Path) -> None:
    model, ids = zoo.build("gemma3_text"), zoo.tokens(50)
    before = zoo.logits(model, ids)
    with pytest.raises(PosencError, match="names a table, which rerope would not change"):
        patch_model(model, "rerope", layers="sliding_attention")
    patch_model(model, "pi", scale=2, layers="sliding_attention")
    types = {table.layer_type: table.rope_type for table in inspect_rope(model)}
    assert types == {"sliding_attention": "pi", "full_attention": "default"}
    after = zoo.logits(model, ids)
    assert zoo.relative_difference(after, before) > 1e-2
    model.save_pretrained(tmp_path)
    assert torch.equal(zoo.logits(AutoModelForCausalLM.from_pretrained(tmp_path), ids), after)
    assert torch.equal(zoo.logits(unpatch_model(model), ids), before)


def test_numbers_do_not_choose_tables_of_no_layer_type() -> None:
    """Layers of DeepSeek V4 read two tables, and their compressors too: half of them would be changed."""
    with pytest.raises(PosencError, match=r"main and compress, are not .*layers='compress'"):
        patch_model(zoo.build("deepseek_v4"), "yarn", scale=4, layers=[0])


def test_sliding_layers_that_share_the_table_stay() -> None:
    """Gemma 2's layers share one; its sliding layers come first."""
    model = zoo.build("gemma2")
    assert model.config.layer_types[0] == "sliding_attention"
    before = model(input_ids=IDS, output_hidden_states=True, use_cache=False).hidden_states
    patch_model(model, {"full": NoPE(), "sliding": None})
    after = model(input_ids=IDS, output_hidden_states=True, use_cache=False).hidden_states
    assert zoo.relative_difference(after[1], before[1]) < 2e-6  # of a sliding layer
    assert zoo.relative_difference(after[2], before[2]) > 1e-3
    assert len(zoo.in_force(model).layers) == 2


def test_a_choice_of_layers_for_a_table_that_others_share(tmp_path: Path) -> None:
    """The same as a dictionary, and once it is saved."""
    one, two = build(), build()
    patch_model(one, "yarn", scale=4, layers=[1], original_max_position_embeddings=ORIGINAL)
    patch_model(two, {1: YaRN(scale=4)}, original_max_position_embeddings=ORIGINAL)
    save_patch(one, tmp_path)
    loaded: Any = load_patch(build(), tmp_path)
    for other in (two, loaded):
        assert torch.equal(zoo.logits(one, IDS), zoo.logits(other, IDS))
    assert_close(zoo.logits(one, IDS), reference(one, {1: Case("yarn", table=YARN4)}, IDS))


def test_a_scaled_checkpoint_keeps_its_scaling_in_the_other_layers(tmp_path: Path) -> None:
    """Bands start from the frequencies in force, also where `replace=True` drops those of other layers."""
    parameters = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
    model = zoo.build("llama", rope_parameters={"rope_theta": 10_000.0, **parameters})
    plain, halved = Case("yarn", table=YARN4), Case("pi", table=("pi", {"scale": 2.0}))
    with pytest.raises(PosencError, match="already scaled"):
        patch_model(model, "pi", scale=2, layers=[1])
    patch_model(model, "pi", scale=2, layers=[1], replace=True)
    cases = dict.fromkeys((0, 2, 3), plain) | {1: halved}
    assert_close(zoo.logits(model, IDS), reference(model, cases, IDS))
    unpatch_model(model)
    patch_model(model, {0: PositionInterpolation(scale=2), 1: ReRoPE(window=8)}, replace=True)
    cases |= {0: halved, 1: replace(CASES["rerope"], table=YARN4)}
    assert_close(zoo.logits(model, IDS), reference(model, cases, IDS))
    model.save_pretrained(tmp_path)
    assert torch.equal(zoo.logits(hf_posenc.from_pretrained(tmp_path), IDS), zoo.logits(model, IDS))


BY_SEQUENCE = DynamicYaRN(update="sequence")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({0: YaRN(scale=4), range(2): NoPE()}, r"Layer 0 is in two keys.*0 and range\(0, 2\)"),
        ({"rope_type": "yarn", "factor": 4.0}, "this is a rope_scaling: write patch_model"),
        ({0: None}, "Every layer of the dictionary has the method None"),
        ({9: NoPE()}, "this model has 2 layers, numbered from 0 to 1"),
        ({"sliding": NoPE()}, "has no sliding layers. Its layers are full_attention"),
        ({0.5: NoPE()}, "A key of the dictionary is"),
        ({0: BY_SEQUENCE, 1: NoPE()}, 'update="sequence" changes a rotary table'),
        ({0: [Clip(pairs=1), YaRN(scale=2)], 1: NoPE()}, "name yarn first"),
        ({0: PositionInterpolation}, "is a class"),
        ({}, "Every layer"),
    ],
)
def test_dictionaries_that_cannot_be_met(request_: Any, message: str) -> None:
    zoo.refused(build(), message, request_)


@pytest.mark.parametrize("key", ["all", "full", "hybrid", 1, range(4)])
def test_layers_that_attend_beside_another_mixer(key: Any) -> None:
    patch = zoo.in_force(patch_model(zoo.build("falcon_h1"), {key: ReRoPE(window=8)}))
    assert len(patch.layers) == (1 if key == 1 else 4)


def test_numbers_of_a_dictionary() -> None:
    """A scale is that of methods by name; other options and layers are refused beside it."""
    model = patch_model(build(), {0: "yarn", 1: "nope"}, scale=4)
    assert str(zoo.in_force(model).config) == "yarn(scale=4) in layer 0; nope() in layer 1"
    for wrong in ({"beta_fast": 8}, {"layers": [0]}):
        with pytest.raises(PosencError, match="belongs into it"):
            patch_model(build(), {0: "yarn", 1: "nope"}, scale=4, **wrong)
    with pytest.raises(PosencError, match="gives methods to layers that rotate"):
        patch_model(build_text_model("gpt2"), {0: "alibi"})


# Their full layers do not rotate, and the config does not say so.
UNROTATED = "afmoe", "cohere2", "exaone4", "llama4_text", "aya_vision"
MORE_UNROTATED = (
    *("cohere2_moe", "exaone_moe", "flint", "kolibri1"),
    *("llama4", "exaone4_5", "muse_glimmer"),
)


@pytest.mark.parametrize(
    ("model_type", "device"), [*covering(UNROTATED, DEVICES), *late(MORE_UNROTATED, DEVICES)]
)
def test_frequencies_of_window_layers_alone_are_refused(model_type: str, device: str) -> None:
    model: Any = zoo.build(model_type)
    state, message = zoo.snapshot(model.to(device)), r'never read past it.*log_n.*layers="all"'
    for method, options in (("yarn", {"scale": 4}), ("dynamic_ntk", {"update": "sequence"})):
        with pytest.raises(UnsupportedModelError, match=message):
            patch_model(model, method, **options)
        assert zoo.snapshot(model) == state
        unpatch_model(patch_model(model, method, **options, layers="all"))
    assert zoo.snapshot(model) == state


@pytest.mark.parametrize("model_type", ["gemma2", "smollm3", "mistral", "gemma3_text", "t5gemma"])
@pytest.mark.parametrize("device", DEVICES)
def test_frequencies_that_full_layers_read_are_patched(model_type: str, device: str) -> None:
    model: Any = zoo.build(model_type)
    model.to(device)
    patch_model(model, "yarn", scale=4)
    assert get_patch(model) is not None


def test_recurrent_layers_beside_a_window_need_no_patch() -> None:
    model = zoo.build("recurrent_gemma")
    with pytest.raises(UnsupportedModelError, match="No other layer reads by attention"):
        patch_model(model, "yarn", scale=4, original_max_position_embeddings=64)
