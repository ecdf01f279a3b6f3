"""generate(), torch.compile, attention weights and the user's own settings, on models whose attention is patched."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

from hf_posenc import PosencError, UnsupportedModelError, patch_model, patched, unpatch_model
from hf_posenc.attention import engine
from hf_posenc.model import masks
from tests.attention.test_attention import apply, assert_close, build
from tests.attention.test_attention import patched as shared
from tests.support import zoo
from tests.support.attention_llama import CASES, ORIGINAL
from tests.support.selection import covering
from tests.support.zoo import CACHE

pytestmark = pytest.mark.filterwarnings("ignore:.*starts untrained")

FEW = (
    *("rerope_log_n", "self_extend", "dual_chunk", "attention_sinks", "alibi", "t5_keep_rope"),
    *("transformer_xl_keep_rope", "xpos", "rope_bias", "dynamic_ntk_row"),
)
"""A case for every way in which the engine differs."""
NEW = 9
"""Tokens to generate."""
TOKENS = {"eos_token_id": None, "pad_token_id": 0}


@pytest.fixture
def model() -> PreTrainedModel:
    return build(**TOKENS)


def patched_by(name: str) -> PreTrainedModel:
    return copy.deepcopy(shared(name, **TOKENS))


@pytest.fixture
def layer() -> PreTrainedModel:
    """A model of one layer: what is traced takes seconds, and another layer the same ones again."""
    return build(num_hidden_layers=1)


def prompts() -> dict[str, Tensor]:
    """Three prompts of 21, 14 and 5 tokens, padded on the left."""
    rows = zoo.tokens(21, batch=3, seed=9)
    mask = torch.ones_like(rows)
    mask[1, :7], mask[2, :16] = 0, 0
    return {"input_ids": rows * mask, "attention_mask": mask}


def likeliest(model: PreTrainedModel, text: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest tokens in the place of the last `NEW` of a text, and their scores, by a forward without any cache.

    They are its own exactly where each is the likeliest after those before it: where decoding was greedy.
    """
    scores = zoo.logits(model, text)[:, -NEW - 1 : -1]
    return scores.argmax(-1), scores


def generate(model: PreTrainedModel, **kwargs: Any) -> Any:
    anything: Any = model
    return anything.generate(
        max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True, **kwargs
    )


CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "none": {"use_cache": False},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "chunks": {"prefill_chunk_size": 5},
}


@pytest.mark.parametrize(("name", "cache"), covering(FEW, CACHES))
def test_generate_on_a_padded_batch(name: str, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "DENSE", 200)  # both kinds of masks in one generation
    check_padded_batch(patched_by(name), cache)


def check_padded_batch(model: PreTrainedModel, cache: str) -> None:
    batch = prompts()
    found = generate(model, **batch, output_logits=True, **CACHES[cache])
    got = torch.stack(found.logits, 1).double()
    assert torch.equal(found.sequences[:, :-NEW], batch["input_ids"])
    for row, count in enumerate((21, 14, 5)):
        text = found.sequences[row : row + 1, -count - NEW :]
        tokens, scores = likeliest(model, text)
        assert torch.equal(text[:, -NEW:], tokens)
        assert_close(got[row : row + 1], scores, cache)


@pytest.mark.gpu
def test_offloaded_cache(model: PreTrainedModel) -> None:
    moved: Any = model
    apply(moved.to("cuda"), "rerope")
    ids = zoo.tokens(21).to("cuda")
    text = generate(model, input_ids=ids, cache_implementation="offloaded").sequences
    assert torch.equal(text[:, :-NEW], ids)
    assert torch.equal(text[:, -NEW:], likeliest(model, text)[0])


@pytest.mark.parametrize("name", ["rerope", "alibi", "dynamic_ntk_row"])
def test_quantised_caches(name: str) -> None:
    """The first new token is read from whole keys, the later ones from rounded ones."""
    pytest.importorskip("optimum.quanto.tensor")
    model, ids = patched_by(name), zoo.tokens(21)
    found = generate(model, input_ids=ids, **QUANTISED)
    assert found.sequences.shape[1] == ids.shape[1] + NEW
    assert torch.equal(found.sequences[:, -NEW], zoo.logits(model, ids)[:, -1].argmax(-1))


def test_quantised_caches_hold_what_they_did(model: PreTrainedModel) -> None:
    """A method that changes nothing and caches keys where they stand: the same rounding, the same tokens."""
    pytest.importorskip("optimum.quanto.tensor")
    ids = zoo.tokens(21)
    want = generate(model, input_ids=ids, **QUANTISED).sequences
    patch_model(model, "string", shift=60, window=10)
    assert torch.equal(generate(model, input_ids=ids, **QUANTISED).sequences, want)


QUANTISED: dict[str, Any] = {
    "cache_implementation": "quantized",
    "cache_config": {"backend": "quanto", "nbits": 4, "q_group_size": 16, "residual_length": 64},
}


@pytest.mark.parametrize(
    ("model_type", "name"),
    covering(("gemma3_text", "mistral"), ("rerope", "alibi", "dynamic_ntk_row")),
)
def test_layers_with_a_sliding_window(model_type: str, name: str) -> None:
    model = zoo.build(model_type, sliding_window=8, eos_token_id=None)
    case = CASES[name]
    patch_model(
        model, case.method, layers="all", original_max_position_embeddings=ORIGINAL, **case.options
    )
    for cache in ("dynamic", "static"):
        check_padded_batch(model, cache)


# torch.compile


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_a_compiled_forward(layer: PreTrainedModel, name: str) -> None:
    """Blocks of queries that share frequencies begin where positions say, which no single graph can hold."""
    model, whole = apply(layer, name), name not in ("xpos", "dynamic_ntk_row")
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend="eager", fullgraph=whole)
    for length in (40, 31):
        ids = zoo.tokens(length)
        assert_close(zoo.logits(compiled, ids), zoo.logits(model, ids), name)


@pytest.mark.parametrize("name", ["dual_chunk", "log_n"])
@pytest.mark.slow
def test_a_compiled_forward_of_a_padded_batch(layer: PreTrainedModel, name: str) -> None:
    model = apply(layer, name)
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    for length in (40, 31):
        ids = zoo.tokens(length, batch=2)
        mask = torch.ones_like(ids)
        got = zoo.logits(compiled, ids, attention_mask=mask)
        assert_close(got, zoo.logits(model, ids))
        mask[0, :9] = 0
        got = zoo.logits(compiled, ids, attention_mask=mask)
        assert_close(got[:1, 9:], zoo.logits(model, ids[:1, 9:]), name)


@torch.no_grad()
def decoded(model: PreTrainedModel, step: Any, ids: Tensor) -> Tensor:
    """A prefill of 20 tokens by the model, then single steps by `step`, into a static cache."""
    cache = StaticCache(config=model.config, max_cache_len=ids.shape[1] + 3)
    parts = [model(input_ids=ids[:, :20], **{CACHE: cache}).logits]
    for i in range(20, ids.shape[1]):
        where = torch.tensor([[i]])
        parts.append(step(input_ids=ids[:, i : i + 1], position_ids=where, **{CACHE: cache}).logits)
    return torch.cat(parts, 1).double()


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_compiled_steps_of_generation(layer: PreTrainedModel, name: str) -> None:
    model = apply(layer, name)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    ids = zoo.tokens(44)
    assert_close(decoded(model, compiled, ids), zoo.logits(model, ids), name)


@pytest.mark.slow
def test_a_compiled_step_is_not_one_for_export(model: PreTrainedModel, monkeypatch: Any) -> None:
    """In PyTorch 2.11, `torch.compiler.is_exporting` is true in every graph, and exports are slow.

    So it is here: the compiler finds another function under its name than the one that it knows.
    """

    def exported(*_: Any) -> Any:
        raise AssertionError("computed as for an export")

    torch.compile(lambda: torch.compiler.is_exporting(), backend="eager")()
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: False)
    monkeypatch.setattr(engine, "exact", exported)
    patch_model(model, "rerope", window=8)
    torch._dynamo.reset()
    decoded(model, torch.compile(model, backend="eager", fullgraph=True), zoo.tokens(22))


@pytest.mark.slow
@pytest.mark.parametrize("bucket", [1, 16])
def test_compiled_steps_with_a_pinned_length(layer: PreTrainedModel, bucket: int) -> None:
    """The pin is the cache's, which a graph would keep as it was: the step leaves the graph there."""
    model = layer
    patch_model(
        model, "dynamic_ntk", update="request", bucket=bucket, original_max_position_embeddings=24
    )
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    ids = zoo.tokens(44)
    assert_close(decoded(model, compiled, ids), decoded(model, model, ids), "request")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rerope", "alibi"])
def test_compiled_to_machine_code(layer: PreTrainedModel, name: str) -> None:
    model = apply(layer, name)
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, fullgraph=True)
    ids = zoo.tokens(40)
    assert_close(zoo.logits(compiled, ids), zoo.logits(model, ids), name)
    assert_close(decoded(model, compiled, ids), zoo.logits(model, ids), name)


# Attention weights, and the implementation the user had chosen


@pytest.mark.parametrize("name", FEW)
@torch.no_grad()
def test_attention_weights(name: str) -> None:
    """They sum to 1 over keys that are not in the future, and give the layer's output."""
    model = patched_by(name)
    ids = zoo.tokens(70, batch=2)  # as many as the kernels take
    places = torch.arange(70).repeat(2, 1)
    values: list[Tensor] = []
    outs: list[Tensor] = []
    attention: Any = model.get_submodule("model.layers.1.self_attn")
    attention.v_proj.register_forward_hook(lambda module, args, out: values.append(out))
    attention.o_proj.register_forward_pre_hook(lambda module, args: outs.append(args[0]))
    found = model(input_ids=ids, position_ids=places, output_attentions=True, use_cache=False)
    weights = found.attentions[1]
    assert_close(found.logits.double(), zoo.logits(model, ids))
    assert weights.shape == (2, 4, 70, 70)
    assert_close(weights.sum(-1), torch.ones(2, 4, 70))
    assert weights.triu(1).abs().max() == 0
    value = values[0].view(2, 70, 2, 16).transpose(1, 2).repeat_interleave(2, 1)
    assert_close((weights @ value).transpose(1, 2).reshape(2, 70, 64), outs[0])


@pytest.mark.parametrize(
    "chosen", ["eager", "sdpa", pytest.param("flex_attention", marks=pytest.mark.slow)]
)
def test_the_chosen_implementation_comes_back(model: PreTrainedModel, chosen: str) -> None:
    model.set_attn_implementation(chosen)
    ids = zoo.tokens(30)
    before = zoo.logits(model, ids)
    with patched(model, "rerope", window=8):
        first = zoo.logits(model, ids)
    assert model.config._attn_implementation == chosen
    assert torch.equal(zoo.logits(model, ids), before)
    model.set_attn_implementation("eager")
    with patched(model, "rerope", window=8):
        assert torch.equal(zoo.logits(model, ids), first)


@pytest.mark.parametrize(
    ("model_type", "method"),
    [
        *(("llama", "rerope"), ("llama", "log_n")),
        *(("bert", "alibi"), ("gpt2", "alibi"), ("opt", "alibi")),
    ],
)
def test_another_implementation_after_the_patch_is_refused(model_type: str, method: str) -> None:
    model = zoo.build(model_type)
    before = zoo.logits(model, zoo.tokens(30))
    options: dict[str, Any] = {"window": 8} if method == "rerope" else {}
    patch_model(model, method, **options)
    model.set_attn_implementation("eager")
    with pytest.raises(PosencError, match=r"'eager' afterwards.*unpatch_model"):
        zoo.logits(model, zoo.tokens(30))
    unpatch_model(model)
    assert torch.equal(zoo.logits(model, zoo.tokens(30)), before)


def prompted(model: PreTrainedModel, kind: str) -> Any:
    peft = pytest.importorskip("peft")
    config: Any = getattr(peft, f"{kind}TuningConfig")
    torch.manual_seed(0)
    return peft.get_peft_model(model, config(num_virtual_tokens=3, task_type="CAUSAL_LM")).eval()


def test_prefix_tuning_is_refused(model: PreTrainedModel) -> None:
    wrapped = prompted(model, "Prefix")
    with pytest.raises(UnsupportedModelError, match=r"PREFIX_TUNING.*frequency method"):
        patch_model(wrapped, "rerope")


@pytest.mark.parametrize("method", ["rerope", "self_extend", "dual_chunk", "dynamic_ntk"])
def test_prefix_tuning_of_a_patched_model_is_refused(model: PreTrainedModel, method: str) -> None:
    """The keys of a prefix are those of no position, and were read as rotated: another model than unpatched."""
    wrapped = prompted(patch_model(model, method), "Prefix")
    with pytest.raises(PosencError, match=r"prefix tuning.*frequency method"):
        zoo.logits(wrapped, zoo.tokens(20))


def test_prefix_tuning_with_frequencies_is_unpatched(model: PreTrainedModel) -> None:
    wrapped = prompted(patch_model(model, "dynamic_ntk", update="sequence"), "Prefix")
    found = zoo.logits(wrapped, zoo.tokens(20))
    unpatch_model(wrapped)
    assert torch.equal(zoo.logits(wrapped, zoo.tokens(20)), found)  # of the original length


@pytest.mark.parametrize("first", ["patch", "prompt"])
@pytest.mark.parametrize("method", ["rerope", "dual_chunk", "dynamic_ntk", "alibi"])
def test_tokens_of_prompt_tuning_count(model: PreTrainedModel, method: str, first: str) -> None:
    if first == "patch":
        wrapped = prompted(patch_model(model, method), "Prompt")
    else:
        wrapped = patch_model(prompted(model, "Prompt"), method)
    ids, learned = zoo.tokens(70), wrapped.get_prompt(batch_size=1)
    embeddings = torch.cat((learned, model.get_input_embeddings()(ids)), 1)
    with torch.no_grad():
        expected = model(inputs_embeds=embeddings, use_cache=False).logits
    assert torch.equal(zoo.logits(wrapped, ids).float(), expected)


@torch.no_grad()
def test_a_step_at_an_earlier_position_is_refused(model: PreTrainedModel) -> None:
    """Padding may stand behind a text, and a cropped cache goes on from where it is."""
    patch_model(model, "rerope", window=16)
    ids, mask = zoo.tokens(22, batch=2), torch.ones(2, 22, dtype=torch.long)
    two_texts, left = torch.arange(10).repeat(2)[None], mask.clone()
    padded = torch.cat((torch.zeros(1, 2, dtype=torch.long), two_texts[:, :18]), 1)
    left[:, :2] = 0
    wrong = (None, 19, mask), (None, 4, mask), (two_texts, 10, mask), (padded, 8, left)
    for given in ({CACHE: DynamicCache(config=model.config)}, {}):  # {}: the forward makes its own
        for first, place, shown in wrong:
            begin = {"position_ids": first, "attention_mask": shown[:, :20], **copy.deepcopy(given)}
            behind = {CACHE: getattr(model(ids[:, :20], **begin), CACHE)}
            behind |= {"position_ids": torch.full((2, 1), place), "attention_mask": shown[:, :21]}
            with pytest.raises(PosencError, match="restarts or repeats behind cached tokens"):
                model(ids[:, 20:21], **behind)
    cache, place_of_both = getattr(model(ids[:, :20]), CACHE), torch.empty(2, 1, dtype=torch.long)
    cache.crop(-5)
    for place in (15, 16):  # written into one tensor
        places = place_of_both.fill_(place)
        model(ids[:, place : place + 1], **{CACHE: cache}, position_ids=places)
    mask[1, 17:20] = 0
    cache = DynamicCache(config=model.config)
    model(ids[:, :20], attention_mask=mask[:, :20], **{CACHE: cache})
    places = torch.tensor([[20, 21], [17, 18]])
    got = model(ids[:, 20:], attention_mask=mask, position_ids=places, **{CACHE: cache})
    want = model(torch.cat((ids[1:, :17], ids[1:, 20:]), 1), use_cache=False).logits[0, -2:]
    torch.testing.assert_close(got.logits[1], want, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_shown_tokens_around_a_hidden_one_count_up(model: PreTrainedModel) -> None:
    patch_model(model, "rerope", window=4)
    ids, mask = zoo.tokens(9), torch.tensor([[1] * 7 + [0, 1]])
    want = model(torch.cat((ids[:, :7], ids[:, 8:]), 1)).logits[:, -1]
    for places in ([5, 6, 6, 7], [5, 6, 6, 5], [5, 6, 6, 6], [5, 6, 7, 8]):
        behind = {CACHE: getattr(model(ids[:, :5]), CACHE), "attention_mask": mask}
        with pytest.raises(PosencError, match="or restarts") if places[-1] != 7 else nullcontext():
            got = model(ids[:, 5:], position_ids=torch.tensor([places]), **behind).logits[:, -1]
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_positions_that_repeat_behind_cached_tokens_are_refused(model: PreTrainedModel) -> None:
    """As of two answers to one prompt in one forward: the position of a cached key is its place in the cache."""
    patch_model(model, "rerope", window=16)
    ids, branches = zoo.tokens(20), zoo.tokens(8, seed=1)
    cache = DynamicCache(config=model.config)
    seen = torch.ones(8, 28, dtype=torch.bool).tril(20)
    seen[4:, 20:24] = False
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
    with torch.no_grad():
        model(ids, **{CACHE: cache})
        places = torch.arange(20, 24).repeat(2)[None]
        with pytest.raises(PosencError, match="restarts or repeats behind cached tokens"):
            model(branches, **{CACHE: cache}, attention_mask=mask, position_ids=places)
