"""log_n leaves attention to the implementation that the model had, which gets scaled queries."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hf_posenc import PosencError, get_patch, patch_model, unpatch_model
from hf_posenc.attention import engine
from hf_posenc.methods import LogN, ReRoPE, YaRN
from tests.attention.test_attention import apply, assert_close, build
from tests.support import zoo
from tests.support.attention_llama import CASES, ORIGINAL, reference
from tests.support.attention_ways import in_steps

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


def test_the_models_own_implementation_gets_scaled_queries(
    spy: tuple[str, Spy], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    patch = get_patch(model)
    assert patch is not None
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
        assert_close(
            in_steps(model, IDS, [20, 9] + [1] * 21), reference(model, CASES["log_n"], IDS)
        )


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


def test_chosen_layers() -> None:
    """The others keep their queries."""
    model, calls = build(), Spy()
    AttentionInterface.register("spy", calls)
    choose(model, "spy")
    patch_model(model, "log_n", layers=[1], original_max_position_embeddings=ORIGINAL)
    other = copy.deepcopy(model)
    unpatch_model(model)
    calls.queries.clear()
    zoo.logits(model, IDS)
    zoo.logits(other, IDS)
    assert torch.equal(calls.queries[0], calls.queries[2])
    assert not torch.equal(calls.queries[1], calls.queries[3])
    AttentionInterface._global_mapping.pop("spy")


def test_a_copy_in_another_process_registers_its_implementation() -> None:
    model = apply(build(), "log_n")
    expected, stored = zoo.logits(model, IDS), pickle.dumps(model)
    for mapping in (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping):
        mapping.pop("hf_posenc_sdpa")
    loaded = pickle.loads(stored)
    assert torch.equal(zoo.logits(loaded, IDS), expected)


def test_an_implementation_that_is_set_afterwards_is_refused() -> None:
    model = apply(build(), "log_n")
    model.set_attn_implementation("eager")
    with pytest.raises(PosencError, match="'eager' afterwards"):
        zoo.logits(model, IDS)
