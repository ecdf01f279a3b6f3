"""Methods inside attention in a Llama: every way to run a text gives the same numbers.

`tests/support/attention_llama.py` has the cases and the float64 reference.
"""

from __future__ import annotations

import copy
import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_posenc import PosencError, patch_model, unpatch_model
from hf_posenc.attention import call as calls
from hf_posenc.attention import exact
from hf_posenc.methods import DynamicNTK, LogN
from hf_posenc.model import masks
from tests.support import zoo
from tests.support.attention_llama import CASES, FORMS, ORIGINAL, Case, randomise, reference
from tests.support.attention_ways import WAYS, in_steps
from tests.support.emulated import EmulatedFlash
from tests.support.selection import covering, late, quick
from tests.support.zoo import CACHE

PATHS = {"exact": (1 << 30, 1 << 18, None), "kernels": (1, 1, None)}
"""Least number of queries for the kernels, most pairs for a written mask, and the backend that is forced."""
FLASH = {"flash": (1 << 30, 1, EmulatedFlash.name)}
"""The path of CUDA's flash attention, for cases of kind bands, chunks or buckets."""
WINDOWED = (
    *("rerope", "attention_sinks", "dual_chunk", "dynamic_ntk_row", "rerope_log_n", "string"),
    *("leaky_rerope", "self_extend", "lm_infinite", "sliding_window", "dynamic_yarn_row"),
    "longrope_row",
)


ALIKE = [name for name in CASES if name not in FORMS]
"""Cases that take a path of `FORMS` with other numbers, which the comparisons with the reference run."""
MAIN = ("rerope", "dual_chunk", "kerple_log", "t5", "rope_bias", "log_n", "dynamic_ntk_row")
"""Of `FORMS`, those that differ most in how a text can be run."""


def build(**overrides: Any) -> PreTrainedModel:
    """A Llama whose float32 rounding is far below 1e-5, which the default weights amplify to."""
    return zoo.build("llama", **{"initializer_range": 0.1, "num_hidden_layers": 2, **overrides})


def apply(model: PreTrainedModel, case: Case | str) -> PreTrainedModel:
    """The model patched with a case, its parameters away from their initial values."""
    found = CASES[case] if isinstance(case, str) else case
    patch_model(model, found.method, original_max_position_embeddings=ORIGINAL, **found.options)
    randomise(model)
    return model


@functools.cache
def patched(name: str, **overrides: Any) -> PreTrainedModel:
    """A model patched with a case, for all tests that only read it: a forward leaves nothing, as one of them says."""
    return apply(build(**overrides), name)


@functools.cache
def expected(name: str, length: int, **overrides: Any) -> Tensor:
    return reference(patched(name, **overrides), CASES[name], zoo.tokens(length))


@pytest.fixture
def model() -> PreTrainedModel:
    return build()


pytestmark = pytest.mark.filterwarnings("ignore:.*starts untrained")


def assert_close(got: Tensor, want: Tensor, what: str = "", tolerance: float = 1e-5) -> None:
    difference = zoo.relative_difference(got, want)
    assert difference < tolerance, f"{what}: relative difference {difference:.1e}"


# The numbers


@pytest.mark.parametrize(
    ("name", "path"),
    [*itertools.product(CASES, PATHS), *itertools.product(WINDOWED, FLASH)],
    indirect=["path"],
)
def test_equals_the_float64_reference(model: PreTrainedModel, name: str, path: str) -> None:
    ids = zoo.tokens(50)
    got = zoo.logits(patched(name), ids)
    assert_close(got, expected(name, 50))
    before = zoo.logits(model, ids)
    assert zoo.relative_difference(got, before) > 0.02  # or the comparison says nothing


@pytest.mark.parametrize("name", quick(CASES, (*MAIN, "transformer_xl")))
def test_equals_the_reference_on_longer_texts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of few queries, where the general path computes."""
    monkeypatch.setattr(exact, "SCRATCH", 1)
    assert_close(zoo.logits(patched(name), zoo.tokens(210)), expected(name, 210))


@pytest.mark.parametrize("path", [*PATHS, *FLASH], indirect=True)
def test_frequencies_that_follow_the_text_beside_a_factor_on_queries(path: str) -> None:
    model, case = build(), replace(CASES["dynamic_ntk_row"], law="log_n")
    methods = [DynamicNTK(**case.options), LogN()]
    patch_model(model, methods, original_max_position_embeddings=ORIGINAL)
    ids = zoo.tokens(45)
    want = reference(model, case, ids)
    assert_close(zoo.logits(model, ids), want)
    assert_close(in_steps(model, ids, [30, *[1] * 15]), want)


GENERAL_ONLY = {
    *("xpos", "rope_bias", "fire"),
    "jet_long",  # its pieces of eight queries
    *("shaw", "shaw_keep_rope"),
    *("transformer_xl", "transformer_xl_keep_rope", "transformer_xl_shared"),
}
"""Cases that no kernel computes."""


@pytest.mark.parametrize(
    ("name", "path"),
    [*((name, None) for name in FORMS), *late(ALIKE, [None]), *itertools.product(WINDOWED, FLASH)],
    indirect=["path"],
)
def test_kernels_run_where_they_can(name: str, path: str | None, used: list[str]) -> None:
    """The comparisons above compare what they say."""
    model = patched(name)
    used.clear()
    zoo.logits(model, zoo.tokens(70))
    expected = {"exact"} if name in GENERAL_ONLY else {EmulatedFlash.name if path else "prefill"}
    assert set(used) == (set() if CASES[name].method in ("log_n", "temperature") else expected)


HEADS = {"MHA": (4, 4), "MQA": (4, 1), "six_heads": (6, 3)}


@pytest.mark.parametrize(
    ("name", "layout", "path"),
    [
        *covering(["rerope", "dual_chunk", "alibi", "t5", "rope_bias", "xpos"], HEADS, PATHS),
        *covering(WINDOWED[:4], HEADS, FLASH),
    ],
    indirect=["path"],
)
def test_every_layout_of_heads(name: str, layout: str, path: str) -> None:
    heads, key_heads = HEADS[layout]
    sizes = {"num_attention_heads": heads, "num_key_value_heads": key_heads}
    sizes["hidden_size"] = 16 * heads
    assert_close(zoo.logits(patched(name, **sizes), zoo.tokens(40)), expected(name, 40, **sizes))


@pytest.mark.parametrize(
    ("name", "dtype", "path"),
    [
        *covering(FORMS, (torch.float16, torch.bfloat16), PATHS),
        *late(ALIKE, (torch.float16, torch.bfloat16), PATHS),
        *covering(WINDOWED[:3], (torch.float16, torch.bfloat16), FLASH),
    ],
    indirect=["path"],
)
def test_half_precision(model: PreTrainedModel, name: str, dtype: torch.dtype, path: str) -> None:
    ids = zoo.tokens(50)
    model = model.half() if dtype == torch.float16 else model.bfloat16()
    native = zoo.relative_difference(zoo.logits(model, ids), reference(model, Case("none"), ids))
    apply(model, name)
    got = zoo.logits(model, ids)
    assert got.isfinite().all()
    assert_close(got, reference(model, CASES[name], ids), tolerance=3 * native)


# The ways to run a text


@pytest.mark.parametrize(
    ("name", "path", "turn"),
    [
        *covering(MAIN, PATHS, range(3)),
        *late([name for name in CASES if name not in MAIN], PATHS, range(3)),
        *covering(WINDOWED[:3], FLASH, range(3)),
        *late(WINDOWED[3:], FLASH, range(3)),
    ],
    indirect=["path"],
)
def test_every_way_to_run_a_text_gives_the_same(
    name: str, path: str, turn: int, used: list[str]
) -> None:
    """By flash attention too, but with a static cache, whose last keys are empty."""
    model, ids = patched(name), zoo.tokens(34)
    full = zoo.logits(model, ids)
    for way in WAYS[turn::3]:
        used.clear()
        assert_close(way(model, ids), full, way.__name__)
        static = "static" in way.__name__
        assert path != "flash" or static or EmulatedFlash.name in used, way.__name__


def test_steps_in_inference_mode() -> None:
    """Its tensors count no writes, by which kept keys are known to be those of the cache."""
    ids = zoo.tokens(34)
    with torch.inference_mode():
        stepped = in_steps(patched("dynamic_ntk_row"), ids, [20, *[1] * 14])
    assert_close(stepped.clone(), expected("dynamic_ntk_row", 34))


@pytest.mark.parametrize(
    ("name", "path"), [*covering(FORMS, PATHS), *late(ALIKE, PATHS)], indirect=["path"]
)
def test_a_later_token_changes_nothing_before_it(name: str, path: str) -> None:
    model, ids = patched(name), zoo.tokens(45)
    full = zoo.logits(model, ids)
    other = ids.clone()
    other[:, 30] = (ids[:, 30] + 1) % 90 + 3
    changed = zoo.logits(model, other)
    assert_close(changed[:, :30], full[:, :30])
    assert zoo.relative_difference(changed[:, 30:], full[:, 30:]) > 1e-2
    assert_close(zoo.logits(model, ids[:, :21]), full[:, :21])


LISTS = {name: CASES["longrope_row"].options[name] for name in ("short_factor", "long_factor")}


@pytest.mark.parametrize(
    ("method", "options", "path"),
    [
        ("dynamic_ntk", {}, "exact"),
        ("dynamic_yarn", {}, "kernels"),
        ("longrope", {"scale": 4.0, **LISTS}, "kernels"),
        *late(["dynamic_ntk"], [{}], ["kernels"]),
    ],
    indirect=["path"],
)
def test_the_length_of_a_request_is_that_of_its_tokens(
    model: PreTrainedModel, method: str, options: dict[str, Any], path: str
) -> None:
    """A mask without positions is enough, for padding on either side."""
    more: dict[str, Any] = {"update": "request", "original_max_position_embeddings": ORIGINAL}
    patch_model(model, method, **options, **more)
    ids, mask = zoo.tokens(40, batch=3), torch.ones(3, 40, dtype=torch.int64)
    mask[1, :14], mask[2, 20:] = 0, 0
    rows = slice(0, 40), slice(14, 40), slice(0, 20)
    got = zoo.logits(model, ids, attention_mask=mask)
    for row, part in enumerate(rows):
        alone = zoo.logits(model, ids[row : row + 1, part])
        assert_close(got[row : row + 1, part], alone, f"row {row}")
    stepped = in_steps(model, ids[:2], [30] + [1] * 10, attention_mask=mask[:2])
    for row, (part, first) in enumerate(((rows[0], 30), (rows[1], 16))):
        alone = in_steps(model, ids[row : row + 1, part], [first] + [1] * 10)
        assert_close(stepped[row : row + 1, part], alone, f"row {row} in steps")


# Masks without positions

ABSOLUTE = ("dual_chunk", "attention_sinks", "log_n", "dynamic_ntk_row", "rerope")


@pytest.mark.parametrize("name", ABSOLUTE)
def test_tokens_that_the_mask_hides_count_nowhere(name: str, path: str) -> None:
    """Also inside a row, as after a prompt that was padded on the right."""
    model = patched(name)
    ids = zoo.tokens(40, batch=2, seed=4)
    mask = torch.ones_like(ids)
    mask[1, 13:19] = 0
    full = zoo.logits(model, torch.cat((ids[1:, :13], ids[1:, 19:]), 1))
    stepped = in_steps(model, ids, [19] + [1] * 21, attention_mask=mask)
    for got in (zoo.logits(model, ids, attention_mask=mask), stepped):
        assert_close(torch.cat((got[1:, :13], got[1:, 19:]), 1), full)
        assert_close(got[:1], zoo.logits(model, ids[:1]))


@pytest.mark.parametrize("name", ABSOLUTE)
def test_a_mask_that_hides_nothing_changes_nothing(
    name: str, path: str, request: pytest.FixtureRequest
) -> None:
    """Nor do positions that are given, as those of packed documents."""
    model = patched(name)
    ids = zoo.tokens(40, batch=2)
    mask, seen = torch.ones_like(ids), []
    hook = model.model.rotary_emb.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs.get("position_ids", args[-1])),
        with_kwargs=True,
    )
    request.addfinalizer(hook.remove)
    assert torch.equal(zoo.logits(model, ids, attention_mask=mask), zoo.logits(model, ids))
    mask[0, :3] = 0
    packed = torch.arange(20).repeat(2)[None].expand(2, -1)
    zoo.logits(model, ids, attention_mask=mask, position_ids=packed)
    assert [len(positions) for positions in seen] == [1, 1, 2]
    assert torch.equal(seen[-1], packed)


@torch.no_grad()
def test_arguments_by_position() -> None:
    model = patched("dual_chunk")
    ids, mask = zoo.tokens(30), torch.ones(1, 30, dtype=torch.int64)
    mask[:, :6] = 0
    decoder: Any = model.model
    got = decoder(ids, mask).last_hidden_state[:, 6:]
    assert_close(got, decoder(ids[:, 6:]).last_hidden_state)
    positions = torch.arange(30)[None]
    given = decoder(ids, mask, positions).last_hidden_state
    assert torch.equal(given, decoder(ids, mask, position_ids=positions).last_hidden_state)
    assert zoo.relative_difference(given[:, 6:], got) > 1e-3


@torch.no_grad()
def test_masks_of_four_dimensions() -> None:
    """They show what is padding in a first forward; with a past they may hide documents as well."""
    model = patched("dual_chunk")
    ids = zoo.tokens(30)
    mask = torch.ones(30, 30, dtype=torch.bool).tril()
    mask[:, :6] = False
    additive = torch.zeros(30, 30).masked_fill(~mask, torch.finfo(torch.float32).min)
    cache = DynamicCache(config=model.config)
    for written in (mask[None, None], additive[None, None]):
        got = zoo.logits(model, ids, attention_mask=written)
        assert_close(got[:, 6:], zoo.logits(model, ids[:, 6:]))
    model(input_ids=ids[:, :20], attention_mask=mask[None, None, :20, :20], **{CACHE: cache})
    step = {"attention_mask": mask[None, None, 20:21, :21], CACHE: cache}
    with pytest.raises(PosencError, match=r"4-D attention_mask .* Pass position_ids"):
        model(input_ids=ids[:, 20:21], **step)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "options"), [("rerope", {"window": 40}), ("alibi", {"keep_rope": True})]
)
def test_what_a_mask_adds_is_added(name: str, options: dict[str, Any], monkeypatch: Any) -> None:
    """Of a whole text and of steps: as transformers adds it where a method does nothing, or where it is taken back."""
    monkeypatch.setattr(exact, "SCRATCH", 1)  # blocks of 16 queries
    model, ids, positions = build(), zoo.tokens(30), torch.arange(30)[None]
    distance, heads = positions[0, :, None] - positions, model.config.num_attention_heads
    torch.manual_seed(0)
    addition = torch.randn(30, 30).masked_fill(distance < 0, torch.finfo(torch.float32).min)
    plain = zoo.logits(model, ids, attention_mask=addition[None, None])
    slopes = 2.0 ** (-8 / heads * torch.arange(1, heads + 1)) * (name == "alibi")
    mask = (addition + slopes[:, None, None] * distance.clamp(min=0))[None]
    patch_model(model, name, **options)
    assert_close(zoo.logits(model, ids, attention_mask=mask), plain)
    cache, parts = DynamicCache(config=model.config), []
    for start, stop in ((0, 20), (20, 23), (23, 24), (24, 30)):
        given = {"attention_mask": mask[:, :, start:stop, :stop], CACHE: cache}
        rows = {"input_ids": ids[:, start:stop], "position_ids": positions[:, start:stop]}
        parts.append(model(**rows, **given).logits)
    assert_close(torch.cat(parts, 1).double(), plain)


@torch.no_grad()
@pytest.mark.parametrize("path", FLASH, indirect=True)
def test_dropout_and_weights_are_for_the_general_path(path: str, used: list[str]) -> None:
    model = apply(build(attention_dropout=0.5), "rerope")
    used.clear()
    model.train()(zoo.tokens(50))
    model.eval()(zoo.tokens(50), output_attentions=True)
    assert {*used} == {"exact"}


# Where a method does nothing

NEUTRAL: dict[str, dict[str, Any]] = {
    **{name: {"window": 40} for name in ("rerope", "leaky_rerope", "sliding_window")},
    **{name: {"window": 40} for name in ("lm_infinite", "attention_sinks", "self_extend")},
    "leaky_rerope ": {"window": 5, "k": 1.0},
    "self_extend ": {"window": 6, "group": 1},
    "string": {"shift": 6, "window": 6},
    "string ": {"shift": 40, "window": 3},
    "dual_chunk": {"chunk": 40, "window": 4},
    "log_n": {},
    "rope_bias": {},
    **{name: {"update": "row"} for name in ("dynamic_pi", "dynamic_ntk", "dynamic_yarn")},
}
"""Options under which a text of 40 tokens, of 64 that the model was trained on, is read as it was."""


@pytest.mark.parametrize(("name", "path"), covering(NEUTRAL, PATHS), indirect=["path"])
def test_neutral_knobs_change_nothing(model: PreTrainedModel, name: str, path: str) -> None:
    ids = zoo.tokens(40)
    before, config = zoo.logits(model, ids), copy.deepcopy(model.config.to_dict())
    patch_model(model, name.strip(), **NEUTRAL[name])
    assert_close(zoo.logits(model, ids), before, tolerance=2e-6)
    assert_close(in_steps(model, ids, [22] + [1] * 18), before, tolerance=2e-6)
    unpatch_model(model)
    assert torch.equal(zoo.logits(model, ids), before)
    assert model.config.to_dict() == config


def test_a_factor_is_for_rotated_features_alone() -> None:
    """`update="row"` reads a text that ends with its bucket as `update="sequence"` does, in one layer."""
    ids = zoo.tokens(ORIGINAL + 8)
    model = zoo.build("gpt_neox", num_hidden_layers=1)  # rotates a part of every head
    last: list[Tensor] = []
    options: dict[str, Any] = {"bucket": 8, "original_max_position_embeddings": ORIGINAL}
    for update in ("row", "sequence"):
        patch_model(model, "dynamic_yarn", update=update, **options)
        last.append(zoo.logits(model, ids)[:, -1])
        unpatch_model(model)
    assert_close(last[0], last[1])


@torch.no_grad()
def test_nothing_of_a_forward_stays(model: PreTrainedModel, monkeypatch: Any) -> None:
    """Layers share positions, masks and angles by the tensors of a forward, and end with them."""
    apply(model, "rerope")
    callee: Any = model
    ids = zoo.tokens(70)
    padding = torch.ones_like(ids)
    padding[:, :5] = 0
    written = torch.ones(1, 1, 70, 70, dtype=torch.bool).tril()
    before = len(calls._shared)
    for mask in (None, padding, written, torch.zeros(written.shape).masked_fill(~written, -1e30)):
        cache = callee(input_ids=ids, attention_mask=mask)[CACHE]
        if mask is None:
            callee(input_ids=ids[:, :1], **{CACHE: cache})
    monkeypatch.setattr(masks, "DENSE", 0)
    callee(input_ids=ids, attention_mask=padding, use_cache=False)
    del mask, written  # which the model passes on
    assert len(calls._shared) == before
