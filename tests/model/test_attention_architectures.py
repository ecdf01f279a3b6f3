"""Attention-path methods in every rotary architecture of transformers, and in models of several towers.

Each either computes what a pair-by-pair reference does, in every way to run a text, or is refused with a reason. The
representative types run always, all others with `-m slow`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc import (
    PosencError,
    UnsupportedModelError,
    get_method,
    inspect_rope,
    patch_model,
    unpatch_model,
)
from hf_posenc.attention.engine import forced
from hf_posenc.model import masks
from tests.support import zoo
from tests.support.attention_llama import CASES, ORIGINAL, randomise
from tests.support.attention_native import KEEPING, RULES, reference
from tests.support.attention_ways import Way, in_batch, in_steps, left_masked, left_padded, natively
from tests.support.emulated import EmulatedFlash
from tests.support.selection import covering, late, quick

DECODERS = (*zoo.decoder_types(), *zoo.text_tower_types())
OTHERS = [name for name in DECODERS if name not in zoo.representative()]
REST = [name for name in zoo.representative() if name not in zoo.ATTENDING]
MAIN = (
    *("llama", "gptj", "gemma4_text", "recurrent_gemma", "moshi", "deepseek_v2", "falcon"),
    *("gpt_oss", "llama4_text"),
)
"""Of `zoo.ATTENDING`, the types whose attention differs most."""
LENGTH = 24
pytestmark = pytest.mark.filterwarnings("ignore:.*starts untrained")

FEW = ("rerope", "alibi", "self_extend", "log_n", "dual_chunk", "dynamic_ntk_row")
MORE = (
    *("rerope", "attention_sinks", "alibi_keep_rope", "t5", "transformer_xl_keep_rope"),
    *("xpos", "rope_bias", "log_n", "dynamic_ntk_row"),
)
"""A case for every path through the engine."""


def patch(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """Patches every layer, also of a checkpoint that comes scaled."""
    method, options = CASES[name].method, dict(CASES[name].options)
    if options.get("window", 0) > 5 and method != "dual_chunk":
        options["window"] = 5  # the sliding windows of the tiny models are of 8 tokens
    if method == "string":
        options = {"shift": 6, "window": 3}
    if method == "longrope":
        pairs = inspect_rope(model)[0].dim // 2
        options |= {"short_factor": [1.0] * pairs, "long_factor": [1.0 + i for i in range(pairs)]}
    given = {"original_max_position_embeddings": ORIGINAL, **options}
    patch_model(model, method, layers="all", replace=options.get("update") == "row", **given)
    randomise(model)
    return model


def cached(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return in_steps(model, ids, [11, 1, 1, 4, ids.shape[1] - 17])


left_masked_cached = in_batch("left_masked_cached", 6, 0, 9, cached="dynamic", positions=False)
WAYS = (cached, left_padded, left_masked, left_masked_cached)
COUNTS_PADDING = ("roformer",)
"""Types that take no positions; patched, they refuse padding before a text (`tests/seams/test_scores.py`)."""


def compared(model_type: str) -> dict[Way, float]:
    """The ways to run a text that the unpatched model has, and how far it is off in each."""
    model, ids = zoo.build(model_type), zoo.tokens(LENGTH)
    ways = WAYS[:1] if model_type in COUNTS_PADDING else WAYS
    errors = {way: natively(model, way, ids) for way in ways}
    return {way: error for way, error in errors.items() if error is not None and error < 0.01}


def reasons(model_type: str, names: Iterable[str]) -> dict[str, str]:
    """For every case: nothing if it works in a model as it should, or the reason of a refusal."""
    model, ids = zoo.build(model_type), zoo.tokens(LENGTH)
    before, config = zoo.logits(model, ids), copy.deepcopy(model.config.to_dict())
    noise = zoo.relative_difference(zoo.logits(model, ids), before)
    modules, weights = [n for n, _ in model.named_modules()], list(model.state_dict())
    native = compared(model_type)
    found = {}
    for name in names:
        try:
            patch(model, name)
        except UnsupportedModelError as refusal:
            found[name] = str(refusal)
        else:
            found[name] = ""
            full = zoo.logits(model, ids)
            acted = zoo.relative_difference(full, before)
            assert acted > 10 * noise + 1e-5, f"{name}: nothing happened ({acted:.1e})"
            for way, error in native.items():
                off = zoo.relative_difference(way(model, ids), full)
                assert off < max(1e-4, 10 * error), f"{name}, {way.__name__}: {off:.1e}"
            unpatch_model(model)
        assert zoo.relative_difference(zoo.logits(model, ids), before) <= noise, name
        assert model.config.to_dict() == config, name
        assert [n for n, _ in model.named_modules()] == modules, name
        assert list(model.state_dict()) == weights, name
    return found


# Refusals

SPARSE = "chooses the keys of a query by a"
MERGED = "merges several tokens into one key by a"
NOT_A_ROTATION = "is not a rotation in a known layout"
NOT_ALONE = "cannot be run on a few tokens alone"
ENCODER = 'in both directions, and .* layers="decoder" patches the decoder alone'
ENCODERS = ("dia", "t5gemma", "t5gemma2")
"""Types of an encoder and a decoder that read text, which methods of causal texts do not take whole."""
REFUSED = {
    **dict.fromkeys(
        (
            *("axk2", "deepseek_v32", "dots3_note", "dots3_note_text"),
            *("glm_moe_dsa", "hy_v4", "mistral_large4_text", "qwen4_exp", "qwen4_exp_text"),
        ),
        SPARSE,
    ),
    "deepseek_v4": MERGED,
    **dict.fromkeys(
        ("blt", "idefics", "kyutai_speech_to_text", "voxtral_realtime_text"), NOT_ALONE
    ),
    **({"dory": NOT_A_ROTATION, "hy_v4_vl_text": SPARSE} if zoo.CACHE == "cache" else {}),  # 5.24
}
"""Types that are refused, with what the message says.

Those with an indexer take methods that keep the rotation, and that with merged keys takes log_n. Dory has a
learned factor on each feature of a rotated query: it takes what need not know the rotation.
"""
SCALES_QUERIES = (
    *("beam", "llama4", "llama4_text", "ministral3", "mistral4"),
    *("mistral_large4", "mistral_large4_text"),
)
"""Types that multiply their queries by a factor of their own."""


GAINS = ("mistral_large4_text",)
"""Types with a learned factor on each frequency, which a method that must know the rotation does not take."""


def expected_reason(model_type: str, name: str) -> str:
    case = CASES.get(name)
    scales = case is not None and case.method in ("log_n", "temperature")
    # A method with a factor beside its bands is refused for the bands first.
    if case and case.law and model_type in SCALES_QUERIES and (scales or model_type not in REFUSED):
        return "scales its queries already"
    if name == "transformer_xl_shared" and model_type == "gemma4_text":
        return "layers of this model differ"  # heads are wider where the whole text is read
    if model_type in ENCODERS and case and not get_method(case.method).bidirectional:
        return ENCODER
    known = name in ("shaw_keep_rope", "transformer_xl_keep_rope")
    if REFUSED.get(model_type) == SPARSE and case and case.options.get("keep_rope"):
        return NOT_A_ROTATION if known and model_type in GAINS else "^$"
    biased = case is not None and get_method(case.method).seam == "bias" and not known
    if (scales or (biased and model_type == "dory")) and REFUSED.get(model_type) != NOT_ALONE:
        return "^$"  # it leaves the choice of keys alone
    return REFUSED.get(model_type, "^$")


def check(model_type: str, names: Iterable[str]) -> None:
    for name, reason in reasons(model_type, names).items():
        assert re.search(expected_reason(model_type, name), reason), f"{name}: {reason}"


@pytest.mark.parametrize(
    ("model_type", "name"),
    [*covering(MAIN, FEW), *late([t for t in zoo.representative() if t not in MAIN], FEW)],
)
def test_works_or_is_refused(model_type: str, name: str) -> None:
    check(model_type, [name])


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [*DECODERS, *zoo.seq2seq_types()])
def test_every_path_in_every_type(model_type: str) -> None:
    check(model_type, MORE)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", zoo.representative())
def test_every_method_in_representative_types(model_type: str) -> None:
    names = [name for name in CASES if name not in (*FEW, *MORE)]
    widths = {table.dim for table in inspect_rope(zoo.build(model_type))}
    if len(widths) > 1:
        names.remove("longrope_row")  # one list of factors cannot fit tables of two widths
    if any(width % (2 * len(CASES["dpe"].options["factors"])) for width in widths):
        names.remove("dpe")
    check(model_type, names)


def test_refused_types_exist() -> None:
    assert {*REFUSED, *GAINS, *ENCODERS} <= {*DECODERS, *zoo.seq2seq_types()}


# The numbers

OWN_ROTARY = (
    *("moshi", "recurrent_gemma", "codegen", "falcon", "gpt_neox_japanese", "gptj", "roformer"),
)
"""Types whose attention modules make their own rotation, which nobody can ask for other positions, or attention.

`tests/seams/test_scores.py` has references of the latter.
"""
TOLERANCE = {"hrm_text": 1e-2, "zamba2": 1e-2}
"""Types that amplify rounding."""


@pytest.mark.parametrize(
    ("model_type", "method"),
    # The model of Muse Spark, and no block of it, knows which of its layers do not rotate.
    [
        *covering(zoo.ATTENDING, RULES),
        ("muse_spark_text", "rerope"),
        *late([*REST, *(name for name in OTHERS if name != "muse_spark_text")], RULES),
        *late(["muse_spark_text"], ["self_extend", "alibi"]),
    ],
)
def test_equals_scores_pair_by_pair_with_its_own_rotary(model_type: str, method: str) -> None:
    model, ids = zoo.build(model_type), zoo.tokens(LENGTH)
    other, (options, _) = zoo.twin(model), RULES[method]
    kwargs = {"layers": "all", "original_max_position_embeddings": ORIGINAL, **options}
    reason = expected_reason(model_type, method)
    if reason != "^$":
        with pytest.raises(UnsupportedModelError, match=reason):
            patch_model(model, method, **kwargs)
        return
    patch_model(model, method, **kwargs)
    got, want = zoo.logits(model, ids), reference(other, ids, method)
    if want is None:
        assert model_type in OWN_ROTARY
        return
    assert zoo.relative_difference(got, want) < TOLERANCE.get(model_type, 1e-4)


INDEXED = [name for name, reason in REFUSED.items() if reason == SPARSE]


@pytest.mark.parametrize(
    ("model_type", "dense"),
    [("deepseek_v32", 1), ("qwen4_exp_text", 1), *late(INDEXED, [1, 1 << 18])],
)
def test_a_bias_beside_the_rotation_leaves_the_choice_of_keys_alone(
    model_type: str, dense: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks are written where an indexer reads them, however large they are."""
    monkeypatch.setattr(masks, "DENSE", dense)
    model, ids = zoo.build(model_type), zoo.tokens(LENGTH)
    other, (options, rule) = zoo.twin(model), KEEPING
    before = zoo.logits(model, ids)
    patch_model(model, "alibi", layers="all", original_max_position_embeddings=ORIGINAL, **options)
    got, want = zoo.logits(model, ids), reference(other, ids, rule)
    assert want is not None
    assert zoo.relative_difference(want, before) > 1e-2
    assert zoo.relative_difference(got, want) < 1e-4
    assert torch.equal(zoo.logits(unpatch_model(model), ids), before)


@pytest.mark.parametrize(
    "model_type",
    [
        "deepseek_v32",
        *late(["deepseek_v4", *(name for name in INDEXED if name not in SCALES_QUERIES)]),
    ],
)
def test_log_n_is_neutral_within_the_trained_length(model_type: str) -> None:
    """To the bit, where an indexer chooses fewer keys than there are."""
    model, ids = zoo.build(model_type), zoo.tokens(LENGTH)
    before = zoo.logits(model, ids)
    patch_model(model, "log_n", original_max_position_embeddings=64)
    assert torch.equal(zoo.logits(model, ids), before)
    unpatch_model(model)
    patch_model(model, "log_n", original_max_position_embeddings=8)
    assert zoo.relative_difference(zoo.logits(model, ids), before) > 1e-3


@pytest.mark.parametrize("model_type", ["ernie4_5_vl_moe_text", *late(["llama"])])
def test_frequencies_of_a_request_are_those_of_the_sequence(model_type: str) -> None:
    """Also where pairs of features read the table in another order; one forward over one text."""
    model, ids = zoo.build(model_type), zoo.tokens(40)
    options = {"original_max_position_embeddings": 16}
    patch_model(model, "dynamic_ntk", update="sequence", **options)  # type: ignore[arg-type]
    want = zoo.logits(model, ids)
    patch_model(model, "dynamic_ntk", update="request", replace=True, **options)  # type: ignore[arg-type]
    assert zoo.relative_difference(zoo.logits(model, ids), want) < 1e-5


def test_a_norm_after_the_rotation_may_be_trained() -> None:
    """Its weights are those of the forward, not of the patch; in a copy of the model its own."""
    model, ids = zoo.build("hunyuan_v1_dense"), zoo.tokens(LENGTH)
    other, (options, _) = zoo.twin(model), RULES["rerope"]
    patch_model(model, "rerope", original_max_position_embeddings=ORIGINAL, **options)
    model, before = copy.deepcopy(model), zoo.logits(model, ids)
    for changed in (model, other):
        for name, weight in changed.named_parameters():
            if name.endswith(("query_layernorm.weight", "key_layernorm.weight")):
                weight.data *= torch.linspace(0.5, 2, len(weight))
    want = reference(other, ids, "rerope")
    assert want is not None
    assert zoo.relative_difference(want, before) > 1e-2
    for backend in (None, EmulatedFlash.name, "exact"):
        with forced(backend):
            assert zoo.relative_difference(zoo.logits(model, ids), want) < 1e-4


@pytest.mark.parametrize(
    ("model_type", "name"),
    covering(
        ["gemma3_text", "gemma2"], ["rerope", "alibi", "dual_chunk", "rope_bias", "dynamic_ntk_row"]
    ),
)
def test_sliding_layers_compute_what_they_did(model_type: str, name: str) -> None:
    """Also in Gemma 2, where they share the rotary with the full layers, and so its keys."""
    model, ids = zoo.build(model_type), zoo.tokens(LENGTH)
    first = model.config.layer_types.index("full_attention")
    assert first > 0
    before, states = zoo.logits(model, ids), layer_inputs(model, ids)
    case = CASES[name]
    patch_model(model, case.method, original_max_position_embeddings=ORIGINAL, **case.options)
    randomise(model)
    for layer, (got, want) in enumerate(zip(layer_inputs(model, ids), states, strict=True)):
        difference = zoo.relative_difference(got, want)
        assert difference < 2e-6 if layer <= first else difference > 1e-4, layer
    assert zoo.relative_difference(cached(model, ids), zoo.logits(model, ids)) < 1e-5
    unpatch_model(model)
    assert torch.equal(zoo.logits(model, ids), before)


def unscaled(config: Any) -> None:
    theta = config.rope_parameters["rope_theta"]
    config.rope_parameters = {"rope_type": "default", "rope_theta": theta}


YARN = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}
SCALED: dict[str, dict[str, Any]] = {
    "gpt_oss": {},  # its sliding layers share the table
    "cwm": {},
    "deepseek_v3": {"rope_parameters": {**YARN, "original_max_position_embeddings": 64}},
    "llama": {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}},
}
"""Checkpoints that come scaled; each in its own way besides the table."""


@pytest.mark.parametrize(
    ("model_type", "update"),
    [("gpt_oss", "row"), *late([name for name in SCALED if name != "gpt_oss"], ["row", "request"])],
)
def test_moving_frequencies_start_from_the_plain_rotation(model_type: str, update: str) -> None:
    model, ids = zoo.build(model_type, **SCALED[model_type]), zoo.tokens(96)
    before, native = zoo.logits(model, ids), zoo.twin(model, unscaled)
    options: dict[str, Any] = {"update": update, "original_max_position_embeddings": ORIGINAL}
    options["scale"] = 2  # without one, that of a checkpoint of type dynamic
    patch_model(model, "dynamic_ntk", replace=True, **options)
    short = ids[:, :ORIGINAL]
    assert zoo.relative_difference(zoo.logits(model, short), zoo.logits(native, short)) < 1e-5
    (table,) = inspect_rope(model)
    assert (table.rope_type, table.attention_factor) == ("default", 1.0)
    patch_model(native, "dynamic_ntk", **options)
    assert zoo.relative_difference(zoo.logits(model, ids), zoo.logits(native, ids)) < 1e-5
    unpatch_model(model)
    assert torch.equal(zoo.logits(model, ids), before)


@torch.no_grad()
def layer_inputs(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    out: Any = model(input_ids=ids, output_hidden_states=True, use_cache=False)
    return [state.double() for state in out.hidden_states]


# Models of several towers, and tokens that see what follows them


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


@pytest.mark.parametrize("model_type", quick(zoo.composite_types(), FEW_COMPOSITES))
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


REFUSED_COMPOSITES = dict.fromkeys(("mistral_large4", "hy_v4_vl"), SPARSE)
REFUSED_COMPOSITES["diffusion_gemma"] = "besides attention"


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
