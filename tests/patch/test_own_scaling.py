"""A checkpoint's own scaling: made exact in caches and batches, used as one list, or kept by what replaces it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import hf_posenc
from hf_posenc import inspect_rope, patch_model, patched, unpatch_model
from hf_posenc.errors import PosencError
from hf_posenc.methods import LongRoPE, ReRoPE, RopeScaling, SelfExtend, YaRN
from hf_posenc.model.discovery import tables_of
from hf_posenc.rope import RopeSpec
from tests.support import zoo
from tests.support.attention_ways import in_steps

SHORT, LONG = [1.0 + 0.1 * i for i in range(8)], [2.0 + i for i in range(8)]
LISTS: dict[str, Any] = {"short_factor": SHORT, "long_factor": LONG}
ORIGINAL = {"original_max_position_embeddings": 16}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, **ORIGINAL, **LISTS}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
MSCALES = {"short_mscale": 1.1, "long_mscale": 1.3}
IDS = zoo.tokens(100)
CLOSE = 2e-3  # of logits of about 10, in float32
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "phi3": ("phi3", {"rope_parameters": LONGROPE, **ORIGINAL}, "longrope"),
    "llama-longrope": ("llama", {"rope_parameters": LONGROPE}, "longrope"),
    "llama-dynamic": ("llama", {"rope_parameters": DYNAMIC}, "dynamic_ntk"),
}


def build(case: str) -> tuple[PreTrainedModel, str]:
    kind, config, method = CASES[case]
    return zoo.build(kind, **config), method


def run(model: Any, ids: Tensor, **kwargs: Any) -> Any:
    with torch.no_grad():
        return model(ids, **kwargs)


def by_steps(model: Any, ids: Tensor, first: int) -> Tensor:
    """The logits of a text whose tokens come one by one after the first ones, from a cache."""
    return in_steps(model, ids, [first, *[1] * (ids.shape[1] - first)])


def off(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("update", ["sequence", "request"])
def test_without_numbers_a_text_is_computed_as_by_transformers(case: str, update: str) -> None:
    model, method = build(case)
    texts = [IDS[:, :15], IDS[:, :17], IDS]
    native = [run(model, ids).logits for ids in texts]
    patch_model(model, method, update=update)
    for ids, logits in zip(texts, native, strict=True):
        assert off(run(model, ids).logits, logits) < CLOSE
    assert patch_model(model, method, update=update) is model  # the same request


@pytest.mark.parametrize("case", CASES)
def test_caches_and_batches_are_exact(case: str) -> None:
    model, method = build(case)
    length = model.config.max_position_embeddings
    native = run(model, IDS[:, :12]).logits
    first, last = (60, 80) if case == "llama-dynamic" else (10, 30)  # across the original length
    text = IDS[:, :last]
    assert off(by_steps(model, text, first), run(model, text).logits) > 1  # transformers' own
    patch_model(model, method)
    whole = run(model, IDS).logits
    assert off(run(model, IDS[:, :12]).logits, native) < CLOSE
    assert off(by_steps(model, text, first), whole[:, :last]) < CLOSE
    ids, mask = torch.cat((IDS, IDS)), torch.ones(2, 100, dtype=torch.long)
    ids[1, 12:], mask[1, 12:] = 0, 0  # a short text beside a long one
    batch = run(model, ids, attention_mask=mask).logits
    assert off(batch[:1], whole) < CLOSE
    assert off(batch[1:, :12], native) < CLOSE
    assert model.config.max_position_embeddings == length
    unpatch_model(model)
    assert torch.equal(run(model, IDS[:, :12]).logits, native)


@pytest.mark.parametrize("case", CASES)
def test_a_long_text_before_changes_nothing(case: str) -> None:
    (model, _), (fresh, method) = build(case), build(case)
    run(model, IDS)
    (used,), (unused,) = inspect_rope(model), inspect_rope(fresh)
    assert torch.equal(used.inv_freq, unused.inv_freq)
    assert not used.difference
    patch_model(model, method)
    patch_model(fresh, method)
    assert torch.equal(run(model, IDS).logits, run(fresh, IDS).logits)


@pytest.mark.parametrize("case", CASES)
def test_a_prompt_past_the_original_length_is_read_as_trained(case: str) -> None:
    """`update="request"`: the long list for the whole prompt, and for what is generated after it."""
    model, method = build(case)
    native = run(model, IDS[:, :80]).logits
    patch_model(model, method, update="request", bucket=1000)
    assert off(by_steps(model, IDS[:, :90], 80)[:, :80], native) < CLOSE


def test_phimoe_reads_its_long_list() -> None:
    """The long list has a reference of its own: transformers 5 reads the short one at every length."""
    model = zoo.build("phimoe", rope_parameters={**LONGROPE, **MSCALES})
    short = run(model, IDS[:, :15]).logits
    patch_model(model, "longrope", update="sequence")
    assert off(run(model, IDS[:, :15]).logits, short) < CLOSE
    long = run(model, IDS).logits
    unpatch_model(model)
    with patched(model, "pi", scale=1, compose=True):
        assert off(run(model, IDS).logits, long) < CLOSE
    static = LongRoPE(short_factor=LONG, long_factor=LONG, attention_factor=MSCALES["long_mscale"])
    patch_model(model, static, replace=True)
    assert off(run(model, IDS).logits, long) < CLOSE


@pytest.mark.parametrize("method", [LongRoPE, SelfExtend])
def test_a_saved_patch_of_own_scaling(tmp_path: Path, method: type[LongRoPE | SelfExtend]) -> None:
    model, _ = build("phi3")
    if method is LongRoPE:
        patch_model(model, "longrope")
    else:
        patch_model(model, "self_extend", scale=2, window=8, compose=True)
    logits = run(model, IDS).logits
    model.save_pretrained(tmp_path)
    loaded = hf_posenc.from_pretrained(tmp_path)
    assert off(run(loaded, IDS).logits, logits) < CLOSE
    assert zoo.in_force(loaded).config == zoo.in_force(model).config


SHARED = r"takes the long list .* for all layers that share"
REFUSED: list[tuple[str, Any, dict[str, Any], str]] = [
    ("phi3", "longrope", {"scale": 8, **LISTS}, '"longrope" without numbers makes its own scaling'),
    ("phi3", "yarn", {"scale": 2}, r"its long list .* from 64 tokens, to 128"),
    ("phi3", LongRoPE(**LISTS), {}, "already scaled"),
    ("phi3", "longrope", {"short_factor": SHORT, "long_factor": SHORT}, "already scaled"),
    ("phi3", "longrope", {"original_max_position_embeddings": 32}, "already scaled"),
    ("phi3", "self_extend", {"scale": 2, "window": 8}, r"scale=2, window=8, compose=True\)"),
    ("phi3", "rerope", {"layers": [0], "compose": True}, SHARED),
    ("phi3", {0: ReRoPE(window=8)}, {"compose": True}, SHARED),
    ("llama-dynamic", "rerope", {"compose": True, **ORIGINAL}, "move with the length of the text"),
    ("llama-dynamic", "yarn", {"compose": True, **ORIGINAL}, "compose=True needs one table"),
    *((case, [CASES[case][2], ReRoPE(window=8)], {}, "on one seam") for case in CASES),
]


@pytest.mark.parametrize(("case", "method", "options", "message"), REFUSED)
def test_what_a_scaling_of_its_own_does_not_allow(
    case: str, method: Any, options: dict[str, Any], message: str
) -> None:
    zoo.refused(build(case)[0], message, method, **options)


def test_equal_lists_do_not_move_with_the_text() -> None:
    model = zoo.build("phi3", rope_parameters={**LONGROPE, "long_factor": SHORT}, **ORIGINAL)
    before = zoo.logits(model, IDS)
    patch_model(model, "rerope", window=200)
    assert off(zoo.logits(model, IDS), before) < CLOSE
    own, _ = build("phi3")
    lists: dict[str, Any] = {"short_factor": LONG, "long_factor": LONG}
    patch_model(own, "longrope", scale=4, replace=True, **lists)
    assert zoo.in_force(own).export == "rope_parameters"


def test_its_own_scaling_is_one_patch_among_others() -> None:
    model, _ = build("phi3")
    for name in ("rerope", "longrope"):
        patch_model(model, name, compose=name == "rerope")
        for again in ({"method": "longrope", "update": "request"}, {"method": "yarn", "scale": 2}):
            with pytest.raises(PosencError, match="already patched with"):
                patch_model(model, **again)
        unpatch_model(model)


@pytest.mark.parametrize(
    ("rope_type", "more", "longest"),
    [
        ("llama3", {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 1024),
        ("longrope", {"factor": 2.0, **LISTS}, 128),
        ("yarn", {"factor": 4.0}, 64),
    ],
)
def test_its_own_scaling_reaches_as_far(
    rope_type: str, more: dict[str, Any], longest: int, tmp_path: Path
) -> None:
    rope = {"rope_type": rope_type, "rope_theta": 1e4, **ORIGINAL, **more}
    model = zoo.build("llama", rope_parameters=rope, max_position_embeddings=longest)
    patch_model(model, rope_type)
    model.save_pretrained(tmp_path)
    for one in (model, hf_posenc.from_pretrained(tmp_path)):
        assert zoo.in_force(one).extended_length == one.config.max_position_embeddings == longest


# One list for all texts
@dataclass(frozen=True, kw_only=True)
class _LongList(RopeScaling):
    """The divisors of long texts, with the factor of LongRoPE's formula (arXiv 2402.13753) for 4 times the context."""

    name = "long_list"
    summary = "one list for all texts"
    source = "a test"
    needs = "nothing"

    def inv_freq(self, rope: RopeSpec, length: Any = None) -> Tensor:
        return rope.default_inv_freq() / torch.tensor(LONG, dtype=torch.float64)

    def cos_sin_factor(self, rope: RopeSpec, length: Any = None) -> float:
        return math.sqrt(1 + math.log(4) / math.log(16))


BAND, EXTENDED = SelfExtend(scale=2, window=8), ("self_extend", {"scale": 2, "window": 8})
TWICE = [2 * factor for factor in LONG]


@pytest.mark.parametrize("length", [12, 100])
@pytest.mark.parametrize(
    ("request_", "replaced"),
    [
        (EXTENDED, [_LongList(), BAND]),
        (EXTENDED, [LongRoPE(short_factor=LONG, long_factor=LONG, scale=4), BAND]),
        (("pi", {"scale": 2}), LongRoPE(short_factor=TWICE, long_factor=TWICE, scale=4)),
    ],
    ids=["band", "list-and-band", "frequencies"],
)
def test_the_long_list_serves_texts_of_every_length(
    request_: tuple[str, dict[str, Any]], replaced: Any, length: int
) -> None:
    model, _ = build("phi3")
    patch_model(model, request_[0], **request_[1], compose=True)
    patch = zoo.in_force(model)
    assert (patch.original_max_position_embeddings, patch.extended_length) == (64, 128)
    logits = run(model, IDS[:, :length]).logits
    unpatch_model(model)
    patch_model(model, replaced, replace=True)
    assert off(run(model, IDS[:, :length]).logits, logits) < CLOSE


@pytest.mark.parametrize("update", ["row", "request", "sequence"])
def test_a_dynamic_method_keeps_the_factor_that_it_grows_from(update: str) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, **ORIGINAL}
    model = zoo.build("llama", rope_parameters=yarn, max_position_embeddings=64)
    native = run(model, IDS[:, :60]).logits
    patch_model(model, "dynamic_pi", update=update, compose=True)
    assert off(run(model, IDS[:, :60]).logits, native) < CLOSE


def test_a_dynamic_method_grows_from_the_long_list() -> None:
    model, _ = build("phi3")
    patch_model(model, "dynamic_pi", compose=True)
    logits = run(model, IDS).logits
    assert off(by_steps(model, IDS, 10), logits) < CLOSE
    unpatch_model(model)
    patch_model(model, _LongList(), replace=True)
    assert off(run(model, IDS).logits[:, :64], logits[:, :64]) < CLOSE  # it reaches 64 tokens


def test_a_table_that_was_set_by_hand_is_refused() -> None:
    model, _ = build("phi3")
    for table in tables_of(model):
        rotary: Any = table.module
        for tensor in (rotary.inv_freq, rotary.original_inv_freq):
            tensor.data.div_(4)
    with pytest.raises(PosencError, match="does not have the frequencies of its config"):
        patch_model(model, "pi", scale=2, compose=True)


# What replaces a scaling of the same type

GPT_OSS = {"rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "truncate": False}
GPT_OSS |= {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 64}
DEEPSEEK = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "mscale": 0.707}
DEEPSEEK |= {"mscale_all_dim": 0.9, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.5}
LLAMA3 |= {"high_freq_factor": 6.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("numbers", [{}, {"replace": True}, {"replace": True, "scale": None}])
@pytest.mark.parametrize(
    ("kind", "rope", "knobs"),
    [
        ("gpt_oss", GPT_OSS, {"truncate": False}),
        ("deepseek_v3", DEEPSEEK, {"mscale": 0.707, "mscale_all_dim": 0.9}),
        ("llama", LLAMA3, {"low_freq_factor": 1.5, "high_freq_factor": 6.0}),
    ],
)
def test_knobs_start_from_those_of_the_checkpoint(
    kind: str, rope: dict[str, Any], knobs: dict[str, Any], numbers: dict[str, Any]
) -> None:
    model = zoo.build(kind, rope_parameters=rope, max_position_embeddings=4096)
    factor, method = rope["factor"], rope["rope_type"]
    if "scale" in numbers:
        numbers = {**numbers, "scale": factor}
    before = run(model, IDS).logits
    patch_model(model, method, **numbers)
    patch = zoo.in_force(model)
    assert patch.options == {"scale": factor, **knobs}
    assert not patch.dropped
    assert patch.original_max_position_embeddings == 64
    assert off(run(model, IDS).logits, before) < CLOSE
    unpatch_model(model)
    patch_model(model, method, scale=2 * factor, replace=True)
    patch = zoo.in_force(model)
    assert patch.options == {"scale": 2 * factor, **knobs}
    assert patch.dropped == {"factor": factor}


@pytest.mark.parametrize("method", [YaRN(scale=32.0), "yarn"])
def test_the_report_says_what_is_dropped(method: Any) -> None:
    model = zoo.build("gpt_oss", rope_parameters=GPT_OSS)
    options: dict[str, Any] = {"truncate": True} if method == "yarn" else {}
    patch_model(model, method, replace=True, **options)
    patch = zoo.in_force(model)
    assert patch.dropped == {"truncate": False}
    assert "drops of the checkpoint's own scaling: truncate=False" in str(patch)
    unpatch_model(model)
    patch_model(model, "ntk", scale=4, replace=True)
    patch = zoo.in_force(model)
    assert patch.dropped["rope_type"] == "yarn"
    assert patch.dropped["truncate"] is False
    assert "rope_theta" not in patch.dropped
    unpatch_model(model)
    patch_model(model, {"full": YaRN(scale=32.0), "sliding": ReRoPE(window=8)}, replace=True)
    assert zoo.in_force(model).dropped == {"truncate": False}


@pytest.mark.parametrize(("kind", "method"), [("ministral3", "temperature"), ("llama", "yarn")])
def test_where_there_is_nothing_to_drop(kind: str, method: str) -> None:
    """A factor on the queries replaces no scaling; a plain checkpoint has none."""
    model = zoo.build(kind)
    (before,) = inspect_rope(model)
    patch_model(model, method, scale=2, replace=True)
    (after,) = inspect_rope(model)
    assert torch.equal(after.inv_freq, before.inv_freq) == (method == "temperature")
    assert not zoo.in_force(model).dropped
