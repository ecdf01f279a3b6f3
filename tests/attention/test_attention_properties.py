"""Random texts, knobs, splits, paddings and head layouts against the float64 reference."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from hf_posenc import unpatch_model
from hf_posenc.attention import prefill
from hf_posenc.model import masks
from tests.attention.test_attention import apply, assert_close, build
from tests.support import zoo
from tests.support.attention_llama import CASES, ORIGINAL, Case, reference
from tests.support.attention_ways import in_steps

pytestmark = pytest.mark.filterwarnings("ignore:.*starts untrained")

width = st.integers(1, 20)
KNOBS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "rerope": {"window": width, "log_n": st.booleans()},
    "leaky_rerope": {"window": width, "k": st.floats(1.0, 16.0)},
    "self_extend": {"window": width, "group": st.integers(1, 6), "log_n": st.booleans()},
    "dual_chunk": {"chunk": st.integers(1, 10), "window": st.integers(1, 6)},
    "string": {"shift": st.integers(5, 20), "window": st.integers(1, 5)},
    "lm_infinite": {"window": width, "sinks": st.integers(1, 5)},
    "attention_sinks": {"window": width, "sinks": st.integers(1, 5), "log_n": st.booleans()},
    "sliding_window": {"window": width},
}
BANDS = st.one_of(
    *(st.fixed_dictionaries({"method": st.just(m), **knobs}) for m, knobs in KNOBS.items())
)
HEADS = ((4, 4), (4, 2), (4, 1), (6, 2))


@functools.cache
def model(heads: tuple[int, int]) -> PreTrainedModel:
    sizes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    return build(**sizes, hidden_size=16 * heads[0])


def case_of(drawn: dict[str, Any]) -> Case:
    knobs = {name: value for name, value in drawn.items() if name != "method"}
    relative = {name: value for name, value in knobs.items() if name != "log_n"}
    return Case(
        drawn["method"], knobs, relative=relative, law="log_n" if knobs.get("log_n") else ""
    )


CASE = st.one_of(BANDS.map(case_of), st.sampled_from(sorted(CASES)).map(CASES.__getitem__))


SPLIT = given(
    case=CASE,
    heads=st.sampled_from(HEADS),
    length=st.integers(1, 60),
    rows=st.sampled_from([1, 64]),
    dense=st.sampled_from([1, 1 << 18]),
    left=st.integers(0, 7),
    right=st.integers(0, 7),
    data=st.data(),
)


@SPLIT
@settings(max_examples=20)
def test_any_split_and_padding_of_any_text_equals_the_reference(**drawn: Any) -> None:
    check_split(**drawn)


@pytest.mark.slow
@SPLIT
@settings(max_examples=80)
def test_more_splits_and_paddings_equal_the_reference(**drawn: Any) -> None:
    check_split(**drawn)


def check_split(
    case: Case,
    heads: tuple[int, int],
    length: int,
    rows: int,
    dense: int,
    left: int,
    right: int,
    data: st.DataObject,
) -> None:
    """Row 0 of a batch of two, padded on both sides, run in pieces."""
    if case.method == "fire":
        length = min(length, 30)  # its reference is slow
    ids = zoo.tokens(length, seed=length)
    batch = zoo.tokens(left + length + right, batch=2, seed=1)
    batch[0, left : left + length] = ids
    mask = torch.ones_like(batch)
    mask[0, :left], mask[0, left + length :] = 0, 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cuts = data.draw(st.sets(st.integers(1, max(1, batch.shape[1] - 1)), max_size=4), label="cuts")
    borders = [0, *sorted(cut for cut in cuts if cut < batch.shape[1]), batch.shape[1]]
    sizes = [stop - start for start, stop in itertools.pairwise(borders)]
    patched = apply(model(heads), case)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prefill, "ROWS", rows)
            patch.setattr(masks, "DENSE", dense)
            got = in_steps(patched, batch, sizes, attention_mask=mask, position_ids=positions)
        want = reference(patched, case, ids)
        alone = reference(patched, case, batch[1:]) if case.method != "fire" else None
    finally:
        unpatch_model(patched)
    assert_close(got[:1, left : left + length], want, "padded row")
    if alone is not None:
        assert_close(got[1:], alone, "other row")


@given(data=st.data(), count=st.integers(1, 4), case=CASE, rows=st.sampled_from([1, 64]))
@settings(max_examples=20)
def test_packed_documents_are_read_one_by_one(
    data: st.DataObject, count: int, case: Case, rows: int
) -> None:
    lengths = [data.draw(st.integers(2, 25), label="length") for _ in range(count)]
    documents = [zoo.tokens(length, seed=i) for i, length in enumerate(lengths)]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    patched = apply(model((4, 2)), case)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(prefill, "ROWS", rows)
            patch.setattr(masks, "DENSE", rows)
            got = zoo.logits(patched, torch.cat(documents, 1), position_ids=positions)
            apart = [zoo.logits(patched, document) for document in documents]
    finally:
        unpatch_model(patched)
    assert_close(got, torch.cat(apart, 1))


@given(
    case=st.sampled_from(["dynamic_ntk_row", "dynamic_yarn_row", "longrope_row"]),
    bucket=st.integers(1, 40),
    length=st.integers(2, 60),
)
@settings(max_examples=20)
def test_rows_of_any_bucket(case: str, bucket: int, length: int) -> None:
    """And text within the original length is untouched, where the method scales nothing there."""
    known = CASES[case]
    options = {**known.options, "bucket": bucket}
    native = zoo.logits(model((4, 2)), zoo.tokens(ORIGINAL))
    patched = apply(model((4, 2)), replace(known, options=options))
    try:
        ids = zoo.tokens(length)
        got = zoo.logits(patched, ids)
        assert_close(got, reference(patched, replace(known, options=options), ids))
        within = zoo.logits(patched, zoo.tokens(ORIGINAL))
    finally:
        unpatch_model(patched)
    if case != "longrope_row":
        assert_close(within, native, tolerance=2e-6)
