"""The loss in chunks against the plain one: value, gradients of every weight, and how many logits there are."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_posenc import patch_model
from hf_posenc.training.chunked_loss import chunk_loss
from tests.evaluation.scoring.test_head_replay import largest
from tests.support import zoo
from tests.support.selection import covering, late, quick

TEXTS = ("gemma3_text", "gemma4_text", "llama4_text")
WITH_HEAD = [t for t in zoo.representative() if not t.endswith("_text") or t in TEXTS]
# What these do between the decoder and the loss, the representative ones do not.
MORE = [
    *("gemma2", "granite", "mixtral", "qwen2_moe", "gpt2", "bloom", "opt", "stablelm", "olmo2"),
    *("mamba", "jamba"),
]
KINDS = ("gptj", "gemma3", "moshi", "llama4_text", "granite", "mamba")
"""One for each way from the decoder to the loss that the other tests do not take: how a model encodes positions does
not matter there."""
LENGTH, CHUNK = 41, 16

Gradients = dict[str, Tensor]


def texts(length: int = LENGTH) -> dict[str, Any]:
    """Two texts whose labels leave out a beginning and a part of the middle, not as many in each."""
    ids = zoo.tokens(length, batch=2)
    labels = ids.clone()
    labels[0, :7] = labels[1, length // 2 : length // 2 + 5] = -100
    return {"input_ids": ids, "labels": labels}


def trained(model: nn.Module, **given: Any) -> tuple[Tensor, Gradients]:
    """Loss and gradients of a forward; dropout, where there is any, by the same seed."""
    model.zero_grad()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        loss = model(use_cache=False, **given).loss
        loss.backward()
    gradients = {n: w.grad.clone() for n, w in model.named_parameters() if w.grad is not None}
    return loss.detach(), gradients


def assert_same(
    found: tuple[Tensor, Gradients], expected: tuple[Tensor, Gradients], tolerance: float = 3e-6
) -> None:
    """Equal up to rounding, in parts of the largest value of each gradient."""
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=0)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        difference = (found[1][name] - gradient).abs().max()
        assert difference <= tolerance * gradient.abs().max(), name


def both(model: nn.Module, chunk: int = CHUNK, **given: Any) -> None:
    expected = trained(model, **given)
    handle = chunk_loss(model, chunk)
    found = trained(model, **given)
    assert handle.exact is not False
    assert_same(found, expected)
    assert max(float(gradient.abs().max()) for gradient in expected[1].values()) > 1e-3
    handle.remove()


@pytest.mark.parametrize("model_type", quick([*WITH_HEAD, *MORE], KINDS))
def test_loss_and_all_gradients_are_the_plain_ones(model_type: str) -> None:
    model = zoo.build(model_type)
    both(model, **texts())
    assert chunk_loss(model, CHUNK).exact
    assert "logits" not in model(**texts(), use_cache=False)


def test_the_loss_is_the_mean_over_labels() -> None:
    model = zoo.build("gemma2")  # a soft cap behind the head
    given = texts()
    logits = zoo.logits(model, given["input_ids"])[:, :-1].log_softmax(-1)
    targets = given["labels"][:, 1:]
    learned = targets != -100
    losses = -logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0][learned]
    chunk_loss(model, 7)
    torch.testing.assert_close(
        trained(model, **given)[0].double(), losses.mean(), rtol=1e-6, atol=0
    )
    items = trained(model, **given, num_items_in_batch=torch.tensor(1000))[0]
    torch.testing.assert_close(items.double(), losses.sum() / 1000, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("chunk", "extra"),
    covering(
        [1, 7, 40, 81, 82],
        [{}, {"num_items_in_batch": 50}, {"num_items_in_batch": torch.tensor(50)}],
    ),
)
def test_any_chunk_gives_the_same(chunk: int, extra: dict[str, Any]) -> None:
    model = zoo.build("llama")
    both(model, chunk, **texts(), **extra)
    chunk_loss(model, chunk)
    assert "logits" not in model(**texts())  # also where one chunk is enough


def test_labels_may_come_shifted() -> None:
    # as context parallelism gives them, whose shards do not hold the next token
    model, given = zoo.build("cohere"), texts()
    shifted = F.pad(given["labels"], (0, 1), value=-100)[:, 1:].roll(3, dims=1).contiguous()
    both(model, **given, shift_labels=shifted)
    expected = trained(model, **given, shift_labels=shifted)
    chunk_loss(model, CHUNK)
    assert_same(trained(model, input_ids=given["input_ids"], shift_labels=shifted), expected)


def test_nothing_to_learn_is_not_a_number_as_before() -> None:
    model, given = zoo.build("llama"), texts()
    given["labels"] = torch.full_like(given["labels"], -100)
    assert model(**given).loss.isnan()
    chunk_loss(model, CHUNK)
    assert model(**given).loss.isnan()
    assert model(**given, num_items_in_batch=5).loss == 0


@pytest.mark.parametrize("model_type", ["mixtral", "phimoe", *late(["qwen2_moe"])])
def test_what_the_model_adds_to_the_loss_stays(model_type: str) -> None:
    model = zoo.build(model_type, output_router_logits=True, router_aux_loss_coef=0.5)
    given = texts() | {"attention_mask": torch.ones(2, LENGTH, dtype=torch.long)}
    with_balance, _ = trained(model, **given)
    without, _ = trained(model, **given, output_router_logits=False)
    assert with_balance - without > 0.1
    both(model, **given)


def test_dropout_is_drawn_as_before() -> None:
    model = zoo.build("gpt2", resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2).train()
    both(model, **texts())
    assert trained(model, **texts())[0] != trained(model.eval(), **texts())[0]


PATCHES: list[tuple[str, dict[str, Any]]] = [
    ("dynamic_ntk", {"update": "row", "bucket": 8, "original_max_position_embeddings": 16}),
    ("rerope", {"window": 16}),
    ("fire", {}),
]
ALIKE: list[tuple[str, dict[str, Any]]] = [
    ("yarn", {"scale": 4}),
    ("dynamic_ntk", {"update": "request", "original_max_position_embeddings": 16}),
    ("alibi", {}),
]


@pytest.mark.parametrize(
    ("model_type", "patch"),
    [
        ("llama", PATCHES[0]),
        *late(["gemma2"], PATCHES[:1]),
        *late(["llama", "gemma2"], PATCHES[1:] + ALIKE),
    ],
)
def test_patched_models_under_gradient_checkpointing(
    model_type: str, patch: tuple[str, dict[str, Any]]
) -> None:
    method, options = patch
    model: Any = patch_model(zoo.build(model_type), method, **options).train()
    plain = trained(model, **texts())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    both(model, **texts())
    chunk_loss(model, CHUNK)
    assert_same(trained(model, **texts()), plain)


def test_logits_never_exceed_a_chunk() -> None:
    vocabulary, chunk = 1024, 8
    model = zoo.build("llama", vocab_size=vocabulary, tie_word_embeddings=True)
    head = vocabulary * 64  # the gradient of its weights
    for length in (65, 129):
        given = texts(length)
        chunk_loss(model, 10**6)
        assert largest(partial(trained, model, **given)) >= 2 * length * vocabulary
        chunk_loss(model, chunk)
        assert largest(partial(trained, model, **given)) == head
        with torch.no_grad():
            assert largest(partial(model, **given)) == max(chunk * vocabulary, 2 * length * 96)
