"""Dependencies between tokens, measured by changing one token at a time in the training model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc.training.batches.collator import DRAWS, POSITIONS
from hf_posenc.training.batches.dependencies import dependencies
from tests.support.attention_llama import CASES, FORMS
from tests.support.dependency_cases import (
    ARCHITECTURES,
    DOCUMENTS,
    FREQUENCIES,
    LENGTH,
    batch_of,
    by_change,
    expected,
    logits,
    patched,
    tiny,
)
from tests.support.selection import covering, late

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*starts untrained"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]


MODELS = [
    (model_type, attention)
    for model_type in ARCHITECTURES
    for attention in ("eager", "sdpa")
    if (model_type, attention) != ("gptj", "sdpa")  # it has none
]


@pytest.mark.parametrize(("model", "positions"), covering(MODELS, POSITIONS), ids=str)
def test_architectures(model: tuple[str, str], positions: str) -> None:
    assert torch.equal(by_change(tiny(*model), batch_of(positions)), expected(positions))


@pytest.mark.parametrize(
    ("name", "positions"),
    [
        *covering([*FREQUENCIES, *FORMS], ["packed", "random"]),
        *late([name for name in CASES if name not in FORMS], ["packed", "random"]),
    ],
)
def test_patched_models(name: str, positions: str) -> None:
    assert torch.equal(by_change(patched(name), batch_of(positions)), expected(positions))


@pytest.mark.parametrize(
    ("name", "positions"), covering(["yarn", "self_extend", "t5", "xpos"], POSITIONS)
)
def test_patched_models_with_eager_attention(name: str, positions: str) -> None:
    model = patched(name, "eager")
    assert torch.equal(by_change(model, batch_of(positions)), expected(positions))


@pytest.mark.parametrize(
    ("name", "reentrant", "positions"),
    [
        *covering(["yarn", "rerope", "fire"], [False, True], POSITIONS),
        *late(["alibi"], [False, True], POSITIONS),
    ],
)
def test_gradients_take_the_same_ways_when_layers_are_computed_again(
    name: str, reentrant: bool, positions: str
) -> None:
    """With gradient checkpointing, in train mode, by a backward like the Trainer's."""
    model = patched(name)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    assert torch.equal(by_backward(model, batch_of(positions)), expected(positions))


def by_backward(model: PreTrainedModel, batch: dict[str, Any]) -> Tensor:
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    embedded = model.get_input_embeddings()(inputs.pop("input_ids"))
    rows = []
    for query in range(LENGTH):
        leaf = embedded.detach().requires_grad_()
        found = logits(model, {**inputs, "inputs_embeds": leaf})
        (found[:, query] * torch.arange(found.shape[-1])).sum().backward()
        assert leaf.grad is not None
        rows.append(leaf.grad.abs().amax(-1) > 0)
    return torch.stack(rows, dim=1)


@pytest.mark.parametrize("name", ["yarn", "rerope", "t5"])
def test_packed_documents_read_as_they_do_alone(name: str) -> None:
    """The loss of a packed batch is the mean over the tokens of its documents, each on its own."""
    model, batch = patched(name), batch_of("packed")
    losses, counted = [], 0
    for row, lengths in zip(batch["input_ids"], DOCUMENTS, strict=True):
        for ids in row.split(lengths):
            if len(ids) > 1:
                scores = logits(model, {"input_ids": ids[None]})[0, :-1].double()
                losses.append(
                    torch.nn.functional.cross_entropy(scores, ids[1:], reduction="sum").item()
                )
                counted += len(ids) - 1
    with torch.no_grad():
        together = model(**batch).loss.item()
    assert int((batch["labels"] != -100).sum()) == counted
    assert together == pytest.approx(sum(losses) / counted, rel=1e-5)


def test_documents_in_one_row_do_not_see_each_other() -> None:
    model, batch = tiny("llama", "sdpa"), batch_of("packed", flatten=True)
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    rows = expected("packed")
    assert torch.equal(dependencies(model, inputs)[0], torch.block_diag(*rows.int()) > 0)


# The traps of transformers that the collator goes around; should they vanish one day, so may the collator's care


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("drawn", DRAWS)
def test_without_a_mask_parts_of_a_text_are_kept_apart(drawn: str, attention: str) -> None:
    batch = batch_of(drawn)
    del batch["attention_mask"]
    found = by_change(tiny("llama", attention), batch)
    row = batch["position_ids"][0]
    place = int((row.diff() > 1).nonzero()[0]) + 1
    assert not bool(found[0, place:, :place].any())


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_with_a_mask_packed_documents_see_each_other(attention: str) -> None:
    batch = batch_of("packed")
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    found = by_change(tiny("llama", attention), batch)
    assert torch.equal(found, expected("contiguous"))
