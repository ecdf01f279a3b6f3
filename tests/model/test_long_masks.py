"""Masks that are kept as their arguments, against the matrices that transformers writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from hf_posenc.attention.call import Run
from hf_posenc.model.masks import CausalMask, LazyMask

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
def test_keys_that_are_seen(
    name: str, offset: int, queries: int, first_key: int, padded: bool
) -> None:
    mask = LazyMask(
        {
            "batch_size": 2,
            "q_length": queries,
            "kv_length": KEYS - first_key,
            "q_offset": offset,
            "kv_offset": first_key,
            "mask_function": FUNCTIONS[name],
            "attention_mask": PADDING if padded else None,
            "device": torch.device("cpu"),
        }
    )
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
    """The pairs of all runs, (batch, queries, keys)."""
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
