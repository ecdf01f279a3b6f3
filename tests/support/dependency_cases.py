"""Models and batches whose dependencies are known, and how to find them by changing one token at a time."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_posenc import patch_model
from hf_posenc.training.collator import DRAWS, PositionCollator
from hf_posenc.training.options import PROMPTED
from tests.support import zoo
from tests.support.attention_llama import CASES, ORIGINAL, randomise
from tests.support.zoo_registry import quiet

LENGTH = 10
DOCUMENTS = ((4, 1, 5), (7, 3))
TARGET = 40

ARCHITECTURES = (
    "llama",
    "cohere",  # interleaved
    "gpt_neox",  # partial
    "gptj",  # a table in every layer
    "gemma3_text",  # sliding windows, a table per layer type
    "olmo3",
    "phimoe",  # experts
    "deepseek_v3",  # latent attention
    "qwen3",
    "llama4_text",  # chunks, layers without positions
    "apertus",
    "ministral3",
)
FREQUENCIES: dict[str, dict[str, Any]] = {
    "yarn": {"scale": 4.0},
    "pi": {"scale": 4.0},
    "dynamic_ntk": {"scale": 2.0, "update": "sequence"},
    "llama3": {"scale": 4.0},
    "nope": {},
}
WIDE = {"lm_infinite": 64, "attention_sinks": 64, "sliding_window": 64}
"""Windows that take in all of the long context: what they hide by distance is not in question here."""


@functools.cache
def tiny(model_type: str, attention: str) -> PreTrainedModel:
    model = zoo.build(model_type)
    with quiet():
        model.set_attn_implementation(attention)
    assert model.config._attn_implementation == attention
    return model


def patched(name: str, attention: str = "sdpa") -> PreTrainedModel:
    with quiet():
        model = zoo.build("llama", num_hidden_layers=2)
        model.set_attn_implementation(attention)
    if name in FREQUENCIES:
        patch_model(model, name, **FREQUENCIES[name])
    else:
        case = CASES[name]
        window = {"window": WIDE[name]} if name in WIDE else {}
        options: Any = {**case.options, **window}
        patch_model(model, case.method, original_max_position_embeddings=ORIGINAL, **options)
        randomise(model)
    return model


def given_of(positions: str) -> dict[str, Any]:
    """What the collator needs for these positions."""
    prompt = {"terminal_prompt": [3, 4]} if positions in PROMPTED else {}
    return {"target_length": TARGET, **prompt} if positions in DRAWS else {}


def batch_of(positions: str, **options: Any) -> dict[str, Any]:
    """Two rows as the collator makes them; drawn positions jump in both."""
    given = {**given_of(positions), **options}
    text = LENGTH - len(given.get("terminal_prompt", ()))
    rows = [
        {"input_ids": zoo.tokens(LENGTH, seed=seed)[0][:text], "document_lengths": lengths}
        for seed, lengths in enumerate(DOCUMENTS)
    ]
    batch = PositionCollator(positions, seed=1, **given)(rows)
    if positions in DRAWS:
        assert all(int(row.diff().max()) > 1 for row in batch["position_ids"])
    return batch


def expected(positions: str) -> Tensor:
    """Each token depends on itself and those in front of it; packed, on those of its own document only."""
    rows = torch.ones(2, LENGTH, LENGTH, dtype=torch.bool).tril()
    if positions == "packed":
        for row, lengths in zip(rows, DOCUMENTS, strict=True):
            document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
            row &= document[:, None] == document[None, :]
    return rows


@torch.no_grad()
def by_change(model: PreTrainedModel, batch: dict[str, Any]) -> Tensor:
    """Bool (b, n, n): whether the logits of a query move when a key's token is another; the whole batch goes along."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    before = logits(model, inputs)
    moved = []
    for key in range(LENGTH):
        ids = inputs["input_ids"].clone()
        ids[:, key] = (ids[:, key] + 17) % words_of(model)
        difference = (logits(model, {**inputs, "input_ids": ids}) - before).abs().amax(-1)
        # Experts are chosen per batch: sums in another order.
        moved.append(difference > 1e-5 * before.abs().amax())
    return torch.stack(moved, dim=-1)


def words_of(model: PreTrainedModel) -> int:
    embedding: Any = model.get_input_embeddings()
    return int(embedding.weight.shape[0])


def logits(model: PreTrainedModel, inputs: dict[str, Any]) -> Tensor:
    """As the Trainer calls a model, which turns its cache off."""
    model.config.use_cache = False
    found: Tensor = model(**inputs).logits
    return found
