"""Several methods at once, and methods that a user writes himself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import log
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc import patch_model, unpatch_model
from hf_posenc.attention import prefill
from hf_posenc.methods import (
    STRING,
    ALiBi,
    DistanceBias,
    LogN,
    ReRoPE,
    RotaryBands,
    Shaw,
    Temperature,
    TransformerXL,
    YaRN,
)
from tests.attention.test_attention import assert_close, build
from tests.patch.test_attention_patching import IDS
from tests.support import zoo
from tests.support.attention_llama import CASES, ORIGINAL, Case, parameters_of, randomise, reference
from tests.support.attention_ways import token_by_token
from tests.support.selection import quick

pytestmark = pytest.mark.filterwarnings("ignore:.*starts untrained")


@pytest.fixture
def model() -> PreTrainedModel:
    return build()


@pytest.fixture(params=[1, 1 << 30])
def each_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernels and by the general path."""
    monkeypatch.setattr(prefill, "ROWS", request.param)


YARN, BIAS = ("yarn", {"scale": 4.0}), Case("alibi", {"keep_rope": True}, bias={})
LISTS: dict[str, tuple[list[Any], Case]] = {
    "yarn, log_n": ([YaRN(scale=4), LogN()], Case("log_n", law="log_n", table=YARN)),
    "yarn, rerope": ([YaRN(scale=4), ReRoPE(window=8)], replace(CASES["rerope"], table=YARN)),
    "rerope, log_n": ([ReRoPE(window=8), LogN()], CASES["rerope_log_n"]),
    "alibi, log_n": ([ALiBi(keep_rope=True), "log_n"], replace(BIAS, law="log_n")),
    # As the authors' code has it, whose cos and sin have a factor for queries and keys alike.
    "string, temperature": (
        [STRING(shift=11, window=4), Temperature(law="constant", factor=(0.1 * log(2) + 1) ** 2)],
        replace(CASES["string"], law="constant", law_knobs={"factor": 1.0693147**2}),
    ),
    "yarn, alibi": ([YaRN(scale=4), ALiBi(keep_rope=True)], replace(BIAS, table=YARN)),
    "yarn, shaw": (
        [YaRN(scale=4), Shaw(max_distance=6, keep_rope=True)],
        replace(CASES["shaw_keep_rope"], table=YARN),
    ),
    "yarn, transformer_xl": (
        [YaRN(scale=4), TransformerXL(keep_rope=True)],
        replace(CASES["transformer_xl_keep_rope"], table=YARN),
    ),
    "rerope, alibi": (
        [ReRoPE(window=8), ALiBi(keep_rope=True)],
        replace(CASES["rerope"], bias={}, bias_of="alibi"),
    ),
}


@pytest.mark.parametrize(
    "which", quick(LISTS, ("rerope, alibi", "yarn, rerope", "yarn, log_n", "yarn, transformer_xl"))
)
def test_lists_compute_all_of_their_methods(model: PreTrainedModel, which: str) -> None:
    methods, case = LISTS[which]
    before = zoo.logits(model, IDS)
    patch_model(model, methods, original_max_position_embeddings=ORIGINAL)
    randomise(model)
    got, want = zoo.logits(model, IDS), reference(model, case, IDS)
    assert_close(token_by_token(model, IDS), got)
    unpatch_model(model)
    assert torch.equal(zoo.logits(model, IDS), before)
    assert_close(got, want)


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ([ReRoPE(window=8), "self_extend"], "one seam"),
        (["alibi", "t5"], "one seam"),
        (["log_n", LogN()], "one seam"),
        ([ReRoPE(window=8), ALiBi()], "drops the rotation.*keep_rope=True"),
        (["alibi", "rope_bias"], "drops the rotation"),
        (["xpos", "rerope"], "one seam"),
        ([ReRoPE(window=8), "shaw"], "rerope changes: name one of them"),
        (["alibi", "nope"], "nope changes: name one of them"),
        ([Shaw(keep_rope=True), "log_n"], "takes a static frequency method"),
    ],
)
def test_lists_without_a_meaning(model: PreTrainedModel, methods: list[Any], message: str) -> None:
    zoo.refused(model, message, methods)


# Methods of one's own
@dataclass(frozen=True, kw_only=True)
class Half(RotaryBands):
    """Past the window distances grow half as fast."""

    name: ClassVar[str] = "half"
    summary: ClassVar[str] = "half as fast"
    source: ClassVar[str] = "here"

    def query_position(self, m: Tensor, original: int) -> Tensor:
        return (m.double() + self.near_window(original)) / 2

    def key_position(self, n: Tensor, original: int) -> Tensor:
        return n.double() / 2


@dataclass(frozen=True, kw_only=True)
class Root(DistanceBias):
    """Minus the square root of the distance, times what is trained."""

    name: ClassVar[str] = "root"
    summary: ClassVar[str] = "a root"
    source: ClassVar[str] = "here"
    trainable: ClassVar[bool] = True

    def initial(self, heads: int, original: int) -> dict[str, Tensor]:
        return {"slope": torch.ones(heads)}

    def bias(
        self,
        distance: Tensor,
        heads: int,
        parameters: Mapping[str, Tensor],
        query_position: Tensor | None = None,
    ) -> Tensor:
        return -parameters["slope"].view(-1, *(1,) * distance.dim()) * distance.double().sqrt()


def test_a_users_own_bands(model: PreTrainedModel, each_path: None) -> None:
    """The same as Leaky ReRoPE at k = 2."""
    patch_model(model, Half(window=8))
    got = zoo.logits(model, IDS)
    assert_close(token_by_token(model, IDS), got)
    assert_close(got, reference(model, Case("leaky_rerope", relative={"window": 8, "k": 2.0}), IDS))


def test_a_users_own_bias(model: PreTrainedModel, each_path: None) -> None:
    """The same as KERPLE's power of a half; it trains as well."""
    patch_model(model, Root())
    got = zoo.logits(model, IDS)
    assert_close(token_by_token(model, IDS), got)
    values = dict(model.state_dict())
    for key in list(values):
        if key.endswith(".posenc.slope"):
            heads = values.pop(key)
            values[key.replace("slope", "r1")] = heads
            values[key.replace("slope", "r2")] = torch.full_like(heads, 0.5)
    assert_close(got, reference(model, Case("kerple_power", bias={}), IDS, values))
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    for value in parameters_of(model).values():
        assert value.grad is not None
        assert value.grad.isfinite().all()
        assert value.grad.any()
