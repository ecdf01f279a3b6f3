"""The loss in chunks against the plain one: value, gradients of every weight, and how many logits there are."""

from __future__ import annotations

import copy
import inspect
import json
import types
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from hf_posenc import patch_model
from hf_posenc.errors import PosencError
from hf_posenc.evaluation.scoring.head_replay import TokenScorer
from hf_posenc.training.chunked_loss import chunk_loss, default_chunk
from scripts.benchmark_memory import CHUNKS, SUBJECTS, VOCABULARY, WHOLE, title
from tests.evaluation.scoring.test_head_replay import largest
from tests.support import zoo
from tests.support.selection import covering, late, quick
from tests.support.zoo import CACHE

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
        assert (found[1][name] - gradient).abs().max() <= tolerance * gradient.abs().max(), name


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
    losses = -logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0][targets != -100]
    chunk_loss(model, 7)
    loss = trained(model, **given)[0]
    torch.testing.assert_close(loss.double(), losses.mean(), rtol=1e-6, atol=0)
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


# The handle: what a model keeps, what it gets back, and when it is tried.
def test_everything_is_put_back() -> None:
    model = zoo.build("gemma2").train()
    model.model.layers[1].eval()
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    parts, modes = list(model.named_modules()), [module.training for module in model.modules()]
    loss_function = model.loss_function
    handle = chunk_loss(model, CHUNK)
    trained(model, **texts())
    assert set(vars(model)) - before[""] == {"forward", "_chunked_loss"}
    handle.remove()
    assert list(model.named_modules()) == parts
    left = {name: set(vars(module)) for name, module in model.named_modules()}
    assert left == before | {"": before[""] | {"forward", "_chunked_loss"}}  # does nothing now
    assert [module.training for module in model.modules()] == modes
    assert model.loss_function is loss_function
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert "logits" in model(**texts())


def test_an_error_in_the_head_puts_everything_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = zoo.build("llama")
    chunk_loss(model, CHUNK)
    decoder, loss_function = model.model, model.loss_function

    def broken(hidden: Tensor) -> Tensor:
        raise RuntimeError("broken")

    monkeypatch.setattr(model.lm_head, "forward", broken)
    with pytest.raises(RuntimeError, match="broken"):
        model(**texts())
    assert model.model is decoder
    assert model.loss_function is loss_function
    assert not decoder._forward_hooks


def test_a_forward_without_labels_is_the_models_own() -> None:
    model: Any = zoo.build("llama")
    ids = texts()["input_ids"]
    expected = model(ids)
    handle = chunk_loss(model, CHUNK)
    output = model(ids)
    assert torch.equal(output.logits, expected.logits)
    assert output[CACHE].get_seq_length() == LENGTH
    generated = model.generate(ids[:, :5], max_new_tokens=4, do_sample=False)
    losses = TokenScorer(model, ids[0], chunk=8)(ids[0])
    handle.remove()
    assert torch.equal(generated, model.generate(ids[:, :5], max_new_tokens=4, do_sample=False))
    assert torch.equal(losses, TokenScorer(model, ids[0], chunk=8)(ids[0]))


def test_tuples_and_positions_of_arguments() -> None:
    model: Any = zoo.build("llama")
    given = texts()
    expected = trained(model, **given)[0]
    chunk_loss(model, CHUNK)
    loss, *others = model(**given, return_dict=False, use_cache=False)
    assert (loss, others) == (model(**given).loss, [])
    torch.testing.assert_close(loss, expected)
    assert model(given["input_ids"], labels=given["labels"]).loss == loss
    embedded = model.get_input_embeddings()(given["input_ids"])
    assert model(inputs_embeds=embedded, labels=given["labels"]).loss == loss


def test_the_signature_stays_for_those_who_read_it() -> None:
    model: Any = zoo.build("llama")
    bare = zoo.build("llama")
    chunk_loss(model, CHUNK)
    assert inspect.signature(model.forward) == inspect.signature(bare.forward)
    assert model.forward.__func__.__get__(model)(**texts()).loss == model(**texts()).loss


def test_a_copy_has_a_loss_of_its_own() -> None:
    model: Any = zoo.build("llama")
    chunk_loss(model, CHUNK)
    expected = trained(model, **texts())
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    assert_same(trained(other, **texts()), expected, 0)
    other.forward.__self__._chunked_loss.remove()
    assert "logits" in other(**texts())
    assert "logits" not in model(**texts())


def test_what_wraps_it_is_kept() -> None:
    model: Any = zoo.build("llama")
    handle = chunk_loss(model, CHUNK)
    autocast: Any = torch.autocast("cpu", torch.bfloat16)  # as accelerate does it
    model.forward = types.MethodType(autocast(model.forward.__func__), model)
    wrapped = model.forward
    assert chunk_loss(model, 8) is handle
    assert "logits" not in model(**texts())
    handle.remove()
    assert model.forward is wrapped
    assert "logits" in model(**texts())
    assert chunk_loss(model, CHUNK).active
    assert "logits" not in model(**texts())


def test_the_default_chunk() -> None:
    assert default_chunk(zoo.build("llama", vocab_size=4096)) == 2**23 // 4096
    # At least 32 MiB of float32 logits: smaller blocks stay in a heap, which fragmented to a gigabyte at 32,000.
    assert default_chunk(zoo.build("llama", vocab_size=32_000)) * 32_000 * 4 >= 2**25
    wide: Any = zoo.tiny_config("llama", hidden_size=4096, vocab_size=128_256)
    with torch.device("meta"):
        model = LlamaForCausalLM(wide)
        assert chunk_loss(model).chunk == default_chunk(model) == 1024
    with pytest.raises(PosencError, match="at least 1 token, not 0"):
        chunk_loss(model, 0)


def test_the_committed_measurement_is_of_this_default() -> None:
    measured = SUBJECTS["training"]
    results = json.loads(measured.result.read_text(encoding="utf-8"))["results"]
    for situation, cases in results.items():
        vocabulary = int(situation.split()[-1])
        with torch.device("meta"):
            assert cases[CHUNKS]["chunk"] == default_chunk(measured.model(vocabulary)), situation
    longest = results[title(max(measured.lengths), VOCABULARY)]
    assert longest[CHUNKS]["peak_mib"] < longest[WHOLE]["peak_mib"] / 10
    assert longest[CHUNKS]["seconds"] < 1.25 * longest[WHOLE]["seconds"]


def test_weights_that_are_not_here_yet_are_tried_on_the_first_batch() -> None:
    config = zoo.tiny_config("gemma2")
    model = zoo.from_config(config)
    with torch.device("meta"):
        absent: Any = type(model)(config)
    handle = chunk_loss(absent, CHUNK)
    assert handle.exact is None
    absent.load_state_dict(model.state_dict(), assign=True)
    absent.tie_weights()
    absent.model.rotary_emb = model.model.rotary_emb
    absent.model.embed_tokens.embed_scale = model.model.embed_tokens.embed_scale
    given = texts() | {"attention_mask": torch.ones(2, LENGTH, dtype=torch.long)}
    runs: list[Any] = []
    absent.model.norm.register_forward_hook(lambda *_: runs.append(1))
    found = trained(absent.eval(), **given)
    assert handle.exact
    assert len(runs) == 2  # a few tokens, and the batch
    assert_same(found, trained(model, **given))
