"""log_n leaves attention to the implementation that the model had, which gets scaled queries."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import hf_posenc
from hf_posenc import PosencError, get_patch, patch_model, unpatch_model
from hf_posenc.attention import engine
from hf_posenc.methods import DynamicYaRN, LogN, ReRoPE, YaRN
from tests.attention.test_attention import apply, assert_close, build
from tests.support import zoo
from tests.support.attention_llama import CASES, ORIGINAL, reference
from tests.support.attention_ways import in_steps
from tests.support.selection import covering, quick

IDS = zoo.tokens(50)


class Spy:
    """An attention implementation that records its calls; flash attention reads its name from the module."""

    def __init__(self) -> None:
        self.queries: list[Tensor] = []
        self.masks: list[Any] = []
        self.names: list[str] = []

    def __call__(self, module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.queries.append(query)
        self.masks.append(args[2])
        self.names.append(module.config._attn_implementation)
        return sdpa_attention_forward(module, query, *args, **kwargs)


@pytest.fixture(params=["spy", "spy_flash"])
def spy(request: pytest.FixtureRequest) -> Iterator[tuple[str, Spy]]:
    """Registered without a mask function under one name, and with sdpa's under the other."""
    found = Spy()
    AttentionInterface.register(request.param, found)
    if request.param == "spy_flash":
        AttentionMaskInterface.register(request.param, sdpa_mask)
    yield request.param, found
    AttentionInterface._global_mapping.pop(request.param)
    AttentionMaskInterface._global_mapping.pop(request.param, None)


def choose(model: PreTrainedModel, name: str) -> None:
    model.config._attn_implementation_internal = name


def test_models_get_scaled_queries(spy: tuple[str, Spy], monkeypatch: pytest.MonkeyPatch) -> None:
    name, calls = spy
    model = build()
    choose(model, name)
    before = zoo.logits(model, IDS)
    plain = calls.queries[0]
    monkeypatch.setattr(engine, "BACKENDS", ())  # the engine computes nothing
    apply(model, "log_n")
    calls.__init__()  # type: ignore[misc]
    got = zoo.logits(model, IDS)
    assert len(calls.queries) == model.config.num_hidden_layers
    factor = LogN().query_factor(torch.arange(50), ORIGINAL).float()[:, None]
    assert torch.equal(calls.queries[0], plain * factor)
    assert set(calls.names) == {name} if "flash" in name else {f"hf_posenc_{name}"}
    assert_close(got, reference(model, CASES["log_n"], IDS))
    patch = zoo.in_force(model)
    assert patch.attention == name
    assert len(patch.layers) == 2
    unpatch_model(model)
    assert torch.equal(zoo.logits(model, IDS), before)
    assert model.config._attn_implementation == name


@pytest.mark.parametrize(
    "name", ["eager", "sdpa", pytest.param("flex_attention", marks=pytest.mark.slow)]
)
def test_every_implementation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    model.set_attn_implementation(name)
    monkeypatch.setattr(engine, "BACKENDS", ())
    apply(model, "log_n")
    assert_close(zoo.logits(model, IDS), reference(model, CASES["log_n"], IDS))
    if name != "flex_attention":
        stepped = in_steps(model, IDS, [20, 9] + [1] * 21)
        assert_close(stepped, reference(model, CASES["log_n"], IDS))


def test_another_method_in_attention_needs_the_engine(spy: tuple[str, Spy]) -> None:
    model = build()
    choose(model, spy[0])
    patch_model(model, [ReRoPE(window=8), LogN()], original_max_position_embeddings=ORIGINAL)
    calls = len(spy[1].queries)
    zoo.logits(model, IDS)
    assert len(spy[1].queries) == calls
    unpatch_model(model)
    patch_model(model, [YaRN(scale=4), LogN()], original_max_position_embeddings=ORIGINAL)
    zoo.logits(model, IDS)
    assert len(spy[1].queries) > calls


NOPE: dict[str, tuple[tuple[int, ...], ...]] = {
    "smollm3": ((0, 1, 2, 3), (0, 1, 2, 3)),  # layer 3 does not rotate
    **dict.fromkeys(("afmoe", "cohere2", "exaone4"), ((3,), (0, 1, 2, 3))),
    "deepseek_v32": ((0, 1, 2, 3), (0, 1, 2, 3)),  # an indexer chooses the keys
}
"""Types with layers that bands cannot change: the layers with full attention, and all."""


def in_the_open(model: PreTrainedModel, layers: tuple[int, ...], ids: Tensor) -> Tensor:
    """Logits with the queries of some layers scaled by the formula, before transformers' own sdpa."""
    position = torch.arange(ids.shape[1], dtype=torch.float64)
    factor = (torch.log(position + 1) / math.log(ORIGINAL)).clamp(min=1).float()[:, None]

    def attention(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        scaled = query * factor if module.layer_idx in layers else query
        if kwargs.get("indices") is not None:  # of the keys that an indexer has chosen
            chosen = torch.zeros_like(args[2][:, 0]).scatter(-1, kwargs["indices"].long(), True)
            args = (*args[:2], args[2] & chosen[:, None], *args[3:])
        return sdpa_attention_forward(module, scaled, *args, **kwargs)

    AttentionInterface.register("in_the_open", attention)
    AttentionMaskInterface.register("in_the_open", sdpa_mask)
    choose(model, "in_the_open")
    try:
        return zoo.logits(model, ids)
    finally:
        AttentionInterface._global_mapping.pop("in_the_open")
        AttentionMaskInterface._global_mapping.pop("in_the_open")


@pytest.mark.parametrize(("model_type", "choice"), covering(NOPE, ["full", "all", (1, 3)]))
def test_layers_that_bands_cannot_change_have_it_too(model_type: str, choice: Any) -> None:
    model, (full, every) = zoo.build(model_type), NOPE[model_type]
    want = in_the_open(zoo.twin(model), {"full": full, "all": every}.get(choice, choice), IDS)
    patch_model(model, "log_n", layers=choice, original_max_position_embeddings=ORIGINAL)
    assert zoo.relative_difference(zoo.logits(model, IDS), want) < 1e-5


def test_beside_bands_layers_that_do_not_rotate_have_it_too() -> None:
    model = zoo.build("smollm3")
    want = in_the_open(zoo.twin(model), (0, 1, 2, 3), IDS)
    both: tuple[Any, ...] = ([ReRoPE(window=99), LogN()], ReRoPE(window=99, log_n=True))
    for methods in both:  # bands that change nothing
        patch_model(model, methods, original_max_position_embeddings=ORIGINAL)
        assert zoo.relative_difference(zoo.logits(model, IDS), want) < 1e-4
        unpatch_model(model)


@pytest.mark.parametrize(
    ("model_type", "method", "layers", "message"),
    [
        ("smollm3", "rerope", [2, 3], r"rerope would change nothing in 3.*it changes: 0, 1, 2\."),
        ("lfm3", "log_n", [1, 3], r"log_n would change nothing in 3.*it changes: 1, 2\."),
        ("beam", "rerope", [3], r"no rotary table serves layer 3.*have one: 0, 2\."),
        ("zamba2", "rerope", [1], r"a module that it shares with .*changes: none by a number\."),
        ("smollm3", "log_n", [4], "this model has 4 layers, numbered from 0 to 3"),
    ],
)
def test_layers_in_which_a_method_has_nothing_to_change(
    model_type: str, method: str, layers: list[int], message: str
) -> None:
    zoo.refused(zoo.build(model_type), message, method, layers=layers)


OWN: dict[str, tuple[int, dict[str, Any]]] = {
    "ministral3": (64, {"law": "ministral", "beta": 0.1}),
    "mistral4": (64, {"law": "ministral", "beta": 0.1}),
    "llama4_text": (8192, {"law": "llama4", "beta": 0.1}),
    "beam": (2048, {"law": "power", "beta": 0.1}),
}
"""Types that scale their queries: L, and the law in `temperature`'s words."""


@pytest.mark.parametrize("model_type", quick(OWN, ("ministral3", "llama4_text")))
def test_a_model_that_scales_its_queries_keeps_one_factor(model_type: str) -> None:
    original, law = OWN[model_type]
    model, ids = zoo.build(model_type), zoo.tokens(150)
    before = zoo.logits(model, ids)
    knobs: dict[str, Any] = {"original_max_position_embeddings": original}
    with pytest.raises(
        PosencError, match=rf"already, by temperature\(law={law['law']}, .*L={original}"
    ):
        patch_model(model, "log_n", **knobs)
    assert get_patch(model) is None
    patch_model(model, "temperature", **law, replace=True, **knobs)
    assert zoo.relative_difference(zoo.logits(model, ids), before) < 1e-6  # the same in its place
    unpatch_model(model)
    patch_model(model, "temperature", law="constant", factor=1.5, replace=True, **knobs)
    assert zoo.relative_difference(zoo.logits(model, ids), before) > 1e-2
    unpatch_model(model)
    assert torch.equal(zoo.logits(model, ids), before)


def test_the_factor_of_ministral_can_be_put_in_and_taken_out(tmp_path: Path) -> None:
    """It is saved so, although its table is scaled."""
    model, ids = zoo.build("ministral3"), zoo.tokens(200)
    before = zoo.logits(model, ids)
    bare = copy.deepcopy(model)
    bare.config.rope_parameters["llama_4_scaling_beta"] = 0.0
    without = zoo.logits(bare, ids)
    for methods in ([YaRN(scale=2), LogN()], ReRoPE(log_n=True)):
        with pytest.raises(PosencError, match="scales its queries already"):
            patch_model(model, methods, compose=True)
    assert zoo.relative_difference(without, before) > 1e-2
    patch_model(model, "pi", scale=1, compose=True)
    assert zoo.relative_difference(zoo.logits(model, ids), before) < 1e-6
    unpatch_model(model)
    patch_model(model, "pi", scale=4, replace=True)
    assert "llama_4_scaling_beta" not in zoo.in_force(model).dropped
    unpatch_model(model)
    patch_model(model, "rerope", window=9, log_n=True, replace=True)
    unpatch_model(model)
    patch_model(model, "temperature", law="constant", factor=1.0, replace=True)
    assert zoo.relative_difference(zoo.logits(model, ids), without) < 1e-5
    model.save_pretrained(tmp_path)
    assert torch.equal(zoo.logits(hf_posenc.from_pretrained(tmp_path), ids), zoo.logits(model, ids))
    patch_model(bare, "temperature", law="ministral", beta=0.1, original_max_position_embeddings=64)
    assert zoo.relative_difference(zoo.logits(bare, ids), before) < 1e-5


@pytest.mark.parametrize("first", [[], [DynamicYaRN(update="sequence")]])  # has a growing factor
@pytest.mark.parametrize("model_type", ["llama", "hunyuan_v1_dense", "gemma3"])
def test_other_models_are_not_taken_for_such(model_type: str, first: Any, recwarn: Any) -> None:
    patch_model(zoo.build(model_type), [*first, LogN()], original_max_position_embeddings=ORIGINAL)
    assert not recwarn.list


def test_a_layer_with_a_rotary_of_its_own_is_chosen_by_it() -> None:
    """Although those of the other layers hold the same frequencies."""
    model = zoo.build("moshi")
    patch_model(model, "rerope", layers=[3])
    assert zoo.in_force(model).layers == ("model.layers.3.self_attn",)


def test_a_copy_in_another_process_registers_its_implementation() -> None:
    model = apply(build(), "log_n")
    expected, stored = zoo.logits(model, IDS), pickle.dumps(model)
    for mapping in (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping):
        mapping.pop("hf_posenc_sdpa")
    assert torch.equal(zoo.logits(pickle.loads(stored), IDS), expected)


def test_a_factor_of_each_head_is_found_and_has_no_law() -> None:
    with pytest.raises(
        PosencError, match="scales its queries already, by no law that hf_posenc knows"
    ):
        patch_model(zoo.build("mistral_large4_text"), "log_n", replace=True)
