"""The handle of the loss in chunks: what a model keeps, what it gets back, and when it is tried."""

from __future__ import annotations

import copy
import inspect
import json
import types
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from hf_posenc.errors import PosencError
from hf_posenc.evaluation.scoring.head_replay import TokenScorer
from hf_posenc.training.chunked_loss import chunk_loss, default_chunk
from scripts.benchmark_memory import CHUNKS, SUBJECTS, VOCABULARY, WHOLE, title
from tests.support import zoo
from tests.training.test_chunked_loss import CHUNK, LENGTH, assert_same, texts, trained


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
    assert left == before | {
        "": before[""] | {"forward", "_chunked_loss"}
    }  # which does nothing now
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
    assert output.past_key_values.get_seq_length() == LENGTH
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
