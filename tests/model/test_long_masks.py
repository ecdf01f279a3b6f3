"""Masks that are kept as their arguments, against the matrices that transformers writes; its older versions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hf_posenc import PosencError, get_patch, inspect_rope, patch_model
from hf_posenc.attention.call import CausalMask, Run
from hf_posenc.model import masks
from hf_posenc.model.masks import LazyMask
from tests.support import zoo

KEYS = 40
PADDING = torch.ones(2, KEYS, dtype=torch.long)
PADDING[0, :7] = 0
FUNCTIONS: dict[str, Any] = {
    "causal": causal_mask_function,
    "window": sliding_window_causal_mask_function(9),
    "chunks": chunked_causal_mask_function(16, torch.zeros(2, dtype=torch.long)),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("offset", "queries", "first_key"), [(0, 40, 0), (24, 16, 0), (24, 10, 0), (30, 10, 6)]
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_seen_keys(name: str, offset: int, queries: int, first_key: int, padded: bool) -> None:
    given: dict[str, Any] = {"batch_size": 2, "device": torch.device("cpu")}
    given |= {"q_length": queries, "kv_length": KEYS - first_key}
    given |= {"q_offset": offset, "kv_offset": first_key, "mask_function": FUNCTIONS[name]}
    mask = LazyMask({**given, "attention_mask": PADDING if padded else None})
    written = mask.rows(0, queries)
    assert written is not None
    assert torch.equal(mask.seen(), written[:, 0].any(-2))
    runs = mask.runs(torch.arange(offset, offset + queries)[None])
    if name == "chunks" or offset + queries < KEYS:
        assert runs is None
        return
    assert runs is not None
    if padded:  # padding is no query of a run
        written[:, 0][PADDING[:, offset : offset + queries] == 0] = False
    assert torch.equal(visible_in(runs, written[:, 0]), written[:, 0])


def visible_in(runs: tuple[Run, ...], like: Tensor) -> Tensor:
    visible = torch.zeros_like(like)
    for run in runs:
        part = visible[run.batch, run.queries, run.keys]
        row = torch.arange(part.shape[1])[:, None] + run.offset
        key = torch.arange(part.shape[2])
        part[:] = (key <= row) & (row - key < (run.window or KEYS))
    return visible


@pytest.mark.parametrize("queries", [2, 11, KEYS])
def test_causal_rows_are_those_of_its_run(queries: int) -> None:
    """Queries behind cached keys too."""
    mask = CausalMask(queries, KEYS, torch.device("cpu"))
    rows, runs = mask.rows(1, queries), mask.runs(torch.arange(KEYS - queries, KEYS)[None])
    assert rows is not None
    assert runs is not None
    whole = torch.zeros(1, queries, KEYS, dtype=torch.bool)
    assert torch.equal(visible_in(runs, whole)[:, 1:], rows[:, 0])


# Older versions of transformers 5; `.ci/run` runs a part of the tests in the oldest itself


@pytest.mark.parametrize("dense", [True, False])
def test_a_mask_from_positions_of_queries(dense: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 5.4, transformers passes `cache_position` instead of a length and an offset."""
    if masks._POSITIONS:
        pytest.skip("this version passes them to every test")
    padding = torch.ones(2, 9, dtype=torch.bool)
    padding[0, :4] = False
    common: dict[str, Any] = {"batch_size": 2, "kv_length": 9, "attention_mask": padding}
    expected: Any = masking_utils.sdpa_mask(q_length=5, q_offset=4, **common)
    of_now: Any = masking_utils.sdpa_mask

    def of_then(batch_size: int, cache_position: Tensor, kv_length: int, **kwargs: Any) -> Any:
        first, kwargs["batch_size"] = int(cache_position[0]), batch_size
        return of_now(q_length=len(cache_position), q_offset=first, kv_length=kv_length, **kwargs)

    monkeypatch.setattr(masking_utils, "sdpa_mask", of_then)
    monkeypatch.setattr(masks, "_POSITIONS", True)
    monkeypatch.setattr(masks, "DENSE", 1000 if dense else 1)
    mask: Any = masks.posenc_mask(cache_position=torch.arange(4, 9), **common)
    if not dense:
        mask = masks.described(mask).rows(0, 5)
    assert torch.equal(mask, expected)


def test_a_dynamic_table_that_never_shrinks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build(
        "llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    )
    monkeypatch.setattr("transformers.__version__", "5.12.1")
    for function in (inspect_rope, lambda model: patch_model(model, "yarn", scale=4, replace=True)):
        with pytest.raises(PosencError, match=r"type dynamic. In transformers 5\.12\.1"):
            function(model)
    assert patch_model(zoo.build("llama"), "dynamic_ntk", scale=2) is not None  # our own
    monkeypatch.setattr("transformers.__version__", "5.13.0")
    assert inspect_rope(model)


@pytest.mark.parametrize("method", ["yarn", "partial_ntk"])
def test_a_form_that_fails_later_is_left_out(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a longrope table of one layer type does before 5.15."""
    forward: Any = LlamaRotaryEmbedding.forward

    def fails(self: Any, x: Tensor, position_ids: Tensor, **kwargs: Any) -> Any:
        if self.rope_type == "longrope" and int(position_ids.max()) > 64:
            if vars(self).setdefault("read", False):
                raise UnboundLocalError("long_inv_freq")
            self.read = True
        return forward(self, x, position_ids, **kwargs)

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", fails)
    model: Any = patch_model(zoo.build("llama"), method, scale=4)
    assert get_patch(model) is not None
    assert model.config.rope_parameters["rope_type"] == ("yarn" if method == "yarn" else "default")
